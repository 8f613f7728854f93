"""What an estimator of attribution needs of the features: weights of samples, and kept matrices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import dask.array as da
import numpy as np
import xarray as xr

from trakdask import arrays
from trakdask.variables import CHECKPOINT, PROJ_DIM, SAMPLE, validate

__all__ = [
    "DEFAULT_ESTIMATOR",
    "Estimator",
    "Weights",
    "chosen_estimator",
    "estimator_weights",
    "has_quadratic_loss",
    "kept",
    "kept_samples",
    "require_estimator",
    "was_measured",
    "weight_data",
]

Estimator = Literal["auto", "trak", "soft", "relatif", "grad_dot", "grad_cos", "tracin"]
DEFAULT_ESTIMATOR: Estimator = "auto"

_MEASURED_TASKS = ("ImageClassification", "TextClassification")
"""Tasks for which tests/benchmarks/quality.py found what is best."""

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
    if estimator not in allowed:
        raise ValueError(
            f"estimator is {estimator!r}; needed one of {list(allowed)}. "
            f"Type estimator={DEFAULT_ESTIMATOR!r}."
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
    if isinstance(power, bool) or not isinstance(power, (int, float, np.number)):
        raise ValueError(f"power is {power!r}; needed a number in [0, 1]. Type power=0.5.")
    if not 0 <= power <= 1:
        raise ValueError(f"power is {power}; needed a number in [0, 1]. Type power=0.5.")
    if not has_quadratic_loss(features):
        a = f"q^{float(power)!r}"
        return Weights(gram=f"{a} (1 - q)", loss=a, power=float(power))
    if power != 1:
        raise ValueError(
            f"power is {power} and the task {features.attrs['task']}; needed 1 for a squared error,"
            " since the slope of |r|^a has no bound at r = 0. Type power=1, or estimator='trak', "
            "which is the same there."
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


def weight_data(features: xr.Dataset, weights: xr.DataArray | None) -> da.Array | None:
    """Return given weights (sample, checkpoint) in the chunks of the features, checked."""
    if weights is None:
        return None
    shape = {dim: features.sizes[dim] for dim in (SAMPLE, CHECKPOINT)}
    found = dict(weights.sizes) if isinstance(weights, xr.DataArray) else type(weights).__name__
    if found not in ({SAMPLE: shape[SAMPLE]}, shape):
        raise ValueError(
            f"weights are {found}; needed a DataArray of {shape}, with or without checkpoint. "
            "Type xr.DataArray(h, dims='sample')."
        )
    if weights.chunks is None and not (weights >= 0).all():
        raise ValueError(
            f"weights go down to {float(weights.min())}; needed numbers >= 0, since the gram "
            "matrix must stay positive. Type weights.clip(min=0)."
        )
    chunks = {dim: features.feature.variable.chunksizes[dim] for dim in shape}
    full = weights.broadcast_like(
        xr.DataArray(np.empty(features.sizes[CHECKPOINT]), dims=CHECKPOINT)
    )
    data: da.Array = full.transpose(SAMPLE, CHECKPOINT).variable.chunk(chunks).data
    return data
