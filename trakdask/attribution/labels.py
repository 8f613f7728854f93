"""The labels of scores: dimensions and coords of samples, groups and targets, and attrs."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr
from scipy import sparse

from trakdask._version import __version__
from trakdask.attribution.groups import group_codes, require_group_coord
from trakdask.provenance import FEATURE_SPEC, as_text
from trakdask.variables import (
    CHECKPOINT,
    MODULE,
    SAMPLE,
    TARGET,
    TARGET_PREFIX,
    TOKEN,
    VARIABLES,
    aligned,
    coords_along,
    require_new,
)

_MOST_COMBINATIONS = 2**20
"""Combinations of values of several coords. Each is a row of the sums; few may have samples."""


Labels = tuple[tuple[str, ...], dict[Hashable, Any]]
"""Dimensions, and coords along them."""

By = str | Sequence[str] | xr.DataArray
"""One coord of samples, several, or the part of each sample that belongs to each group."""


def labelled(
    name: str, labels: Labels, data: Any, attrs: Any, checkpoint: xr.DataArray | None = None
) -> xr.DataArray:
    """Return a DataArray without copying its coords, as the constructor of DataArray does.

    ``checkpoint`` is the coord of the last axis, if checkpoints are not averaged.
    """
    dims, coords = labels
    if checkpoint is not None:
        dims, coords = (*dims, CHECKPOINT), coords | {CHECKPOINT: checkpoint}
    require_new(coords, [name])
    return xr.Dataset({name: (dims, data, attrs)}, coords=coords)[name]


def labels_of_scores(samples: xr.Dataset, targets: xr.Dataset) -> Labels:
    """Return the dimensions and coords of scores; one side may be divided into tokens or modules.

    Raises
    ------
    ValueError
        If coords of training samples have the names of the targets' coords.
    """
    parts, coords = _labels_of_samples(samples)
    target_dims, target_coords = _labels_of_targets(targets)
    require_new(coords, target_coords)
    return (SAMPLE, *parts, *target_dims), coords | target_coords


def labels_of_groups(
    samples: xr.Dataset, targets: xr.Dataset, by: By
) -> tuple[Labels, np.ndarray | sparse.csr_array, list[int]]:
    """Return the dimensions and coords of sums of scores by groups, and the samples' groups.

    Groups are numbered as the entries of an array whose shape comes last, with -1 for none. If
    ``by`` is a DataArray, they are the parts of samples in groups, (sample, group), sparse.

    Raises
    ------
    ValueError
        If the samples have no such coord, the targets have one of that name, or combinations are
        too many; if an array has other dimensions, or is not finite.
    """
    dims, coords = _labels_of_targets(targets)
    # 1. Parts of samples in groups.
    if isinstance(by, xr.DataArray):
        if by.ndim == 1:
            raise ValueError(
                f"expected by as parts of samples in groups, (sample, group), got labels {by.dims};"
                " try features.assign_coords(group=('sample', labels)), and by='group'"
            )
        is_parts = by.ndim == 2 and SAMPLE in by.dims and by.dtype.kind in "biuf"
        if not is_parts or not np.isfinite(by.values).all():
            raise ValueError(
                f"expected by as finite parts of samples in groups, (sample, group), got {by.dtype}"
                f" {by.dims}; try xr.DataArray(parts, {{'author': names}}, ('sample', 'author'))"
            )
        by = by.transpose(SAMPLE, ...)
        name = str(by.dims[1])
        # Without the names of the groups, since samples have no labels along this dimension to
        # align them with.
        parts = aligned(by.drop_vars(name, errors="ignore"), samples, what="by")
        require_new([name], [TARGET, *coords])
        # Without names, groups are numbered.
        coords[name] = by[name].variable
        return ((name, *dims), coords), sparse.csr_array(parts.values), [by.sizes[name]]
    # 2. Groups by the values of one or several coords.
    names = names_of_groups(coords_along(samples, SAMPLE), by, [TARGET, *coords])
    codes, sizes = np.zeros((), np.int8), []
    for name in names:
        numbers, groups = group_codes(samples[name].values)
        coords[name] = name, groups
        sizes.append(len(groups))
        if len(sizes) > 1 and math.prod(sizes) > max(_MOST_COMBINATIONS, samples.sizes[SAMPLE]):
            raise ValueError(
                f"expected up to {_MOST_COMBINATIONS:,} combinations of the values of by, or one "
                f"for each sample, got {math.prod(sizes):,} of {names[: len(sizes)]}; try fewer "
                "coords, or one whose values are the combinations that occur: "
                "assign_coords(group=('sample', values)), and by='group'"
            )
        kind = np.min_scalar_type(-math.prod(sizes) - 1)  # a byte or two for each of 10⁸ samples
        # The number of a combination has the numbers of its values as digits, those of the last
        # coord lowest. A sample that lacks one of the values is in no group.
        product = codes.astype(kind) * kind.type(len(groups)) + numbers.astype(kind)
        codes = np.where((codes < 0) | (numbers < 0), kind.type(-1), product)
    return ((*names, *dims), coords), codes, sizes


def names_of_groups(
    of_samples: Iterable[Hashable], by: str | Sequence[str], of_targets: Iterable[Hashable] = ()
) -> list[str]:
    """Return the names of the coords that samples are grouped by, of the names of all their coords.

    Raises
    ------
    ValueError
        As :func:`labels_of_groups`.
    """
    names: list[Any] = list(by) if isinstance(by, list | tuple) and by else [by]
    taken = list(of_targets)
    for name in names:
        require_group_coord(name, of_samples, taken)
        taken.append(name)
    return names


def labels_without_targets(labels: Labels, n_axes: int) -> Labels:
    """Return the labels of groups, which are the first axes, alone."""
    names = labels[0][:n_axes]
    return names, {name: labels[1][name] for name in names}


def with_rest(
    members: np.ndarray | sparse.csr_array, n_groups: int
) -> np.ndarray | sparse.csr_array:
    """Return members with one group more, of what no group has, so that groups are all samples."""
    if isinstance(members, sparse.csr_array):
        # What the parts of a sample lack to 1. It is negative where they are more than the sample.
        return sparse.hstack([members, 1 - members.sum(axis=1)[:, None]], format="csr")
    return np.where(members < 0, n_groups, members)


def _labels_of_samples(ds: xr.Dataset) -> Labels:
    """Return the dimension of tokens or modules, if there is one, and all coords of samples."""
    parts = tuple(dim for dim in (TOKEN, MODULE) if dim in ds.variables["feature"].dims)
    coords = ds.coords.variables.items()
    dims = {SAMPLE, *parts}
    return parts, {name: coord for name, coord in coords if coord.dims and set(coord.dims) <= dims}


def _labels_of_targets(targets: xr.Dataset) -> Labels:
    """Return the dimensions and coords of targets, with their prefix."""
    parts, coords = _labels_of_samples(targets)
    labels: dict[Hashable, Any] = {}
    for name, coord in coords.items():
        dims = [TARGET if dim == SAMPLE else dim for dim in coord.dims]
        data = coord.values if coord.dims == (SAMPLE,) else coord.data
        labels[name if name in parts else f"{TARGET_PREFIX}{name}"] = dims, data, coord.attrs
    return (TARGET, *parts), labels


def score_attrs(
    training: xr.Dataset, targets: xr.Dataset, how: Mapping[str, str]
) -> dict[str, Any]:
    """Return the attrs of scores: how features were made, and how scores were made from them."""
    attrs = training.attrs
    # The names and shapes of all parameters can be long, and scores are as they are without them.
    kept = {name: attrs[name] for name in FEATURE_SPEC if name in attrs and name != "parameters"}
    return as_text(kept) | {
        **VARIABLES["score"].attrs,
        **how,
        "source": attrs.get("source", ""),
        "target_source": targets.attrs.get("source", ""),
        "trakdask_version": __version__,
    }
