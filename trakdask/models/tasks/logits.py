"""Parts that tasks share: variables of samples, logits of a model, and margins."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from trakdask.html_tables import HtmlTable
from trakdask.models.tasks.protocol import Batch, Forward, missing_variable

MASK = "attention_mask"
"""Name of the variable that marks the padding of sequences, as in transformers."""


class ModelTask(HtmlTable):
    """A task whose model takes variables of the samples, by their names or in their order."""

    inputs: tuple[str, ...]
    positional: bool
    _other_variables: ClassVar[tuple[str, ...]] = ("label",)
    """Options that name further variables; an option that is None by default is optional."""

    def __post_init__(self) -> None:
        inputs: Any = self.inputs
        is_one = isinstance(inputs, str) or not isinstance(inputs, Iterable)
        names = (inputs,) if is_one else tuple(inputs)
        if not names or not all(isinstance(name, str) for name in names):
            raise ValueError(f"expected names of variables as inputs, got {inputs!r}; try ('x',)")
        object.__setattr__(self, "inputs", names)
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
    for name in names:
        if name not in arrays:
            raise missing_variable(name, arrays)
    return Batch({name: _as_tensor(arrays[name]) for name in names})


def _as_tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(np.asarray(value))


def without_absent_mask(inputs: tuple[str, ...], present: Collection[str]) -> tuple[str, ...]:
    """Return the inputs without the attention mask, if it is not there: nothing is padded then."""
    return inputs if MASK in present else tuple(name for name in inputs if name != MASK)


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
    """
    arguments = {name: batch[name] for name in inputs}
    output = forward(*arguments.values()) if positional else forward(**arguments)
    return at_least_float32(_logits_of(output))


def _logits_of(output: Any) -> Tensor:
    logits = output
    if isinstance(output, Mapping) or hasattr(output, "logits"):  # such as a ModelOutput
        logits = output["logits"] if isinstance(output, Mapping) else output.logits
    elif isinstance(output, (tuple, list)) and output:
        logits = output[0]
    if not isinstance(logits, Tensor):
        raise ValueError(
            "expected logits, an object with .logits, or a tuple that begins with logits from the "
            f"model, got {shape_of(output)}; try wrapping the model, or a task of your own"
        )
    return logits


def at_least_float32(values: Tensor) -> Tensor:
    """Return float64 tensors unchanged, and others in float32."""
    return values if values.dtype == torch.float64 else values.float()


def shape_of(value: object) -> str:
    """Return the shape of a tensor, or the type of anything else, for messages."""
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


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
    Exactness: value and gradient are stable where p is near 0 or 1, unlike log p - log(1-p).
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
