"""Gradient stores of bergson, opened as lazy trakdask features."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import xarray as xr
import yaml

from trakdask._version import __version__
from trakdask.provenance import digest
from trakdask.samples.fingerprints import mapped
from trakdask.variables import CHECKPOINT, SAMPLE, VARIABLES

__all__ = ["open_bergson"]

PathLike = str | os.PathLike[str]

_BLOCK_BYTES = 2**25
_STORED = {
    "float16": np.float16,
    "bfloat16": np.uint16,  # numpy has no bfloat16; it is the upper half of a float32
    "float32": np.float32,
    "float64": np.float64,
}
# Settings of a run that do not affect its gradients, only where and how it ran.
_NOT_OF_THE_GRADIENTS = (
    *("run_path", "overwrite", "distributed", "fsdp", "data", "tokenizer", "drop_columns"),
    *("max_tokens", "debug", "token_batch_size", "max_batch_size", "auto_batch_size", "profile"),
    *("attribute_tokens",),
)


def open_bergson(stores: PathLike | Sequence[PathLike] | Mapping[str, PathLike]) -> xr.Dataset:
    """Open a gradient store of bergson (``bergson build``) as features.

    Parameters
    ----------
    stores
        Folder of a store. For several checkpoints of a model, a list of folders, or a mapping from
        names to folders, each with the same samples in the same order. Nothing is written to them.

    Returns
    -------
    Lazy Dataset with ``feature`` (sample, proj_dim, checkpoint), ``out_to_loss`` and ``output``
    (sample, checkpoint), float32. Columns are those of all modules, in the order of
    ``attrs["parameters"]``. In a store of tokens each token is a sample, identified by the coords
    ``document`` and ``token``. Add other metadata from ``data.hf`` with
    ``features.assign_coords(source=("sample", datasets.load_from_disk(...)["source"]))``.

    Raises
    ------
    FileNotFoundError
        If there is no such folder, or it lacks a file.
    ValueError
        If the run was interrupted, a file is truncated, or the stores have different samples or
        modules.

    Notes
    -----
    The gradients are those of the loss, not of a model output f. They already contain Q, so
    ``out_to_loss`` is 1, and scores attribute the target's loss (> 0 where training on the sample
    lowered it). The stores have no outputs, so ``output`` is NaN and ``damping="auto"`` is the
    closed form. ``score(features, targets, "grad_cos")`` compares gradients as
    ``bergson query`` with ``unit_normalize`` does.

    A row that was never written looks like a zero gradient. Since ``bergson`` renames a folder
    from ``<name>.part`` when it is complete, a folder with that suffix is rejected.

    ``config.yaml`` records how a run was made. Features and targets with different records of
    model, loss or projection cannot be scored together.

    Only headers are read here. Each task memory-maps the file read-only and copies a block of at
    most 32 MB; on a cluster, workers need the folder under the same path.

    References
    ----------
    EleutherAI/bergson, version 2.5.1: ``bergson.data.create_index`` and ``create_token_index``.
    """
    if isinstance(stores, (str, os.PathLike)):
        stores = [stores]
    named = stores if isinstance(stores, Mapping) else dict(enumerate(stores))
    opened = {str(name): _store(path) for name, path in named.items()}
    if not opened:
        raise ValueError("expected at least one store, got none; try open_bergson('runs/index')")
    first = next(iter(opened.values()))
    for name, store in opened.items():
        if (store.n_rows, store.sizes) != (first.n_rows, first.sizes):
            raise ValueError(
                "expected stores of the same samples and modules, got "
                f"{store.n_rows, store.sizes} for checkpoint {name!r} and "
                f"{first.n_rows, first.sizes} for the first; try opening them separately"
            )
    folders = [str(store.file.parent) for store in opened.values()]
    attrs = {
        "projector": {"kind": "bergson", "proj_dim": first.width},
        "checkpoints": {name: store.settings for name, store in opened.items()},
        "checkpoint_ids": {name: i for i, name in enumerate(opened)},
        "parameters": {name: [size] for name, size in first.sizes.items()},
        "task": "loss",
        "formula": "feature = P^T grad loss",
        "trakdask_version": __version__,
        "source": f"bergson-{digest({'paths': folders})[:32]}",
        "stored_dtype": {name: store.dtype for name, store in opened.items()},
    }
    feature = da.stack([store.feature() for store in opened.values()], axis=-1)
    one, unknown = (da.full_like(feature[:, 0], value, dtype=np.float32) for value in (1.0, np.nan))
    arrays = {"feature": feature, "output": unknown, "out_to_loss": one}
    data = {n: (VARIABLES[n].dims, array, VARIABLES[n].attrs) for n, array in arrays.items()}
    coords: dict[str, Any] = {CHECKPOINT: (CHECKPOINT, np.array(list(opened), dtype=object))}
    return xr.Dataset(data, coords=coords | first.coords(), attrs=attrs)


@dataclass(frozen=True)
class _Store:
    """The contents of the headers of one store."""

    file: Path
    n_rows: int
    sizes: dict[str, int]
    dtype: str
    settings: str
    """A digest of what determines the gradients; "unknown" if it is not recorded."""
    has_tokens: bool

    @property
    def width(self) -> int:
        return sum(self.sizes.values())

    def coords(self) -> dict[str, Any]:
        """Return the document and the token of each row of a store of tokens."""
        if not self.has_tokens:
            return {}
        offsets = np.load(self.file.with_name("offsets.npy"))  # the first row of each document
        lengths = np.diff(offsets)
        document = np.repeat(np.arange(len(lengths)), lengths)
        token = np.arange(self.n_rows) - offsets[document]
        return {"document": (SAMPLE, document), "token": (SAMPLE, token)}

    def feature(self) -> da.Array:
        """Return the lazy array (sample, proj_dim) float32."""
        shape = (self.n_rows, self.width)
        stored = np.memmap(self.file, _STORED[self.dtype], "r", shape=shape)
        rows = max(1, _BLOCK_BYTES // (4 * self.width))
        file = mapped(stored) or stored
        values = da.from_array(file, chunks=(rows, -1), inline_array=True)
        if self.dtype == "bfloat16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        array: da.Array = values.astype(np.float32)
        return array


def _store(path: PathLike) -> _Store:
    folder = Path(path).expanduser().resolve()
    if not (folder / "info.json").is_file():
        inside = sorted(each.parent.name for each in folder.glob("*/info.json"))
        instead = f"one of the folders inside it: {inside}" if inside else "that of `bergson build`"
        raise FileNotFoundError(
            f"expected info.json of a bergson store in {folder}, got none; try {instead}"
        )
    if folder.suffix == ".part":  # rows that were not written look like zero gradients
        raise ValueError(
            f"expected a complete store, got {folder}, which a run of bergson has not finished; "
            "try running bergson again"
        )
    info = json.loads((folder / "info.json").read_bytes())
    return _Store(
        file=folder / "gradients.bin",
        n_rows=info["num_grads"],
        sizes=info["grad_sizes"],
        dtype=info["base_dtype"],
        settings=_settings(folder),
        has_tokens=bool(info.get("attribute_tokens")),
    )


def _settings(folder: Path) -> str:
    """Return a digest of the model, loss, projection and preprocessing in ``config.yaml``."""
    path = folder / "config.yaml"
    if not path.is_file():
        return "unknown"
    steps = yaml.safe_load(path.read_text("utf-8")).get("steps", [])
    builds = [dict(each["build"]) for each in steps if "build" in each]
    for build in builds:
        index = build.get("index_cfg", {})
        build["index_cfg"] = {k: v for k, v in index.items() if k not in _NOT_OF_THE_GRADIENTS}
    return digest({"build": builds})[:32] if builds else "unknown"
