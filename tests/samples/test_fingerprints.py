"""Equal content has an equal fingerprint in every process; a map is read again from its file."""

from __future__ import annotations

import hashlib
import os
import pickle
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr

import trakdask
import trakdask as td
from trakdask.samples import fingerprints
from trakdask.samples.array_source import validate_samples
from trakdask.samples.datasets import source_of
from trakdask.samples.fingerprints import fingerprint, mapped

# As a script, so that its classes are by-value ones of `__main__`, as in a notebook.
SCRIPT = """
import numpy as np, torch
from torch.utils.data import Dataset, TensorDataset
from trakdask.samples.array_source import from_arrays
from trakdask.samples.fingerprints import fingerprint

scale = {scale}

def helper(x):
    return helper(x - 1) if x > 3 else x * scale

class Mine(Dataset):
    __slots__ = ("tensor",)
    def __init__(self):
        self.tensor = torch.arange(6.0).reshape(2, 3)
    def __len__(self):
        return len(self.tensor)
    @property
    def first(self):
        return self.tensor[0]
    def __getitem__(self, i):
        return helper(self.tensor[i]) {edit}

print(fingerprint(Mine()))
print(fingerprint(lambda: [helper, "a" in {{"a", "b", "c"}}]))
print(fingerprint(TensorDataset(torch.ones(4, 2), torch.arange(4))))
print(fingerprint(torch.nn.Linear(2, 2).requires_grad_(False).__class__))
print(fingerprint({{"x": np.arange(5), "y": [1, "two", None]}}))
samples = from_arrays({{"x": np.arange(6.0)}}, coords={{"label": [0, 1] * 3}}, chunks=4)
print(samples.attrs["source"], samples.x.data.name)
"""


def written(path: Path, **values: object) -> str:
    path.write_text(SCRIPT.format(**values))
    return str(path)


@pytest.mark.slow
def test_fingerprint__equal_in_every_process_unless_code_or_globals_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(path: str) -> list[str]:
        runpy.run_path(path, run_name="__main__")
        return capsys.readouterr().out.split()

    path = written(tmp_path / "one.py", scale=2, edit="")
    env = os.environ | {"PYTHONPATH": str(Path(trakdask.__file__).parents[1])}
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, env=env)
    assert len(set(done.stdout.split())) == 7, done.stderr
    assert done.stdout.split() == run(written(tmp_path / "two.py", scale=2, edit=""))
    edited = zip(done.stdout.split(), run(written(Path(path), scale=3, edit="+ 1")), strict=True)
    assert [a == b for a, b in edited] == [False, False] + [True] * 5


@pytest.mark.parametrize("make", [np.array, torch.tensor, lambda x: torch.tensor(x).bfloat16()])
def test_fingerprint__by_dtype_shape_and_values(make: Callable[[list], Any]) -> None:
    array = make([[0.0, 1.0], [2.0, 3.0]])
    same = [make(array.tolist()), make(array.T.tolist()).T]
    assert {fingerprint(each) for each in same} == {fingerprint(array)}
    half = "f2" if make is np.array else torch.half
    cast = array.astype(half) if make is np.array else array.to(half)
    others = [cast, array.reshape(4), array.T, array + 1, array[0, 0], array[0, :1]]
    assert len({fingerprint(each) for each in [array, *others]}) == 7


class Rows:
    """A torch Dataset that reads its items from a map."""

    def __init__(self, path: Path) -> None:
        self.rows = np.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> np.ndarray:
        return np.array(self.rows[index])


def from_table(path: Path) -> xr.Dataset:
    return td.from_dataframe(path, variables={"x": "x"})


SOURCES: dict[str, tuple[str, Callable[[Path], xr.Dataset]]] = {
    "map": ("x.npy", lambda path: td.from_arrays({"x": np.load(path, mmap_mode="r")})),
    "rows of a map": (
        "x.npy",
        lambda path: td.from_arrays({"x": np.load(path, mmap_mode="r")[3:]}),
    ),
    "selection": ("x.npy", lambda path: SOURCES["map"][1](path).isel(sample=[5, 7])),
    "map in a torch dataset": ("x.npy", lambda path: td.from_torch(Rows(path), names="x")),
    "parquet": ("x.parquet", from_table),
    "folder": (".", lambda path: td.from_dataframe(path / "*.arrow", variables={"x": "x"})),
    "datasets": (".", lambda path: from_table(datasets.load_from_disk(path))),
    "rows of datasets": (
        ".",
        lambda path: from_table(datasets.load_from_disk(path).select([7, 5])),
    ),
}


