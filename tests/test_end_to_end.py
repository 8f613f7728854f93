"""The whole chain against the formula, written in float64 numpy and a loop of ``backward()``."""

from __future__ import annotations

from pathlib import Path

import dask
import numpy as np
import pytest
import torch
import xarray as xr
from distributed import Client
from torch import Tensor, nn

import trakdask as td
from tests.projection.reference import signs
from trakdask import examples
from trakdask.projection import RowMap

N_TRAIN, N_TARGET, N_GIVEN = 120, 15, 40


def gradients_by_backward(
    build, state: dict[str, Tensor], ds: xr.Dataset
) -> tuple[np.ndarray, np.ndarray, dict[str, tuple[int, ...]]]:
    """Flat gradients (n, parameters) of log p/(1-p), and 1 - p, sample by sample in float64."""
    module = build().double().eval()
    module.load_state_dict(state)
    rows, q = [], []
    for image, label in zip(ds.image.values, ds.label.values, strict=True):
        module.zero_grad()
        logits = module(torch.from_numpy(image[None]).double())[0]
        log_p = logits.log_softmax(0)[label]
        others = torch.cat([logits[:label], logits[label + 1 :]])
        (logits[label] - others.logsumexp(0)).backward()
        rows.append(torch.cat([p.grad.flatten() for p in module.parameters()]).numpy())
        q.append(-np.expm1(log_p.item()))
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    return np.array(rows), np.array(q), shapes


def matrix_of(projector: td.Rademacher, shapes: dict, checkpoint: int) -> np.ndarray:
    """P (parameters, proj_dim) in float64, entry by entry from its definition."""
    row_map = RowMap.from_shapes(shapes, alignment=projector.row_alignment)
    n_rows = -(-row_map.n_rows // 128) * 128
    matrix = signs(0, n_rows, 0, projector.proj_dim, seed=projector.seed, checkpoint=checkpoint)
    rows = [row_map.offset(n) + np.arange(row_map.size(n)) for n in shapes]
    return matrix[np.concatenate(rows)] / np.sqrt(projector.proj_dim)


def scores_by_formula(phi: list, target: list, q: list, factor: float = 0.03) -> np.ndarray:
    """mean_c[φ_c(z) (K_c + λ_c I)⁻¹ φ_c(t)] · mean_c[Q_c(z)], with the identity
    (ΦᵀΦ + λI)⁻¹ = (I - Φᵀ(ΦΦᵀ + λI)⁻¹Φ)/λ, so that no matrix is larger than n × n."""
    total = 0.0
    for x, t in zip(phi, target, strict=True):
        kernel = x @ x.T
        damping = factor * np.sum(kernel**2) / np.trace(kernel)
        inner = x @ t.T
        inside = np.linalg.solve(kernel + damping * np.eye(len(x)), inner)
        total = total + (inner - kernel @ inside) / damping
    return total / len(phi) * np.mean(q, axis=0)[:, None]


@pytest.fixture(scope="module")
def mlp_paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("mlp")
    return examples.digits_checkpoints(folder, examples.digits_mlp, n_checkpoints=2, epochs=3)


@pytest.fixture(scope="module")
def data() -> tuple[xr.Dataset, xr.Dataset]:
    train, targets = examples.digits(n_target=N_TARGET, chunks=50)
    return train.isel(sample=slice(N_TRAIN)), targets


def small_mlp() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10)
    )


