"""plan: numbers by hand for a model of 53 parameters; nothing is computed."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from distributed import Client
from torch import nn

import trakdask as td
from tests.laziness import raise_if_dask_computes
from trakdask.planning import plan
from trakdask.planning.fits import N_CURVATURE, N_WEIGHTS, fit_seconds
from trakdask.planning.pilot import Pilot
from trakdask.projection import Projector
from trakdask.projection.mask import Mask

SIZES = (30, 5, 15, 3)  # elements of the four parameters of `build`
N_SAMPLES, N_CHECKPOINTS = 20, 2


def by_hand(projector: td.Rademacher) -> dict[str, Any]:
    """Count with a loop; tensors start at multiples of 512."""
    n_rows = 0
    for size in SIZES:
        n_rows = -(-n_rows // 512) * 512 + size
    digits = int(projector.arithmetic[-1])
    entries = n_rows * projector.proj_dim
    features = N_SAMPLES * N_CHECKPOINTS
    return {
        "projector": repr(projector),
        "proj_dim": projector.proj_dim,
        "n_rows": n_rows,
        "sample_operations": 2 * digits * entries,
        "gram_operations": features * projector.proj_dim**2,
        # As many eigenvectors as samples: there are more columns.
        "decomposition_operations": features * (4 * projector.proj_dim + 9 * N_SAMPLES) * N_SAMPLES,
        "random_bits": entries,
        "feature_bytes": 4 * features * projector.proj_dim,
        "store_bytes": features * (4 * (projector.proj_dim + 2) + 8)
        + 4 * N_CHECKPOINTS * projector.proj_dim * (projector.proj_dim + 1) // 2,
        "buffer_bytes": projector.cost(n_rows).buffer_bytes,
        **memory_by_hand(projector.proj_dim),
        "rounding_error": {1: 1.1e-2, 2: 9e-5, 3: 4e-7}[digits],
        "product_error": pytest.approx((1 / projector.proj_dim) ** 0.5),
        "worst_product_error": pytest.approx((2 / projector.proj_dim) ** 0.5),
    }


def memory_by_hand(p: int) -> dict[str, int]:
    """Blocks have 8 samples; the bounds themselves are compared with what tasks take."""
    k = N_SAMPLES  # eigenvectors
    gram = 4 * p * 3 * N_SAMPLES + (8 + 2 * 4) * p**2
    factors = 8 * (2 * p**2 + 2 * p * k + 3 * k**2)
    blocks = 2 * 4 * 8 * p + N_CHECKPOINTS * 4 * 100 * p
    solved = 8 * p**2 + (4 + 20) * 100 * p
    return {
        "save_bytes": max(gram, factors),
        "query_bytes": max(blocks + 20 * 8 * 100, solved),
    }


def build() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def features(projector: Projector) -> xr.Dataset:
    x, label = np.zeros((N_SAMPLES, 2, 3), "f4"), np.arange(N_SAMPLES) % 3
    samples = td.from_arrays({"image": x}, coords={"label": label}, chunks=8)
    states = {f"c{i}": build().state_dict() for i in range(N_CHECKPOINTS)}
    model = td.Model(build, states, task="image_classification")
    return td.featurize(samples, model, projector)


OWN = td.Rademacher(proj_dim=32, seed=4)
OTHER = td.Rademacher(proj_dim=512, arithmetic="int8x3")
FEATURES = features(OWN)


def test_plan__numbers_are_those_by_hand() -> None:
    with raise_if_dask_computes():
        found = plan(FEATURES, [OTHER, td.Identity()])
    assert (found.n_samples, found.n_blocks, found.n_checkpoints) == (20, 3, 2)
    assert found.n_parameters == sum(SIZES)
    own, other, identity = (row for _, row in found.projections.iterrows())
    assert dict(own) == by_hand(OWN)
    assert dict(other) == by_hand(OTHER)
    assert (identity.proj_dim, identity.n_rows) == (53, 53)
    assert identity.feature_bytes == 4 * 20 * 2 * 53
    assert (identity.sample_operations, identity.rounding_error) == (0, 0.0)


@pytest.mark.parametrize(
    ("n_samples", "n_fitted", "task"),
    [
        (600, 520, "image_classification"),
        (90, 2000, "image_classification"),
        (600, 500, "regression"),
    ],
)
def test_plan__a_fit_keeps_the_bytes_that_are_planned(
    n_samples: int, n_fitted: int, task: str
) -> None:
    inputs = {"image" if "image" in task else "x": np.eye(n_samples, 6, dtype="f4")}
    labels = {"label" if "image" in task else "y": np.arange(n_samples) % 3}
    samples = td.from_arrays(inputs | labels)
    nets = [nn.Linear(6, 3 if "image" in task else 1) for _ in range(2)]
    model = td.Model(nets[0], [net.state_dict() for net in nets], task=task)
    found = plan(td.featurize(samples, model), n_fitted=n_fitted).fit
    fitted = td.fit(samples, model, n_samples=n_fitted, progress=False)
    kept = sum(array.nbytes for array in fitted.arrays.values())
    assert 0.99 * found["kept_bytes"] < kept <= found["kept_bytes"]  # parameters may have no weight
    n, with_curvature = min(n_samples, n_fitted), n_samples >= 500
    n_few = min(n, N_CURVATURE)
    of_curvature = (2 + ("image" in task)) * n_few * with_curvature
    assert found["n_gradients"] == n + of_curvature + n_few * ("image" in task)
    assert plan(td.featurize(samples, model, fitted)).fit is None


def test_plan__a_fit_of_a_model_of_tokens_takes_all_samples() -> None:
    ids, n = np.arange(700 * 6).reshape(700, 6) % 9, 700
    samples = td.from_arrays({"image": ids, "label": np.arange(n) % 3})
    model = td.Model(nn.Sequential(nn.EmbeddingBag(9, 4), nn.Linear(4, 3)))
    assert plan(td.featurize(samples, model)).fit["n_gradients"] == 4 * n + N_WEIGHTS


def test_plan__hooks_turn_the_inputs_of_a_gradient_and_others_all_of_it() -> None:
    samples = td.from_arrays({"image": np.eye(600, 6, dtype="f4"), "label": np.arange(600) % 3})
    model = td.Model(nn.Linear(6, 3), task="image_classification")
    by_hooks, by_loop = (
        plan(td.featurize(samples, model, gradients=name)).fit for name in ("hooks", "loop")
    )
    n_turned = 600 + 600 + 600 + 600  # less the first pass, which finds the coordinates
    assert (by_hooks["turning"], by_loop["turning"]) == (
        round(n_turned * 6**2 / (3 * 21)),
        0,
    )
    assert by_loop["operations"] - by_hooks["operations"] == 2 * n_turned * 18 * 6


def test_plan__a_fit_takes_as_long_as_its_passes_and_products() -> None:
    pilot = Pilot(10, 3.0, 2.0, 0.5, 2, 0, 0, 0)
    fit = {"n_gradients": 300, "turning": 100, "operations": 0, "kept_bytes": 0, "memory_bytes": 0}
    once = fit_seconds(fit, pilot, n_checkpoints=3, proj_dim=8)
    assert once == 3 * 400 * 0.2 / 2
    more = fit_seconds(fit | {"operations": 2 * 10 * 8**2}, pilot, 3, 8)
    assert more - once == pytest.approx(3 * 1.6 * 0.5 / 2)
    shown = repr(dataclasses.replace(plan(FEATURES), pilot=pilot, fit=fit, block_bytes=4 * 10 * 8))
    assert "A td.fit before: about 80 s, gradients of 300 samples, " in shown


def test_plan__opened_store_gives_the_same(tmp_path: Path) -> None:
    lazy = features(Mask(keep=40))  # its spec is nested
    opened = td.save(lazy, tmp_path / "f.zarr", progress=False)
    with raise_if_dask_computes():
        found = plan(opened, [OTHER])
    frame = found.projections
    assert frame.equals(plan(lazy, [OTHER]).projections)
    assert repr(pickle.loads(pickle.dumps(found))) == repr(found)
    assert "random_bits" in found._repr_html_().split("<details>")[1]
    assert frame.proj_dim.tolist() == [40, 512]
    assert {dtype.kind for dtype in frame.drop(columns="projector").dtypes} <= {"i", "f"}


@pytest.mark.parametrize("least", [0, 32])
def test_plan__store_bytes_are_those_on_disk(
    least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With eigenvectors and without."""
    for module in ("derived", "planning.plans"):
        monkeypatch.setattr(f"trakdask.{module}.LEAST_DIM", least)
    td.save(FEATURES, tmp_path / "f.zarr", progress=False)
    sizes = [
        file.stat().st_size
        for name in ("feature*", "out*", "gram*")
        for file in (tmp_path / "f.zarr").glob(f"{name}/**/*")
        if file.is_file() and file.name != "zarr.json"
    ]
    padding = (24 - N_SAMPLES) * N_CHECKPOINTS * 4 * 32  # zarr fills up the last chunk
    checks = 4 * len(sizes)  # a CRC-32C for each chunk
    planned = plan(FEATURES).projections.store_bytes[0] + padding + checks
    assert sum(sizes) == pytest.approx(planned, rel=0.02)  # zeros of a small matrix take some space


