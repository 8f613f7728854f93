"""What an estimator of attribution needs of the features: weights of samples, and kept matrices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import dask.array as da
import numpy as np
import xarray as xr

from trakdask import arrays
from trakdask.arrays import lineage
from trakdask.variables import (
    CHECKPOINT,
    PROJ_DIM,
    SAMPLE,
    aligned,
    validate,
)

__all__ = [
    "DEFAULT_ESTIMATOR",
    "Estimator",
    "Weights",
    "chosen_estimator",
    "estimator_weights",
    "has_quadratic_loss",
    "kept",
    "kept_samples",
    "origin",
    "require_estimator",
    "was_measured",
    "weight_data",
    "with_origin",
    "without_foreign_sums",
]

Estimator = Literal["auto", "trak", "soft", "relatif", "grad_dot", "grad_cos", "tracin"]
DEFAULT_ESTIMATOR: Estimator = "auto"

_REDUCED = ("feature", "out_to_loss")
"""Arrays that a gram matrix is reduced from; the second one only where its weights need it."""

_MEASURED_TASKS = ("ImageClassification", "TextClassification")
"""Tasks for which tests/benchmarks/quality.py found what is best."""

_ORIGIN = "reduced_from"
"""In the attrs of a gram matrix: dask's names of the arrays that it was reduced from."""

_QUADRATIC_TASKS = ("Regression",)
"""Tasks whose Q is a residual of either sign, of a loss with constant curvature."""


@dataclass(frozen=True)
class Weights:
    """Weights of the gram matrix (h) and of the scores (g) as names, and where they come from.

    The names are formulas in q = out_to_loss. They stand in ``attrs`` of kept matrices, which are
    used for the same name and no other.
    """

    gram: str = "1"
    loss: str = "Q"
    power: float | None = None

    @property
    def sums(self) -> tuple[str, ...]:
        """What scores with these weights and the automatic λ need of all samples."""
        return ("gram",) if self.power is None else ("gram", "loss_gradient")

    def gram_data(self, features: xr.Dataset) -> da.Array | None:
        """Return h (sample, checkpoint), None for 1."""
        if self.power is None:
            return None
        return arrays.weights.soft_gram_weights(features.out_to_loss.data, self.power)

    def loss_data(self, features: xr.Dataset) -> da.Array:
        """Return g (sample, checkpoint)."""
        q: da.Array = features.out_to_loss.data
        return q if self.power is None else arrays.weights.soft_loss_weights(q, self.power)

    def attrs(self, features: xr.Dataset) -> dict[str, Any]:
        """Return the ``attrs`` of matrices that are reduced from these features."""
        return {
            "gram_weights": self.gram,
            "loss_weights": self.loss,
            "power": self.power,
            "samples": features.sizes[SAMPLE],
            "source": features.attrs.get("source", ""),
            "pooled_checkpoints": [str(name) for name in features[CHECKPOINT].values],
        }


def chosen_estimator(estimator: Estimator, features: xr.Dataset) -> Estimator:
    """Return what ``"auto"`` stands for, anything else as it is.

    ``"soft"`` where it was measured to be the best, ``"trak"`` for other tasks and for models with
    BatchNorm.
    """
    if estimator != "auto":
        return estimator
    # Features of before, or not made by featurize, do not say whether there is BatchNorm.
    suits = was_measured(features) and features.attrs.get("batch_norm") is False
    return "soft" if suits else "trak"


def was_measured(features: xr.Dataset) -> bool:
    """Return whether the task is one for which the quality of scores was measured."""
    return str(features.attrs.get("task", "")).partition("(")[0] in _MEASURED_TASKS


def require_estimator(estimator: object, allowed: tuple[str, ...] = get_args(Estimator)) -> None:
    """Refuse what is no estimator."""
    if not isinstance(estimator, str) or estimator not in allowed:
        raise ValueError(
            f"expected estimator as one of {list(allowed)}, got {estimator!r}; "
            f"try estimator={DEFAULT_ESTIMATOR!r}"
        )


