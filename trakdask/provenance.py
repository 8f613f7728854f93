"""How features were made, kept in ``attrs``; what was made differently refuses to meet."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import xarray as xr

from trakdask.errors import StoreMismatchError
from trakdask.variables import CHECKPOINT, PROJ_DIM

__all__ = [
    "EARLIER_SOURCE",
    "FEATURE_SPEC",
    "PRECISION",
    "STORE_SPEC",
    "digest",
    "require_comparable",
    "require_same",
    "spec",
]

FEATURE_SPEC = ("projector", "checkpoints", "checkpoint_ids", "parameters", "task")
"""Attrs that training and target features must share for their product to mean anything."""

EARLIER_SOURCE = "earlier_source"
"""What the source was called when all numeric coords were part of it: stores made then have it."""

PRECISION = ("dtype", "autocast", "float32_matmul_precision")
STORE_SPEC = (*FEATURE_SPEC, "source", *PRECISION)
"""Attrs that all blocks of a store must share: of the same samples, in the same precision."""

_REMEDY = {
    "projector": "Featurize both with one projector (kind, proj_dim, seed and arithmetic).",
    "checkpoints": "Featurize both with the same checkpoints, in one td.Model.",
    "checkpoint_ids": "Give both models the same checkpoint_ids, or none.",
    "parameters": "Select the same parameters= in both models.",
    "task": "Give both models the same task.",
    "source": "Choose another store, append_dim='sample' if these are more samples of it, or set "
    "samples.attrs['source'] if the data are the same.",
    "dtype": "Featurize with the dtype= of the store, or save to another one.",
    "autocast": "Featurize under the torch.autocast of the store, or save to another one.",
    "float32_matmul_precision": "Set torch.set_float32_matmul_precision(...) to that of the store.",
    "layout": "Use the blocks of the store (samples.chunk(sample=...)) and its dtype (dtype=).",
    "tag": "Choose another store, or type the store's tag= if both train alike.",
    "samples": "Choose another store for other training samples.",
    "targets": "Choose another store for other targets.",
}


def spec(ds: xr.Dataset) -> dict[str, Any]:
    """Return the part of a Dataset's ``attrs`` that determines its features.

    Of the checkpoints, those that the Dataset still has: ``attrs`` do not follow a selection.
    """
    found = {name: ds.attrs[name] for name in STORE_SPEC if name in ds.attrs}
    names = [str(name) for name in ds[CHECKPOINT].values] if CHECKPOINT in ds.coords else []
    for field in ("checkpoints", "checkpoint_ids"):
        if set(names) <= set(found.get(field, ())):
            found[field] = {name: found[field][name] for name in names}
    return found


def digest(values: Mapping[str, Any]) -> str:
    """Hash plain JSON values, independent of the order of keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def require_same(
    found: Mapping[str, Any],
    needed: Mapping[str, Any],
    *,
    what: str,
    names: tuple[str, ...] = FEATURE_SPEC,
) -> None:
    """Check that two specs agree.

    Raises
    ------
    StoreMismatchError
        At the first difference; it names the field and shows both values.
    """
    for name in names:
        if _plain(found.get(name)) == _plain(needed.get(name)):
            continue
        key, left, right = _first_difference(found.get(name), needed.get(name))
        raise StoreMismatchError(
            f"{what} differ in {name}{key}: found {left}, needed {right}. {_REMEDY[name]}"
        )


def _first_difference(found: Any, needed: Any) -> tuple[str, str, str]:
    if isinstance(found, Mapping) and isinstance(needed, Mapping):
        for key in (*needed, *found):
            if _plain(found.get(key)) != _plain(needed.get(key)):
                return f"[{key!r}]", _short(found.get(key)), _short(needed.get(key))
        return "", f"the order {list(found)}", str(list(needed))
    return "", _short(found), _short(needed)


def _plain(value: Any) -> Any:
    """Return what a value becomes in JSON, as a text: a store gives back lists for tuples."""
    return json.dumps(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def require_comparable(features: xr.Dataset, other: xr.Dataset, name: str = "target") -> None:
    """Refuse features that were made differently, or of other checkpoints."""
    what = f"{name} and training features"
    require_same(spec(other), spec(features), what=what)
    ours, theirs = (ds[CHECKPOINT].values.tolist() for ds in (features, other))
    if ours != theirs:
        raise StoreMismatchError(
            f"{what} differ in checkpoint: found {theirs}, needed {ours}. "
            "Select the same checkpoints, in the same order, from both."
        )
    if (p := other.sizes[PROJ_DIM]) != features.sizes[PROJ_DIM]:
        raise StoreMismatchError(
            f"{what} differ in proj_dim: found {p}, needed "
            f"{features.sizes[PROJ_DIM]}. Take the same proj_dim slice of both."
        )
