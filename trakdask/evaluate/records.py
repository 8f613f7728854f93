"""A folder with the outputs of retrained models, one file per model, complete or absent.

A file is named after the mask and the seed of its model. Calls with more subsets or seeds, and
other experiments with the same ``train_fn``, can therefore share a store and train no model twice.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from trakdask.checks import shown
from trakdask.files import Folder, location
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

    store: Folder

    def done(self) -> set[str]:
        """List the keys of completed models."""
        names = (self.store / _FOLDER).names()
        return {name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)}

    def read(self, key: str, n_targets: int) -> np.ndarray | None:
        """Return the outputs of a completed model; None if it has not been completed.

        Raises
        ------
        ValueError
            If the file is damaged.
        """
        try:
            content = (self.store / _FOLDER).read(f"{key}{_SUFFIX}")
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
        path = f"{self.store.url}/{_FOLDER}/{key}{_SUFFIX}"
        return ValueError(
            f"expected the outputs of one model in {path!r}, got {got}; try deleting it, so that "
            "this model is trained again"
        )

    def write(self, key: str, outputs: np.ndarray) -> None:
        """Store the outputs of a model; the file gets its name only when it is complete."""
        with (self.store / _FOLDER).writing(f"{key}{_SUFFIX}") as file:
            np.save(file, outputs)


def open_records(store: str | os.PathLike[str], spec: dict[str, Any]) -> Records:
    """Open the store of models with this spec, or create it.

    Raises
    ------
    StoreMismatchError
        If the store has models of another spec; the message names the field.
    FileExistsError
        If the folder or file contains something else.
    ValueError
        If the spec of the store is damaged.
    """
    folder = Folder(location(store))
    names = folder.names()
    if _SPEC in names:
        what = f"these models and those of the store {folder.url!r}"
        stored = _read_spec(f"{folder.url}/{_SPEC}", folder.read(_SPEC))
        require_same(spec, stored, what=what, names=tuple(spec))
    elif names:
        raise FileExistsError(
            f"expected a new path, or a store of retrained models, got {folder.url!r}, which "
            "contains something else; try another path"
        )
    else:
        folder.write(_SPEC, json.dumps(spec).encode())
    return Records(folder)


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
