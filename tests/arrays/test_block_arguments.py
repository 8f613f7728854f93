"""What tasks get of large inputs, against slices of numpy."""

from __future__ import annotations

import pickle

import dask
import dask.array as da
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.stored_arrays import StoredArray, stored
from trakdask.arrays.block_arguments import (
    Bounds,
    PackedRows,
    Slices,
    block_of,
    read_in_task,
)
from trakdask.arrays.blocks import block_starts, flat

_sizes = st.lists(st.integers(0, 20), min_size=1, max_size=6).map(tuple)


@given(_sizes)
def test_bounds__of_ranges(sizes: tuple[int, ...]) -> None:
    bounds = Bounds(sizes)
    together = [i for block in range(len(sizes)) for i in range(*bounds[(block,)])]
    assert together == list(range(sum(sizes)))


@given(_sizes, st.sampled_from([1, 2, 3, 7, 8, 255, 256, 70_000]), st.integers(0, 2**32))
def test_packed_rows__are_the_integers(sizes: tuple[int, ...], most: int, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, most + 1, sum(sizes))
    packed, starts = PackedRows(values, most, sizes), block_starts(sizes)
    for i in range(len(sizes)):
        block = PackedRows.unpack(packed[(i,)])
        np.testing.assert_array_equal(block, values[starts[i] : starts[i + 1]])
        assert block.dtype == np.int64


def test_packed_rows__bytes() -> None:
    packed = PackedRows(np.arange(80_000) % 8, 7, (40_000, 40_000))
    assert len(pickle.dumps(packed)) < 80_000 * 3 / 8 + 1000


COLUMNS = [
    np.arange(5000) * 3,
    np.arange(5000).astype("datetime64[D]").astype("datetime64[ns]"),
    np.array([f"s{i % 7}" for i in range(5000)], np.dtypes.StringDType()),
    np.array(["", "ä"] * 2500, np.dtypes.StringDType()),
    np.array([f"s{i % 7}" for i in range(5000)], dtype=object),
]


@pytest.mark.parametrize("values", COLUMNS, ids=lambda values: str(values.dtype))
def test_slices__elsewhere(values: np.ndarray) -> None:
    slices = Slices(values, ((4000, 0, 1000),))
    for each in (slices, pickle.loads(pickle.dumps(slices))):
        blocks = [block_of(each[(i,)]) for i in range(3)]
        assert [len(block) for block in blocks] == [4000, 0, 1000]
        np.testing.assert_array_equal(np.concatenate(blocks), values)


def blocks_of(array: da.Array, **options: object) -> list[list[np.ndarray]]:
    """Return what each task reads."""
    argument, _ = read_in_task(array, **options)
    shape = argument.numblocks
    return [list(flat(pickle.loads(pickle.dumps(argument[i])))) for i in np.ndindex(*shape)]


def test_read_in_task__blocks() -> None:
    values = np.random.default_rng(0).standard_normal((10, 3, 2))
    array = stored(values, ((4, 3, 3), 3, 1))
    expected = [[values[s, :, c : c + 1] for c in (0, 1)] for s in ROWS]
    for found, wanted in zip(blocks_of(array), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)
    groups = blocks_of(array, groups=[[0, 2], [1]], by_checkpoint=True)
    assert [len(group) for group in groups] == [2, 2, 1, 1]
    np.testing.assert_array_equal(groups[1][1], values[7:, :, 1:])


ROWS = [slice(0, 4), slice(4, 7), slice(7, 10)]


def test_read_in_task__converted_blocks() -> None:
    values = np.random.default_rng(0).random((10, 2))
    array = da.map_blocks(np.sqrt, stored(values, (5, 1)) * 2, dtype=float)
    (first, _), (_, last) = blocks_of(array)
    np.testing.assert_array_equal(first, np.sqrt(values[:5, :1] * 2))
    np.testing.assert_array_equal(last, np.sqrt(values[5:, 1:] * 2))


def test_read_in_task__of_nothing_that_takes_time_or_is_in_memory() -> None:
    x = stored(np.ones((10, 2)), (5, 1))
    shared = {
        "in memory": da.from_array(np.ones((10, 2)), chunks=(5, 1)),
        "persisted": x.persist(scheduler="sync"),
        "computed": da.random.default_rng(0).random((10, 2), chunks=(5, 1)),
        "reduced": x - x.sum(axis=0),
        "rechunked": x.rechunk((10, 1)),
        "selected": x[::2],
        "from gradients": da.map_blocks(np.multiply, x, dask.delayed(2.0, name="job"), dtype=float),
    }
    assert {name: read_in_task(array) for name, array in shared.items()} == dict.fromkeys(shared)


def test_read_in_task__of_nothing_that_has_no_store_below_it() -> None:
    """Blockwise layers alone, which every task that needs a block would compute again."""
    made = da.map_blocks(np.sqrt, da.ones((6, 2), chunks=(3, 1)), dtype=np.float64)
    assert read_in_task(made) is None


def test_stored_array__is_read_once_per_block() -> None:
    array = stored(np.ones((10, 2)), (5, 1))
    (source,) = (x for x in array.dask.values() if isinstance(x, StoredArray))
    array.compute(scheduler="sync")
    assert list(source.reads.values()) == [1] * 4
