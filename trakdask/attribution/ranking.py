"""Questions to lazy scores: the best and worst training samples of each target, by metadata."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any
from uuid import uuid4

import dask
import dask.array as da
import numpy as np
import xarray as xr

from trakdask import arrays
from trakdask.arrays.block_arguments import StoredColumn
from trakdask.arrays.topk import TileMask
from trakdask.variables import (
    MODULE,
    RANK,
    SAMPLE,
    TARGET,
    TOKEN,
    VARIABLES,
    aligned,
    coords_along,
    stays_in_store,
)

__all__ = ["require_scores", "top_k"]

Where = xr.DataArray | np.ndarray | Callable[[xr.Dataset], xr.DataArray]


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
        which a mask over samples selects nothing are never read. A DataArray is aligned with the
        scores by its labels, if both have an index; else its coords must equal theirs. The tile
        that a function gets has ``sample`` and ``target``, positions where there are no labels.
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
        If k is not in 1..n, a mask has another length or dtype, or selects fewer than k samples,
        or cannot be aligned. When computed: if the function raises, or returns no mask of its tile.

    Notes
    -----
    Compute all variables together, as in ``top.compute().to_dataframe()``: xarray would compute
    those of a lazy Dataset one after the other, and each would repeat the query.

    Local ranking is fused with the score tiles and merged by a tree: n × m scores never exist.
    Exact and independent of chunks.

    Examples
    --------
    >>> import trakdask as td
    >>> features = td.testing.simulate_features(n_samples=8, proj_dim=4)
    >>> scores = td.score(features, features.isel(sample=slice(2)))
    >>> top = td.top_k(scores, 3, where=scores.label == 1).compute()
    >>> top.label.values.tolist()
    [[1, 1, 1], [1, 1, 1]]
    """
    require_scores(scores)
    n = scores.sizes[SAMPLE]
    if n == 0:
        raise ValueError("expected scores of 1 sample or more, got 0; try another selection")
    if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or not 1 <= k <= n:
        raise ValueError(
            f"expected k as an integer from 1 to the {n} samples, got {k!r}; try k={min(10, n)}"
        )
    if not isinstance(largest, (bool, np.bool_)):
        raise TypeError(f"expected largest as True or False, got {largest!r}; try largest=True")
    if not isinstance(scores.data, da.Array):
        scores = scores.copy(data=scores.variable.chunk().data)
    mask = _mask(scores, where)
    if isinstance(mask, np.ndarray) and (count := int(mask.sum())) < k:
        smaller = f"k={count}, or a mask that selects more" if count else "a mask that selects some"
        raise ValueError(
            f"expected where to select k={k} samples or more, got {count} of {n}; try {smaller}"
        )
    value, position = arrays.topk.top_k(scores.data, int(k), largest=largest, mask=mask)
    dims = (TARGET, RANK)
    attrs = {**scores.attrs, "order": "descending" if largest else "ascending"}
    may_pad = isinstance(mask, TileMask) or scores.attrs.get("target_on_error") == "record"
    coords = _gathered_coords(scores, position, may_pad=may_pad)
    coords |= {name: (TARGET, c) for name, c in _columns_along(scores, TARGET).items()}
    # A copy, as dask.compute (2026.8) misses an array of a Dataset that only one other is made of.
    return xr.Dataset(
        {
            "score": (dims, value, VARIABLES["score"].attrs),
            "position": (dims, da.map_blocks(np.copy, position), VARIABLES["position"].attrs),
        },
        coords={**coords, RANK: np.arange(k)},
        attrs=attrs,
    )


def require_scores(scores: object) -> None:
    """Reject anything but floating-point scores (sample, target)."""
    if not isinstance(scores, xr.DataArray):
        raise TypeError(
            f"expected scores as a DataArray (sample, target), got a {type(scores).__name__}; try "
            "what td.score returns"
        )
    if scores.dims != (SAMPLE, TARGET):
        raise ValueError(
            f"expected scores with the dimensions (sample, target), got {scores.dims}; try "
            f"{_remedy(scores)}"
        )
    if scores.dtype.kind != "f":
        raise TypeError(
            f"expected scores in floating point, got {scores.dtype}; try scores.astype('float32')"
        )


