"""Define the names, dimensions and descriptions of all arrays that trakdask creates."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import dask.array as da
import numpy as np
import pandas as pd
import xarray as xr

from trakdask.arrays.gram import mirrored
from trakdask.arrays.graphs import plain, reader
from trakdask.checks import shown

SAMPLE = "sample"
TARGET = "target"
CHECKPOINT = "checkpoint"
PROJ_DIM = "proj_dim"
PROJ_DIM_1 = "proj_dim_1"
COLUMN = "proj_column"
"""The coord that numbers the columns of features, so that two sides can be compared."""
COMPONENT = "component"
SKETCH_DIM = "sketch_dim"
RANK = "rank"
TOKEN = "token"
MODULE = "module"

NORM, OUTPUT = "feature_norm", "output"
GRAM, LOSS_GRADIENT, DAMPING = "gram", "loss_gradient", "damping"
EIGENVALUES, EIGENVECTORS = "gram_eigenvalues", "gram_eigenvectors"
WRONG_CLASSES = "wrong_classes"
TRAINED_ON = "trained_on"
TRIANGLE = "triangle"
"""In the attrs of a symmetric matrix in a store, which has zeros below the diagonal."""

DERIVED = (GRAM, LOSS_GRADIENT, EIGENVALUES, EIGENVECTORS, DAMPING)
"""All that :func:`trakdask.save` computes from features and stores beside them."""

N_SAMPLES = "n_samples"
"""In the attrs of derived arrays: of how many samples they are."""

# Features in memory are divided, so that all threads work on them. At 1024 columns this is 16 MiB.
_ROWS_OF_UNCHUNKED = 4096
TARGET_PREFIX = "target_"
"""Prefix of the targets' coords in scores; xarray would drop a name that both sides share."""


@dataclass(frozen=True)
class Variable:
    """Describe one array: its name, its dimensions and a sentence for its attrs."""

    name: str
    dims: tuple[str, ...]
    description: str
    kind: str = "f"
    """The kind of its dtype: floating point, or ``"b"`` for bool."""

    @property
    def attrs(self) -> dict[str, str]:
        """Return the ``attrs`` of a DataArray that holds this variable."""
        return {"description": self.description}

    def holding(self, data: Any) -> tuple[tuple[str, ...], Any, dict[str, str]]:
        """Return the variable with some data, as the constructor of a Dataset takes it."""
        return self.dims, data, self.attrs


_EACH = (SAMPLE, CHECKPOINT)
_ALL = (
    Variable("feature", (SAMPLE, PROJ_DIM, CHECKPOINT), "projected gradient of the model output f"),
    Variable("feature_norm", _EACH, "squared norm of feature"),
    Variable("output", _EACH, "model output f, the scalar that is attributed"),
    Variable("out_to_loss", _EACH, "Q = -dloss/df; 1 - p for classification"),
    Variable(TRAINED_ON, _EACH, "whether the checkpoint was trained on the sample", kind="b"),
    Variable("error", _EACH, "why a sample failed and is NaN; '' where it did not"),
    Variable("scale", _EACH, "power of two: feature is this times the stored one"),
    Variable("gram", (PROJ_DIM, PROJ_DIM_1, CHECKPOINT), "sum over samples of h φ φᵀ"),
    Variable("loss_gradient", (PROJ_DIM, CHECKPOINT), "sum over samples of mean_c[g] φ"),
    Variable("gram_eigenvalues", (COMPONENT, CHECKPOINT), "eigenvalues of gram, ascending"),
    Variable("gram_eigenvectors", (PROJ_DIM, COMPONENT, CHECKPOINT), "eigenvectors of gram"),
    Variable(
        WRONG_CLASSES,
        (PROJ_DIM, PROJ_DIM_1, CHECKPOINT),
        "mean of 2 √q ψ ψᵀ over a part of the samples, ψ of the likeliest wrong class",
    ),
    Variable("moment_scale", ("coordinate", CHECKPOINT), "(√v + 10⁻⁸)^-1/2, Adam's v"),
    Variable(
        "curvature_eigenvectors",
        ("entry", CHECKPOINT),
        "eigenvectors of every axis of every parameter, row by row",
    ),
    Variable(
        "curvature_scale",
        ("coordinate", CHECKPOINT),
        "factors of gradients in the coordinates of the eigenvectors",
    ),
    Variable(
        "curvature_leading",
        ("leading", CHECKPOINT),
        "coordinates with most of the scaled curvature, the first columns of the sketch",
    ),
    Variable(
        "principal_components",
        (SKETCH_DIM, PROJ_DIM, CHECKPOINT),
        "orthonormal columns that reduce the sketch; int8: sign(q) q², divided by its length",
    ),
    Variable(
        "principal_shares",
        (PROJ_DIM, CHECKPOINT),
        "part of the squared length of the fitted samples that a component has",
    ),
    Variable(
        "self_influence", (SAMPLE,), "how much training on a sample lowered its own loss; >= 0"
    ),
    Variable("damping", (CHECKPOINT,), "λ added to the diagonal of the gram matrix, absolute"),
    Variable(
        "score",
        (SAMPLE, TARGET),
        "attribution of a target's output to a training sample; > 0: training on it raised f",
    ),
    Variable("position", (TARGET, RANK), "position of the training sample; -1 where there is none"),
)

