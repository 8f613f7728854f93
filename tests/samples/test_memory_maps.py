"""What is read again from a file is what the array in memory holds; anything else is not a map."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from trakdask.samples.fingerprints import mapped

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
OTHERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "copy": lambda x: x[3:].copy(),
    "computed": lambda x: x + 1,
    "strided rows": lambda x: x[::2],
    "columns": lambda x: x[:, 1:],
    "transposed": lambda x: x.T,
    "empty": lambda x: x[:0],
}


@pytest.fixture(params=[0, 20], ids=["from the start", "after a header"])
def path_and_offset(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, int]:
    path = tmp_path / "rows"
    path.write_bytes(request.param * b"-" + WHOLE.tobytes())
    return path, request.param


def opened(path: Path, offset: int, mode: str = "r") -> np.memmap:
    return np.memmap(path, dtype=WHOLE.dtype, mode=mode, offset=offset, shape=WHOLE.shape)


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_mapped__reads_the_same_bytes_again(part, path_and_offset) -> None:
    file = mapped(part(opened(*path_and_offset)))
    assert file is not None
    again, expected = pickle.loads(pickle.dumps(file))[:], part(WHOLE)
    assert again.dtype == expected.dtype
    np.testing.assert_array_equal(again, expected)


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_mapped__of_anything_else_is_none(other, path_and_offset) -> None:
    assert mapped(other(opened(*path_and_offset))) is None
    assert mapped(other(WHOLE)) is None


@pytest.mark.parametrize("mode", ["r+", "c"])
def test_mapped__of_a_map_that_may_be_written_to_is_none(mode, path_and_offset) -> None:
    assert mapped(opened(*path_and_offset, mode)[2:]) is None


def test_mapped__finds_the_file_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows").write_bytes(WHOLE.tobytes())
    file = mapped(opened(Path("rows"), 0))
    monkeypatch.chdir("/")
    assert file is not None
    np.testing.assert_array_equal(file[2:4], WHOLE[2:4])


def test_mapped__a_file_that_has_changed_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(WHOLE.tobytes())
    file = mapped(opened(path, 0))
    path.write_bytes(WHOLE.tobytes() + b"more")
    assert file is not None
    with pytest.raises(OSError, match=r"rows.*has changed"):
        file[:]
