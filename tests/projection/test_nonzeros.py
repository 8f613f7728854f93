"""Nonzeros are sorted by column, and kept as long as there is room for them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from trakdask.projection import nonzeros
from trakdask.projection.nonzeros import Nonzeros, SparseMatrix, nonzeros_of, sort_nonzeros
from trakdask.projection.philox import STREAM_SJLT, philox4x32

MATRIX = SparseMatrix(proj_dim=12, sparsity=5, seed=2**40 + 3, checkpoint=7)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> nonzeros._Kept:
    fresh = nonzeros._Kept(10**5)
    monkeypatch.setattr(nonzeros, "_kept", fresh)
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
@pytest.mark.usefixtures("kept")
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
    shape = (matrix.n_groups, 16384, 4)
    words = np.random.default_rng(0).integers(0, 2**32, shape, dtype=np.uint32)
    results = []
    for switch in ("0", "1"):
        monkeypatch.setenv("TRAKDASK_NUMBA", switch)
        results.append(sort_nonzeros(words, matrix))
    for numpy_array, numba_array in zip(*results, strict=True):
        np.testing.assert_array_equal(numpy_array, numba_array)


def test_nonzeros_of__drawn_once(kept: nonzeros._Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    first = nonzeros_of(MATRIX, 0, 100)
    monkeypatch.setattr(nonzeros, "fill_words", None)
    assert nonzeros_of(MATRIX, 0, 100) is first
    with pytest.raises(TypeError):
        nonzeros_of(MATRIX, 0, 99)
    with pytest.raises(TypeError):
        nonzeros_of(MATRIX._replace(checkpoint=8), 0, 100)


def blocks_kept(kept: nonzeros._Kept, matrix: SparseMatrix) -> list[int]:
    return [row for row in range(0, 1000, 100) if kept.get(matrix, (row, 100)) is not None]


def test_kept__is_full_with_the_first_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    size = sort_nonzeros(np.zeros((2, 100, 4), np.uint32), MATRIX).nbytes
    kept = nonzeros._Kept(3 * size + 1)
    monkeypatch.setattr(nonzeros, "_kept", kept)
    for row in range(0, 1000, 100):
        nonzeros_of(MATRIX, row, 100)
    assert blocks_kept(kept, MATRIX) == [0, 100, 200]
    other = MATRIX._replace(checkpoint=8)
    nonzeros_of(other, 300, 100)  # makes the older matrix give way
    assert blocks_kept(kept, MATRIX) == []
    assert blocks_kept(kept, other) == [300]


def test_kept__used_by_threads_at_once(kept: nonzeros._Kept) -> None:
    rows = [0, 100, 200, 0, 100, 200] * 20
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda row: nonzeros_of(MATRIX, row, 100), rows))
    assert kept._bytes == 3 * found[0].nbytes
    for row, each in zip(rows, found, strict=True):
        assert listed(each) == signed_rows(MATRIX, row, 100)
