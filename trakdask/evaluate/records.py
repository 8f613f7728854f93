"""A folder of retrained models' outputs: one file per model, which is there only if it is whole.

A file is named by what the model was trained on (mask and seed), so that more subsets, more seeds
and other experiments with the same ``train_fn`` share a store and train no model twice.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import uuid
from dataclasses import dataclass
from typing import Any

import fsspec
import numpy as np

from trakdask.locations import location
from trakdask.provenance import require_same

__all__ = ["Records", "model_key", "open_records"]

_SPEC = "spec.json"
_FOLDER = "models"
_SUFFIX = ".npy"


def model_key(mask: np.ndarray, seed: int) -> str:
    """Name a model by what it was trained on.

    Examples
    --------
    >>> model_key(np.array([True, False]), 0) == model_key(np.array([True, False]), 1)
    False
    """
    what = f"{len(mask)} samples, seed {seed}:".encode() + np.packbits(mask).tobytes()
    return hashlib.sha256(what).hexdigest()[:32]


@dataclass(frozen=True)
class Records:
    """The completed models of one store."""

    store: str

    def done(self) -> set[str]:
        """List the keys of completed models."""
        fs, path = fsspec.core.url_to_fs(f"{self.store}/{_FOLDER}")
        fs.invalidate_cache()
        names = fs.ls(path, detail=False) if fs.exists(path) else []
        names = [name.replace("\\", "/").rpartition("/")[2] for name in names]
        return {name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)}

    def read(self, key: str) -> np.ndarray | None:
        """Return the outputs of a completed model, None if there is none."""
        fs, path = fsspec.core.url_to_fs(self._path(key))
        try:
            content = fs.cat_file(path)
        except FileNotFoundError:
            return None
        values: np.ndarray = np.load(io.BytesIO(content), allow_pickle=False)
        return values

    def write(self, key: str, outputs: np.ndarray) -> None:
        """Store the outputs of a model; renamed into place, so absent or whole."""
        content = io.BytesIO()
        np.save(content, outputs)
        _write_whole(self._path(key), content.getvalue())

    def _path(self, key: str) -> str:
        return f"{self.store}/{_FOLDER}/{key}{_SUFFIX}"


def open_records(store: str | os.PathLike[str], spec: dict[str, Any]) -> Records:
    """Open or make a store of models that have one spec.

    Raises
    ------
    StoreMismatchError
        If the store has models of another spec; the field is named.
    FileExistsError
        If the place holds something else.
    """
    place = location(store)
    fs, path = fsspec.core.url_to_fs(place)
    if fs.exists(f"{path}/{_SPEC}"):
        found = json.loads(fs.cat_file(f"{path}/{_SPEC}"))
        what = f"these models and those of the store {place!r}"
        require_same(spec, found, what=what, names=tuple(spec))
    elif fs.exists(path) and not all(n.endswith(".partial") for n in fs.ls(path, detail=False)):
        raise FileExistsError(
            f"{place!r} exists and is no store of retrained models; needed a new path, or a store "
            "to resume. Choose another path."
        )
    else:
        _write_whole(f"{place}/{_SPEC}", json.dumps(spec).encode())
    return Records(place)


def _write_whole(url: str, content: bytes) -> None:
    fs, path = fsspec.core.url_to_fs(url)
    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    partial = f"{path}.{uuid.uuid4().hex}.partial"
    fs.pipe_file(partial, content)
    fs.mv(partial, path)