def _remedy(scores: xr.DataArray) -> str:
    if "checkpoint" in scores.dims:
        return "scores.mean('checkpoint')"
    if {TOKEN, MODULE} & set(scores.dims):
        dim = TOKEN if TOKEN in scores.dims else MODULE
        return f"scores.sum({dim!r}), or scores.isel(target=0).rename({dim}='target')"
    if set(scores.dims) == {SAMPLE, TARGET}:
        return "scores.transpose('sample', 'target')"
    if scores.dims == (SAMPLE,):
        return "scores.isel(target=[0]), with a list, which keeps the dimension"
    if scores.dims == (TARGET,):
        return "scores.isel(sample=[0]), with a list, which keeps the dimension"
    return "what td.score returns"


def _columns_along(scores: xr.DataArray, dim: str) -> dict[Hashable, np.ndarray | da.Array]:
    """Return the values of coords: in memory, or as lazy arrays if they stay in a store."""
    sizes = scores.variable.chunksizes[SAMPLE]
    return {
        name: coord.data if stays_in_store(coord, sizes) else coord.values
        for name, coord in coords_along(scores, dim).items()
    }


def _mask(scores: xr.DataArray, where: Where | None) -> np.ndarray | TileMask | None:
    """Return None, a mask over samples, or one of tiles."""
    if where is None:
        return None
    if callable(where) and not isinstance(where, (xr.DataArray, np.ndarray)):
        of_samples, of_targets = (_columns_along(scores, dim) for dim in (SAMPLE, TARGET))
        function = functools.partial(_mask_of_coords, where, list(of_samples), list(of_targets))
        pairs = [(values, "s") for values in of_samples.values()]
        return TileMask(function, (*pairs, *((values, "t") for values in of_targets.values())))
    if isinstance(where, np.ma.MaskedArray):
        raise TypeError(
            f"expected where without hidden entries, got a MaskedArray that hides "
            f"{int(np.ma.getmaskarray(where).sum())} of {where.size}; try where.filled(False)"
        )
    if not isinstance(where, xr.DataArray):
        values = np.asarray(where)
        _require_mask(scores, values.dtype, _sizes(values.shape))
        where = xr.DataArray(values, dims=(SAMPLE, TARGET)[: values.ndim])
    else:
        if set(where.dims) <= {SAMPLE, TARGET}:
            where = aligned(where, scores, what="where")
        _require_mask(scores, where.dtype, dict(where.sizes))
    if where.dims == (SAMPLE,):
        return where.values
    if where.dims == (TARGET, SAMPLE):
        where = where.transpose(SAMPLE, TARGET)
    return TileMask(_broadcast, ((where.values, "t" if where.dims == (TARGET,) else "st"),))


def _sizes(shape: tuple[int, ...]) -> dict[Hashable, int]:
    names = (SAMPLE, TARGET, *(f"axis {i}" for i in range(2, len(shape))))
    return dict(zip(names, shape, strict=False))


def _require_mask(scores: xr.DataArray, dtype: np.dtype[Any], sizes: dict[Hashable, int]) -> None:
    needed = {dim: scores.sizes[dim] for dim in (SAMPLE, TARGET)}
    right_size = all(needed.get(str(dim)) == size for dim, size in sizes.items())
    if dtype.kind != "b" or not sizes or not right_size:
        raise ValueError(
            f"expected where as bool over the samples, {{'sample': {needed[SAMPLE]}}}, or over "
            f"both, {needed}, got {dtype} over {sizes}; try where=(scores.label == 3), or "
            "where=lambda tile: tile.label == tile.target_label"
        )


