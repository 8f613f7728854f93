from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from trakdask.projection.row_map import RowMap

shape = st.lists(st.integers(0, 40), max_size=3).map(tuple)


def offsets_by_hand(shapes: list[tuple[int, ...]], alignment: int) -> list[int]:
    """Walk row by row to the next aligned one."""
    offsets, row = [], 0
    for lengths in shapes:
        while row % alignment:
            row += 1
        offsets.append(row)
        row += math.prod(lengths)
    return offsets


@settings(max_examples=40, deadline=None)
@given(st.lists(shape, min_size=1, max_size=6), st.sampled_from([1, 128, 512]))
def test_from_shapes__aligned_in_the_given_order(
    shapes: list[tuple[int, ...]], alignment: int
) -> None:
    names = [f"layer{i}" for i in reversed(range(len(shapes)))]
    rows = RowMap.from_shapes(dict(zip(names, shapes, strict=True)), alignment=alignment)
    assert rows.names == tuple(names)
    assert [rows.offset(name) for name in names] == offsets_by_hand(shapes, alignment)
    assert [rows.shape(name) for name in names] == shapes
    assert [rows.size(name) for name in names] == [math.prod(lengths) for lengths in shapes]
    assert rows.n_rows == rows.offset(names[-1]) + rows.size(names[-1])
    assert rows.n_parameters == sum(map(math.prod, shapes))
