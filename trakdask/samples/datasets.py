"""Datasets of samples: put together, validated, drawn from, and identified by their content."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import xarray as xr

from trakdask.samples.coords import check_names, normalise_coords
from trakdask.samples.fingerprints import fingerprint
from trakdask.samples.sources import identity_of, require_samples
from trakdask.variables import SAMPLE, require_alike, require_new

_SOURCE = re.compile(r"samples-[0-9a-f]{64}")


def assemble(variables: Mapping[str, xr.Variable], coords: Any, chunks: object) -> xr.Dataset:
    """Create a Dataset from lazy variables with equal chunks along samples, and from coords."""
    return dataset_of(variables, coords, {"chunks": chunks} if chunks == "auto" else {})


def dataset_of(
    variables: Mapping[str, xr.Variable], coords: Any, attrs: Mapping[str, Any]
) -> xr.Dataset:
    """Create a Dataset from lazy variables (sample, ...) and from coords, after checks of both."""
    if not variables:
        raise ValueError(
            "expected at least one model input, got none; try td.from_arrays({'image': images}), "
            "or samples.reset_coords('name')"
        )
    check_names(variables)
    first = xr.DataArray(next(iter(variables.values())))
    for name, variable in variables.items():
        require_alike(xr.DataArray(variable), first, what=f"variable {name!r}")
    require_samples(len(first), f"the variables {list(variables)}")
    values = normalise_coords(coords, len(first))
    samples = {name: (SAMPLE, array) for name, array in values.items()}
    require_new(samples, variables)
    ds = xr.Dataset(variables, samples, attrs)
    return ds.assign_attrs(source=source_of(ds))


def drawn(ds: xr.Dataset, n: int, block: int) -> xr.Dataset:
    """Return n samples that are drawn at random, always the same ones, in their order.

    Parameters
    ----------
    ds
        As :func:`validate_samples` returns it.
    n
        How many; all of them if there are no more.
    block
        How many drawn samples are in a block.
    """
    if ds.sizes[SAMPLE] <= n:
        return ds
    some = ds.isel({SAMPLE: drawn_places(ds.sizes[SAMPLE], n)})
    # Variables, one at a time: Dataset.chunk would make coords lazy.
    return some.assign({name: some.variables[name].chunk({SAMPLE: block}) for name in some})


def drawn_places(total: int, n: int) -> np.ndarray:
    """Return the places of n samples that are drawn at random, in their order; or of all."""
    return np.sort(np.random.default_rng(0).permutation(total)[:n])


def source_of(ds: xr.Dataset, inputs: Collection[str] | None = None) -> str:
    """Identify the values that a model can read, independently of chunks.

    Parameters
    ----------
    ds
        Dataset with lazy variables and in-memory coords.
    inputs
        Names of the coords that the model reads; other coords do not affect the result. By default,
        as long as no model is known, all numeric coords are included.

    Returns
    -------
    ``ds.attrs["source"]`` if the user set it, else a hash of the variables, identified by dask's
    names, and of those coords. Strings and times are not included, since models cannot read them,
    so such metadata may be added later.
    """
    source = ds.attrs.get("source")
    # What this function has returned is not the user's, and attrs survive isel: it is made again.
    if source is not None and not _SOURCE.fullmatch(str(source)):
        return str(source)
    coords = sorted(
        (str(name), fingerprint(coord.values))
        for name, coord in ds.coords.variables.items()
        if coord.dtype.kind in "biuf" and (inputs is None or name in inputs)
    )
    names = sorted(
        (str(name), str(array.dtype), array.shape, identity_of(array))
        for name, array in ds.variables.items()
        if name in ds.data_vars
    )
    return f"samples-{fingerprint(repr((names, coords)))}"