def _mask_of_coords(
    where: Callable[[xr.Dataset], xr.DataArray],
    names: Sequence[Hashable],
    target_names: Sequence[Hashable],
    samples: range,
    targets: range,
    *coords: np.ndarray,
) -> np.ndarray:
    dims = [SAMPLE] * len(names) + [TARGET] * len(target_names)
    pairs = zip(dims, coords, strict=True)
    named: dict[Hashable, Any] = dict(zip((*names, *target_names), pairs, strict=True))
    for dim, positions in {SAMPLE: samples, TARGET: targets}.items():
        named.setdefault(dim, (dim, np.array(positions)))  # where there are no labels
    tile = xr.Dataset(coords=named)
    at = f"at samples {samples.start}:{samples.stop} and targets {targets.start}:{targets.stop}"
    try:
        result = where(tile)
    except Exception as err:
        raise ValueError(
            f"expected the function where= to return a mask of the coords "
            f"{list(map(str, tile.coords))}, got {err!r} {at}; try a comparison of these coords, "
            "of which those of targets begin with 'target_'"
        ) from err
    is_mask = isinstance(result, xr.DataArray) and result.dtype == bool
    if not is_mask or not set(result.dims) <= {SAMPLE, TARGET}:
        actual = type(result).__name__
        if isinstance(result, xr.DataArray):
            actual = f"{result.dtype} over {result.dims}"
        raise ValueError(
            "expected the function where= to return a boolean DataArray over sample and target, "
            f"got {actual} {at}; try lambda tile: tile.label == tile.target_label"
        )
    if wrong := {str(d): n for d, n in result.sizes.items() if n != tile.sizes[d]}:
        raise ValueError(
            f"expected the function where= to return a mask of the tile's {dict(tile.sizes)}, got "
            f"{wrong} {at}; try comparing coords of the tile, not of all scores"
        )
    mask = result.variable.transpose(SAMPLE, TARGET, missing_dims="ignore")
    return _broadcast(samples, targets, mask.values, mask.dims)


def _broadcast(
    samples: range, targets: range, mask: np.ndarray, dims: tuple[Hashable, ...] = (TARGET,)
) -> np.ndarray:
    """Return a mask over targets, or over ``dims``, as (sample, target)."""
    if dims == (SAMPLE,):
        mask = mask[:, None]
    return np.broadcast_to(mask, (len(samples), len(targets)))


def _gathered_coords(
    scores: xr.DataArray, position: da.Array, *, may_pad: bool
) -> dict[Hashable, Any]:
    """Return the metadata of the ranked samples, looked up once their positions are known."""
    coords: dict[Hashable, Any] = {}
    for name, values in _columns_along(scores, SAMPLE).items():
        dtype = values.dtype
        if may_pad and dtype.kind in "iub":
            dtype = np.dtype(np.float64)
        data = da.map_blocks(
            functools.partial(_gather, dtype=dtype), position, column=_column(values),
            dtype=dtype, meta=np.empty((0, 0), dtype),
            name=f"{name}-{uuid4().hex}",
        )  # fmt: skip
        coords[name] = ((TARGET, RANK), data)
    return coords


def _column(values: np.ndarray | da.Array) -> Any:
    """Return all values as one task, of which others take the rows that they need."""
    column = StoredColumn(values) if isinstance(values, da.Array) else values
    return dask.delayed(column, name=f"column-{uuid4().hex}", traverse=False)


def _gather(
    position: np.ndarray, column: np.ndarray | StoredColumn, dtype: np.dtype[Any]
) -> np.ndarray:
    missing = position < 0
    # Never row -1: that is the last sample.
    gathered = column[np.where(missing, 0, position)].astype(dtype)
    if missing.any():
        gathered[missing] = _missing_value(dtype)
    return gathered


def _missing_value(dtype: np.dtype[Any]) -> Any:
    if dtype.kind in "iub":
        raise ValueError(
            "expected k samples with a score that is not NaN for every target, since integer "
            "coords cannot be missing, got fewer; try a smaller k, or leaving such targets out "
            "with scores.isel(target=...)"
        )
    return {"f": np.nan, "M": np.datetime64("NaT"), "m": np.timedelta64("NaT")}.get(dtype.kind, "")