def estimator_weights(features: xr.Dataset, estimator: Estimator, power: float) -> Weights:
    """Return the weights of an estimator for the task that the features were made with.

    Raises
    ------
    ValueError
        If ``power`` is not in [0, 1], or not 1 for a quadratic loss.
    """
    if chosen_estimator(estimator, features) != "soft":
        return Weights()
    is_number = isinstance(power, (int, float, np.number)) and not isinstance(power, bool)
    if not is_number or not 0 <= power <= 1:
        raise ValueError(f"expected power as a number in [0, 1], got {power!r}; try power=0.5")
    if not has_quadratic_loss(features):
        a = f"q^{float(power)!r}"
        return Weights(gram=f"{a} (1 - q)", loss=a, power=float(power))
    if power != 1:
        raise ValueError(
            f"expected power=1 for the squared error of the task {features.attrs['task']}, since "
            f"the slope of |r|^a has no bound at r = 0, got power={power}; try power=1, or "
            "estimator='trak', which is the same there"
        )
    return Weights()


def has_quadratic_loss(features: xr.Dataset) -> bool:
    """Return whether Q is a residual, not a probability, by the name of the task."""
    return str(features.attrs.get("task", "")).partition("(")[0] in _QUADRATIC_TASKS


def kept(features: xr.Dataset, name: str, weights: Weights) -> da.Array | None:
    """Return the matrix that :func:`save` kept beside the features, if it is the one needed.

    Of the same data, weights and projection, and of no fewer samples than are here: a selection of
    rows keeps it. ``loss_gradient`` also pools the checkpoints, so they must all be here.
    """
    if name not in features:
        return None
    array, needed = features[name], weights.attrs(features)
    # A store of before has no attrs: its matrix is that of weights 1.
    found = needed | {"gram_weights": "1"} if name == "gram" else {}
    found = found | array.attrs
    same = {"gram": ["gram_weights"], "loss_gradient": ["loss_weights", "pooled_checkpoints"]}[name]
    is_same = all(found.get(key) == needed[key] for key in ("source", *same))
    is_whole = found.get("samples", 0) >= needed["samples"]
    if not is_same or not is_whole or set(array.shape[:-1]) != {features.sizes[PROJ_DIM]}:
        return None
    validate(features, [name], what="features")
    data: da.Array = array.data
    return data


def kept_samples(features: xr.Dataset) -> int:
    """Return the number of samples that the kept gram matrix is a sum over."""
    return int(features["gram"].attrs.get("samples", features.sizes[SAMPLE]))


def with_origin(features: xr.Dataset) -> xr.Dataset:
    """Return features whose gram matrix names the arrays that it is a sum over: those here."""
    if "gram" not in features:
        return features
    array = features["gram"]
    attrs = {"samples": features.sizes[SAMPLE], **array.attrs, **origin(features)}
    return features.assign(gram=array.variable._replace(attrs=attrs))


def origin(features: xr.Dataset) -> dict[str, Any]:
    """Return the ``attrs`` of a gram matrix that name the arrays which it is reduced from."""
    data = {name: features[name].data for name in _REDUCED if name in features}
    return {_ORIGIN: {n: each.name for n, each in data.items() if isinstance(each, da.Array)}}


def without_foreign_sums(features: xr.Dataset) -> xr.Dataset:
    """Return features without the kept matrices if these are not sums over what is here.

    They are if the arrays are those that the matrices were reduced from, whole or with rows or
    checkpoints selected lazily. Arrays in memory say nothing of where they come from. If there are
    as many samples as in the sum, the diagonal of the gram matrix tells whether they are the same.

    Raises
    ------
    ValueError
        If the arrays are others, or it cannot be known, and a matrix of the samples here would be
        another than the one that was kept.
    """
    n, attrs = features.sizes[SAMPLE], features["gram"].attrs
    root, needed = attrs.get(_ORIGIN, {}), attrs.get("samples")
    names = _REDUCED[: 1 if attrs.get("power") is None else 2]
    data = {name: features[name].data for name in names}
    found = {name: lineage.sources(data[name], root.get(name)) for name in names}
    is_selected = all(found[name] == {root.get(name)} for name in names)
    if is_selected and _is_aligned(features, data, found):
        return features
    in_memory = all(lineage.is_in_memory(data[name], found[name]) for name in names)
    if n == needed and in_memory and not is_selected:
        if _has_diagonal_of(features):
            return features
    elif needed is not None and n >= needed:
        return features.drop_vars(["gram", "loss_gradient"], errors="ignore")
    listed = " or ".join(repr(name) for name in names)
    raise ValueError(
        f"expected {listed} as they were when 'gram' was reduced from {needed or 'its'} samples, "
        f"whole or with rows selected lazily, got arrays of {n} samples that were changed or loaded"
        " since; try selecting with features.isel(sample=...) before loading, or features.drop_vars"
        "(['gram', 'loss_gradient'], errors='ignore') to reduce a new matrix of these samples alone"
    )


