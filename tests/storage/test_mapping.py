"""Mapped chunks against what zarr reads."""

from __future__ import annotations

from pathlib import Path

import google_crc32c
import numpy as np
import pytest
import zarr
from zarr.codecs import Crc32cCodec

from trakdask.files import Folder
from trakdask.storage import mapping
from trakdask.storage.mapping import MappedChunks, lazy_array

ROWS, COLUMNS = 10, 2**17  # chunks of 2 MiB, which are mapped; those of 4 rows of 3 are read


@pytest.fixture(params=[COLUMNS, 3])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> zarr.Array:
    group = zarr.open_group(tmp_path / "f.zarr", mode="w")
    values = np.random.default_rng(0).standard_normal((ROWS, request.param)).astype("f4")
    return group.create_array(
        "feature", data=values, chunks=(4, request.param), compressors=[Crc32cCodec()]
    )


def lazy(source: zarr.Array, tmp_path: Path):
    return lazy_array(Folder.at(tmp_path / "f.zarr", None), "feature", source, token="x")


def file(tmp_path: Path, block: int) -> Path:
    return tmp_path / f"f.zarr/feature/c/{block}/0"


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what checksums are computed of, here."""
    sizes: list[int] = []
    value = google_crc32c.value

    def counting(data) -> int:
        sizes.append(len(data))
        return value(data)

    monkeypatch.setattr(mapping.google_crc32c, "value", counting)
    return sizes


@pytest.mark.parametrize(
    "rows", [slice(None), slice(4, 8), slice(1, 6), slice(8, 10), [9, 0, 3], slice(None, None, -1)]
)
def test_lazy_array__equals_what_zarr_reads(source: zarr.Array, tmp_path: Path, rows) -> None:
    data = lazy(source, tmp_path)
    assert data.chunks == ((4, 4, 2), source.shape[1:])
    np.testing.assert_array_equal(data[rows].compute(scheduler="sync"), source[:][rows])


def test_lazy_array__is_not_copied_nor_asked_of_zarr(source: zarr.Array, tmp_path: Path) -> None:
    chunks = MappedChunks(Folder.at(tmp_path / "f.zarr", None), "feature", source)
    chunks._source = None  # type: ignore[assignment]
    with pytest.raises(AttributeError):
        chunks[0:1, 0 : source.shape[1]]
    chunks._source = source
    block = chunks[0:4, 0 : source.shape[1]]
    is_mapped = isinstance(_root(block), np.memmap)
    assert is_mapped == (source.shape[1] == COLUMNS)


def test_chunks__a_row_by_its_number(source: zarr.Array, tmp_path: Path) -> None:
    chunks = MappedChunks(Folder.at(tmp_path / "f.zarr", None), "feature", source)
    np.testing.assert_array_equal(chunks[5, 0:3], source[5, 0:3])


def _root(block: np.ndarray):
    base = block
    while isinstance(base.base, np.ndarray):
        base = base.base
    return base


def test_lazy_array__checksums_are_verified_once(
    source: zarr.Array, tmp_path: Path, verified: list[int]
) -> None:
    for _ in range(2):
        lazy(source, tmp_path).compute(scheduler="sync")
    assert verified == [4 * 4 * source.shape[1]] * 3
    content = file(tmp_path, 0).read_bytes()
    file(tmp_path, 0).unlink()
    file(tmp_path, 0).write_bytes(content)  # as new as if it had been written anew
    lazy(source, tmp_path).compute(scheduler="sync")
    assert len(verified) == 4


def test_lazy_array__flipped_bit(source: zarr.Array, tmp_path: Path) -> None:
    lazy(source, tmp_path).compute(scheduler="sync")
    content = bytearray(file(tmp_path, 1).read_bytes())
    content[5] ^= 1
    file(tmp_path, 1).unlink()
    file(tmp_path, 1).write_bytes(content)
    np.testing.assert_array_equal(lazy(source, tmp_path)[:4].compute(), source[:4])
    with pytest.raises(ValueError, match="checksum"):
        lazy(source, tmp_path).compute(scheduler="sync")


def test_lazy_array__lost_chunk_is_left_to_zarr(source: zarr.Array, tmp_path: Path) -> None:
    file(tmp_path, 1).unlink()
    found = lazy(source, tmp_path).compute(scheduler="sync")
    np.testing.assert_array_equal(found, source[:])
    assert (found[4:8] == 0).all()


def test_lazy_array__writing_to_a_block_leaves_the_file(source: zarr.Array, tmp_path: Path) -> None:
    before = file(tmp_path, 0).read_bytes()
    block = lazy(source, tmp_path)[:4].compute(scheduler="sync")
    block += 1
    assert file(tmp_path, 0).read_bytes() == before
    np.testing.assert_array_equal(block, source[:4] + 1)


def test_lazy_array__compressed_chunks_are_read_by_zarr(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "f.zarr", mode="w")
    source = group.create_array("feature", data=np.ones((8, 3)), chunks=(4, 3))
    data = lazy(source, tmp_path)
    np.testing.assert_array_equal(data.compute(), np.ones((8, 3)))
    assert "MappedChunks" not in str([type(v) for v in data.dask.values()])
