"""The zarr group of a store, and the one file that says what counts.

``zarr.json`` of the group holds its attributes, one of which, ``arrays``, is the metadata of every
array: trakdask looks nowhere else. So a writer first writes chunks, and then this file, which is
replaced in one piece, so that a reader sees the store as it was before or as it is after. New rows
lie in chunks of their own, or in one whose rows so far stay the same. New coords and sums must not
overwrite the old ones before the commit. The two versions therefore have different names of chunks:
their numbers are separated by ``/`` or by ``.``. Arrays of two names would not do, since each name
is a variable of ``xr.open_zarr``. The old chunks are removed once they do not count.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np
import xarray as xr
import zarr
from zarr.abc.buffer import Buffer
from zarr.abc.store import OffsetByteRequest, Store
from zarr.codecs import Crc32cCodec, ZstdCodec
from zarr.storage import FsspecStore, LocalStore, MemoryStore, StorePath

from trakdask._version import __version__
from trakdask.errors import IncompleteFeaturesError
from trakdask.files import UNCACHED, Folder
from trakdask.variables import (
    CHECKPOINT,
    DERIVED,
    FITTED,
    GRAM,
    PROJ_DIM,
    PROJ_DIM_1,
    SAMPLE,
    TRIANGLE,
    VARIABLES,
    WRONG_CLASSES,
)

METADATA = "zarr.json"
RECORDS = "feature/records"
"""Inside of an array, because zarr warns of folders in a group that are no arrays."""
DROPPED, ERROR, SCALE = "dropped", "error", "scale"
STORE_ATTRS = ("arrays", "coordinates", "n_samples", "sources", "unfinished", "lacking", "erased")
"""Attributes that describe the store, and not the features. What a call of save adds is
``unfinished`` until all of it counts; ``lacking`` are blocks that counted, and that repair removed.
"""


_COMPRESSED = (GRAM, WRONG_CLASSES, "principal_components")
"""Symmetric matrices, whose zeros below the diagonal then take no space, and codes, whose space is
an eighth less. Whatever queries read is not compressed: it takes longer, and saves 7 %."""


class _Files(FsspecStore):
    """Files at a URL, each read in one request."""

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Buffer | None:
        # s3fs would first ask how long a whole file is, in a request of its own.
        return await super().get(key, prototype, byte_range or OffsetByteRequest(0))


def zarr_store(folder: Folder, *, read_only: bool = False) -> Store:
    """Return a folder as a zarr store."""
    if folder.is_local:
        return LocalStore(folder.url, read_only=read_only)
    options = {**UNCACHED, **folder.options}
    return _Files.from_url(folder.url, options, read_only=read_only)


@dataclass
class Group:
    """The valid state of a store: its attributes, and the metadata of its arrays by their names."""

    folder: Folder
    attrs: dict[str, Any]
    arrays: dict[str, dict[str, Any]]
    before: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Metadata of the arrays that count so far."""

    @classmethod
    def read(cls, folder: Folder) -> Group:
        """Return what counts in a store.

        Raises
        ------
        FileNotFoundError
            If there is no store.
        ValueError
            If its metadata cannot be read, or another program has written it.
        """
        metadata: dict[str, Any] = {}
        with suppress(FileNotFoundError, NotADirectoryError):
            metadata = folder.read_json(METADATA)
        attrs = metadata.get("attributes", {})
        if "arrays" not in attrs:
            names = folder.names()[:3]
            holds = f"holds {names}, and no store of this version" if names else "does not exist"
            raise FileNotFoundError(
                f"expected a store of features at {folder.url!r}, which {holds}; try "
                "td.save(features, store), another path, or xr.open_zarr for other zarr groups"
            )
        arrays = attrs.pop("arrays")
        # What xarray has copied has chunks of other names. The layout of features never changes, so
        # that it tells.
        there = (metadata.get("consolidated_metadata") or {}).get("metadata") or {
            "feature": folder.read_json(f"feature/{METADATA}")
        }
        if any(of(there["feature"]) != of(arrays["feature"]) for of in (chunks_of, separator_of)):
            raise ValueError(
                f"expected a store that td.save has written, got a copy that another program has "
                f"written at {folder.url!r}; try xr.open_zarr({folder.url!r}), or "
                "td.save(xr.open_zarr(copy), 'new.zarr') to change it"
            )
        return cls(folder, attrs, dict(arrays), arrays)

    # ------------------------------------------------------------------------------- what it holds

    @property
    def n_samples(self) -> int:
        """How many samples count, dropped ones among them."""
        return int(self.attrs["n_samples"])

    @property
    def block(self) -> int:
        """How many samples are in a block."""
        return chunks_of(self.arrays["feature"])[0]

    @property
    def checkpoints(self) -> list[str]:
        """Names of the checkpoints that count."""
        return list(self.attrs["checkpoints"])

    def rows_of_sources(self) -> Iterator[tuple[str, range]]:
        """Yield the sets of samples that were saved together: their source, and their rows."""
        start = 0
        for source, n in self.attrs["sources"]:
            yield source, range(start, start + n)
            start += n

    @property
    def features(self) -> list[str]:
        """Names of the arrays of numbers of each sample and checkpoint."""
        return [n for n, array in self.arrays.items() if dims_of(array) in _OF_FEATURES]

    @property
    def numbers(self) -> list[str]:
        """Names of these arrays but for the features themselves."""
        return [name for name in self.features if name != "feature"]

    def counts(self, row: int, index: int) -> bool:
        """Return whether the block of a row at a checkpoint counts, and was not lost."""
        is_there = row < self.n_samples and index < len(self.checkpoints)
        return is_there and [row // self.block, index] not in self.attrs.get("lacking", ())

    @property
    def coords(self) -> list[str]:
        """Names of the coords, ``dropped`` among them."""
        others = {*self.features, *FITTED, *DERIVED}
        return [name for name in self.arrays if name not in others]

    def array(self, name: str, *, read_only: bool = False) -> zarr.Array[Any]:
        """Return an array, which is small when it is pickled; nothing is read.

        A chunk is written even if it equals the fill value, because an absent one counts as lost;
        but for reasons of failures, which there are hardly any. Reading only, nothing is made, not
        even the folder of a store that has gone.
        """
        path = StorePath(zarr_store(self.folder, read_only=read_only), name)
        array: zarr.Array[Any] = zarr.Array.from_dict(path, self.arrays[name])
        return array.with_config({"write_empty_chunks": name != ERROR})

    def chunk_key(self, name: str, index: Sequence[int]) -> str:
        """Return the path of a chunk in the folder of its array."""
        return separator_of(self.arrays[name]).join(["c", *map(str, index)])

    def chunk_indices(self, name: str) -> Iterator[tuple[int, ...]]:
        """Return the numbers of all chunks of an array, in order."""
        metadata = self.arrays[name]
        sizes = zip(metadata["shape"], chunks_of(metadata), strict=True)
        return np.ndindex(*(-(-size // chunk) for size, chunk in sizes))

    def stored_chunks(self, name: str) -> set[tuple[int, ...]]:
        """Return the numbers of the chunks that are in the store, from one listing."""
        files = (self.folder / name).files()
        return {i for i in self.chunk_indices(name) if self.chunk_key(name, i) in files}

    def require_chunks(self, name: str) -> None:
        """Raise if an array lacks chunks: zarr would read fill values in their place.

        Chunks of numbers may be absent where :func:`verify` has put it on record.
        """
        sizes, is_small = chunks_of(self.arrays[name]), dims_of(self.arrays[name]) in _OF_FEATURES
        for index in sorted({*self.chunk_indices(name)} - self.stored_chunks(name)):
            if not is_small or self.counts(index[0] * sizes[0], index[-1]):
                raise lost_chunk(self.folder, f"{name}/{self.chunk_key(name, index)}")

    def require_complete(self) -> None:
        """Raise if blocks are missing of what counts."""
        if not self.n_samples or "lacking" in self.attrs:
            raise IncompleteFeaturesError(
                f"expected all blocks of features in {self.folder.url!r}, but some are missing; "
                "try td.save(features, store), with the features that it was made of, which "
                "computes the missing blocks"
            )

    # ------------------------------------------------------------------------------- what it is to

    def target(self) -> Group:
        """Return the group with what an unfinished call of save adds."""
        attrs = {**self.attrs, **self.attrs.get("unfinished", {})}
        attrs.pop("unfinished", None)
        attrs["n_samples"] = sum(n for _, n in attrs["sources"])
        sizes = {SAMPLE: attrs["n_samples"], CHECKPOINT: len(attrs["checkpoints"])}
        arrays = dict(self.arrays)
        for name in {*self.features, *FITTED} & {*arrays}:
            pairs = zip(dims_of(arrays[name]), arrays[name]["shape"], strict=True)
            arrays[name] = {**arrays[name], "shape": [sizes.get(dim, n) for dim, n in pairs]}
        return Group(self.folder, attrs, arrays, self.before)

    def add(
        self,
        name: str,
        sizes: Mapping[Any, int],
        dtype: Any,
        *,
        block: int = 1,
        grows: bool = False,
        attrs: Mapping[str, Any] | None = None,
    ) -> None:
        """Add the metadata of an array in chunks of a block of samples and a checkpoint.

        Features do not compress, so they are stored as they are, with a checksum. An array that
        grows keeps its chunks, as they are encoded; else it is beside the one that counts.
        """
        files: dict[str, Buffer] = {}
        variable = VARIABLES.get(name)
        dims = variable.dims if variable else (SAMPLE, CHECKPOINT)
        chunks = {**sizes, SAMPLE: block, CHECKPOINT: 1}
        is_compressed = name in _COMPRESSED
        if grows:
            is_compressed = any(codec["name"] == "zstd" for codec in self.before[name]["codecs"])
        triangle = {TRIANGLE: "upper"} if is_compressed and PROJ_DIM_1 in dims else {}
        # Into memory, since only its metadata is asked for: what a store has under this name may
        # still count.
        zarr.create_array(
            MemoryStore(files),
            name=name,
            shape=tuple(sizes[dim] for dim in dims),
            chunks=tuple(max(1, chunks[dim]) for dim in dims),
            dtype=dtype,
            compressors=[ZstdCodec(), Crc32cCodec()] if is_compressed else [Crc32cCodec()],
            chunk_key_encoding=self._key_encoding(name, grows=grows),
            fill_value={"T": "", "i": -1, "b": True}.get(np.dtype(dtype).kind, np.nan),
            dimension_names=dims,
            attributes={**(variable.attrs if variable else {}), **(attrs or {}), **triangle},
            zarr_format=3,
        )
        self.arrays[name] = _metadata_in(files, name)

    def _key_encoding(self, name: str, *, grows: bool = False) -> dict[str, Any]:
        """Return how chunks are named: by another separator than the chunks that count."""
        is_dotted = name in self.before and separator_of(self.before[name]) == "."
        return {"name": "default", "separator": "." if is_dotted == grows else "/"}

    def write_variables(self, variables: Mapping[str, xr.Variable]) -> None:
        """Write arrays that are in memory, as xarray encodes them, beside the stored ones."""
        encoding = {
            name: {
                "chunk_key_encoding": self._key_encoding(name),
                "compressors": [ZstdCodec(), Crc32cCodec()],
                "_FillValue": None,  # NaN is NaN
            }
            for name in variables
        }
        # zarr would replace the metadata of an array at once. So it writes into memory, and only
        # chunks are copied: whether they count is decided by the commit.
        files: dict[str, Buffer] = {}
        xr.Dataset(variables).drop_encoding().to_zarr(
            MemoryStore(files), mode="w", consolidated=False, zarr_format=3, encoding=encoding,
            write_empty_chunks=True,
        )  # fmt: skip
        for path, data in files.items():
            if not path.endswith(METADATA):
                self.folder.write(path, data.to_bytes(), durable=False)
        for name in variables:
            self.arrays[name] = _metadata_in(files, name)

    def commit(self) -> None:
        """Let the written arrays count, from now on, and nothing else."""
        # Names of Dask's arrays have this in them, so that nothing cached outlives a commit.
        self.attrs["saved"] = {
            "at": datetime.now(UTC).isoformat(), "versions": {"trakdask": __version__}
        }  # fmt: skip
        self.attrs["coordinates"] = " ".join(sorted({*self.coords, ERROR} & {*self.arrays}))
        files = {
            f"{name}/{METADATA}": array
            for name, array in self.arrays.items()
            if array != self.before.get(name)
        }
        # Consolidated metadata and the metadata of each array are for other readers. trakdask does
        # not read them, because tools rewrite them. Before there is a store, its own file is first:
        # by it a folder is known for a store. Later it is last, because it is what commits.
        files[METADATA] = {
            "zarr_format": 3,
            "node_type": "group",
            "attributes": {**self.attrs, "arrays": self.arrays},
            "consolidated_metadata": {
                "kind": "inline",
                "must_understand": False,
                "metadata": self.arrays,
            },
        }
        for path in sorted(files, key=lambda path: (path == METADATA) == bool(self.before)):
            is_commit = path == METADATA  # the others are for other readers
            self.folder.write(path, json.dumps(files[path]).encode(), durable=is_commit)
        self.before = dict(self.arrays)

    def sweep(self) -> None:
        """Remove what does not count any more: arrays, chunks, and partial files."""
        there = self.folder.names()
        self.sweep_records()
        # Features grow where they are, in chunks of the same names: there is nothing to remove.
        for name in {*DERIVED, DROPPED, *self.arrays}.intersection(there) - {"feature"}:
            if name not in self.arrays:
                self.folder.remove(name)
                continue
            is_nested = separator_of(self.arrays[name]) == "/" or not self.arrays[name]["shape"]
            # Chunks so far are files such as c.0.1, if these are in folders such as c/0/1, and the
            # other way round. The only chunk of an array without axes is c.
            for file in (self.folder / name).names():
                if file.startswith("c.") if is_nested else file == "c":
                    self.folder.remove(f"{name}/{file}")
        self.folder.sweep()

    def sweep_records(self) -> None:
        """Remove records, unless some are of blocks that do not count yet."""
        if not {"unfinished", "lacking"} & {*self.attrs}:
            self.folder.remove(RECORDS)


# -------------------------------------------------------------------------- metadata of an array

_OF_FEATURES = ([SAMPLE, PROJ_DIM, CHECKPOINT], [SAMPLE, CHECKPOINT])


def _metadata_in(files: Mapping[str, Buffer], name: str) -> dict[str, Any]:
    return json.loads(files[f"{name}/{METADATA}"].to_bytes())


def dims_of(metadata: dict[str, Any]) -> list[str]:
    """Return the dimensions of an array."""
    return list(metadata.get("dimension_names") or [])


def chunks_of(metadata: dict[str, Any]) -> list[int]:
    """Return the sizes of its chunks."""
    return list(metadata["chunk_grid"]["configuration"]["chunk_shape"])


def separator_of(metadata: dict[str, Any]) -> str:
    """Return the character between the numbers in the name of a chunk."""
    return str(metadata["chunk_key_encoding"]["configuration"]["separator"])


def lost_chunk(folder: Folder, path: str) -> IncompleteFeaturesError:
    """Return the error of a chunk that should be in a store."""
    return IncompleteFeaturesError(
        f"expected the chunk {path!r} in the store {folder.url!r}, but it is gone; try "
        "td.open(store) again if the store was changed since, or td.verify(store), which says how "
        "to restore it"
    )


def kind(dtype: np.dtype[Any]) -> str:
    """Return the kind of values of a dtype, whatever their width."""
    return "number" if dtype.kind in "iuf" else dtype.type.__name__