def _is_aligned(
    features: xr.Dataset, data: dict[str, da.Array], found: dict[str, frozenset[str]]
) -> bool:
    """Return whether columns are whole, and rows and checkpoints the same everywhere."""
    parts = [lineage.selection(data[name], found[name]) for name in data]
    names = features["gram"].attrs.get("pooled_checkpoints", [])
    here = [str(name) for name in features[CHECKPOINT].values]
    expected = tuple(names.index(name) for name in here) if set(here) <= set(names) else None
    return not parts[0].columns and all(
        part.rows == parts[0].rows
        and part.checkpoints == (parts[0].checkpoints if expected is None else expected)
        for part in parts
    )


def _has_diagonal_of(features: xr.Dataset) -> bool:
    """Return whether the diagonal of the kept gram matrix is that of the features, to rounding."""
    matrix, x = features["gram"].data, features.feature.data
    if matrix.shape[0] != x.shape[1]:
        return False
    h = Weights(power=features["gram"].attrs.get("power")).gram_data(features)
    # On this machine: a cluster would be sent what is in memory here.
    found = arrays.gram.diagonal(x, h).compute(scheduler="sync")
    is_here = lineage.is_in_memory(matrix, lineage.sources(matrix))
    diagonal = da.einsum("iic->ic", matrix).compute(scheduler="sync" if is_here else None)
    largest = np.nanmax(diagonal, initial=0)
    return bool(np.allclose(found, diagonal, rtol=1e-4, atol=1e-6 * largest, equal_nan=True))


def weight_data(features: xr.Dataset, weights: xr.DataArray | None) -> da.Array | None:
    """Return given weights (sample, checkpoint) in the chunks of the features, checked.

    By their labels where both sides have them: see :func:`trakdask.variables.aligned`.
    """
    if weights is None:
        return None
    shape = {dim: features.sizes[dim] for dim in (SAMPLE, CHECKPOINT)}
    if isinstance(weights, xr.DataArray) and set(weights.dims) <= set(shape):
        weights = aligned(weights, features, what="weights")
    found = dict(weights.sizes) if isinstance(weights, xr.DataArray) else type(weights).__name__
    if found not in ({SAMPLE: shape[SAMPLE]}, shape):
        raise ValueError(
            f"expected weights as a DataArray of {shape}, with or without checkpoint, got {found}; "
            "try xr.DataArray(h, dims='sample')"
        )
    if weights.dtype.kind not in "fiub":
        raise ValueError(
            f"expected weights in numbers, got dtype {weights.dtype}; try weights.astype(float)"
        )
    if weights.chunks is None:
        _require_positive(weights)
    chunks = {dim: features.feature.variable.chunksizes[dim] for dim in shape}
    full = weights.broadcast_like(
        xr.DataArray(np.empty(features.sizes[CHECKPOINT]), dims=CHECKPOINT)
    )
    data: da.Array = full.transpose(SAMPLE, CHECKPOINT).variable.chunk(chunks).data
    return data


def _require_positive(weights: xr.DataArray) -> None:
    values = weights.values
    bad = ~(np.isfinite(values) & (values >= 0))
    if bad.any():
        at = np.argwhere(bad)[0]
        where = ", ".join(f"{dim} {int(i)}" for dim, i in zip(weights.dims, at, strict=True))
        raise ValueError(
            f"expected finite weights >= 0, since the gram matrix must stay positive, got "
            f"{values[tuple(at)]} at {where}; try weights.clip(min=0).fillna(0)"
        )
