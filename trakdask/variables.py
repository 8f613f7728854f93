"""Names, dimensions and dtypes of every array that trakdask makes: the only spelling there is."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import dask.array as da
import numpy as np
import xarray as xr

__all__ = [
    "CHECKPOINT",
    "PROJ_DIM",
    "PROJ_DIM_1",
    "RANK",
    "SAMPLE",
    "TARGET",
    "TARGET_PREFIX",
    "VARIABLES",
    "Variable",
    "lazy_features",
    "load_coords",
    "may_have_failed",
    "validate",
]

SAMPLE = "sample"
TARGET = "target"
CHECKPOINT = "checkpoint"
PROJ_DIM = "proj_dim"
PROJ_DIM_1 = "proj_dim_1"
RANK = "rank"
_ROWS_OF_UNCHUNKED = 4096
TARGET_PREFIX = "target_"
"""Put before the targets' coords in scores: a bare name on both sides would be dropped silently."""


@dataclass(frozen=True)
class Variable:
    """What one array means: its name, dimensions, kind of dtype and a sentence for its attrs."""

    name: str
    dims: tuple[str, ...]
    description: str

    @property
    def attrs(self) -> dict[str, str]:
        """The ``attrs`` of a DataArray that holds this variable."""
        return {"description": self.description}


_ALL = (
    Variable(
        "feature",
        (SAMPLE, PROJ_DIM, CHECKPOINT),
        "projected gradient of the model output with respect to the parameters",
    ),
    Variable("output", (SAMPLE, CHECKPOINT), "model output f, the scalar that is attributed"),
    Variable("out_to_loss", (SAMPLE, CHECKPOINT), "Q = -dloss/df; 1 - p for classification"),
    Variable("error", (SAMPLE, CHECKPOINT), "why a sample failed and is NaN; '' where it did not"),
    Variable(
        "feature_scale",
        (SAMPLE, CHECKPOINT),
        "a power of two: feature is what is stored as float16, times this",
    ),
    Variable("gram", (PROJ_DIM, PROJ_DIM_1, CHECKPOINT), "sum over samples of h φ φᵀ"),
    Variable("loss_gradient", (PROJ_DIM, CHECKPOINT), "sum over samples of mean_c[g] φ"),
    Variable("self_influence", (SAMPLE,), "how much training on a sample raised its own output"),
    Variable("damping", (CHECKPOINT,), "λ added to the diagonal of the gram matrix, absolute"),
    Variable(
        "score",
        (SAMPLE, TARGET),
        "attribution of a target's output to a training sample; > 0: training on it raised f",
    ),
    Variable("position", (TARGET, RANK), "position of the training sample; -1 where there is none"),
)

VARIABLES: dict[str, Variable] = {variable.name: variable for variable in _ALL}


def validate(ds: xr.Dataset, names: Iterable[str], *, what: str = "dataset") -> None:
    """Check that a Dataset holds the named variables with their dimensions; reads metadata only.

    Parameters
    ----------
    ds
        Any Dataset.
    names
        Keys of :data:`VARIABLES`.
    what
        How the error calls ``ds``.

    Raises
    ------
    TypeError
        If ``ds`` is no Dataset.
    ValueError
        If a variable is missing, has other dimensions, is not floating point, or is split
        across chunks along ``proj_dim``.
    """
    if not isinstance(ds, xr.Dataset):
        raise TypeError(
            f"{what} is a {type(ds).__name__}; needed an xarray.Dataset as td.featurize and "
            "td.open return it."
        )
    for name in names:
        _validate_variable(ds, VARIABLES[name], what)


def _validate_variable(ds: xr.Dataset, variable: Variable, what: str) -> None:
    name = variable.name
    if name not in ds:
        raise ValueError(
            f"{what} has the variables {_listed(ds.data_vars)}; needed {name!r} "
            f"{variable.dims}. Make it with td.featurize(samples, model)."
        )
    array = ds[name]
    if array.dims != variable.dims:
        raise ValueError(
            f"{name!r} of {what} has the dimensions {array.dims}; needed {variable.dims}. "
            f"Use ds.transpose{variable.dims!r}."
        )
    if not np.issubdtype(array.dtype, np.floating):
        raise ValueError(
            f"{name!r} of {what} has dtype {array.dtype}; needed floating point. "
            f"Use ds.assign({name}=ds.{name}.astype('float32'))."
        )
    for dim in {PROJ_DIM, PROJ_DIM_1} & set(variable.dims):
        chunks = array.variable.chunksizes.get(dim, ())
        if len(chunks) > 1:
            raise ValueError(
                f"{name!r} of {what} has {len(chunks)} chunks along {dim!r} {tuple(chunks)}; "
                f"needed one. Use ds.chunk({dim}=-1)."
            )


def load_coords(ds: xr.Dataset) -> xr.Dataset:
    """Return the Dataset with its coords in memory: ``Dataset.chunk`` makes them lazy, too."""
    lazy = {name: coord.load() for name, coord in ds.coords.items() if coord.chunks is not None}
    return ds.assign_coords(lazy) if lazy else ds


def lazy_features(features: xr.Dataset) -> xr.Dataset:
    """Return features with lazy arrays, one checkpoint per chunk, and coords in memory.

    Without the coord ``error``, which :func:`open` reads when it is asked for: NaN says the same.
    """

    def chunk(array: xr.DataArray) -> xr.DataArray:
        # Variables one by one: Dataset.chunk would make the coords lazy.
        is_lazy = isinstance(array.data, da.Array)
        sizes = {CHECKPOINT: 1} if is_lazy else {SAMPLE: _ROWS_OF_UNCHUNKED, CHECKPOINT: 1}
        here = {dim: size for dim, size in sizes.items() if dim in array.dims}
        return array.copy(data=array.variable.chunk(here).data)

    if "error" in features.coords:
        features = features.drop_vars("error")
    return load_coords(features).map(chunk, keep_attrs=True)


def may_have_failed(features: xr.Dataset) -> bool:
    """Tell whether samples of features were recorded as failed, or may be once they are computed.

    Examples
    --------
    >>> may_have_failed(xr.Dataset({"error": (("sample", "checkpoint"), [["", "too long"]])}))
    True
    """
    if "error" not in features:
        return False
    error = features.error
    return error.chunks is not None or bool((error.values != "").any())


def _listed(names: Iterable[Hashable]) -> str:
    return "[" + ", ".join(repr(name) for name in names) + "]"