def write(folder: Path, value: float = 1) -> None:
    """Write the same rows in every form, the last number of the last but two as a value."""
    x = np.arange(40.0).reshape(10, 4)
    x[7, 3] = value
    folder.mkdir()
    rows = datasets.Dataset.from_dict({"x": x.tolist()})
    rows.save_to_disk(folder)
    np.save(folder / "x.npy", x)
    pd.DataFrame({"x": list(x)}).to_parquet(folder / "x.parquet")


def source(folder: Path, kind: str) -> str:
    name, make = SOURCES[kind]
    return source_of(validate_samples(make(folder / name).drop_attrs()))


@pytest.mark.parametrize("kind", SOURCES)
def test_source__follows_the_content_of_files(tmp_path: Path, kind: str) -> None:
    """Neither the place nor the times of a file; an archive may set that of a change, too."""
    one, other, changed = (tmp_path / name for name in ("one", "other", "changed"))
    write(one)
    write(changed, 2)
    before = source(one, kind)
    shutil.copytree(one, other)
    for path in other.iterdir():
        os.utime(path, (1, 1))
    assert source(other, kind) == before
    one.rename(tmp_path / "moved")
    assert source(tmp_path / "moved", kind) == before
    for path in changed.iterdir():  # of the same sizes, and changed in place
        if path.suffix in (".npy", ".parquet", ".arrow"):
            (other / path.name).write_bytes(path.read_bytes())
            os.utime(other / path.name, (1, 1))
    assert source(other, kind) != before


@pytest.mark.parametrize("damage", [None, "x" * 64, b"\xff"])
def test_fingerprint__of_a_large_map_is_kept_for_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str | bytes | None
) -> None:
    read: list[int] = []

    def content(array: np.ndarray) -> str:
        read.append(array.size)
        return hashlib.sha256(array.tobytes()).hexdigest()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, value in {"_LARGE": 1, "_SETTLED_S": -1.0, "_content": content}.items():
        monkeypatch.setattr(fingerprints, name, value)
    np.save(tmp_path / "x.npy", np.arange(9))
    for _ in range(2):
        monkeypatch.setattr(fingerprints, "_contents", {})  # as in another process
        found = fingerprint(np.load(tmp_path / "x.npy", mmap_mode="r"))
        assert found == fingerprint(np.load(tmp_path / "x.npy", mmap_mode="r"))
        assert found == fingerprint(np.arange(9))
        for kept in (tmp_path / "cache" / "trakdask").iterdir():
            if damage is not None:
                kept.write_bytes(damage if isinstance(damage, bytes) else damage.encode())
    assert len(read) == 3 + (damage is not None)


# --- memory maps ---------------------------------------------------------------------------------

WHOLE, HEADER = np.arange(120, dtype="<i4").reshape(10, 4, 3), 20 * b"-"

PARTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "whole": lambda x: x,
    "later rows": lambda x: x[3:7],
    "slice of a slice": lambda x: x[2:][1:][:2],
    "another shape": lambda x: x.reshape(20, 6)[5:],
    "other bytes": lambda x: x.view("u1")[2:],
    "plain array over the map": lambda x: np.asarray(x)[6:],
}
OTHERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "copy": lambda x: x[3:].copy(),
    "strided rows": lambda x: x[::2],
    "transposed": lambda x: x.T,
    "empty": lambda x: x[:0],
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "rows").write_bytes(HEADER + WHOLE.tobytes())
    return tmp_path / "rows"


def opened(path: Path, mode: str = "r") -> np.memmap:
    return np.memmap(path, dtype=WHOLE.dtype, mode=mode, offset=len(HEADER), shape=WHOLE.shape)


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_mapped__reads_the_same_bytes_again(part, path: Path) -> None:
    file = mapped(part(opened(path)))
    assert file is not None
    again, expected = pickle.loads(pickle.dumps(file))[:], part(WHOLE)
    assert again.dtype == expected.dtype
    np.testing.assert_array_equal(again, expected)


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_mapped__of_anything_else_is_none(other, path: Path) -> None:
    assert mapped(other(opened(path))) is None
    assert mapped(other(WHOLE)) is None
    for mode in ("r+", "c"):  # such a map can differ from its file
        assert mapped(opened(path, mode)[2:]) is None


def test_mapped__finds_its_file_from_another_folder_unless_it_has_changed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)
    file = mapped(opened(Path("rows")))
    monkeypatch.chdir("/")
    assert file is not None
    np.testing.assert_array_equal(file[2:4], WHOLE[2:4])
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(OSError, match=r"rows.*has changed"):
        file[:]
