"""Nothing computes before save, compute or an export: every public function under a guard."""

from __future__ import annotations

import ast
import importlib
import inspect
import operator
from pathlib import Path

import dask.array as da
import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr

import trakdask as td
from tests.laziness import raise_if_dask_computes
from trakdask.testing import simulate_features

X = np.random.default_rng(0).standard_normal((12, 4)).astype(np.float32)
LABEL = np.arange(12) % 3


def model() -> td.Model:
    torch.manual_seed(0)
    return td.Model(torch.nn.Linear(4, 3))


def assert_lazy(data: xr.Dataset | xr.DataArray) -> None:
    ds = data if isinstance(data, xr.Dataset) else data.to_dataset(name="data")
    for name, array in ds.data_vars.items():
        assert isinstance(array.data, da.Array), f"{name} is not lazy"


def from_arrays() -> xr.Dataset:
    return td.from_arrays({"image": X}, coords={"label": LABEL}, chunks=5)


def from_torch() -> xr.Dataset:
    dataset = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(LABEL))
    return td.from_torch(dataset, names=("image", "label"), chunks=5)


def score_parts() -> xr.DataArray:
    features = td.featurize(from_arrays(), model(), projector=td.SJLT(8))
    options = {"parts": ["weight"], "estimator": td.Trak(damping=0.1)}
    return td.score_parts(features, features, model(), of=from_arrays(), **options)


def train(positions: np.ndarray, seed: int) -> np.ndarray:
    raise AssertionError("a model was trained")


LABEL_IS_WRONG = np.arange(40) % 4 == 0
FEATURES = simulate_features(n_samples=40, proj_dim=8, chunks=16)
TARGETS = simulate_features(n_samples=10, proj_dim=8, chunks=16, seed=1)
MANY = simulate_features(n_samples=60, proj_dim=8, n_checkpoints=3, chunks=16)
MANY_TARGETS = simulate_features(n_samples=50, proj_dim=8, n_checkpoints=3, seed=1)
SEEDS = simulate_features(n_samples=60, proj_dim=8, n_checkpoints=5, chunks=16)
HALVES = td.evaluate.subsets(SEEDS, 5).rename(subset="checkpoint")
PUBLIC = {
    "from_arrays": from_arrays,
    "from_torch": from_torch,
    "featurize": lambda: td.featurize(from_arrays(), model(), projector=td.Rademacher(64)),
    "featurize_recording": lambda: td.featurize(from_arrays(), model(), on_error="record"),
    "score_parts": score_parts,
    "gram": lambda: td.gram(FEATURES),
    "damping": lambda: td.damping(FEATURES),
    "damping_by_outputs": lambda: td.damping(MANY, estimator="soft", calibrate=MANY_TARGETS),
    "score": lambda: td.score(FEATURES, TARGETS),
    "score_tracin": lambda: td.score(FEATURES, TARGETS, td.TracIn({"c0": 0.1, "c1": 0.2})),
    "self_influence": lambda: td.self_influence(MANY, estimator="soft"),
    "group_score": lambda: td.group_score(FEATURES, TARGETS, by="label"),
    "share": lambda: td.group_score(SEEDS, SEEDS, by="label", share=True),
    "effects": lambda: td.group_score(
        SEEDS.assign(trained_on=HALVES), SEEDS, by="label", effect=True
    ),
    "combine": lambda: td.combine(TARGETS, by="label"),
    "combine_metric": lambda: td.combine(TARGETS, metric="accuracy"),
    "metric": lambda: td.evaluate.metric(TARGETS.output, TARGETS, "accuracy"),
    "group_score_metric": lambda: td.group_score(FEATURES, TARGETS, by="label", metric="loss"),
    "top_k, over targets": lambda: td.top_k(
        td.score(FEATURES, TARGETS), fraction=0.1, over_targets="max", by="label"
    ),
    "top_k": lambda: td.top_k(td.score(FEATURES, TARGETS), 3),
    "subsets": lambda: td.evaluate.subsets(FEATURES, 4),
    "leave_one_out": lambda: td.evaluate.leave_one_out(FEATURES),
    "retrain": lambda: td.evaluate.retrain(train, td.evaluate.subsets(FEATURES, 4), 10),
    "lds": lambda: td.evaluate.lds(
        td.score(FEATURES, TARGETS),
        td.evaluate.subsets(FEATURES, 4),
        td.evaluate.retrain(train, td.evaluate.subsets(FEATURES, 4), 10),
    ),
    "baselines": lambda: td.evaluate.baselines(FEATURES, TARGETS),
    "removal_curve": lambda: td.evaluate.removal_curve(train, td.score(FEATURES, TARGETS), [0.1]),
    "leave_group_out": lambda: td.evaluate.leave_group_out(
        train, td.group_score(SEEDS, SEEDS, by="label", level=0.9), SEEDS.label
    ),
    "mislabelled_curve": lambda: td.evaluate.mislabelled_curve(FEATURES.output, LABEL_IS_WRONG),
    "accessor": lambda: FEATURES.trak.score(TARGETS).trak.top_k(3),
    "from_features": lambda: td.from_features(X, "embeddings", coords={"label": LABEL}, chunks=5),
    "simulate_features": lambda: simulate_features(),
}


