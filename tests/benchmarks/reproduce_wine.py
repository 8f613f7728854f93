"""pyDVL's study of flipped labels on the wine data: influences against exact ones, and detection.

    python tests/benchmarks/reproduce_wine.py

The protocol is from pyDVL's notebook on the wine data: its splits, network (13-16-16-3, tanh),
training, number of flipped labels, and regularization (0.1 on the Hessian of the mean loss). The
exact influences are computed here from the definition, in float64, with each of three matrices.
trakdask computes its own by ``td.Soft(power=1)`` with ``Identity`` at the same regularization.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import xarray as xr
from _machine import parser_of
from numpy.typing import NDArray
from sklearn.datasets import load_wine
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import MinMaxScaler
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn.functional import cross_entropy

import trakdask as td

Floats = NDArray[np.float64]
FLIPPED = 10
REGULARIZATION = 0.1


@dataclass(frozen=True)
class Wine:
    """Test samples, and training samples whose first ten have a wrong label."""

    x: NDArray[np.float32]
    y: NDArray[np.int64]
    x_test: NDArray[np.float32]
    y_test: NDArray[np.int64]

    @property
    def is_flipped(self) -> NDArray[np.bool_]:
        return np.arange(len(self.y)) < FLIPPED


def wine(seed: int) -> Wine:
    """Split 60 : 10 : 30, scale to [0, 1], flip ten labels; the validation split is not used."""
    x, y = load_wine(return_X_y=True)
    x, x_test, y, y_test = train_test_split(x, y, train_size=0.7, random_state=seed)
    x, _, y, _ = train_test_split(x, y, train_size=0.6 / 0.7, random_state=seed)
    scaler = MinMaxScaler().fit(x)
    y = np.where(np.arange(len(y)) < FLIPPED, (y + 1) % 3, y)
    scaled = (scaler.transform(rows).astype(np.float32) for rows in (x, x_test))
    return Wine(next(scaled), y, next(scaled), y_test)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(13, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    )


def trained(data: Wine, seed: int, epochs: int) -> nn.Module:
    """Train with Adam in batches of 32 in a fixed order; the learning rate changes every step."""
    torch.manual_seed(seed)
    net, x, y = network(), torch.from_numpy(data.x), torch.from_numpy(data.y)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.005, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=300)
    for _ in range(epochs):
        for rows in torch.arange(len(y)).split(32):
            optimizer.zero_grad()
            cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()
            schedule.step()
    return net.eval()


# --- the definition, in float64 -------------------------------------------------------------------


def exact_influences(net: nn.Module, data: Wine) -> dict[str, Floats]:
    """Return ∇ℓ(z)ᵀ (M + 0.1 I)⁻¹ ∇ℓ(t) of every pair, (sample, target), for each matrix M."""
    flat, logits = _flattened(net)
    x, y, x_test, y_test = (
        torch.from_numpy(array) for array in (data.x, data.y, data.x_test, data.y_test)
    )
    x, x_test = x.double(), x_test.double()

    def loss(parameters: Tensor, one: Tensor, label: Tensor) -> Tensor:
        return cross_entropy(logits(parameters, one), label)

    def mean_loss(parameters: Tensor) -> Tensor:
        return cross_entropy(logits(parameters, x), y)

    gradients = vmap(jacrev(loss), (None, 0, 0))
    of_logits = vmap(jacrev(logits), (None, 0))(flat, x)
    p = logits(flat, x).softmax(1)
    # f = log p / (1 - p) of the own label: ∇ℓ = -(1 - p) ∇f, and d²ℓ/df² = p (1 - p).
    p_label = p.gather(1, y[:, None])
    of_f = gradients(flat, x, y) / (p_label - 1)
    curvature = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    n, of_classes = len(y), torch.einsum("nap,nab,nbq->pq", of_logits, curvature, of_logits)
    matrices = {
        "Gauss-Newton of f": of_f.T @ (p_label * (1 - p_label) * of_f) / n,
        "Gauss-Newton of logits": of_classes / n,
        "Hessian": jacrev(jacrev(mean_loss))(flat),
    }
    left, right = gradients(flat, x, y), gradients(flat, x_test, y_test)
    identity = REGULARIZATION * torch.eye(len(flat), dtype=torch.float64)
    return {
        name: (left @ torch.linalg.solve(matrix + identity, right.T)).numpy()
        for name, matrix in matrices.items()
    }


def _flattened(net: nn.Module) -> tuple[Tensor, Callable[[Tensor, Tensor], Tensor]]:
    """Return all parameters as one float64 vector, and the logits as a function of it."""
    net = net.double()
    parameters = {name: value.detach() for name, value in net.named_parameters()}
    flat = torch.cat([value.ravel() for value in parameters.values()])
    sizes = [value.numel() for value in parameters.values()]

    def logits(vector: Tensor, x: Tensor) -> Tensor:
        parts = zip(parameters.items(), vector.split(sizes), strict=True)
        return functional_call(net, {k: part.view_as(v) for (k, v), part in parts}, (x,))

    return flat, logits


# --- trakdask -------------------------------------------------------------------------------------


def influences(net: nn.Module, data: Wine) -> tuple[xr.DataArray, xr.DataArray, xr.DataArray]:
    """Return influences (sample, target), self-influences and losses (sample)."""
    model = td.Model(network, [net.float().state_dict()])
    train, test = (
        td.featurize(td.from_arrays({"image": x, "label": y}), model, projector=td.Identity())
        for x, y in ((data.x, data.y), (data.x_test, data.y_test))
    )
    n = len(data.y)
    # The gram matrix is a sum over samples, the Hessian of the notebook a mean.
    estimator = td.Soft(1, td.Absolute(REGULARIZATION * n), wrong_classes=False)
    # A score is the effect on f of the target; its loss falls by 1 - p for every unit of f.
    effect = td.score(train, test, estimator) * test.out_to_loss.mean("checkpoint").rename(
        sample="target"
    )
    on_itself = td.self_influence(train, estimator)
    loss = np.logaddexp(0, -train.output.mean("checkpoint"))
    return n * effect.compute(), n * on_itself.compute(), loss.compute()


def results(seed: int, epochs: int) -> dict[str, float]:
    """Return all numbers of one run: split, flipped labels, initial weights."""
    data = wine(seed)
    net = trained(data, seed, epochs)
    with torch.no_grad():
        right = net(torch.from_numpy(data.x_test)).argmax(1).numpy() == data.y_test
    effect, on_itself, loss = influences(net, data)
    found: dict[str, float] = {"accuracy": right.mean()}
    for name, exact in exact_influences(net, data).items():
        found[f"Pearson, {name}"] = np.corrcoef(exact.ravel(), effect.values.ravel())[0, 1]
        means = np.corrcoef(exact.mean(1), effect.mean("target"))[0, 1]
        found[f"Pearson of means, {name}"] = means
    harm = -effect.mean("target")
    found["mean influence, flipped"] = -harm[data.is_flipped].mean()
    found["mean influence, others"] = -harm[~data.is_flipped].mean()
    for name, values in (("mean influence", harm), ("self-influence", on_itself), ("loss", loss)):
        curve = td.evaluate.mislabelled_curve(values, data.is_flipped, [0.1, 0.2])
        auc = td.evaluate.mislabelled_auc(values, data.is_flipped)
        found[f"AUC, {name}"] = auc.auc
        found[f"found in 20 %, {name}"] = curve.found.sel(fraction=0.2)
    return {name: float(value) for name, value in found.items()}


def main(arguments: list[str] | None = None) -> None:
    options = parser_of(__doc__, runs=10, epochs=300).parse_args(arguments)
    torch.set_num_threads(1)
    print(f"python {sys.version.split()[0]}, torch {torch.__version__}, numpy {np.__version__}")
    print(f"{options.runs} runs: splits and weights of the seeds from 24, {options.epochs} epochs")
    runs = [results(24 + i, options.epochs) for i in range(options.runs)]
    print(f"{'':<42}{'first':>9}{'median':>9}{'lowest':>9}{'highest':>9}")
    for name in runs[0]:
        values = np.array([run[name] for run in runs])
        row = values[0], np.median(values), values.min(), values.max()
        print(f"{name:<42}" + "".join(f"{value:>9.4f}" for value in row))


if __name__ == "__main__":
    main()