VARIABLES: dict[str, Variable] = {variable.name: variable for variable in _ALL}

FITTED = (
    *("moment_scale", "curvature_eigenvectors", "curvature_scale", "curvature_leading"),
    *("principal_components", "principal_shares", WRONG_CLASSES),
)
"""The values of a fitted projector, which features hold so that others can be made like them."""


def validate(ds: xr.Dataset, names: Iterable[str], *, what: str = "dataset") -> None:
    """Check that a Dataset has the named variables with their dimensions, reading metadata only.

    Dimensions may be in any order, which :func:`lazy_features` does not keep.

    Parameters
    ----------
    ds
        Any Dataset.
    names
        Keys of :data:`VARIABLES`.
    what
        Name of ``ds`` in error messages.

    Raises
    ------
    TypeError
        If ``ds`` is not a Dataset.
    ValueError
        If a variable is missing, has other dimensions, is not floating point, or is split
        across chunks along ``proj_dim``.
    """
    if not isinstance(ds, xr.Dataset):
        raise TypeError(
            f"expected {what} as an xarray.Dataset, got {shown(ds)} ({type(ds).__name__}); try the "
            "result of td.featurize or td.open"
        )
    for dim, many, remedy in (
        (CHECKPOINT, "checkpoints", "labels in ds.sel"),
        (PROJ_DIM, "columns", "columns in ds.isel"),
    ):
        if ds.sizes.get(dim) == 0:
            raise ValueError(
                f"expected {what} of one or more {many}, got none; try other {remedy}({dim}=...)"
            )
    for name in names:
        _validate_variable(ds, VARIABLES[name], what)
    # Scores and rankings take the coords of their samples along, which must not hide their own.
    of_results = {*VARIABLES, TARGET, RANK, CHECKPOINT, PROJ_DIM} - {"self_influence"}
    coords = (n for n, coord in ds.coords.variables.items() if coord.dims == (SAMPLE,))
    require_new(coords, of_results)
    if "scale" in ds:  # as xr.open_zarr shows a store in float16
        raise ValueError(
            f"expected {what} as td.open decodes them, got features in float16 and their scale; "
            "try ds.assign(feature=ds.feature.astype('f4') * ds.scale.astype('f4'))"
            ".drop_vars('scale')"
        )


def require_new(coords: Iterable[Hashable], taken: Iterable[Hashable]) -> None:
    """Refuse names that others have: one of both would take the place of the other."""
    for n in sorted(map(str, {*coords} & {*taken})):
        raise ValueError(f"expected a name that nothing else has, got {n!r}; try {f'my_{n}'!r}")


def _validate_variable(ds: xr.Dataset, variable: Variable, what: str) -> None:
    name = variable.name
    if name not in ds:
        raise ValueError(
            f"expected {name!r} {variable.dims} in {what}, got the variables "
            f"{list(map(str, ds.data_vars))}; try td.featurize(samples, model)"
        )
    array = ds.variables[name]
    missing = [dim for dim in variable.dims if dim not in array.dims]
    others = [str(dim) for dim in array.dims if dim not in variable.dims]
    if missing or others:
        # As many others as missing ones may have other names. If more are missing, a number has
        # selected from one; if fewer, there is one too many.
        remedy = f"ds.rename({dict(zip(others, missing, strict=False))})"
        if len(missing) > len(others):
            remedy = f"ds.isel({missing[-1]}=[0]), with a list, which keeps the dimension"
        elif len(others) > len(missing):
            remedy = f"ds.isel({others[-1]}=0)"
        raise ValueError(
            f"expected {name!r} of {what} with the dimensions {variable.dims}, got {array.dims}; "
            f"try {remedy}"
        )
    if array.dtype.kind != variable.kind:
        wanted, dtype = (
            ("as bool", "bool") if variable.kind == "b" else ("in floating point", "float32")
        )
        raise ValueError(
            f"expected {name!r} of {what} {wanted}, got {array.dtype}; "
            f"try ds.assign({name}=ds.{name}.astype({dtype!r}))"
        )
    for dim in {PROJ_DIM, PROJ_DIM_1} & set(variable.dims):
        chunks = array.chunksizes.get(dim, ())
        if len(chunks) > 1:
            raise ValueError(
                f"expected {name!r} of {what} in one chunk along {dim!r}, got {len(chunks)} "
                f"{tuple(chunks)}; try ds.chunk({dim}=-1)"
            )