@pytest.mark.filterwarnings("ignore:.* groups have more than 30% of the samples")
@pytest.mark.filterwarnings("ignore:all samples of .* are in one group")
@pytest.mark.parametrize("name", PUBLIC)
def test_public_function__computes_nothing(name: str) -> None:
    with raise_if_dask_computes():
        assert_lazy(PUBLIC[name]())


def test_from_dataframe__parquet_computes_nothing(tmp_path: Path) -> None:
    pd.DataFrame({"x": list(X), "y": LABEL}).to_parquet(tmp_path / "part.parquet")
    with raise_if_dask_computes():
        samples = td.from_dataframe(
            str(tmp_path / "*.parquet"), variables={"image": "x"}, coords=["y"]
        )
        assert_lazy(samples)


def test_open__computes_nothing_but_coords(tmp_path: Path) -> None:
    td.save(FEATURES, tmp_path / "f.zarr", progress=False)
    opened = td.open(tmp_path / "f.zarr")
    assert_lazy(opened)
    assert all(
        isinstance(c.data, np.ndarray) or c.dtype.kind in "TU" for c in opened.coords.values()
    )
    assert "sample" not in opened.indexes


NOT_LAZY = {
    "attribute": "writes to a store",
    "assign_coords": "writes to a store",
    "calibrate": "writes to a store",
    "drop": "writes to a store",
    "evaluate.train_on_halves": "trains models",
    "evaluate.cross_validate": "returns numbers, not arrays to go on with",
    "evaluate.reliability": "returns numbers, not arrays to go on with",
    "examples.digits": "returns arrays that are bundled",
    "examples.digits_halves": "trains models",
    "examples.mnist": "returns arrays that are bundled",
    "from_dataframe": "has a test of its own above",
    "open": "has a test of its own above",
    "save": "runs the computation",
}
"""Public functions that return labelled arrays but are not in the table, with the reason."""


def public_functions() -> set[str]:
    """Names of the functions of the top level, and of the modules that are public themselves."""
    modules = {
        name: getattr(td, name) for name in td.__all__ if inspect.ismodule(getattr(td, name))
    }
    names = {f"{name}.{each}" for name, module in modules.items() for each in module.__all__}
    names |= set(td.__all__)
    return {name for name in names if inspect.isfunction(operator.attrgetter(name)(td))}


def test_public_function__is_in_the_table_if_it_returns_labelled_arrays() -> None:
    returning = set()
    for name in public_functions():
        annotations = getattr(operator.attrgetter(name)(td), "__annotations__", {})
        if "xr.Data" in str(annotations.get("return")):
            returning.add(name)
    cases = {case + "_" for case in PUBLIC}
    listed = {
        name for name in returning if any(c.startswith(name.split(".")[-1] + "_") for c in cases)
    }
    assert returning - listed == set(NOT_LAZY)


def test_public_names__are_those_of_the_stub_and_of_the_modules_behind_it() -> None:
    stub = ast.parse(Path(td.__file__).with_suffix(".pyi").read_text("utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    listed = {alias.asname: (node.module, alias.name) for node in imports for alias in node.names}
    assert set(td.__all__) == set(listed) == set(dir(td)) & set(listed)
    for public, (module, name) in listed.items():
        where = importlib.import_module(f"trakdask.{module}" if module else "trakdask")
        assert getattr(td, public) is getattr(where, name), public
