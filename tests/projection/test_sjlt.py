from __future__ import annotations

import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.projection.reference import normal, philox4x32, small_integers
from trakdask.projection import sjlt
from trakdask.projection.philox import STREAM_SJLT
from trakdask.projection.row_map import RowMap
from trakdask.projection.sjlt import SJLT, Nonzeros, SparseMatrix, nonzeros_of, sort_nonzeros
from trakdask.projection.stream import project

SMALL = SJLT(proj_dim=12, sparsity=3, seed=3)
NUMBA = {"numba": "1", "numpy": "0"}


def nonzero(projector: SJLT, row: int, j: int, checkpoint: int) -> tuple[int, int]:
    """Return (bucket, sign) of one nonzero, in Python integers."""
    counter = (row & 0xFFFFFFFF, j >> 2, checkpoint, (row >> 32) | STREAM_SJLT << 16)
    words = philox4x32(counter, (projector.seed & 0xFFFFFFFF, projector.seed >> 32))
    word = int(words[j & 3])
    return (word * projector.proj_dim) >> 32, 1 - 2 * (word & 1)


def nonzeros(
    projector: SJLT, row_offset: int, n_rows: int, checkpoint: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return the buckets and signs of a window of rows, both (sparsity, n_rows)."""
    rows = np.arange(row_offset, row_offset + n_rows, dtype=np.uint64)
    low, high = rows & np.uint64(0xFFFFFFFF), rows >> np.uint64(32) | np.uint64(1 << 16)
    key = (projector.seed & 0xFFFFFFFF, projector.seed >> 32)
    words = np.stack(
        [philox4x32((low, j >> 2, checkpoint, high), key)[j & 3] for j in range(projector.sparsity)]
    ).astype(np.uint64)
    buckets = words * np.uint64(projector.proj_dim) >> np.uint64(32)
    return buckets.astype(np.int64), 1.0 - 2.0 * (words & np.uint64(1))


def project_by_hand(projector: SJLT, block: Tensor, row_offset: int, checkpoint: int) -> Tensor:
    """Add up the nonzeros in float64, all samples at a time."""
    out = np.zeros((projector.proj_dim, len(block)))
    for buckets, signs in zip(
        *nonzeros(projector, row_offset, block.shape[1], checkpoint), strict=True
    ):
        np.add.at(out, buckets, (block.double().numpy() * signs).T)
    return torch.from_numpy(out.T)


def project_one(projector: SJLT, block: Tensor, row_offset: int = 0, checkpoint: int = 4) -> Tensor:
    out = torch.zeros(projector.proj_dim, len(block), dtype=torch.float64).T
    projector.project_block(block, row_offset, checkpoint, out)
    return out


def project_flat(projector: SJLT, flat: Tensor, checkpoint: int = 4) -> Tensor:
    rows = RowMap.from_shapes({"flat": flat.shape[1:]}, alignment=1)
    return project(projector, {"flat": flat}, rows, checkpoint)


@pytest.fixture(autouse=True)
def nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each backend has to draw and sort the nonzeros itself."""
    monkeypatch.setattr(sjlt, "_kept", sjlt._Kept(0))


@pytest.fixture(params=NUMBA)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TRAKDASK_NUMBA", NUMBA[request.param])
    return str(request.param)


@pytest.mark.parametrize("row", [0, 16384 * 5, 2**32 - 16384, 2**32 + 16384, 2**47 - 16384])
@pytest.mark.parametrize("seed", [0, 2**64 - 1])
@pytest.mark.usefixtures("backend")
def test_project_block__entries_are_those_of_the_definition(row: int, seed: int) -> None:
    projector, checkpoint = SJLT(proj_dim=1000, sparsity=6, seed=seed), 2**32 - 1
    expected = torch.zeros(3, 1000, dtype=torch.float64)
    for i, j in itertools.product(range(3), range(6)):
        bucket, sign = nonzero(projector, row + i, j, checkpoint)
        expected[i, bucket] += sign
    assert torch.equal(project_one(projector, torch.eye(3), row, checkpoint), expected)


@pytest.mark.parametrize("sparsity", [1, 3, 4, 5, 9])
@pytest.mark.parametrize(
    ("n_samples", "n_rows", "proj_dim"),
    [
        (1, 1, 1),
        (3, 127, 77),
        (4, 16384, 3),
        (5, 130, 512),
        (9, 16383, 4096),
        (37, 300, 70000),
        (2, 400, 2**18 + 1),
    ],
)
@pytest.mark.usefixtures("backend")
def test_project_block__exact_on_small_integers(
    n_samples: int, n_rows: int, proj_dim: int, sparsity: int
) -> None:
    projector = SJLT(proj_dim, sparsity, seed=2**63 + 5)
    block, row = small_integers(n_samples, n_rows), 2**32 + 16384 * 3
    expected = project_by_hand(projector, block, row, 9)
    assert torch.equal(project_one(projector, block, row, 9), expected)


@pytest.mark.parametrize(("proj_dim", "sparsity"), [(1, 1), (1, 5), (1, 7), (2, 1)])
@pytest.mark.parametrize("n_samples", [2, 6])
@pytest.mark.usefixtures("backend")
def test_project_block__exact_where_nothing_cancels(
    proj_dim: int, sparsity: int, n_samples: int
) -> None:
    # Gradients with the signs of their rows and of 14 bits: too large for sums in float32.
    projector = SJLT(proj_dim, sparsity)
    _, signs = nonzeros(projector, 0, 4999, 4)
    values = 16383 * np.where(signs.sum(0) < 0, -1, 1)
    block = torch.from_numpy(values).float().expand(n_samples, 4999)
    expected = project_by_hand(projector, block, 0, 4)
    assert not torch.equal(expected.float().double(), expected)
    assert torch.equal(project_one(projector, block), expected)


@pytest.mark.parametrize("sparsity", [7, 8, 64])
@pytest.mark.parametrize("n_samples", [2, 6])
@pytest.mark.usefixtures("backend")
def test_project_block__exact_at_the_largest_sums(
    sparsity: int, n_samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Words of 0 are nonzeros of +1 in column 0; the largest integer is 2**14.
    words = np.zeros((-(-sparsity // 4), 16384, 4), np.uint32)
    nonzeros = sort_nonzeros(words, SparseMatrix(2, sparsity, 0, 0))
    monkeypatch.setattr(sjlt, "nonzeros_of", lambda *_: nonzeros)
    found = project_one(SJLT(2, sparsity), torch.full((n_samples, 16384), 1 - 2.0**-24))
    expected = torch.tensor([16384.0 * sparsity, 0.0]).double()
    assert torch.equal(found, expected.expand(n_samples, 2))


@settings(max_examples=8)
@given(cuts=st.lists(st.integers(1, 69), unique=True, max_size=4))
def test_project__split_into_batches_is_invisible(cuts: list[int]) -> None:
    flat = normal(70, 17000)
    edges = [0, *sorted(cuts), 70]
    with pytest.MonkeyPatch.context() as patch:
        for switch in NUMBA.values():
            patch.setenv("TRAKDASK_NUMBA", switch)
            parts = [project_flat(SMALL, flat[a:b]) for a, b in itertools.pairwise(edges)]
            assert torch.equal(torch.cat(parts), project_flat(SMALL, flat))


def strided_columns(block: Tensor) -> Tensor:
    return block.repeat_interleave(3, dim=1)[:, ::3]


def rows_of_a_larger_one(block: Tensor) -> Tensor:
    return torch.cat([block, block, block], dim=1)[:, block.shape[1] : 2 * block.shape[1]]


@pytest.mark.parametrize("n_samples", [1, 3, 9])
@pytest.mark.parametrize(
    "layout", [strided_columns, rows_of_a_larger_one, lambda block: block.T.contiguous().T]
)
@pytest.mark.usefixtures("backend")
def test_project_block__layout_is_invisible(n_samples: int, layout: Any) -> None:
    block = normal(n_samples, 5000)
    assert torch.equal(project_one(SMALL, layout(block)), project_one(SMALL, block))


@pytest.mark.parametrize("n_samples", [4, 40])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.usefixtures("backend")
def test_project__sample_that_is_not_finite_is_nan(n_samples: int, bad: float) -> None:
    projector = SJLT(proj_dim=4096, sparsity=1)  # most columns are hit by no row
    flat = normal(n_samples, 50)
    clean = project_flat(projector, flat)
    flat[2, 49] = bad
    found = project_flat(projector, flat)
    others = torch.arange(n_samples) != 2
    assert found[2].isnan().all()
    assert torch.equal(found[others], clean[others])


@pytest.mark.usefixtures("backend")
def test_project_block__concurrent_threads_do_not_share_buffers() -> None:
    blocks = [normal(6, n_rows) for n_rows in (300, 5000, 129, 2048) * 3]
    expected = [project_one(SMALL, block) for block in blocks]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda block: project_one(SMALL, block), blocks))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(("proj_dim", "factor"), [(96, 4), (15, 3), (1, 64)])
@pytest.mark.parametrize("sparsity", [1, 4, 5])
def test_project_block__adjacent_columns_add_up_to_a_smaller_proj_dim(
    proj_dim: int, factor: int, sparsity: int
) -> None:
    block = small_integers(3, 5000)
    small = project_one(SJLT(proj_dim, sparsity), block)
    large = project_one(SJLT(proj_dim * factor, sparsity), block)
    assert torch.equal(large.unflatten(1, (proj_dim, factor)).sum(2), small)


def test_cost__counts() -> None:
    cost = SJLT(proj_dim=4096, sparsity=5).cost(10**6)
    assert cost.operations == 10 * 10**6
    assert cost.random_bits == 256 * 10**6
    assert cost.product_error == (4096**-0.5, 2048**-0.5)
    assert 16384 * 32 * 4 < cost.buffer_bytes < 64 * 2**20


# ------------------------------------------------------------ nonzeros, which are sorted and kept

MATRIX = SparseMatrix(proj_dim=12, sparsity=5, seed=2**40 + 3, checkpoint=7)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> sjlt._Kept:
    fresh = sjlt._Kept(10**5)
    monkeypatch.setattr(sjlt, "_kept", fresh)
    return fresh


def signed_rows(matrix: SparseMatrix, row_offset: int, n_rows: int) -> list[list[tuple[int, int]]]:
    """By column, the pairs (-sign, row) of its nonzeros, one by one."""
    found: list[list[tuple[int, int]]] = [[] for _ in range(matrix.proj_dim)]
    key = matrix.seed & 0xFFFFFFFF, matrix.seed >> 32
    for row in range(n_rows):
        for j in range(matrix.sparsity):
            at = row_offset + row
            counter = (at & 0xFFFFFFFF, j >> 2, matrix.checkpoint, at >> 32 | STREAM_SJLT << 16)
            word = int(philox4x32(counter, key)[j & 3])
            found[word * matrix.proj_dim >> 32].append((2 * (word & 1) - 1, row))
    return [sorted(column) for column in found]


def listed(found: Nonzeros) -> list[list[tuple[int, int]]]:
    columns = []
    for k in range((len(found.starts) - 1) // 2):
        start, middle, stop = found.starts[2 * k : 2 * k + 3]
        plus = [(-1, int(row)) for row in found.rows[start:middle]]
        minus = [(1, int(row)) for row in found.rows[middle:stop]]
        columns.append(sorted(plus) + sorted(minus))
    return columns


@pytest.mark.parametrize("numba", ["0", "1"])
@pytest.mark.parametrize("row_offset", [0, 2**32 - 16384, 2**33])
def test_nonzeros_of__are_those_of_the_definition(
    row_offset: int, numba: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAKDASK_NUMBA", numba)
    found = nonzeros_of(MATRIX, row_offset, 100)
    assert found.rows.dtype == np.uint16
    assert listed(found) == signed_rows(MATRIX, row_offset, 100)


@pytest.mark.parametrize("proj_dim", [1, 2, 1000, 2**15, 2**15 + 1, 100_003])
@pytest.mark.parametrize("sparsity", [1, 4, 9])
def test_sort_nonzeros__numba_and_numpy_agree(
    proj_dim: int, sparsity: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = SparseMatrix(proj_dim, sparsity, 0, 0)
    shape = (-(-matrix.sparsity // 4), 16384, 4)
    words = np.random.default_rng(0).integers(0, 2**32, shape, dtype=np.uint32)
    results = []
    for switch in ("0", "1"):
        monkeypatch.setenv("TRAKDASK_NUMBA", switch)
        results.append(sort_nonzeros(words, matrix))
    for numpy_array, numba_array in zip(*results, strict=True):
        np.testing.assert_array_equal(numpy_array, numba_array)


def test_nonzeros_of__drawn_once(kept: sjlt._Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    first = nonzeros_of(MATRIX, 0, 100)
    monkeypatch.setattr(sjlt, "fill_words", None)
    assert nonzeros_of(MATRIX, 0, 100) is first
    with pytest.raises(TypeError):
        nonzeros_of(MATRIX, 0, 99)
    with pytest.raises(TypeError):
        nonzeros_of(MATRIX._replace(checkpoint=8), 0, 100)


def blocks_kept(kept: sjlt._Kept, matrix: SparseMatrix) -> list[int]:
    return [row for row in range(0, 1000, 100) if kept.get(matrix, (row, 100)) is not None]


def test_kept__is_full_with_the_first_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    size = sort_nonzeros(np.zeros((2, 100, 4), np.uint32), MATRIX).nbytes
    kept = sjlt._Kept(3 * size + 1)
    monkeypatch.setattr(sjlt, "_kept", kept)
    for row in range(0, 1000, 100):
        nonzeros_of(MATRIX, row, 100)
    assert blocks_kept(kept, MATRIX) == [0, 100, 200]
    other = MATRIX._replace(checkpoint=8)
    nonzeros_of(other, 300, 100)  # makes the older matrix give way
    assert blocks_kept(kept, MATRIX) == []
    assert blocks_kept(kept, other) == [300]


def test_kept__used_by_threads_at_once(kept: sjlt._Kept) -> None:
    rows = [0, 100, 200, 0, 100, 200] * 20
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda row: nonzeros_of(MATRIX, row, 100), rows))
    assert kept._bytes == 3 * found[0].nbytes
    for row, each in zip(rows, found, strict=True):
        assert listed(each) == signed_rows(MATRIX, row, 100)
