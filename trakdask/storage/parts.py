"""A part of a store: features of one set of samples at some checkpoints, block by block.

The first part lies at the root of the store, and every append adds one beside it. A part is a zarr
group, with its own completion records and a list of the files that it was made with.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xarray as xr
import zarr
from zarr.abc.store import Store
from zarr.codecs import Crc32cCodec

from trakdask import arrays
from trakdask.attribution.estimators import Weights
from trakdask.errors import IncompleteFeaturesError
from trakdask.execution.layers import token_of
from trakdask.files import Folder
from trakdask.provenance import REQUIRED_SPEC, digest, spec
from trakdask.storage.zarr_stores import (
    METADATA,
    Arrays,
    Complete,
    Recorded,
    Writable,
    zarr_store,
)
from trakdask.variables import CHECKPOINT, PROJ_DIM, SAMPLE, VARIABLES

__all__ = [
    "ASSIGNED",
    "BESIDE",
    "DROPS",
    "ERROR",
    "FACTORS",
    "FEATURE_NAMES",
    "GRAM",
    "LEASE",
    "LOSS_GRADIENT",
    "METADATA",
    "PARTS",
    "RECORDS",
    "REDUCTIONS",
    "SCALE",
    "TEMPLATE",
    "UNFINISHED",
    "ChunkFiles",
    "Part",
    "create",
    "described",
    "write_coords",
]

FEATURE_NAMES = ("feature", "feature_norm", "output", "out_to_loss")
GRAM = "gram"
LOSS_GRADIENT = "loss_gradient"
SCALE = "feature_scale"
ERROR = "error"
REDUCTIONS = (GRAM, LOSS_GRADIENT)
"""Arrays that are reduced from the features of a checkpoint, and covered by one record of it."""

RECORDS = "records"
LEASE = "lease-"
"""How the name of a lease begins, among the records."""
PARTS = "parts"
DROPS = "drops"
ASSIGNED = "assigned"
FACTORS = "factors"
BESIDE = frozenset({RECORDS, PARTS, DROPS, ASSIGNED, FACTORS})
"""Folders beside the arrays, which are no coords."""

UNFINISHED = "unfinished"
"""A file of this name among the records says that nothing in the part counts yet."""
TEMPLATE = "template.json"
"""Among the records: every file of the new part, with its size, checksum and, if JSON, content."""
_FLAT: dict[str, Any] = {"name": "default", "separator": "."}
"""Chunks lie in one folder, not in one each: a listing on resume takes less than half the time."""


@dataclass(frozen=True)
class Part:
    """Where the blocks of one feature set are stored, and which of them are complete.

    Parameters
    ----------
    folder
        Its zarr group.
    spec
        How the features are made; what other features must agree with to be the same.
    layout
        ``samples`` in all and per ``block``, and the ``dtype`` on disk.
    """

    folder: Folder
    spec: Mapping[str, Any]
    layout: Mapping[str, Any]

    def __reduce__(self) -> tuple[Any, ...]:
        return Part, (self.folder, self.spec, self.layout)  # without what it has read

    @property
    def source(self) -> Any:
        """What identifies the samples."""
        return self.spec.get("source")

    @cached_property
    def checkpoints(self) -> list[str]:
        """Names of the checkpoints' folders: only hexadecimal digits, whatever ``attrs`` say."""
        return [f"{int(id):08x}" for id in self.spec["checkpoint_ids"].values()]

    @cached_property
    def n_blocks(self) -> int:
        """Blocks of each checkpoint."""
        return int(-(-self.layout["samples"] // self.layout["block"]))

    @cached_property
    def digest(self) -> str:
        """Hash of spec and layout: the blocks of other features are not blocks of these."""
        return digest({"spec": self.spec, "layout": self.layout})

    @cached_property
    def records(self) -> Folder:
        """The folder of the completion records."""
        return self.folder / f"{RECORDS}/{self.digest[:16]}"

    def record(self, index: int, block: str) -> str:
        """Return the file, below ``records``, that says that a block is complete."""
        return f"{self.checkpoints[index]}/{block}.json"

    def done(self, index: int) -> set[str]:
        """Return names of the completed blocks of a checkpoint: block numbers, and "gram"."""
        names = (self.records / self.checkpoints[index]).names()
        return {name.removesuffix(".json") for name in names if name.endswith(".json")}

    def count_done(self) -> int:
        """Return the number of completed blocks, gram matrices among them."""
        return sum(len(self.done(index)) for index in range(len(self.checkpoints)))

    def write_record(
        self, index: int, block: str, files: Mapping[str, list[int]], about: Mapping[str, Any]
    ) -> None:
        """State that a block is complete: the last file that its task writes."""
        record = {"spec": self.digest, "block": block, "files": files, **about}
        self.records.write(self.record(index, block), json.dumps(record).encode())

    @cached_property
    def files(self) -> dict[str, list[int]]:
        """Size and checksum of the files that it was made with: metadata and coords.

        Raises
        ------
        IncompleteFeaturesError
            If the list was lost, or is damaged.
        """
        try:
            files = self.records.read_json(TEMPLATE)
            return {path: [about["bytes"], about["checksum"]] for path, about in files.items()}
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as err:
            raise IncompleteFeaturesError(
                f"expected the list of files {TEMPLATE} among the records of the store "
                f"{self.folder.url!r}, got none that can be read ({type(err).__name__}); try "
                "ds = td.open(store, require_complete=False), and if it looks right, "
                "td.save(ds, new_store)"
            ) from err

    @property
    def arrays(self) -> set[str]:
        """Names of its arrays, coords among them, according to the list of its files."""
        return {path.partition("/")[0] for path in self.files if path.count("/") == 1} - BESIDE

    @cached_property
    def _metadata(self) -> dict[str, bytes]:
        return {}

    def store(self, *, complete: bool = True, only: Collection[str] | None = None) -> Arrays:
        """Return the zarr store of its arrays, without the folders beside them.

        Parameters
        ----------
        complete
            Whether it rejects files that were changed or lost since they were listed.
        only
            Names of the arrays whose files it knows: every task gets a copy of these.
        """
        store = zarr_store(self.folder, read_only=True)
        if not complete:
            return Arrays(store, self.folder, BESIDE)
        known = {
            path: about
            for path, about in self.files.items()
            if only is None or "/" not in path or path.partition("/")[0] in only
        }
        return Complete(
            store, self.folder, known, token=self.token, may_lack=(ERROR,), hidden=BESIDE,
            metadata=self._metadata,
        )  # fmt: skip

    @property
    def token(self) -> str:
        """Tell what is there from what was there before, if the store was deleted and made anew."""
        local = self.folder.is_local
        made = os.stat(f"{self.folder.url}/{METADATA}").st_mtime_ns if local else ""
        return f"{self.digest} {made}"

    def writable(self, names: Iterable[str]) -> Writable:
        """Return arrays to write to, those of the names that it has."""
        return Writable.among(self.folder, names, self.files)


class ChunkFiles:
    """The chunk files of a part's blocks, and their sizes; each array is opened once."""

    def __init__(self, part: Part) -> None:
        names, store = (*FEATURE_NAMES, ERROR, SCALE, *REDUCTIONS), part.store()
        self._arrays = {
            name: (of.ndim, of.metadata.encode_chunk_key, _chunk_bytes(of))
            for name in part.arrays.intersection(names)
            for of in [store.array(name)]
        }

    def of(self, block: str, index: int, *, optional: bool = False) -> dict[str, int | None]:
        """Return the files of a block, by its name, with their bytes.

        The size is None where it depends on the content. Optional files are those that exist only
        if samples failed.
        """
        names = REDUCTIONS if block == GRAM else (*FEATURE_NAMES, SCALE, *((ERROR,) * optional))
        first = () if block == GRAM else (int(block),)
        files = {}
        for name in names:
            if name in self._arrays:
                ndim, key, size = self._arrays[name]
                middle = (0,) * (ndim - len(first) - 1)
                files[f"{name}/{key((*first, *middle, index))}"] = size
        return files


def described(features: xr.Dataset, folder: Folder, dtype: str | None) -> Part:
    """Return the part that features would be in a folder, by their spec and layout.

    ``attrs`` follow a selection of samples unchanged. But only what featurize itself has named is
    the whole: dask names everything made of it.
    """
    if missing := [name for name in REQUIRED_SPEC if name not in features.attrs]:
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
    made = spec(features)
    name = features.feature.data.name
    if token_of(name) is None:
        made["source"] = f"{made.get('source', '')}/{name}"
    return Part(folder, made, _layout(features, dtype))


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


def _chunk_bytes(of: zarr.Array[Any]) -> int | None:
    """Return the bytes of a chunk's file; None if it is compressed, or text."""
    if of.dtype.kind == "T" or any(not isinstance(codec, Crc32cCodec) for codec in of.compressors):
        return None
    return int(np.prod(of.chunks)) * of.dtype.itemsize + 4 * len(of.compressors)


# ------------------------------------------------------------------------------------- a new part


def create(part: Part, features: xr.Dataset, weights: Weights | None) -> None:
    """Make the arrays of a part, without chunks, and its coords, with theirs.

    What an unfinished attempt left is removed first.

    Parameters
    ----------
    part
        Where they go.
    features
        What will be stored.
    weights
        Of the reductions that will be stored; None if there will be none.
    """
    features = features.assign_attrs(part.spec)
    control = part.folder / RECORDS
    control.write(UNFINISHED, b"trakdask is making this store; nothing in it counts yet\n")
    part.folder.sweep()
    for folder in (part.folder, control):
        for name in folder.names():
            if name not in (RECORDS, UNFINISHED) and not name.startswith(LEASE):
                folder.remove(name)
    store = Recorded(zarr_store(part.folder))
    zarr.create_group(store, zarr_format=3).create_group(RECORDS)
    write_coords(store, features.coords.to_dataset())
    group = zarr.open_group(store, mode="r+", zarr_format=3)
    group.update_attributes({**features.attrs, "layout": part.layout})
    for name in FEATURE_NAMES:
        _create_array(group, part, features, name, features[name].dtype)
    # Whether failures are recorded or not: a run that raises may be resumed by one that does not.
    _create_array(group, part, features, ERROR, np.dtypes.StringDType())
    if part.layout["dtype"] == "float16":
        _create_array(group, part, features, SCALE, np.dtype("f8"))
    if weights is not None:
        for name in weights.sums:
            dtype = np.result_type(
                arrays.gram.accumulation_dtype(features.sizes[PROJ_DIM]), features.feature.dtype
            )
            _create_array(group, part, features, name, dtype, weights.attrs(features))
    part.records.write(TEMPLATE, json.dumps(_inventory(store)).encode())
    control.remove(UNFINISHED)


def write_coords(store: Store, coords: xr.Dataset) -> None:
    """Write coords, as xarray encodes them; every chunk, since an absent one counts as lost."""
    coords = coords.drop_attrs(deep=False).drop_encoding()
    coords.to_zarr(store, mode="a", consolidated=False, zarr_format=3, write_empty_chunks=True)


def _create_array(
    group: zarr.Group,
    part: Part,
    features: xr.Dataset,
    name: str,
    dtype: np.dtype[Any],
    attrs: dict[str, Any] | None = None,
) -> None:
    variable = VARIABLES[name]
    sizes = {**features.sizes, "proj_dim_1": features.sizes[PROJ_DIM]}
    blocks = {**sizes, SAMPLE: part.layout["block"], CHECKPOINT: 1}
    group.create_array(
        name,
        shape=tuple(sizes[dim] for dim in variable.dims),
        chunks=tuple(max(1, blocks[dim]) for dim in variable.dims),
        dtype=part.layout["dtype"] if name == "feature" else dtype,
        compressors=[Crc32cCodec()],  # no compression: features do not compress
        chunk_key_encoding=_FLAT,
        fill_value="" if name == ERROR else np.nan,
        dimension_names=variable.dims,
        attributes={**variable.attrs, **(attrs or {})},
    )


# ------------------------------------------------------------------ the files that it was made with


def _inventory(store: Recorded) -> dict[str, Any]:
    """List the files of a new part; metadata with its text, so that it can be restored."""
    files: dict[str, Any] = {}
    for path, (size, known) in store.written.items():
        files[path] = {"bytes": size, "checksum": known}
        if path in store.metadata:
            files[path]["content"] = store.metadata[path].decode()
    return files
