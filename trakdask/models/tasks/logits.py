"""Functions that tasks share: calling a model, finding its logits, and margins."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from trakdask.checks import require_number
from trakdask.html_tables import HtmlTable
from trakdask.models.tasks.protocol import Batch, Forward, SampleError

__all__ = [
    "MASK",
    "ModelTask",
    "as_names",
    "as_tensors",
    "at_least_float32",
    "call_model",
    "check_temperature",
    "check_variable",
    "margin",
    "one_minus_p",
    "per_sample",
    "require_classes",
    "require_labels_in_range",
    "shape_of",
    "without_absent_mask",
]


MASK = "attention_mask"
"""Name of the variable that marks the padding of sequences, as in transformers."""


def as_names(names: str | Iterable[str]) -> tuple[str, ...]:
    """Return the names of variables as a tuple; a single name may be given without one."""
    given = (names,) if isinstance(names, str) or not isinstance(names, Iterable) else tuple(names)
    if not given or not all(isinstance(name, str) for name in given):
        raise ValueError(
            f"expected the names of one or more variables as inputs, got {names!r}; try "
            "inputs=('x',)"
        )
    return given


class ModelTask(HtmlTable):
    """A task whose model takes variables of the samples, by their names or in their order."""

    inputs: tuple[str, ...]
    positional: bool
    _other_variables: ClassVar[tuple[str, ...]] = ("label",)
    """Options with the names of further variables; those that are None by default are optional."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", as_names(self.inputs))
        for option in self._other_variables:
            is_optional = getattr(type(self), option) is None
            check_variable(getattr(self, option), option, optional=is_optional)

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of the variables that the task reads."""
        names = (*self.inputs, *(getattr(self, option) for option in self._other_variables))
        return tuple(dict.fromkeys(name for name in names if name is not None))


def as_tensors(arrays: Mapping[Any, Any], names: Sequence[str]) -> Batch:
    """Return some of the arrays, tensors or labelled arrays of a mapping as one batch."""
    if not isinstance(arrays, Mapping):
        raise TypeError(
            "expected samples as a Dataset or a mapping from name to array, got "
            f"{type(arrays).__name__}; try samples={{{next(iter(names), 'x')!r}: array}}"
        )
    if missing := [name for name in names if name not in arrays]:
        raise ValueError(
            f"expected the variable {missing[0]!r} in samples, got {list(map(str, arrays))}; try "
            "renaming a variable of the samples, or passing its name to the task"
        )
    return Batch({name: _as_tensor(name, arrays[name]) for name in names})


def _as_tensor(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    try:
        return torch.from_numpy(np.array(value))
    except (TypeError, ValueError) as err:
        raise TypeError(
            f"expected numbers in {name!r}, got {type(value).__name__} ({err}); try "
            "numpy.asarray(...) with numbers or booleans, padded to one shape"
        ) from err


def without_absent_mask(inputs: tuple[str, ...], present: Collection[str]) -> tuple[str, ...]:
    """Return the inputs without the attention mask, if it is not there: nothing is padded then."""
    return inputs if MASK in present else tuple(name for name in inputs if name != MASK)


def check_temperature(temperature: float) -> None:
    """Reject a temperature that is not a positive, finite number."""
    require_number("temperature", temperature, low=0, remedy="try temperature=1.0")


def check_variable(value: object, option: str, *, optional: bool = False) -> None:
    """Reject a value that is not the name of a variable."""
    if not (isinstance(value, str) and value) and not (optional and value is None):
        raise TypeError(
            f"expected the name of a variable as {option}, got {value!r}; try {option}={option!r}"
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
        Whether they are passed in this order; otherwise by their names.

    Raises
    ------
    ValueError
        If the model returns neither a tensor, nor an object with ``logits``, nor a tuple that
        begins with logits.
    RuntimeError
        If it cannot run under vmap; the message also says what to do with models of transformers.
    """
    given = {name: batch[name] for name in inputs}
    try:
        output = forward(*given.values()) if positional else forward(**given)
    except RuntimeError as err:
        if "vmap" not in str(err):
            raise
        raise RuntimeError(
            "expected a model that does not branch on values of its input, since vmap cannot run "
            f"one that does, got an error ({str(err).splitlines()[0][:120]}...); try "
            "gradients='loop', or build models of transformers with attn_implementation='eager' "
            "(encoders such as BERT still branch on an attention mask)"
        ) from err
    return at_least_float32(_logits_of(output))


