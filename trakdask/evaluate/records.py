"""A folder with the outputs of retrained models, one file per model, complete or absent.

A file is named after the mask and the seed of its model. Calls with more subsets or seeds, and
other experiments with the same ``train_fn``, can therefore share a store and train no model twice.
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

from trakdask.checks import shown
from trakdask.locations import location
from trakdask.provenance import require_same

__all__ = ["Records", "model_key", "open_records"]

_SPEC = "spec.json"
_FOLDER = "models"
_SUFFIX = ".npy"


def model_key(mask: np.ndarray, seed: int) -> str:
    """Return the name of a model: a hash of its mask and seed.

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

    def read(self, key: str, n_targets: int) -> np.ndarray | None:
        """Return the outputs of a completed model; None if it has not been completed.

        Raises
        ------
        ValueError
            If the file is damaged.
        """
        fs, path = fsspec.core.url_to_fs(self._path(key))
        try:
            content = fs.cat_file(path)
        except FileNotFoundError:
            return None
        try:
            values: np.ndarray = np.load(io.BytesIO(content), allow_pickle=False)
        except (ValueError, EOFError, OSError) as err:
            raise self._damaged(key, f"a damaged file ({err})") from err
        if values.shape != (n_targets,):
            raise self._damaged(key, f"an array of shape {values.shape}")
        return values

    def _damaged(self, key: str, got: str) -> ValueError:
        return ValueError(
            f"expected the outputs of one model in {self._path(key)!r}, got {got}; try deleting "
            "it, so that this model is trained again"
        )

    def write(self, key: str, outputs: np.ndarray) -> None:
        """Store the outputs of a model; the file gets its name only when it is complete."""
        content = io.BytesIO()
        np.save(content, outputs)
        _write_whole(self._path(key), content.getvalue())

    def _path(self, key: str) -> str:
        return f"{self.store}/{_FOLDER}/{key}{_SUFFIX}"


def open_records(store: str | os.PathLike[str], spec: dict[str, Any]) -> Records:
    """Open the store of models with this spec, or create it.

    Raises
    ------
    StoreMismatchError
        If the store has models of another spec; the message names the field.
    FileExistsError
        If the folder or file holds something else.
    ValueError
        If the spec of the store is damaged.
    """
    url = location(store)
    fs, path = fsspec.core.url_to_fs(url)
    if fs.exists(f"{path}/{_SPEC}"):
        what = f"these models and those of the store {url!r}"
        stored = _read_spec(f"{url}/{_SPEC}", fs.cat_file(f"{path}/{_SPEC}"))
        require_same(spec, stored, what=what, names=tuple(spec))
    elif fs.exists(path) and not all(n.endswith(".partial") for n in fs.ls(path, detail=False)):
        raise FileExistsError(
            f"expected a new path, or a store of retrained models, got {url!r}, which holds "
            "something else; try another path"
        )
    else:
        _write_whole(f"{url}/{_SPEC}", json.dumps(spec).encode())
    return Records(url)


def _read_spec(url: str, content: bytes) -> dict[str, Any]:
    try:
        stored = json.loads(content)
    except ValueError as err:
        raise ValueError(
            f"expected the spec of a store of retrained models in {url!r}, got a damaged file "
            f"({err}); try another path"
        ) from err
    if not isinstance(stored, dict):
        raise ValueError(
            f"expected the spec of a store of retrained models in {url!r}, got {shown(stored)}; "
            "try another path"
        )
    return stored


def _write_whole(url: str, content: bytes) -> None:
    fs, path = fsspec.core.url_to_fs(url)
    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    partial = f"{path}.{uuid.uuid4().hex}.partial"
    fs.pipe_file(partial, content)
    fs.mv(partial, path)
