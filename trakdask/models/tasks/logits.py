"""What tasks share: calling a model, finding its logits, and margins."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trakdask.models.tasks.protocol import Batch, Forward

__all__ = [
    "as_names",
    "as_tensors",
    "at_least_float32",
    "call_model",
    "check_temperature",
    "margin",
    "one_minus_p",
    "per_sample",
    "require_classes",
    "shape_of",
]


def as_names(names: str | Iterable[str]) -> tuple[str, ...]:
    """Return names of variables as a tuple: one name may stand alone."""
    found = (names,) if isinstance(names, str) else tuple(names)
    if not found or not all(isinstance(name, str) for name in found):
        raise ValueError(
            f"inputs is {names!r}; needed the names of one variable or more. Use inputs=('x',)."
        )
    return found


def as_tensors(arrays: Mapping[Any, Any], names: Iterable[str]) -> Batch:
    """Return some of the arrays, tensors or labelled arrays of a mapping as one batch."""
    found = {name: arrays[name] for name in names}
    return Batch(
        {
            name: value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
            for name, value in found.items()
        }
    )


def check_temperature(temperature: float) -> None:
    """Refuse a temperature that no softmax has."""
    if not (isinstance(temperature, (int, float)) and 0 < temperature < math.inf):
        raise ValueError(
            f"temperature is {temperature!r}; needed a positive number. Use temperature=1.0."
        )


def call_model(forward: Forward, batch: Batch, inputs: tuple[str, ...], positional: bool) -> Tensor:
    """Run the model on some variables and return its logits, float32 or float64.

    Parameters
    ----------
    forward
        Model at one checkpoint.
    batch
        Samples.
    inputs
        Names of the variables that are the model's arguments.
    positional
        Whether they are passed in this order, or by their names.

    Raises
    ------
    ValueError
        If the model returns no tensor, nothing with ``logits``, and no tuple that begins with one.
    RuntimeError
        If it cannot run under vmap; the message says what to do with a model of transformers.
    """
    given = {name: batch[name] for name in inputs}
    try:
        output = forward(*given.values()) if positional else forward(**given)
    except RuntimeError as err:
        if "vmap" not in str(err):
            raise
        raise RuntimeError(
            "the model decides on values of its input, which vmap cannot follow "
            f"({str(err).splitlines()[0][:120]}...). Models of transformers can run under vmap if "
            "they are built with attn_implementation='eager'; encoders such as BERT then still "
            "look at an attention mask."
        ) from err
    return at_least_float32(_logits_of(output))


def _logits_of(output: Any) -> Tensor:
    found = output
    if isinstance(output, Mapping) or hasattr(output, "logits"):  # a ModelOutput, or its like
        found = output["logits"] if isinstance(output, Mapping) else output.logits
    elif isinstance(output, (tuple, list)) and output:
        found = output[0]
    if not isinstance(found, Tensor):
        raise ValueError(
            f"the model returned {shape_of(output)}; the task needs a tensor of logits, an object "
            "with .logits, or a tuple that begins with logits. Wrap the model, or write a task."
        )
    return found


def at_least_float32(values: Tensor) -> Tensor:
    """Return float64 as it is, and everything else in float32."""
    return values if values.dtype == torch.float64 else values.float()


def shape_of(value: object) -> str:
    """Describe what was found where a tensor was needed."""
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def require_classes(logits: Tensor, label: Tensor, name: str) -> Tensor:
    """Check logits (batch, classes) and labels (batch,); return the labels as int64."""
    if logits.ndim != 2 or logits.shape[1] < 2:
        raise ValueError(
            f"the model returned {shape_of(logits)} for a batch of {len(label)}; classification "
            "needs logits (batch, classes) with 2 classes or more. Wrap the model so that it "
            "returns them, or take BinaryClassification for a single logit."
        )
    if label.ndim != 1 or label.is_floating_point() or label.is_complex():
        raise ValueError(
            f"{name!r} is {label.dtype} of shape {tuple(label.shape)}; classification needs "
            "integer classes, one per sample. Use labels.astype(int) and drop other axes."
        )
    return label.long()


def per_sample(values: Tensor, size: int, what: str) -> Tensor:
    """Return one number per sample, (batch,), from (batch,) or (batch, 1)."""
    if values.shape not in ((size,), (size, 1)):
        raise ValueError(
            f"{what} has shape {tuple(values.shape)} for a batch of {size}; needed ({size},) or "
            f"({size}, 1), one number per sample. Wrap the model so that it returns one, or write "
            "a task."
        )
    return values.reshape(size)


def margin(logits: Tensor, label: Tensor) -> Tensor:
    """Compute log p/(1-p) of the labelled class: its logit less logsumexp of the others.

    Parameters
    ----------
    logits
        (..., classes).
    label
        (...), int64.

    Returns
    -------
    (...).

    Notes
    -----
    Exactness: stable where p is near 0 or 1, in value and gradient; log p - log(1-p) is not.
    Cost: one copy of the logits.

    Examples
    --------
    >>> margin(torch.tensor([[1.0, 0.0, 0.0]]).log_softmax(1), torch.tensor([0]))
    tensor([0.3069])
    """
    index = label[..., None]
    others = logits.scatter(-1, index, -torch.inf)
    return logits.gather(-1, index)[..., 0] - others.logsumexp(-1)


def one_minus_p(margin: Tensor) -> Tensor:
    """Return 1 - p of a margin log p/(1-p), exact also where p is near 1."""
    return torch.sigmoid(-margin)
