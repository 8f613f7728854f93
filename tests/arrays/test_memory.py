"""Each bound is above the memory that the operation takes, and at most about twice as much."""

from __future__ import annotations

import ctypes
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import psutil
import pytest
import xarray as xr
from scipy import sparse

import trakdask as td
from tests.clusters import exit_code
from trakdask import arrays, execution
from trakdask.arrays import memory
from trakdask.arrays.factorization import decompose
from trakdask.arrays.graphs import stored
from trakdask.arrays.memory import Sizes
from trakdask.fits.components import _principal
from trakdask.testing import simulate_features

SLACK = 10e6
"""Bytes of graphs and small arrays, and above all of other threads: clusters of earlier tests."""


def zeros(n: int, p: int, c: int, rows: int, *, read: bool = False) -> da.Array:
    """Return features in blocks of rows, in memory or read by tasks."""
    chunks = da.core.normalize_chunks((rows, p, 1), (n, p, c))
    if not read:
        return da.zeros((n, p, c), chunks=chunks, dtype="f4")

    def block(key: tuple[slice, ...]) -> np.ndarray:
        return np.zeros(
            [len(range(*k.indices(m))) for k, m in zip(key, (n, p, c), strict=True)], "f4"
        )

    return stored(block, chunks, "f4", f"zeros-{n}-{p}-{c}-{rows}")


def peak(*lazy: da.Array) -> int:
    """Return the most memory that computing takes."""
    graph = dask.optimize(*lazy)
    dask.compute(*graph, scheduler="sync")  # imports, and what libraries keep
    return traced(lambda: dask.compute(*graph))


def traced(call: Callable[[], Any]) -> int:
    """Return the most memory that a call takes of Python and numpy; one task after the other."""
    with dask.config.set(scheduler="sync"):
        tracemalloc.start()
        call()
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return most


def require_tight(bound: float, measured: float) -> None:
    assert measured < bound + SLACK
    assert bound < 2 * measured + SLACK


@pytest.mark.parametrize(
    ("n", "p", "rows", "dtype"),
    [(1800, 800, 600, "float32"), (1800, 800, 600, "float64"), (40_000, 300, 500, "float32")],
)
def test_gram(n: int, p: int, rows: int, dtype: str) -> None:
    x, weights = da.zeros((n, p, 1), chunks=(rows, p, 1), dtype=dtype), da.ones((n, 1), chunks=rows)
    measured = peak(*arrays.gram.gram_and_sum(x, weights, weights))
    waiting = 8 * p**2 * (n // (8 * p))  # partial matrices
    bound = memory.gram(Sizes.of(x))
    assert bound / 3 < measured < bound + waiting + SLACK


@pytest.mark.parametrize(("read", "p", "n_targets"), [(False, 512, 300), (True, 64, 2000)])
def test_score(read: bool, p: int, n_targets: int) -> None:
    x, t = zeros(1024, p, 3, 1024, read=read), zeros(n_targets, p, 3, n_targets)
    sizes, weights = (Sizes.of(x), Sizes.of(t)), da.ones((1024, 3), chunks=(1024, 1))
    tile = arrays.score.score(x, t, weights)
    require_tight(memory.score(*sizes), peak(tile))
    require_tight(memory.score(*sizes, ranked=True), peak(*arrays.topk.top_k(tile, 10)))
    folds = da.ones((1024, 3))
    with_errors = arrays.score.score(x, t, weights, folds=folds)
    require_tight(memory.score(*sizes, errors=True), peak(with_errors))


@pytest.mark.parametrize(("k", "n_others"), [(10, 0), (10, 2), (1900, 2)])
def test_top_k(k: int, n_others: int) -> None:
    score, *others = (
        da.full((10 * 2000, 400), i, chunks=(2000, 400), dtype="f4") for i in range(n_others + 1)
    )
    bound = memory.top_k(2000, 400, k, n_others=n_others)
    waiting = 8 * 2000 * 400 * (2 + n_others) if k > 10 else 0  # rankings of blocks, of two nodes
    measured = peak(*arrays.topk.top_k(score, k, others=others))
    assert measured < bound + waiting + SLACK
    assert bound < 2 * measured + SLACK


@pytest.mark.parametrize(("read", "n_groups"), [(False, 2000), (True, 10)])
def test_group_sums(read: bool, n_groups: int) -> None:
    x, codes = zeros(8000, 512, 1, 4000, read=read), np.arange(8000) % n_groups
    weights = da.ones((8000, 1), chunks=(4000, 1))
    bound = memory.group_sums(Sizes.of(x), n_groups)
    require_tight(bound, peak(arrays.groups.weighted_sums(x, weights, codes, n_groups, axes="sc")))


def test_group_sums__of_folds() -> None:
    x = zeros(2000, 256, 1, 1000)
    members = sparse.csr_array((np.ones(2000), (np.arange(2000), np.arange(2000) % 500)))
    sums = arrays.groups.weighted_sums(x, da.ones((2000, 5), chunks=(1000, 5)), members, 500)
    require_tight(memory.group_sums(Sizes.of(x), 500, 5), peak(sums))
    folds = arrays.groups.weighted_sums(x, da.ones((2000, 50), chunks=(1000, 50)))
    require_tight(memory.group_sums(Sizes.of(x), 50), peak(folds))


@pytest.mark.parametrize("decomposed", [False, True])
def test_solve(decomposed: bool) -> None:
    p, labels = 800, ["c0"]
    k, lam = da.eye(p, chunks=p)[:, :, None], da.ones(1)
    if decomposed:
        values, vectors = arrays.spectra.eigenvectors(k, labels)
        spectrum = arrays.spectra.spectrum(values, vectors, None, 10, labels)
        lazy = arrays.spectra.inverse(spectrum, lam)
    else:
        lazy = arrays.solve.cholesky(k, lam, labels)
    rows = zeros(2000, p, 1, 2000)
    inverse, rows = dask.persist(lazy, rows, scheduler="sync")
    held, sizes = 8 * p**2 + rows.nbytes, Sizes.of(rows)
    require_tight(memory.solve(sizes, p), held + peak(arrays.solve.solve(inverse, rows)))
    require_tight(memory.leverage(sizes, p), held + peak(arrays.solve.leverage(inverse, rows)))


counts_peaks = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="Linux counts the peak"
)


