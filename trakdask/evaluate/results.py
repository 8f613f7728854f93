"""The common part of evaluations: scores of several estimators, lazy results, checks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import dask
import dask.array as da
import numpy as np
import xarray as xr

from trakdask.arrays.graphs import plain
from trakdask.checks import require_integer, require_number, shown
from trakdask.variables import SAMPLE, TARGET, coords_along, require_alike


def lazy_results(
    function: Callable[..., Mapping[str, np.ndarray]],
    *inputs: Any,
    of: xr.DataArray,
    variables: Mapping[str, tuple[tuple[Hashable, ...], str]],
    labels: Mapping[str, Any] | None = None,
    sizes: Mapping[Hashable, int] | None = None,
) -> xr.Dataset:
    """Return a lazy Dataset of the arrays that one task computes from all inputs at once.

    Parameters
    ----------
    function
        Returns the arrays by name.
    *inputs
        Its arguments; some are lazy.
    of
        The evaluated array, (sample, ...): results have its coords along other dimensions.
    variables
        Dimensions and description of each array.
    labels, sizes
        Labels of further dimensions, and the sizes of dimensions without labels.
    """
    # All variables are parts of what one task returns.
    results = dask.delayed(function, pure=True)(*inputs)
    labels = {"bound": np.array(["low", "high"]), **(labels or {})}
    sizes = {**of.sizes, **{dim: len(values) for dim, values in labels.items()}, **(sizes or {})}
    arrays = {}
    for name, (dims, description) in variables.items():
        shape = tuple(sizes[dim] for dim in dims)
        data = da.from_delayed(results[name], shape, dtype=np.dtype(np.float64))
        arrays[name] = (dims, data, {"description": description})
    return xr.Dataset(arrays, coords={**coords_along(of, *of.dims[1:]), **labels})


def as_array(scores: xr.DataArray | Mapping[str, xr.DataArray], *dims: Hashable) -> xr.DataArray:
    """Return scores with these dimensions first; a mapping gets the dimension ``estimator``.

    All entries of a mapping have the coords of the first one: others may be bare numbers.
    """
    if isinstance(scores, Mapping):
        if not scores:
            raise ValueError(
                "expected at least one array of scores, got none; try {'soft': scores}"
            )
        first = next(iter(scores.values()))
        for name, one in scores.items():
            require_alike(one, first, what=f"scores of {name!r}")
        together = xr.concat(
            [one.reset_coords(drop=True) for one in scores.values()],
            xr.Variable("estimator", list(scores)),
            coords="minimal", compat="override", join="exact", combine_attrs="drop",
        )  # fmt: skip
        scores = together.assign_coords(coords_along(first, *first.dims))
    if not isinstance(scores, xr.DataArray):
        raise TypeError(f"expected a DataArray {dims}, got {shown(scores)}; try xr.DataArray(...)")
    if scores.sizes.get(TARGET) == 0:
        raise ValueError(f"expected an array {dims} of some targets, got none; try other targets")
    scores = scores.transpose(*dims, ...)
    return require_real(scores) if TARGET in dims else scores


def require_real(values: xr.DataArray) -> xr.DataArray:
    """Return an array of real numbers: ranks would leave out the imaginary parts of others."""
    if values.dtype.kind not in "biuf":
        raise TypeError(
            f"expected real numbers {values.dims}, got the dtype {values.dtype}; try .real, or "
            ".astype(float)"
        )
    return values


def lazy_data(array: xr.DataArray) -> da.Array:
    """Return the array of a DataArray, made lazy if it is in memory."""
    return plain(array.variable.chunk().data if array.chunks is None else array.data)


def checked_masks(masks: xr.DataArray) -> xr.DataArray:
    """Return masks (subset, sample).

    Raises
    ------
    ValueError
        If they are not bool: positions, or 0 and 1, would select other samples.
    """
    if not isinstance(masks, xr.DataArray):
        raise TypeError(
            f"expected masks as a DataArray (subset, sample), got {type(masks).__name__}; try "
            "xr.DataArray(masks, dims=('subset', 'sample'))"
        )
    if masks.dtype != bool:
        raise ValueError(f"expected masks of dtype bool, got {masks.dtype}; try masks.astype(bool)")
    return masks.transpose("subset", SAMPLE)


def require_known(values: np.ndarray) -> None:
    """Reject statistics (..., target) that are all NaN."""
    if np.isnan(values).all():
        raise ValueError(
            "expected scores, and outputs, that differ and are not NaN, for at least one "
            f"of {values.shape[-1]} targets, got none; try features without failed samples, whose "
            "scores are NaN"
        )


def require_fraction(name: str, value: object) -> float:
    """Return a number strictly between 0 and 1."""
    return require_number(name, value, high=1, remedy="try 0.95 for 95 %")


def require_fractions(values: Sequence[float]) -> list[float]:
    """Return numbers strictly between 0 and 1."""
    if np.ndim(values) != 1:
        raise ValueError(f"expected a list of fractions, got {shown(values)}; try [0.1, 0.2]")
    return [require_fraction("every fraction", value) for value in values]


def require_bootstrap(resamples: object, seed: object, confidence: object) -> dict[str, Any]:
    """Return the options of a bootstrap by name, checked."""
    return {
        "resamples": require_integer("resamples", resamples, 1, remedy="try resamples=1000"),
        "seed": require_integer("seed", seed, 0, remedy="try seed=0"),
        "confidence": require_fraction("confidence", confidence),
    }
