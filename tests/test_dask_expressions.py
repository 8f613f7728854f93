"""Dask's arrays of expressions answer queries; those of the package dask-array do everything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import dask.array as da
import distributed
import numpy as np
import pytest
import torch
import xarray as xr

import trakdask as td

ROOT = Path(__file__).parents[1]
_SCRIPT = """
import json, warnings
warnings.simplefilter("ignore")
{first}
from tests.test_dask_expressions import answers, queries
for call in {calls}:
    print(json.dumps(eval(call)))
"""


def queries(folder: str, *, is_planned: bool) -> dict[str, object]:
    """Return what is asked of features in stores, and lazy arrays of theirs."""
    assert hasattr(da, "elemwise") == is_planned, "the arrays are the other ones"
    features, targets = td.open(f"{folder}/train.zarr"), td.open(f"{folder}/targets.zarr")
    sums = ["gram", "loss_gradient", "feature_norm"]
    changed = features.drop_vars(sums)  # they are made anew
    results = {f"score, {e}": td.score(features, targets, e) for e in ESTIMATORS}
    results |= {
        "changed": td.score(changed, targets, "soft"),
        "some": td.score(features.isel(sample=slice(3, 77)), targets, "soft"),
        "each": td.score(features, targets, "soft", average=False),
        "chunks": td.score(features.chunk(sample=33), targets.chunk(sample=2), "soft"),
        "persisted": td.score(features.persist(), targets, "soft"),
        "top_k": td.top_k(results["score, soft"], 3).position,
        "top_k, where": td.top_k(results["score, soft"], 3, where="label == 1").position,
        "group_score": td.group_score(features, targets, "soft", by="label"),
        "intervals": td.score(features, targets, "soft", level=0.9).upper,
        "share": td.group_score(features, targets, "grad_cos", by="label", share=True),
        "self_influence": td.self_influence(features),
        "gram": td.gram(changed),
        "damping": td.damping(changed, "soft").damping,
        "combine": td.score(features, td.combine(targets, by="label"), "trak"),
        "metric": td.score(features, td.combine(targets, metric="accuracy"), "trak"),
        "feature": features.feature.isel(sample=slice(29, 31)),
    }
    return {name: result.compute().values.round(4).tolist() for name, result in results.items()}


ESTIMATORS = ("auto", "soft", "trak", "relatif", "grad_dot", "grad_cos")


def answers(folder: str, *, cluster: bool) -> dict[str, object]:
    """Return what a user asks first, of lazy inputs that xarray has chunked."""
    if cluster:
        with distributed.Client(processes=False, dashboard_address=":0"):
            return answers(folder, cluster=False)
    x = np.random.default_rng(0).normal(size=(40, 6)).astype("f4")
    ds = xr.Dataset({"image": (("sample", "pixel"), x)}, {"label": ("sample", np.arange(40) % 3)})
    samples = ds.chunk(sample=16)
    torch.manual_seed(0)
    model = td.Model(torch.nn.Linear(6, 3), task="image_classification")
    features = td.featurize(samples, model, td.SJLT(8))
    store = f"{folder}/f.zarr"
    saved = td.save(features, store, progress=False)
    opened = td.save(features.assign_attrs(source="2"), store, append_dim="sample", progress=False)
    opened = td.drop(store, where=opened.label == 2)
    targets = features.isel(sample=slice(4)).chunk(sample=3)
    scores = td.score(opened.chunk(sample=10), targets)
    td.to_zarr(scores, f"{folder}/s.zarr")
    results = {
        "saved": saved.feature.sum("sample"),
        "score": scores,
        "written": xr.open_zarr(f"{folder}/s.zarr").score,
        "top_k": td.top_k(td.score(opened, targets), k=3).position,
        "group_score": td.group_score(opened, targets, by="label"),
        "self_influence": td.self_influence(opened),
        "some rows": td.score(opened.isel(sample=slice(0, 20)).persist(), targets),
    }
    return {name: result.values.round(4).tolist() for name, result in results.items()}


def run(*calls: str, first: str = "", **env: str) -> tuple[list[dict[str, object]], str]:
    """Return what calls give in a new process, up to one that fails, and what it says."""
    script = _SCRIPT.format(first=first, calls=calls)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), **env}
    done = subprocess.run([sys.executable, "-c", script], env=env, text=True, capture_output=True)
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def require_close(theirs: dict[str, object], ours: dict[str, object]) -> None:
    assert theirs.keys() == ours.keys()
    for name, values in ours.items():
        np.testing.assert_allclose(theirs[name], values, rtol=1e-3, atol=1e-3, err_msg=name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_query_planning__of_dask_itself_answers_queries_and_stores_nothing(tmp_path: Path) -> None:
    for name, n, estimator in (("train", 120, "soft"), ("targets", 7, None)):
        made = td.testing.simulate_features(n, 6, 5, chunks=30, seed=n)
        td.save(made, tmp_path / f"{name}.zarr", estimator=estimator, progress=False)
    folder = str(tmp_path)
    calls = f"queries({folder!r}, is_planned=True)", f"answers({folder!r}, cluster=False)"
    answered, said = run(*calls, DASK_ARRAY__QUERY_PLANNING="True")
    assert "NotImplementedError: expected Dask with array.query-planning off" in said
    assert len(answered) == 1, said
    require_close(answered[0], queries(folder, is_planned=False))


@pytest.mark.faults
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_dask_array__in_the_place_of_dask(tmp_path: Path) -> None:
    pytest.importorskip("dask_array")
    calls = []
    for name, cluster in (("threads", False), ("cluster", True)):
        (tmp_path / name).mkdir()
        calls.append(f"answers({str(tmp_path / name)!r}, cluster={cluster})")
    register = "from dask_array.xarray import register; register()"
    answered, said = run(*calls, first=register)
    assert len(answered) == 2, said
    ours = answers(str(tmp_path), cluster=False)
    for theirs in answered:
        require_close(theirs, ours)


def test_graphs__are_known_to_one_module() -> None:
    words = ("dask.layers", "dask.blockwise", "dask.highlevelgraph", "da.optimize", ".dask.layers")
    modules = {
        path.relative_to(ROOT / "trakdask").as_posix()
        for path in (ROOT / "trakdask").rglob("*.py")
        if any(word in path.read_text() for word in words)
    }
    assert modules == {"arrays/graphs.py"}