@counts_peaks
@pytest.mark.parametrize("k", [300, 1500])
def test_eigenvectors(k: int) -> None:
    p = 1500
    half = np.random.default_rng(0).normal(size=(p, k))
    matrix = half @ half.T
    measured = matrix.nbytes + resident(lambda: decompose(matrix, k))
    require_tight(memory.eigenvectors(p, k), measured)


@counts_peaks
@pytest.mark.parametrize(("n", "width"), [(1000, 4000), (1600, 1600)])
def test_principal_components(n: int, width: int) -> None:
    both = np.random.default_rng(0).standard_normal((n, width + 2), dtype="f4")
    batches = [slice(i, min(i + 256, n)) for i in range(0, n, 256)]
    measured = both.nbytes + resident(lambda: _principal(100, 0, batches, both))
    require_tight(memory.principal_components(n, width), measured)


def features_of(n: int, p: int, rows: int) -> xr.Dataset:
    """Return features of one checkpoint, in blocks of rows."""
    few = simulate_features(n_samples=2, proj_dim=2, n_checkpoints=1)
    weights = few.out_to_loss.dims, da.ones((n, 1), chunks=(rows, 1), dtype="f4")
    return xr.Dataset(
        {"feature": (few.feature.dims, zeros(n, p, 1, rows)), "out_to_loss": weights},
        coords={"checkpoint": few.checkpoint},
        attrs=few.attrs,
    )


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_stored(dtype: str | None, tmp_path: Path) -> None:
    lazy = features_of(8192, 1024, 8192)
    save = partial(td.save, lazy, estimator=None, dtype=dtype, progress=False)
    save(tmp_path / "imports.zarr")
    measured = traced(lambda: save(tmp_path / "f.zarr"))
    require_tight(memory.stored(Sizes.of(lazy.feature.data), half=dtype is not None), measured)


@pytest.mark.parametrize("n_threads", [1, 8])
def test_verified(n_threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    features, store = features_of(16 * 1024, 1024, 1024), tmp_path / "f.zarr"
    td.save(features, store, estimator=None, progress=False)
    chunk = 1024 * 1024 * 4
    if n_threads == 1:  # a machine with less memory
        monkeypatch.setattr("trakdask.storage.changes.memory_limit", lambda here: 3 * chunk)
    verify = partial(td.verify, store, checksums=True)
    assert verify().empty
    require_tight(memory.verified(chunk, n_threads), traced(verify))


def test_exported(tmp_path: Path) -> None:
    data = xr.DataArray(da.zeros((8000, 1000), chunks=(4000, 1000)), dims=("sample", "target"))
    td.to_zarr(data[:10], tmp_path / "imports")
    measured = traced(lambda: td.to_zarr(data, tmp_path / "scores"))
    require_tight(memory.exported(data.nbytes // 2), measured)


@counts_peaks
@pytest.mark.parametrize("text", [False, True])
def test_tabled(text: bool, tmp_path: Path) -> None:
    assert exit_code(_require_tight_table, text, tmp_path) == 0


def _require_tight_table(text: bool, folder: Path) -> None:
    """Compare in a process of its own: Arrow keeps pages that other tests have freed."""
    shape, bounds = (10_000, 200), []
    words = np.array([f"source {i}" for i in range(1000)], np.dtypes.StringDType())
    values: dict[str, np.ndarray] = {"position": np.arange(2_000_000).reshape(shape)}
    values["label"] = values["position"] % 7
    if text:
        values["source"] = words[values["position"] % 1000]
    lazy = {name: da.from_array(v, chunks=-1).map_blocks(np.copy) for name, v in values.items()}
    lazy["score"] = da.zeros(shape, chunks=-1, dtype="f4")
    top = xr.Dataset({name: (("target", "rank"), v) for name, v in lazy.items()})
    top = top.set_coords({"label", "source"} & {*lazy})
    td.to_parquet(top.isel(target=slice(10)), folder / "imports")
    with pytest.MonkeyPatch.context() as patch, dask.config.set(scheduler="sync"):
        patch.setattr(execution, "require_memory", lambda n_bytes, *_: bounds.append(n_bytes))
        measured = resident(lambda: td.to_parquet(top, folder / "top"))
    require_tight(bounds[0], measured)


def resident(call: Callable[[], Any]) -> int:
    """Return by how much this process grows; LAPACK does not ask Python for its memory."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is measured anew
    before = psutil.Process().memory_info().rss
    call()
    lines = Path("/proc/self/status").read_text().splitlines()
    (most,) = (int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    return 1024 * most - before
