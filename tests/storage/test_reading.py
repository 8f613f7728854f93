"""Mapped chunks against what zarr reads."""

from __future__ import annotations

from pathlib import Path

import google_crc32c
import numpy as np
import pytest
import zarr

import trakdask as td
from trakdask.files import Folder
from trakdask.storage import reading
from trakdask.storage.group import Group
from trakdask.storage.reading import lazy_array, read_chunk
from trakdask.testing import simulate_features

ROWS, WIDE = 10, 2**17  # chunks of 2 MiB, which are mapped; those of 4 rows of 3 are read


@pytest.fixture(params=[WIDE, 3])
def group(request: pytest.FixtureRequest, tmp_path: Path) -> Group:
    features = simulate_features(ROWS, request.param, 1, chunks=4)
    td.save(features, tmp_path / "f.zarr", estimator=None, progress=False)
    return Group.read(Folder(str(tmp_path / "f.zarr")))


def source(group: Group) -> np.ndarray:
    return zarr.open_group(group.folder.url, mode="r")["feature"][:]


def file(group: Group, block: int) -> Path:
    return Path(group.folder.url, f"feature/c.{block}.0.0")


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what checksums are computed of, here."""
    sizes: list[int] = []
    value = google_crc32c.value

    def counting(data: np.ndarray) -> int:
        sizes.append(len(data))
        return value(data)

    monkeypatch.setattr(reading.google_crc32c, "value", counting)
    return sizes


@pytest.mark.parametrize(
    "rows",
    [slice(None), slice(4, 8), slice(5, 7), slice(1, 6), slice(8, 10), [9, 0, 3],
     slice(None, None, -1), np.array([True, False] * 5), 5],
)  # fmt: skip
def test_lazy_array__equals_what_zarr_reads(group: Group, rows: object) -> None:
    data = lazy_array(group, "feature")
    assert data.chunks[0] == (4, 4, 2)
    np.testing.assert_array_equal(data[rows].compute(scheduler="sync"), source(group)[rows])


def test_chunks__are_mapped_where_they_are_large(group: Group) -> None:
    width = group.arrays["feature"]["shape"][1]
    block = read_chunk(
        group.array("feature"), group.folder, True, (slice(0, 4), slice(0, width), slice(0, 1))
    )
    base = block
    while isinstance(base.base, np.ndarray):
        base = base.base
    assert isinstance(base, np.memmap) == (block.shape[1] == WIDE)


def test_lazy_array__checksums_are_verified_once(group: Group, verified: list[int]) -> None:
    for _ in range(2):
        lazy_array(group, "feature").compute(scheduler="sync")
    assert verified == [4 * 4 * group.arrays["feature"]["shape"][1]] * 3
    content = file(group, 0).read_bytes()
    file(group, 0).unlink()
    file(group, 0).write_bytes(content)  # as new as if it had been written anew
    lazy_array(group, "feature").compute(scheduler="sync")
    assert len(verified) == 4


def test_lazy_array__flipped_bit(group: Group) -> None:
    lazy_array(group, "feature").compute(scheduler="sync")
    content = bytearray(file(group, 1).read_bytes())
    content[5] ^= 1
    file(group, 1).unlink()
    file(group, 1).write_bytes(content)
    lazy_array(group, "feature")[:4].compute()
    with pytest.raises(ValueError, match=r"feature/c\.1\.0\.0.*checksum"):
        lazy_array(group, "feature").compute(scheduler="sync")


def test_lazy_array__writing_to_a_block_leaves_the_file(group: Group) -> None:
    before = file(group, 0).read_bytes()
    block = lazy_array(group, "feature")[:4].compute(scheduler="sync")
    block += 1
    assert file(group, 0).read_bytes() == before
    np.testing.assert_array_equal(block, source(group)[:4] + 1)