def aligned(array: xr.DataArray, to: xr.Dataset | xr.DataArray, *, what: str) -> xr.DataArray:
    """Return an array with its entries reordered by label to match ``to``.

    Along each dimension that has an index on both sides, entries are selected by label, and those
    that ``to`` lacks are left out. Other dimensions are matched by position, and have to be as long
    as in ``to``. Coords that both arrays have must be equal.

    Raises
    ------
    ValueError
        If labels are missing, only ``array`` has labels, sizes differ, or coords differ.
    pandas.errors.InvalidIndexError
        If labels of ``array`` are not unique.

    Examples
    --------
    >>> array = xr.DataArray([1, 2], coords={"checkpoint": ["b", "a"]})
    >>> to = xr.DataArray([0, 0], coords={"checkpoint": ["a", "b"]})
    >>> aligned(array, to, what="weights").values.tolist()
    [2, 1]
    """
    for dim in set(array.dims) & set(array.indexes):
        # To a side without labels, the labels 0, 1, ... are as good as none.
        labels, wanted = array.indexes[dim], to.indexes.get(dim, pd.RangeIndex(array.sizes[dim]))
        if labels.equals(wanted):
            continue
        positions = labels.get_indexer(wanted)
        missing = wanted[positions < 0]
        if len(missing) or dim not in to.indexes:
            raise ValueError(
                f"expected {what} with the labels {shown(wanted.tolist())} along {dim!r}, got "
                f"{shown(labels.tolist())}, where {len(missing)} are missing, the first of them "
                f"{missing.tolist()[:1]}; try .sel({dim}=...) with the same labels on both, or "
                f".drop_vars({dim!r}), or .to_numpy() of what pandas made, to match by position"
            )
        array = array.isel({dim: positions})
    require_alike(array, to, what=what)
    return array


def data_in_order(values: Any, to: xr.Dataset | xr.DataArray, *dims: Hashable, what: str) -> Any:
    """Return values along some dimensions of ``to``, without labels, in the order of its labels.

    A DataArray, and what pandas made, have labels of their own, see :func:`aligned`. What has none
    is returned as it is.

    Examples
    --------
    >>> to = xr.DataArray([0, 0], coords={"sample": ["a", "b"]})
    >>> data_in_order(pd.Series([1, 2], ["b", "a"]), to, "sample", what="by").tolist()
    [2, 1]
    """
    if isinstance(values, pd.Series | pd.DataFrame):
        values = xr.DataArray(values, dims=dims[: values.ndim])
    return aligned(values, to, what=what).data if isinstance(values, xr.DataArray) else values


def require_alike(array: xr.DataArray, to: xr.Dataset | xr.DataArray, *, what: str) -> None:
    """Check that the dimensions of an array that ``to`` has, too, have the same size and coords.

    Raises
    ------
    ValueError
        If they differ.
    """
    shared = [dim for dim in array.dims if dim in to.sizes]
    sizes, wanted = ({dim: ds.sizes[dim] for dim in shared} for ds in (array, to))
    if sizes != wanted:
        raise ValueError(
            f"expected {what} with the sizes {wanted}, got {sizes}; try one entry for each that "
            "there is now: samples may have been selected, dropped or appended"
        )
    for name, coord in coords_along(array, *array.dims).items():
        # A coord that the other side lacks agrees with itself.
        other = to.coords.variables.get(name, coord)
        is_alike = coord.sizes == other.sizes and name != "error"
        if is_alike and not coord.equals(other):  # lazy ones are compared by their names
            i = int(np.flatnonzero(coord.values != other.values)[0])
            raise ValueError(
                f"expected {what} in the order of the scored arrays, which have {other.values[i]} "
                f"for the coord {name!r} at {coord.dims[0]} {i}, got {coord.values[i]}; try "
                f"selecting and sorting both in the same way, or {what}.reset_coords(drop=True) "
                "to match by position"
            )