@pytest.mark.parametrize(
    ("build", "projector", "error"),
    [
        # All 1,210 parameters of a small network: its gram matrix is not projected.
        (small_mlp, td.Identity(), 1e-4),
        (examples.digits_mlp, td.Rademacher(proj_dim=256, seed=11), 2e-3),
    ],
    ids=["identity", "rademacher"],
)
def test_score__equals_the_formula(tmp_path: Path, data, build, projector, error: float) -> None:
    paths = examples.digits_checkpoints(tmp_path, build, n_checkpoints=2, epochs=3)
    model = td.Model(build, paths)
    features, targets = (td.featurize(ds, model, projector=projector) for ds in data)
    found = td.score(features, targets, td.Trak(damping=0.03)).compute()
    states = [torch.load(path, weights_only=True) for path in paths]
    of_train, of_targets = (
        [gradients_by_backward(build, state, ds) for state in states] for ds in data
    )
    matrices = [
        1 if projector == td.Identity() else matrix_of(projector, shapes, checkpoint.id)
        for (_, _, shapes), checkpoint in zip(of_train, model.checkpoints, strict=True)
    ]
    phi, phi_of_targets = (
        [np.dot(gradients, matrix) for (gradients, *_), matrix in zip(side, matrices, strict=True)]
        for side in (of_train, of_targets)
    )
    expected = scores_by_formula(phi, phi_of_targets, [q for _, q, _ in of_train])
    assert np.linalg.norm(found.values - expected) <= error * np.linalg.norm(expected)


class Given(nn.Module):
    """f(x) = w·x: the gradient of a sample is the sample itself, to the last bit."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(700))
        self.v = nn.Parameter(torch.zeros(3, 100))

    def forward(self, x: Tensor) -> Tensor:
        return (x[:, :700] * self.w).sum(1) + (x[:, 700:] * self.v.flatten()).sum(1)


class Passed:
    variables = ("x",)

    def output(self, forward, batch):
        return forward(batch["x"])

    def out_to_loss(self, forward, batch):
        return batch["x"][:, 0].abs()


def given_features(chunks: int, projector, batch_size, gradients="vmap") -> xr.Dataset:
    x = np.random.default_rng(3).standard_normal((N_GIVEN, 1000), dtype=np.float32)
    samples = td.from_arrays({"x": x}, coords={"label": np.arange(N_GIVEN) % 3}, chunks=chunks)
    state = Given().state_dict()
    model = td.Model(Given, [state, {**state, "w": torch.ones(700)}], task=Passed())
    return td.featurize(
        samples, model, projector=projector, batch_size=batch_size, gradients=gradients
    )


@pytest.mark.parametrize("projector", [td.Identity(), td.Rademacher(proj_dim=77, seed=5)])
def test_featurize__no_bit_depends_on_how_it_is_cut_or_where(
    projector, process_client: Client
) -> None:
    names = ["feature", "output", "out_to_loss"]
    reference = given_features(N_GIVEN, projector, N_GIVEN)[names].compute(scheduler="sync")
    cuts = [(7, 3, "sync"), (16, 64, "threads"), (1, 1, "threads"), (30, "auto", process_client)]
    for chunks, batch_size, scheduler in cuts:
        with dask.config.set(scheduler=scheduler, num_workers=2):
            found = given_features(chunks, projector, batch_size)[names].compute()
        np.testing.assert_array_equal(found.feature, reference.feature)
        np.testing.assert_array_equal(found.out_to_loss, reference.out_to_loss)
        np.testing.assert_allclose(found.output, reference.output, rtol=1e-5, atol=1e-6)
    looped = given_features(20, projector, 10, gradients="loop").feature
    np.testing.assert_array_equal(looped.compute(scheduler="sync"), reference.feature)


def test_pipeline__same_scores_on_every_scheduler(
    mlp_paths, data, process_client: Client, tmp_path: Path
) -> None:
    projector = td.Rademacher(proj_dim=128)

    def run(chunks: int, batch_size: int, name: str) -> np.ndarray:
        model = td.Model(examples.digits_mlp, mlp_paths)
        train, targets = (ds.chunk(sample=chunks) for ds in data)
        features = td.featurize(train, model, projector=projector, batch_size=batch_size)
        saved = td.save(features, tmp_path / name, progress=False)
        target_features = td.featurize(targets, model, projector=projector)
        return td.score(saved, target_features, td.Trak(damping=0.03)).compute().values

    on_cluster = run(40, 16, "cluster.zarr")
    scale = np.abs(on_cluster).max()
    for scheduler, chunks, batch_size in [("sync", 120, 120), ("threads", 17, 5)]:
        with dask.config.set(scheduler=scheduler):
            found = run(chunks, batch_size, f"{scheduler}.zarr")
        np.testing.assert_allclose(found, on_cluster, rtol=0, atol=1e-5 * scale)