@pytest.mark.parametrize(("rank", "widths"), [(64, []), (65, [64, 128])])
def test_plan__compares_more_columns_where_they_are_few(rank: int, widths: list[int]) -> None:
    wide = td.Model(nn.Linear(100, 3), task="image_classification")
    samples = td.from_arrays({"image": np.zeros((rank, 100), "f4"), "label": np.zeros(rank, int)})
    found = plan(td.featurize(samples, wide, projector=OWN))
    assert found.projections.proj_dim.tolist() == [32, *widths]
    assert ("or td.fit" in repr(found)) == bool(widths)


class Counted(nn.Sequential):
    """Counts the samples that pass it, and needs 200 MB for those that are not 0."""

    n_samples = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counted.n_samples += len(x)
        return super().forward(x) + torch.ones(50_000_000 * bool(x.any())).sum() * 0


@pytest.mark.parametrize("n_samples", [8, 40])
def test_plan__pilot_computes_two_blocks(n_samples: int) -> None:
    x, label = np.zeros((n_samples, 6), "f4"), np.arange(n_samples) % 3
    x[0] = 1
    samples = td.from_arrays({"image": x, "label": label}, chunks=8)
    states = {f"c{i}": Counted(nn.Linear(6, 3)).state_dict() for i in range(2)}
    model = td.Model(lambda: Counted(nn.Linear(6, 3)), states, task="image_classification")
    lazy = td.featurize(samples, model, projector=OWN, gradients="loop", batch_size=8)
    before = Counted.n_samples
    found = plan(lazy, pilot=True)
    assert 2 * 8 <= Counted.n_samples - before <= 4 * 8  # some more check the gradients
    assert 1.9e8 < found.pilot.task_bytes < 4e8
    assert found.memory_bytes(3) - found.memory_bytes(1) == 2 * found.pilot.task_bytes


def test_plan__pilot_on_a_client(client: Client) -> None:
    found = plan(FEATURES, pilot=True)
    assert found.pilot.n_slots == 2
    assert found.pilot.block_s > 0
    assert found.memory_bytes() > found.pilot.process_bytes > 0
