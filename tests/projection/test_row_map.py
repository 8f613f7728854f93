from __future__ import annotations

import json
import math
from typing import Any

import pytest
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
    assert RowMap.from_dict(json.loads(json.dumps(rows.to_dict()))) == rows
    assert hash(RowMap.from_dict(rows.to_dict())) == hash(rows)


@pytest.mark.parametrize(
    ("shapes", "alignment", "message"),
    [
        ({}, 1, r"at least one.*empty"),
        ({"a": (3,)}, 0, r"alignment .*divisor of 16384, got 0"),
        ({"a": (3,)}, 3, r"alignment .*divisor of 16384, got 3"),
        ({"a": (3, -1)}, 1, r"'a', got \(3, -1\)"),
    ],
)
def test_from_shapes__refused(shapes: dict[str, Any], alignment: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RowMap.from_shapes(shapes, alignment=alignment)


def test_from_dict__offsets_that_do_not_belong_to_the_shapes() -> None:
    data = RowMap.from_shapes({"a": (3,), "b": (4,)}, alignment=512).to_dict()
    data["tensors"][1]["offset"] = 128
    with pytest.raises(ValueError, match=r"\(0, 512\).*got \(0, 128\).*from_shapes"):
        RowMap.from_dict(data)


def test_offset__unknown_name() -> None:
    rows = RowMap.from_shapes({"a": (3,)}, alignment=1)
    with pytest.raises(ValueError, match=r"got 'c'.*row_map\.names"):
        rows.offset("c")
