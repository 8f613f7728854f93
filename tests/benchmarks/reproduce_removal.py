"""kronfluence's tutorial on regression: remove the most helpful samples, train again, see the loss.

    python tests/benchmarks/reproduce_removal.py

The protocol is from kronfluence's notebook ``examples/uci/tutorial.ipynb``: a perceptron with
three hidden layers of 128, plain stochastic gradients, the last tenth of shuffled data as queries,
ten queries at a time, for which the samples with the highest sum of scores are removed. Its data
(concrete) are not in scikit-learn; diabetes replaces them. Losses are means of as many
networks as ``--networks`` says, which are trained together.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from dataclasses import dataclass

import numpy as np
import torch
import xarray as xr
from _machine import parser_of
from numpy.typing import NDArray
from sklearn.datasets import load_diabetes
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

import trakdask as td
from trakdask.arrays.evaluation import mean_interval

Rows = NDArray[np.float32]
WIDTHS = (10, 128, 128, 128, 1)
BATCH, EPOCHS, QUERIES = 32, 40, 10
COUNTS = (5, 10, 20, 30)


@dataclass(frozen=True)
class Data:
    """Standardized inputs and values of the training samples and of the queries."""

    x: Rows
    y: Rows
    x_query: Rows
    y_query: Rows


def diabetes() -> Data:
    x, y = load_diabetes(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    x, y = x[order], y[order, None]
    n = round(0.9 * len(y))
    inputs, values = (StandardScaler().fit(rows[:n]) for rows in (x, y))
    x, y = (f.transform(rows).astype(np.float32) for f, rows in ((inputs, x), (values, y)))
    return Data(x[:n], y[:n, 0], x[n:], y[n:, 0])


def network() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(WIDTHS):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@dataclass(frozen=True)
class Networks:
    """Several networks that are trained side by side: weights (network, in, out), biases."""

    weights: list[Tensor]
    biases: list[Tensor]

    @classmethod
    def drawn(cls, n: int) -> Networks:
        """Draw initial weights as torch does."""
        linear = [[layer for layer in network() if isinstance(layer, nn.Linear)] for _ in range(n)]
        layers = list(zip(*linear, strict=True))
        return cls(
            [
                torch.stack([one.weight.detach().T for one in each]).requires_grad_()
                for each in layers
            ],
            [
                torch.stack([one.bias.detach() for one in each])[:, None].requires_grad_()
                for each in layers
            ],
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Return predictions (network, row) of inputs (network, row, 10)."""
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.baddbmm(bias, x.relu() if i else x, weight)
        return x[:, :, 0]

    def state(self, i: int) -> dict[str, Tensor]:
        """Return the state dict of one of them."""
        layers = enumerate(zip(self.weights, self.biases, strict=True))
        parts = ((2 * k, weight[i].T, bias[i, 0]) for k, (weight, bias) in layers)
        return {
            f"{k}.{name}": value.detach().contiguous()
            for k, weight, bias in parts
            for name, value in (("weight", weight), ("bias", bias))
        }


def trained(x: Rows, y: Rows, seed: int, n: int, epochs: int) -> Networks:
    """Train n networks, each with initial weights and an order of its own."""
    torch.manual_seed(seed)
    networks, inputs, values = Networks.drawn(n), torch.from_numpy(x), torch.from_numpy(y)
    parameters = [*networks.weights, *networks.biases]
    optimizer = torch.optim.SGD(parameters, lr=0.03, weight_decay=1e-5)
    for _ in range(epochs):
        order = torch.rand(n, len(y)).argsort(1)
        for rows in order.split(BATCH, dim=1):
            if rows.shape[1] == BATCH:  # the rest is dropped
                optimizer.zero_grad()
                error = networks(inputs[rows]) - values[rows]
                error.square().mean(1).sum().backward()
                optimizer.step()
    return networks


def outputs_of(
    positions: NDArray[np.int64], seed: int, data: Data, queries: slice, n: int, epochs: int
) -> NDArray[np.float64]:
    """Return minus the loss of each query, a mean over networks that see these samples only."""
    networks = trained(data.x[positions], data.y[positions], 1004 + seed, n, epochs)
    x = torch.from_numpy(data.x_query[queries]).expand(n, -1, -1)
    with torch.no_grad():
        error = networks(x) - torch.from_numpy(data.y_query[queries])
    return -error.double().square().mean(0).numpy()


def helpfulness(data: Data, epochs: int) -> dict[str, xr.DataArray]:
    """Return how much each sample lowers the loss of each query, by several scores."""
    networks = trained(data.x, data.y, 0, 5, epochs)
    samples = td.from_arrays({"x": data.x, "y": data.y})
    queries = td.from_arrays({"x": data.x_query, "y": data.y_query})
    found = {}
    for name, n, estimator in (
        ("trakdask", 1, "auto"),
        ("trakdask, 5 checkpoints", 5, "auto"),
        ("gradient similarity", 1, "grad_dot"),
    ):
        model = td.Model(network, [networks.state(i) for i in range(n)], task="regression")
        projector = td.SJLT(2048)
        features, targets = (
            td.featurize(part, model, projector=projector).compute() for part in (samples, queries)
        )
        # A score is the effect on the prediction; the loss falls by y - ŷ for every unit of it.
        residual = targets.out_to_loss.mean("checkpoint").rename(sample="target")
        found[name] = (td.score(features, targets, estimator=estimator) * residual).compute()
    return found


def rises(
    scores: xr.DataArray, options: argparse.Namespace, data: Data, random_seed: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return how much the loss of each query rises, (query, count): ranked and random removal."""
    ranked, random = [], []
    for group in range(options.groups):
        queries = slice(group * QUERIES, (group + 1) * QUERIES)
        train = functools.partial(
            outputs_of, data=data, queries=queries, n=options.networks, epochs=options.epochs
        )
        curve = td.evaluate.removal_curve(
            train, scores.isel(target=queries), [k / len(data.y) for k in options.counts],
            n_random=1, random_seed=random_seed + group, progress=False,
        ).compute(scheduler="sync")  # fmt: skip
        ranked.append((curve.full_output - curve.output).values)
        random.append((curve.full_output - curve.random_output).values)
    return np.concatenate(ranked), np.concatenate(random)


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__, networks=15, groups=4, epochs=EPOCHS, counts=COUNTS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    data = diabetes()
    print(f"python {sys.version.split()[0]}, torch {torch.__version__}, numpy {np.__version__}")
    print(
        f"{len(data.y)} samples, {options.groups} groups of {QUERIES} queries, "
        f"{options.networks} networks for each removal"
    )
    print("rise of the mean squared error of the queries, and its 95 % interval over queries")
    print(f"{'removed':<28}" + "".join(f"{k:>27}" for k in options.counts))
    rise, random = {}, []
    for i, (name, scores) in enumerate(helpfulness(data, options.epochs).items()):
        rise[name], other = rises(scores, options, data, i * options.groups)
        random.append(other)
    rise["random"] = np.mean(random, axis=0)
    for name, values in rise.items():
        print_row(name, values)
    print("difference, query by query")
    for name in ("gradient similarity", "random"):
        print_row(f"trakdask - {name}", rise["trakdask"] - rise[name])


def print_row(name: str, values: NDArray[np.float64]) -> None:
    low, high = mean_interval(values.T, 0.95)
    cells = zip(values.mean(axis=0), low, high, strict=True)
    texts = (f"{value:.3f} ({a:.3f} to {b:.3f})" for value, a, b in cells)
    print(f"{name:<28}" + "".join(f"{text:>27}" for text in texts), flush=True)


if __name__ == "__main__":
    main()