def _logits_of(output: Any) -> Tensor:
    logits = output
    if isinstance(output, Mapping) or hasattr(output, "logits"):  # such as a ModelOutput
        logits = output["logits"] if isinstance(output, Mapping) else output.logits
    elif isinstance(output, (tuple, list)) and output:
        logits = output[0]
    if not isinstance(logits, Tensor):
        raise ValueError(
            "expected a tensor of logits, an object with .logits, or a tuple that begins with "
            f"logits, got {shape_of(output)} from the model; try wrapping the model, or a task of "
            "your own"
        )
    return logits


def at_least_float32(values: Tensor) -> Tensor:
    """Return float64 tensors unchanged, and others in float32."""
    return values if values.dtype == torch.float64 else values.float()


def shape_of(value: object) -> str:
    """Return the shape of a tensor, or the type of anything else, for messages."""
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def require_classes(logits: Tensor, label: Tensor, name: str) -> Tensor:
    """Check logits (batch, classes) and labels (batch,); return the labels as int64.

    Labels that are out of range are clamped, because they would crash a CUDA kernel and vmap cannot
    look at values. :func:`require_labels_in_range` rejects them.
    """
    if logits.ndim != 2 or logits.shape[1] < 2 or len(logits) != len(label):
        raise ValueError(
            f"expected logits ({len(label)}, classes) with at least 2 classes for a batch of "
            f"{len(label)}, got {shape_of(logits)} from the model; try wrapping the model so that "
            "it returns one row of logits per sample, or "
            "td.tasks.BinaryClassification for a single logit"
        )
    advice = "labels.argmax(1), if they are one-hot" if label.ndim == 2 else "labels.astype(int)"
    if label.ndim != 1 or label.is_floating_point() or label.is_complex():
        raise ValueError(
            f"expected integer classes in {name!r}, one per sample, got {label.dtype} of shape "
            f"{tuple(label.shape)}; try {advice}"
        )
    return label.long().clamp(0, logits.shape[1] - 1)


def require_labels_in_range(label: Tensor, n_classes: int, name: str) -> None:
    """Reject labels that are not classes.

    This looks at values, so it must not be called by ``output``, which runs under vmap.
    """
    bad = (label < 0) | (label >= n_classes)
    if bool(bad.any()):
        row = int(bad.nonzero()[0, 0])
        value = int(label[row])
        condition = f"< {n_classes}" if value >= n_classes else ">= 0"
        off_by_one = value == n_classes and int(label.min()) > 0
        raise SampleError(
            f"expected {name} in 0..{n_classes - 1} ({n_classes} classes), got {value} at sample "
            "{sample}; try "
            + ("labels that start at 0 (labels - 1), or " if off_by_one else "")
            + f"samples.isel(sample=samples[{name!r}] {condition})",
            row,
        )


def per_sample(values: Tensor, size: int, what: str) -> Tensor:
    """Return one number per sample, (batch,), from (batch,) or (batch, 1)."""
    if values.shape not in ((size,), (size, 1)):
        raise ValueError(
            f"expected one number per sample, shape ({size},) or ({size}, 1), for a batch of "
            f"{size}, got {what} of shape {tuple(values.shape)}; try another task, or wrap the "
            "model so that it returns one number per sample"
        )
    return values.reshape(size)


def margin(logits: Tensor, label: Tensor) -> Tensor:
    """Compute log p/(1-p) of the labelled class: its logit minus the logsumexp of the others.

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
    Exactness: value and gradient are stable where p is near 0 or 1, unlike those of
    log p - log(1-p).
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
    """Return 1 - p of a margin log p/(1-p), also accurate where p is near 1."""
    return torch.sigmoid(-margin)
