"""Dask's arrays of expressions: its own are refused, and the package dask-array is taken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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
from tests.test_dask_expressions import answers
print(json.dumps(answers({folder!r}, cluster={cluster})))
"""


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


_CALL = "import dask.array as da; da.store([], [])"
_PLANNING = {**os.environ, "DASK_ARRAY__QUERY_PLANNING": "True"}


def run(
    first: str, folder: Path, *, cluster: bool = False, **variables: str
) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    script = _SCRIPT.format(first=first, folder=str(folder), cluster=cluster)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), **variables}
    return subprocess.run([sys.executable, "-c", script], env=env, text=True, capture_output=True)


@pytest.mark.slow
def test_query_planning__of_dask_itself_is_refused(tmp_path: Path) -> None:
    done = run("", tmp_path / "f", DASK_ARRAY__QUERY_PLANNING="True")
    assert "ImportError: expected Dask with array.query-planning off" in done.stderr
    done = subprocess.run([sys.executable, "-c", _CALL], env=_PLANNING, capture_output=True)
    assert b"NotImplementedError" in done.stderr, "Dask has da.store now: try not to refuse it"


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [False, True])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_dask_array__in_the_place_of_dask(tmp_path: Path, cluster: bool) -> None:
    pytest.importorskip("dask_array")
    register = "from dask_array.xarray import register; register()"
    done = run(register, tmp_path / "theirs", cluster=cluster)
    assert not done.returncode, done.stderr
    (tmp_path / "ours").mkdir()
    theirs, ours = json.loads(done.stdout), answers(str(tmp_path / "ours"), cluster=False)
    for name, values in ours.items():
        np.testing.assert_allclose(theirs[name], values, rtol=1e-3, atol=1e-3, err_msg=name)


def test_graphs__are_known_to_one_module() -> None:
    words = ("dask.layers", "dask.blockwise", "dask.highlevelgraph", "da.optimize", ".dask.layers")
    modules = {
        path.relative_to(ROOT / "trakdask").as_posix()
        for path in (ROOT / "trakdask").rglob("*.py")
        if any(word in path.read_text() for word in words)
    }
    assert modules == {"arrays/graphs.py"}
