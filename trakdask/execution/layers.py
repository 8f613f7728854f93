"""Names of the layers that featurize adds to a graph: made here, and recognised here.

Stores and schedulers see nothing of an array but its name. A name says whether an array is exactly
what featurize made, and which block of it a task has computed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import dask.array as da
import numpy as np

__all__ = [
    "bundle_of",
    "feature_layer",
    "featurize_layer",
    "has_featurize_layer",
    "take",
    "token_of",
]

_TOKEN = r"[0-9a-f]{32}"


def featurize_layer(token: str) -> str:
    """Name the layer whose tasks compute all variables of a block."""
    return f"featurize-{token}"


def feature_layer(token: str) -> str:
    """Name the array ``feature`` that is taken from these tasks.

    Parameters
    ----------
    token
        32 hexadecimal digits, a hash of everything that determines the features.
    """
    return f"feature-{token}"


def token_of(name: str) -> str | None:
    """Return the token in the name of a ``feature`` that nothing has changed, else None.

    Examples
    --------
    >>> token_of(feature_layer("0" * 32)) == "0" * 32
    True
    >>> token_of("getitem-0123") is None
    True
    """
    match = re.fullmatch(f"feature-({_TOKEN})", name)
    return match[1] if match else None


def has_featurize_layer(names: Iterable[str]) -> bool:
    """Tell whether a graph with layers of these names still computes gradients."""
    return any(name.startswith("featurize-") for name in names)


def bundle_of(feature: da.Array) -> da.Array | None:
    """Return the results of the tasks of featurize, if a ``feature`` is still taken from them.

    Returns
    -------
    Array (sample, checkpoint) of one tuple per block; None where tasks no longer compute gradients.
    """
    token = token_of(feature.name)
    if token is None or featurize_layer(token) not in feature.dask.layers:
        return None
    rows, _, checkpoints = feature.chunks
    meta = np.empty((0, 0), object)
    return da.Array(feature.dask, featurize_layer(token), (rows, checkpoints), object, meta)


def take(results: Any, key: Any) -> Any:
    """Return one of the arrays that a task computed together, by position or by name.

    Not ``operator.getitem``, which the optimizer of Dask takes for a slice of an array.
    """
    return results[key]