def coords_along(array: xr.DataArray | xr.Dataset, *dims: Hashable) -> dict[Hashable, xr.Variable]:
    """Return the coords that run along one of the dimensions and no other.

    Examples
    --------
    >>> array = xr.DataArray([[1, 2]], dims=("a", "b"), coords={"letter": ("b", ["x", "y"])})
    >>> list(coords_along(array, "a")), list(coords_along(array, "a", "b"))
    ([], ['letter'])
    """
    return {
        name: coord
        for name, coord in array.coords.variables.items()
        if len(coord.dims) == 1 and coord.dims[0] in dims
    }


def checkpoint_names(ds: xr.Dataset) -> list[str]:
    """Return the names of the checkpoints of features."""
    return [str(name) for name in ds[CHECKPOINT].values]


def stays_in_store(coord: xr.Variable, sizes: tuple[int, ...]) -> bool:
    """Return whether tasks can read the values of a coord of samples, block by block, in a store.

    Parameters
    ----------
    coord
        A coord, such as ``open(..., load_coords=False)`` has.
    sizes
        Sizes of the blocks of samples that tasks work on.
    """
    data = coord.data
    return reader(data) is not None and data.chunks == (sizes,)


def ordered(features: xr.Dataset) -> xr.Dataset:
    """Return features with all dimensions in the order in which :data:`VARIABLES` has them.

    Matrices of which a store has the triangle, as ``xr.open_zarr`` shows them, are made whole.
    """
    # Others, such as those of a fit, keep their places in between: checkpoints come last.
    order = (SAMPLE, SKETCH_DIM, PROJ_DIM, PROJ_DIM_1, COMPONENT, ..., CHECKPOINT)
    features = features.transpose(*order, missing_dims="ignore")
    upper = {n: a.variable for n, a in features.data_vars.items() if TRIANGLE in a.attrs}
    if not upper:
        return features
    rows, whole = features[COLUMN].values if COLUMN in features.coords else None, {}
    for name, matrix in upper.items():
        data = plain(matrix.chunk({PROJ_DIM: -1, PROJ_DIM_1: -1, CHECKPOINT: 1}).data)
        attrs = {key: value for key, value in matrix.attrs.items() if key != TRIANGLE}
        whole[name] = matrix.dims, data.map_blocks(mirrored, rows=rows, meta=data._meta), attrs
    return features.assign(whole)


def lazy_features(features: xr.Dataset) -> xr.Dataset:
    """Return features with lazy arrays, one checkpoint per chunk, and coords in memory.

    Dimensions are in the order of :func:`ordered`.

    Coords that are lazy, as ``Dataset.chunk`` makes all of them, are loaded, unless tasks can read
    them in a store. The coord ``error`` is dropped, because :func:`open` loads it lazily and failed
    samples are NaN anyway.
    """
    if "error" in features.coords:
        features = features.drop_vars("error")
    features = ordered(features)
    # Variables, one at a time: Dataset.chunk would make coords lazy, and Dataset.map copies them.
    # The values of a fitted projector are not asked for, and may be large.
    data = {n: features.variables[n] for n in features.data_vars if n not in FITTED}
    others = {}
    for name, variable in data.items():
        # An array of another package than Dask has chunks, too; see `plain`.
        is_lazy = variable.chunks is not None and isinstance(variable.data, da.Array)
        if not is_lazy or max(variable.chunksizes.get(CHECKPOINT, (1,))) > 1:
            chunks = {CHECKPOINT: 1}
            if variable.chunks is None:
                chunks[SAMPLE] = _ROWS_OF_UNCHUNKED
            chunked = variable.chunk({d: n for d, n in chunks.items() if d in variable.dims})
            others[name] = chunked.copy(data=plain(chunked.data))
    lazy = features.assign(others) if others else features
    # Blocks of samples as the tasks will have them, which can read coords of the same blocks only.
    sizes = next((v.chunksizes[SAMPLE] for v in (data | others).values() if SAMPLE in v.dims), ())
    coords = {name: v for name, v in lazy.coords.variables.items() if v.chunks is not None}
    loaded = {name: v.load() for name, v in coords.items() if not stays_in_store(v, sizes)}
    return lazy.assign_coords(loaded) if loaded else lazy
