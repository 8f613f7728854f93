"""What is read again from a file is what the array in memory holds; anything else is not a map."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from trakdask.execution.memory_maps import is_plain_array, memmap_location, open_memmap

WHOLE = np.arange(120, dtype="<i4").reshape(10, 4, 3)

PARTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "whole": lambda x: x,
    "later rows": lambda x: x[3:7],
    "one row": lambda x: x[4],
    "slice of a slice": lambda x: x[2:][1:][:2],
    "another shape": lambda x: x.reshape(20, 6)[5:],
    "other bytes": lambda x: x.view("u1")[2:],
    "plain array over the map": lambda x: np.asarray(x)[6:],
}
OTHERS: dict[str, Callable[[np.ndarray], object]] = {
    "copy": lambda x: x[3:].copy(),
    "computed": lambda x: x + 1,
    "strided rows": lambda x: x[::2],
    "columns": lambda x: x[:, 1:],
    "transposed": lambda x: x.T,
    "empty": lambda x: x[:0],
    "list": lambda x: x.tolist(),
}


@pytest.fixture(params=[0, 20], ids=["from the start", "after a header"])
def path_and_offset(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, int]:
    path = tmp_path / "rows"
    path.write_bytes(request.param * b"-" + WHOLE.tobytes())
    return path, request.param


def mapped(path: Path, offset: int, mode: str = "r") -> np.memmap:
    return np.memmap(path, dtype=WHOLE.dtype, mode=mode, offset=offset, shape=WHOLE.shape)


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_memmap_location__is_where_the_bytes_are(
    part: Callable[[np.ndarray], np.ndarray], path_and_offset: tuple[Path, int]
) -> None:
    location = memmap_location(part(mapped(*path_and_offset)))
    assert location is not None
    again, expected = open_memmap(*location), part(WHOLE)
    assert again.dtype == expected.dtype
    np.testing.assert_array_equal(again, expected)
    assert not again.flags.writeable


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_memmap_location__of_anything_else_is_none(
    other: Callable[[np.ndarray], object], path_and_offset: tuple[Path, int]
) -> None:
    assert memmap_location(other(mapped(*path_and_offset))) is None
    assert memmap_location(other(WHOLE)) is None


@pytest.mark.parametrize("mode", ["r+", "c"])
def test_memmap_location__of_a_map_that_may_be_written_to_is_none(
    mode: str, path_and_offset: tuple[Path, int]
) -> None:
    assert memmap_location(mapped(*path_and_offset, mode)[2:]) is None


def test_memmap_location__is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows").write_bytes(WHOLE.tobytes())
    location = memmap_location(mapped(Path("rows"), 0))
    assert location == (str(tmp_path / "rows"), "<i4", 0, WHOLE.shape)


def test_is_plain_array__of_bytes_and_nothing_else() -> None:
    plain = [WHOLE, np.array(["a"]), np.array([True]), np.array(["2020-01-01"], "M8[D]")]
    others = [np.array([None]), np.array([(1,)], "i4,"), np.ma.array([1]), np.int64(1), [1]]
    assert [is_plain_array(x) for x in plain] == [True] * len(plain)
    assert [is_plain_array(x) for x in others] == [False] * len(others)
