"""Names of the layers that featurize adds to a graph: made here, and recognised here.

Stores and schedulers see nothing of an array but its name. A name says whether an array is exactly
what featurize made, and which block of it a task has computed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import dask.array as da
import numpy as np

__all__ = [
    "bundle_of",
    "feature_layer",
    "featurize_layer",
    "save_layer",
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


def save_layer(token: str, *, fused: bool) -> str:
    """Name the layer whose tasks store blocks.

    Parameters
    ----------
    token
        32 hexadecimal digits.
    fused
        Whether these tasks are fused with those of featurize. They need the same prefix then: to
        tasks of different prefixes dask adds another for each, which only renames it.
    """
    return f"{'featurize' if fused else 'save-block'}-{token}"


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


def bundle_of(arrays: Mapping[str, da.Array]) -> da.Array | None:
    """Return the results of the tasks of featurize, if these variables are still taken from them.

    Parameters
    ----------
    arrays
        ``feature`` and the other variables of a Dataset, by their names.

    Returns
    -------
    Array (sample, checkpoint) of one tuple per block, with a graph of these tasks alone; None where
    a variable was changed, selected or computed.
    """
    feature = arrays["feature"]
    token = token_of(feature.name)
    if token is None or any(arrays[name].name != f"{name}-{token}" for name in arrays):
        return None
    layer = featurize_layer(token)
    if layer not in feature.dask.layers:
        return None
    rows, _, checkpoints = feature.chunks
    graph, meta = feature.dask.cull_layers([layer]), np.empty((0, 0), object)
    return da.Array(graph, layer, (rows, checkpoints), object, meta)


def take(results: Any, key: Any) -> Any:
    """Return one of the arrays that a task computed together, by position or by name.

    Not ``operator.getitem``, which the optimizer of Dask takes for a slice of an array.
    """
    return results[key]
