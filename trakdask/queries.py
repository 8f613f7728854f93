"""Questions to lazy scores: the best and worst training samples of each target, by metadata."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import dask.array as da
import numpy as np
import xarray as xr
from dask.base import tokenize

from trakdask import arrays
from trakdask.variables import RANK, SAMPLE, TARGET, VARIABLES

__all__ = ["top_k"]

Where = xr.DataArray | np.ndarray | Callable[[xr.Dataset], xr.DataArray]
TileMask = Callable[[int, int, int, int], np.ndarray]


def top_k(
    scores: xr.DataArray, k: int, *, where: Where | None = None, largest: bool = True
) -> xr.Dataset:
    """Rank the training samples of each target and keep the first k, with their metadata.

    Parameters
    ----------
    scores
        Scores (sample, target) of :func:`score`.
    k
        How many samples per target.
    where
        Which samples count: a boolean mask (sample), such as ``scores.source == "web"``; a mask
        over (sample, target), in memory; or a function from the coords of a tile to a mask,
        evaluated tile by tile, such as ``lambda tile: tile.label == tile.target_label``. Blocks in
        which a mask over samples selects nothing are never read.
    largest
        ``True``: the most helpful first; ``False``: the most harmful first.

    Returns
    -------
    Lazy Dataset (target, rank) with ``score`` float32, ``position`` int64 of the training sample,
    and the samples' coords at those positions. Equal scores rank by position; NaN never ranks.
    Where ``where`` depends on the target and leaves fewer than k samples, or where a target failed
    (``featurize(..., on_error="record")``), the rest is position -1 and NaN (integer coords then
    become float64, strings "").

    Raises
    ------
    ValueError
        If k is not in 1..n, a mask has another length or dtype, or selects fewer than k samples.

    Notes
    -----
    Local ranking is fused with the score tiles and merged by a tree: n × m scores never exist.
    Exact and independent of chunks.

    Examples
    --------
    >>> import trakdask as td
    >>> features = td.testing.simulate_features(n_samples=8, proj_dim=4)
    >>> scores = td.score(features, features.isel(sample=slice(2)))
    >>> top = td.top_k(scores, 3, where=scores.label == 1)
    >>> top.label.values.tolist()
    [[1, 1, 1], [1, 1, 1]]
    """
    _require_scores(scores)
    n = scores.sizes[SAMPLE]
    if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or not 1 <= k <= n:
        raise ValueError(f"k is {k!r}; needed an integer from 1 to the {n} samples.")
    if not isinstance(scores.data, da.Array):
        scores = scores.copy(data=scores.variable.chunk().data)
    mask = _mask(scores, where)
    if isinstance(mask, np.ndarray) and (count := int(mask.sum())) < k:
        raise ValueError(
            f"where selects {count} of {n} samples; needed at least k={k}. "
            f"Type k={max(count, 1)} or widen the mask."
        )
    value, position = arrays.topk.top_k(scores.data, int(k), largest=largest, mask=mask)
    dims = (TARGET, RANK)
    attrs = {**scores.attrs, "order": "descending" if largest else "ascending"}
    may_pad = callable(mask) or scores.attrs.get("target_on_error") == "record"
    coords = _gathered_coords(scores, position, may_pad=may_pad)
    coords |= {name: c for name, c in _coords_along(scores, TARGET).items()}
    return xr.Dataset(
        {
            "score": (dims, value, VARIABLES["score"].attrs),
            "position": (dims, position, VARIABLES["position"].attrs),
        },
        coords={**coords, RANK: np.arange(k)},
        attrs=attrs,
    )


def _require_scores(scores: object) -> None:
    if not isinstance(scores, xr.DataArray) or scores.dims != (SAMPLE, TARGET):
        found = scores.dims if isinstance(scores, xr.DataArray) else type(scores).__name__
        raise ValueError(
            f"scores are {found}; needed a DataArray (sample, target) of td.score. "
            "Average an ensemble with scores.mean('checkpoint')."
        )


def _coords_along(scores: xr.DataArray, dim: str) -> dict[Hashable, Any]:
    return {name: (dim, c.values) for name, c in scores.coords.items() if c.dims == (dim,)}


def _mask(scores: xr.DataArray, where: Where | None) -> np.ndarray | TileMask | None:
    """Return what the array room takes: no mask, one over samples, or a function of tile bounds."""
    if where is None:
        return None
    if callable(where) and not isinstance(where, (xr.DataArray, np.ndarray)):
        coords = {**_coords_along(scores, SAMPLE), **_coords_along(scores, TARGET)}
        return functools.partial(_mask_of_coords, where, xr.Dataset(coords=coords))
    if not isinstance(where, xr.DataArray):
        where = xr.DataArray(np.asarray(where), dims=(SAMPLE, TARGET)[: np.ndim(where)])
    _require_mask(scores, where)
    if where.dims == (SAMPLE,):
        return where.values
    return functools.partial(_mask_of_array, where.reset_coords(drop=True).load())


def _require_mask(scores: xr.DataArray, where: xr.DataArray) -> None:
    needed = {dim: scores.sizes[dim] for dim in (SAMPLE, TARGET)}
    right_size = all(needed.get(str(dim)) == size for dim, size in where.sizes.items())
    if where.dtype != bool or not where.dims or not right_size:
        raise ValueError(
            f"where is a mask {dict(where.sizes)} of dtype {where.dtype}; needed bool over the "
            f"samples, {{'sample': {needed[SAMPLE]}}}, or over both, {needed}. Type "
            "where=(scores.label == 3), or where=lambda tile: tile.label == tile.target_label."
        )


def _mask_of_coords(
    where: Callable[[xr.Dataset], xr.DataArray],
    coords: xr.Dataset,
    start: int,
    stop: int,
    target_start: int,
    target_stop: int,
) -> np.ndarray:
    tile = coords.isel(sample=slice(start, stop), target=slice(target_start, target_stop))
    try:
        result = where(tile)
    except (AttributeError, KeyError) as err:
        raise ValueError(
            f"the function where= failed with {err!r}; needed coords that the scores have: "
            f"{list(map(str, coords.coords))}. Those of targets begin with 'target_'."
        ) from err
    if not isinstance(result, xr.DataArray) or result.dtype != bool:
        found = result.dtype if isinstance(result, xr.DataArray) else type(result).__name__
        raise ValueError(
            f"the function where= returned {found}; needed a boolean DataArray over sample and "
            "target. Compare coords, as in lambda tile: tile.label == tile.target_label."
        )
    return _broadcast(result, stop - start, target_stop - target_start)


def _mask_of_array(
    mask: xr.DataArray, start: int, stop: int, target_start: int, target_stop: int
) -> np.ndarray:
    bounds = {SAMPLE: slice(start, stop), TARGET: slice(target_start, target_stop)}
    tile = mask.isel({dim: bounds[str(dim)] for dim in mask.dims})
    return _broadcast(tile, stop - start, target_stop - target_start)


def _broadcast(mask: xr.DataArray, n_samples: int, n_targets: int) -> np.ndarray:
    full = xr.DataArray(np.ones((n_samples, n_targets), bool), dims=(SAMPLE, TARGET))
    result: np.ndarray = (full & mask.reset_coords(drop=True)).transpose(SAMPLE, TARGET).values
    return result


def _gathered_coords(
    scores: xr.DataArray, position: da.Array, *, may_pad: bool
) -> dict[Hashable, Any]:
    """Metadata of the ranked samples, looked up lazily in the coords in memory."""
    coords: dict[Hashable, Any] = {}
    for name, (_, values) in _coords_along(scores, SAMPLE).items():
        if may_pad and values.dtype.kind in "iub":
            values = values.astype(np.float64)
        data = da.map_blocks(
            functools.partial(_gather, values), position,
            dtype=values.dtype, meta=np.empty((0, 0), values.dtype),
            name=f"{name}-{tokenize(position.name, values)}",
        )  # fmt: skip
        coords[name] = ((TARGET, RANK), data)
    return coords


def _gather(values: np.ndarray, position: np.ndarray) -> np.ndarray:
    missing = position < 0
    found = values[np.where(missing, 0, position)]  # never values[-1]: that is the last sample
    if missing.any():
        found[missing] = _missing_value(values.dtype)
    return found


def _missing_value(dtype: np.dtype[Any]) -> Any:
    if dtype.kind in "iub":
        raise ValueError(
            "fewer than k samples have a score that is not NaN, and integer metadata cannot be "
            "missing; needed a smaller k, or targets that did not fail. Type td.top_k(scores, "
            "k=...), or leave such targets out with scores.isel(target=...)."
        )
    return {"f": np.nan, "M": np.datetime64("NaT"), "m": np.timedelta64("NaT")}.get(dtype.kind, "")
