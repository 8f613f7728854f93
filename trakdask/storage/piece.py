"""A piece of a store: features of one set of samples at some checkpoints, block by block."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xarray as xr
import zarr
from zarr.codecs import Crc32cCodec

from trakdask.execution.layers import token_of
from trakdask.files import Folder
from trakdask.provenance import FEATURE_SPEC, digest, spec
from trakdask.storage.zarr_stores import Arrays, Recorded, zarr_store
from trakdask.variables import CHECKPOINT, SAMPLE

__all__ = [
    "ASSIGNED",
    "BESIDE",
    "DROPS",
    "ERROR",
    "FACTORS",
    "FEATURE_NAMES",
    "GRAM",
    "LOSS_GRADIENT",
    "PARTS",
    "RECORDS",
    "SCALE",
    "SUMS",
    "Files",
    "Piece",
    "array",
    "describe",
]

FEATURE_NAMES = ("feature", "output", "out_to_loss")
GRAM = "gram"
LOSS_GRADIENT = "loss_gradient"
SCALE = "feature_scale"
ERROR = "error"
SUMS = (GRAM, LOSS_GRADIENT)
RECORDS = "records"
PARTS = "parts"
DROPS = "drops"
ASSIGNED = "assigned"
FACTORS = "factors"
BESIDE = frozenset({RECORDS, PARTS, DROPS, ASSIGNED, FACTORS})
"""Folders beside the arrays, which are no coords."""


@dataclass(frozen=True)
class Piece:
    """Where the blocks of one feature set go, and which are there.

    Parameters
    ----------
    place
        Its zarr group.
    spec
        How the features are made; what other features must agree with to be the same.
    layout
        ``samples`` in all and per ``block``, and the ``dtype`` on disk.
    """

    place: Folder
    spec: Mapping[str, Any]
    layout: Mapping[str, Any]

    @property
    def checkpoints(self) -> list[str]:
        """Names of the checkpoints' folders: only hexadecimal digits, whatever ``attrs`` say."""
        return [f"{int(id):08x}" for id in self.spec["checkpoint_ids"].values()]

    @property
    def n_blocks(self) -> int:
        """Blocks of each checkpoint."""
        return int(-(-self.layout["samples"] // self.layout["block"]))

    @cached_property
    def digest(self) -> str:
        """Hash of spec and layout: the blocks of other features are not blocks of these."""
        return digest({"spec": self.spec, "layout": self.layout})

    @property
    def records(self) -> Folder:
        """The folder of the completion records."""
        return self.place / RECORDS / self.digest[:16]

    def folder(self, index: int) -> Folder:
        """Return the folder of the records of one checkpoint."""
        return self.records / self.checkpoints[index]

    def done(self, index: int) -> set[str]:
        """Return names of the completed blocks of a checkpoint: block numbers, and "gram"."""
        names = self.folder(index).names()
        return {name.removesuffix(".json") for name in names if name.endswith(".json")}

    def count_done(self) -> int:
        """Return the number of completed blocks, gram matrices among them."""
        return sum(len(self.done(index)) for index in range(len(self.checkpoints)))

    def write_record(
        self, index: int, block: str, files: Mapping[str, list[int]], about: Mapping[str, Any]
    ) -> None:
        """State that a block is complete: the last file that its task writes."""
        record = {"spec": self.digest, "block": block, "files": files, **about}
        self.folder(index).write(f"{block}.json", json.dumps(record).encode())

    def group(self, store: Recorded | None = None) -> zarr.Group:
        """Open the zarr group; to write if given where."""
        if store is not None:
            return zarr.open_group(store, mode="r+", zarr_format=3)
        return zarr.open_group(self.arrays(), mode="r", zarr_format=3)

    def arrays(self) -> Arrays:
        """Return the zarr store of its arrays, without what lies beside them."""
        return Arrays(zarr_store(self.place, read_only=True), BESIDE)


class Files:
    """The chunk files of a piece's blocks, and their bytes; it opens each array once."""

    def __init__(self, piece: Piece) -> None:
        group = piece.group()
        self._arrays = {
            name: (of.ndim, of.metadata.encode_chunk_key, _chunk_bytes(of))
            for name in (*FEATURE_NAMES, ERROR, SCALE, *SUMS)
            if name in group
            for of in [array(group, name)]
        }

    def of(self, block: str, index: int, *, optional: bool = False) -> dict[str, int | None]:
        """Return the files of a block, by its name; None where content decides their size.

        Optional files, too, if asked: those that are only there if samples failed.
        """
        names = SUMS if block == GRAM else (*FEATURE_NAMES, SCALE, *((ERROR,) * optional))
        first = () if block == GRAM else (int(block),)
        found = {}
        for name in names:
            if name in self._arrays:
                ndim, key, size = self._arrays[name]
                middle = (0,) * (ndim - len(first) - 1)
                found[f"{name}/{key((*first, *middle, index))}"] = size
        return found


def describe(features: xr.Dataset, dtype: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return spec and layout of features; a selection of samples is told apart from the whole.

    ``attrs`` follow a selection unchanged. But only what featurize itself named is the whole: dask
    names everything made of it.
    """
    if missing := [name for name in FEATURE_SPEC if name not in features.attrs]:
        raise ValueError(
            f"expected attrs as td.featurize writes them, by which a store is known, got none of "
            f"{missing}; try features.assign_attrs(original.attrs)"
        )
    names = [str(name) for name in features[CHECKPOINT].values]
    if len(set(names)) < len(names) or not set(names) <= set(features.attrs["checkpoints"]):
        raise ValueError(
            f"expected checkpoints of {list(features.attrs['checkpoints'])} (attrs), each once, "
            f"got {names}; try another selection of checkpoints"
        )
    described = spec(features)
    name = features.feature.data.name
    if token_of(name) is None:
        described["source"] = f"{described.get('source', '')}/{name}"
    return described, _layout(features, dtype)


def array(group: zarr.Group, name: str) -> zarr.Array[Any]:
    """Return an array whose chunks are written even if they are all NaN: absent means missing."""
    found = group[name]
    assert isinstance(found, zarr.Array)
    return found.with_config({"write_empty_chunks": True})


def _chunk_bytes(of: zarr.Array[Any]) -> int | None:
    """Return the bytes of a chunk's file; None if it is compressed, or text."""
    if of.dtype.kind == "T" or any(not isinstance(codec, Crc32cCodec) for codec in of.compressors):
        return None
    return int(np.prod(of.chunks)) * of.dtype.itemsize + 4 * len(of.compressors)


def _layout(features: xr.Dataset, dtype: str | None) -> dict[str, Any]:
    chunks = features.feature.variable.chunksizes.get(SAMPLE, (features.sizes[SAMPLE],))
    if len(set(chunks[:-1])) > 1 or chunks[-1] > chunks[0]:
        raise ValueError(
            "expected equal chunks of samples (the last may be smaller), since each is one chunk "
            f"of the store, got {chunks[:4]}...; try features.chunk(sample={max(chunks)})"
        )
    return {
        "samples": sum(chunks),
        "block": chunks[0],
        "dtype": str(dtype or features.feature.dtype),
    }
