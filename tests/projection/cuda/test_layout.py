from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trakdask.projection.cuda import layout
from trakdask.projection.cuda.layout import Columns, Run

SIZES = st.integers(1, 70_000)
SAMPLES = st.integers(1, 5000)
CACHES = st.sampled_from([1, 2**20, 2**22, 50 * 2**20, 2**28])


def rows_of(run: Run) -> list[tuple[int, int]]:
    """Return [start, stop) of every block of a run, one after the other."""
    starts = [run.first + block * run.n_rows for block in range(run.n_blocks)]
    return [(start, start + run.n_rows) for start in starts]


@given(n_rows=st.integers(1, 10**6), block_bytes=st.integers(1, 2**28))
def test_runs__are_the_blocks_of_the_grid_in_order(n_rows: int, block_bytes: int) -> None:
    found = [block for run in layout.runs(n_rows, block_bytes) for block in rows_of(run)]
    starts = range(0, n_rows, 16384)
    assert found == [(start, min(start + 16384, n_rows)) for start in starts]
    for run in layout.runs(n_rows, block_bytes):
        assert run.n_blocks == 1 or run.n_blocks * block_bytes <= 2**26
        assert run.stop == rows_of(run)[-1][1]
        assert run.depth % 128 == 0
        assert run.n_rows <= run.depth < run.n_rows + 128


def test_runs__no_grid_is_too_long() -> None:
    assert max(run.n_blocks for run in layout.runs(2**31, 1)) < 2**16


@given(n_samples=SAMPLES, n_digits=st.integers(1, 3))
def test_lines__suit_the_product(n_samples: int, n_digits: int) -> None:
    lines = layout.lines(n_samples, n_digits)
    assert lines % 8 == 0
    assert lines > 16
    assert n_digits * n_samples <= lines <= max(24, n_digits * n_samples + 7)


@given(n_samples=SAMPLES, n_digits=st.integers(1, 3), n_blocks=st.integers(1, 2**15))
def test_quantize_grid__one_per_sample_and_line_of_zeros(
    n_samples: int, n_digits: int, n_blocks: int
) -> None:
    zeros = layout.lines(n_samples, n_digits) - n_digits * n_samples
    assert layout.quantize_grid(n_samples, n_digits, n_blocks) == (n_samples + zeros, n_blocks)


@given(width=SIZES, cache_bytes=CACHES)
def test_dense_columns__each_column_once_and_in_the_cache(width: int, cache_bytes: int) -> None:
    tiles = list(layout.dense_columns(width, cache_bytes))
    assert_columns(tiles, width)
    assert all(tile.padded % 8 == 0 and tile.n <= tile.padded < tile.n + 8 for tile in tiles)
    assert all(tile.padded <= tiles[0].padded for tile in tiles)
    assert all(
        tile.padded * 16384 <= max(8 * 16384, cache_bytes // 2 + 7 * 16384) for tile in tiles
    )


def assert_columns(tiles: list[Columns], width: int) -> None:
    columns = [column for tile in tiles for column in range(tile.first, tile.first + tile.n)]
    assert columns == list(range(width))


@pytest.mark.parametrize(("width", "expected"), [(2048, [1024] * 2), (4096, [1368, 1368, 1360])])
def test_dense_columns__of_an_h100(width: int, expected: list[int]) -> None:
    assert [tile.n for tile in layout.dense_columns(width, 50 * 2**20)] == expected


@given(width=SIZES, n_samples=SAMPLES, n_digits=st.integers(1, 3))
def test_dense_block_bytes__holds_digits_and_sums(
    width: int, n_samples: int, n_digits: int
) -> None:
    columns = Columns(0, width, width)
    bound = layout.dense_block_bytes(n_samples, n_digits, columns)
    lines = layout.lines(n_samples, n_digits)
    assert bound == max(lines * 16384, lines * width * 4)


@given(n_columns=SIZES, n_counters=st.integers(1, 1024))
def test_fill_grid__a_thread_per_counter(n_columns: int, n_counters: int) -> None:
    blocks, one = layout.fill_grid(n_columns, n_counters)
    assert one == 1
    assert 0 <= blocks * layout.TILE_THREADS - n_columns * n_counters < layout.TILE_THREADS


@given(n_samples=SAMPLES, n_columns=SIZES)
def test_combine_grid__a_thread_per_sum(n_samples: int, n_columns: int) -> None:
    samples, blocks = layout.combine_grid(n_samples, n_columns)
    assert samples == n_samples
    assert 0 <= blocks * layout.TILE_THREADS - n_columns < layout.TILE_THREADS


@given(proj_dim=SIZES, sparsity=st.integers(1, 64), n_samples=SAMPLES)
def test_sparse_tile__each_column_once_and_in_shared_memory(
    proj_dim: int, sparsity: int, n_samples: int
) -> None:
    tile = layout.sparse_tile(proj_dim, sparsity, n_samples)
    assert_columns(list(tile.columns(proj_dim)), proj_dim)
    assert tile.shared_bytes <= 2**16
    assert tile.shared_bytes >= tile.group * tile.n_columns * tile.item_bytes
    assert tile.shared_bytes >= 4 * layout.THREADS
    assert 1 <= tile.group <= min(4, n_samples)
    assert 2**14 * 16384 * sparsity < 2 ** (8 * tile.item_bytes - 1)  # no sum overflows
    if proj_dim <= 4096 and sparsity < 8:
        assert tile.group == min(4, n_samples)


def test_threads__are_powers_of_two() -> None:
    assert [n & (n - 1) for n in (layout.THREADS, layout.TILE_THREADS)] == [0, 0]
