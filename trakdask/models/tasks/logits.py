"""Parts that tasks share: variables of samples, logits of a model, and margins."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, dataclass_transform
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from trakdask.checks import require_flags
from trakdask.errors import warn_once
from trakdask.html_tables import HtmlTable
from trakdask.models.tasks.protocol import Batch, Forward, missing_variable
from trakdask.torch_internals import last_operation

MASK = "attention_mask"
"""Name of the variable that marks the padding of sequences, as in transformers."""


_rows_seen: WeakKeyDictionary[torch.nn.Module, dict[Any, Tensor]] = WeakKeyDictionary()
"""By module, thread and what is looked for: numbers of the first samples."""

_MOST_ROWS = 64
_MANY_VALUES = 16
_SPREAD = 0.25
"""Fewer numbers, or numbers that are closer together, may be in [0, 1] by chance."""

_OF_LOGITS = ("", "addmm", "mm", "linear", "add", "convolution", "bmm")
"""The last operation of models that end in a layer, or one that is not known."""


def option(*, default: Any = None, alias: str | None = None, kw_only: bool = True) -> Any:
    """Return a field that is passed by keyword; ``alias`` is the keyword, for type checkers."""
    # For type checkers: they read ``alias`` at each call, and the default of ``kw_only`` here.
    return field(default=default, kw_only=kw_only)


@dataclass_transform(frozen_default=True, field_specifiers=(option,))
def task(kind: type[Any]) -> type[Any]:
    """Make a frozen dataclass of a task, whose field ``returned`` is its option ``output``.

    No field can have that name, which is the name of a method of tasks.
    """
    made: Any = dataclass(frozen=True, repr=False)(kind)
    generated = made.__init__
    signature = inspect.signature(generated)

    @functools.wraps(generated)
    def init(self: Any, *args: Any, output: Any = None, **options: Any) -> None:
        # The name of the field is what dataclasses.replace passes.
        if "returned" in options and output is not None:
            raise TypeError(
                f"expected one of output= and returned=, got {output!r} and "
                f"{options['returned']!r}; try output={output!r}"
            )
        generated(self, *args, **({"returned": output} | options))

    named = [
        p.replace(name=p.name.replace("returned", "output")) for p in signature.parameters.values()
    ]
    init.__signature__ = signature.replace(parameters=named)  # type: ignore[attr-defined]
    made.__init__ = init
    return made


@dataclass(frozen=True, repr=False)
class ModelTask(HtmlTable):
    """A task whose model takes variables of the samples, by their names or in their order.

    Tasks have the fields ``positional`` and ``returned``, too, behind those of their own: stores
    keep the settings of a task in their order.
    """

    inputs: tuple[str, ...] = ("x",)
    _other_variables: ClassVar[tuple[str, ...]] = ("label",)
    """Options that name further variables; an option that is None by default is optional."""

    def __post_init__(self) -> None:
        inputs: Any = self.inputs
        is_one = isinstance(inputs, str) or not isinstance(inputs, Iterable)
        # A tuple, whatever was given: stores keep the text of a task, and compare it.
        names = (inputs,) if is_one else tuple(inputs)
        if not names or not all(isinstance(name, str) for name in names):
            raise ValueError(f"expected names of variables as inputs, got {inputs!r}; try ('x',)")
        object.__setattr__(self, "inputs", names)
        require_flags(positional=getattr(self, "positional", False))
        for option in self._other_variables:
            is_optional = getattr(type(self), option) is None
            check_variable(getattr(self, option), option, optional=is_optional)

    def __repr__(self) -> str:
        # Optional settings that are None are not shown: older texts of tasks do not have them.
        values = {f: getattr(self, f.name) for f in fields(self)}
        shown = [
            f"{'output' if f.name == 'returned' else f.name}={value!r}"
            for f, value in values.items()
            if value is not None or not f.kw_only
        ]
        return f"{type(self).__qualname__}({', '.join(shown)})"

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of the variables that the task reads."""
        names = (*self.inputs, *(getattr(self, option) for option in self._other_variables))
        return tuple(dict.fromkeys(name for name in names if name is not None))

    @property
    def naming(self) -> tuple[str, ...]:
        """The options that only say where the data are."""
        return ("inputs", *self._other_variables)

    @property
    def token_variables(self) -> tuple[str, ...]:
        """Names of the variables (batch, tokens); none of tasks that are not about texts."""
        return ()

    @property
    def number_variables(self) -> tuple[str, ...]:
        """Names of the variables that are one number, or a few, of each sample."""
        return tuple(name for name in self.variables if name not in self.inputs)

    def for_variables(self: Any, n_dims: Mapping[str, int]) -> Any:
        """Return the task for samples with some variables, given their numbers of dimensions.

        A model that takes its inputs by name needs no attention mask where nothing is padded.
        """
        inputs = self.inputs
        if MASK not in n_dims and not self.positional:
            inputs = tuple(name for name in inputs if name != MASK)
        return self if inputs == self.inputs else replace(self, inputs=inputs)

    def logits(self: Any, forward: Forward, batch: Batch) -> Tensor:
        """Return what the model makes of a batch, float32 or float64.

        Raises
        ------
        ValueError
            If the model returns neither a tensor, nor an object with ``logits``, nor a tuple that
            begins with logits, or what it returns lacks the part that is named.
        """
        return at_least_float32(part_of(self._call(forward, batch), self.returned))

    def _call(self: Any, forward: Forward, batch: Batch, **others: Tensor) -> Any:
        """Return what the model returns for its inputs, and for other arguments by name."""
        arguments = {name: batch[name] for name in self.inputs}
        if self.positional:
            return forward(*arguments.values(), **others)
        return forward(**arguments, **others)


def as_tensors(arrays: Mapping[Any, Any], names: Sequence[str]) -> Batch:
    """Return some of the arrays, tensors or labelled arrays of a mapping as one batch."""
    for name in names:
        if name not in arrays:
            raise missing_variable(name, arrays)
    values = {name: arrays[name] for name in names}
    tensors = {n: torch.tensor(np.asarray(v)) for n, v in values.items() if not torch.is_tensor(v)}
    return Batch(values | tensors)


def check_variable(value: object, option: str, *, optional: bool = False) -> None:
    """Reject a value that is not the name of a variable."""
    if not (isinstance(value, str) and value) and not (optional and value is None):
        raise TypeError(
            f"expected the name of a variable as {option}, got {value!r}; try {option}={option!r}"
        )


def part_of(result: Any, name: str | int | None = None) -> Tensor:
    """Return the logits in what a model returns, or the part of another name or position."""
    # A position in a ModelOutput of transformers, which is a mapping and counts its values, too.
    if isinstance(name, int) and isinstance(result, Mapping) and name not in result:
        result = tuple(result.values())
    part, key = None, "logits" if name is None else name
    if isinstance(result, Tensor):
        part = result if name is None else None
    elif isinstance(result, Mapping):  # such as a ModelOutput of transformers
        part = result.get(key)
    elif isinstance(key, str) and hasattr(result, key):
        part = getattr(result, key)
    elif isinstance(result, (tuple, list)) and not isinstance(name, str):
        place = name or 0
        part = result[place] if -len(result) <= place < len(result) else None
    if isinstance(part, Tensor):
        return part
    if isinstance(result, Mapping):
        known = [key for key, value in result.items() if isinstance(value, Tensor)]
        remedy = f"td.tasks.Classification(output={known[0]!r})" if known else "wrapping the model"
        raise ValueError(
            f"expected {key!r} in what the model returns, got {type(result).__name__} with "
            f"tensors named {known}; try {remedy}"
        )
    raise ValueError(
        "expected logits, an object with .logits, or a tuple that begins with logits from the "
        f"model, got {shape_of(result)}; try wrapping the model, or a task of your own"
    )


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
    # -inf takes the class out of the sum, in which at least one other class is left.
    index = label[..., None]
    others = logits.scatter(-1, index, -torch.inf)
    return logits.gather(-1, index)[..., 0] - others.logsumexp(-1)


def one_minus_p(margin: Tensor) -> Tensor:
    """Return 1 - p of a margin log p/(1-p), also accurate where p is near 1."""
    return torch.sigmoid(-margin)


def warn_of_probabilities(forward: Forward, values: Tensor, *, is_softmax: bool = True) -> None:
    """Warn once of a model that returns probabilities where logits are expected.

    Its last operation says so, or numbers in [0, 1], of which each row sums to 1, or which vary as
    those of a model that ends in a layer would not. This looks at values, so ``output``, which runs
    under vmap, must not call it.

    Parameters
    ----------
    forward
        The model.
    values
        What it returned, (..., classes), or (..., labels).
    is_softmax
        Whether rows of probabilities would sum to 1. Else each one is for itself.
    """
    # Autograd knows the operation, if the model has run with gradients. Else only numbers can tell.
    operation = last_operation(values)
    name = operation if operation in ("softmax", "sigmoid") else None
    if name is None and (is_softmax or operation not in _OF_LOGITS):
        name = _looks_like(forward, values, is_softmax)
    if name is not None:
        warn_once(
            "probabilities",
            "expected logits from the model, got numbers in [0, 1]"
            f"{' that sum to 1' * (name == 'softmax')}, as a {name} returns them; if they are "
            f"probabilities, outputs and scores are wrong; try the model without its {name}, or "
            f"one that returns torch.{'log' if name == 'softmax' else 'logit'} of them",
        )


def _looks_like(forward: Forward, values: Tensor, is_softmax: bool) -> str | None:
    """Return what the first samples look like: ``"softmax"``, ``"sigmoid"`` or None."""
    # (row, class), of sequences the first four tokens: one look at a few numbers is enough.
    flat = (values[:, :4] if values.ndim > 2 else values).flatten(0, -2)[:_MOST_ROWS]

    def ranges() -> Tensor:
        return torch.stack([flat.amin(-1), flat.amax(-1), flat.sum(-1)], 1)

    seen = _first_rows(forward, ("probabilities", is_softmax), ranges)
    if seen is None or bool((seen[:, 0] < 0).any() | (seen[:, 1] > 1).any()):
        return None
    if is_softmax:
        # A sum of probabilities that a model has rounded to half precision is not quite 1.
        eps = torch.finfo(next(iter(forward.parameters.values())).dtype).eps
        is_one = (seen[:, 2] - 1).abs() < max(1e-4, 2 * eps)
        return "softmax" if len(seen) > 2 and bool(is_one.all()) else None
    is_many = len(seen) * flat.shape[-1] >= _MANY_VALUES
    is_wide = bool(seen[:, 1].max() - seen[:, 0].min() >= _SPREAD)
    return "sigmoid" if is_many and is_wide else None


def warn_of_padding(forward: Forward, ids: Tensor, counted: Tensor | None = None) -> None:
    """Warn once of sequences with padding, of which no mask tells the model.

    Padding is the ``pad_token_id`` of the model's configuration at either end, or else an id that
    several sequences repeat at their ends, some more often than others.

    Parameters
    ----------
    forward
        The model.
    ids
        Tokens (batch, tokens).
    counted
        Whether the last token of a sequence counts in its output, (batch,).
    """
    if ids.ndim != 2 or ids.shape[1] < 2 or ids.is_floating_point():
        return

    def repetitions() -> Tensor:
        found = []
        for part in (ids, ids.flip(1)):
            # How many ids at the end are the last one: the product is 1 until another id comes.
            run = (part == part[:, -1:]).flip(1).long().cumprod(1).sum(1)
            found += [part[:, -1], run if counted is None else run * counted]
        return torch.stack(found, 1)

    seen = _first_rows(forward, "padding", repetitions)
    if seen is None:
        return
    known = getattr(getattr(forward.module, "config", None), "pad_token_id", None)
    # Columns are the id at the right end and its repetitions, then those at the left end.
    for last, run in (seen[:, :2].T, seen[:, 2:].T):
        last, run = last[run > 1], run[run > 1]
        if not len(run):
            continue
        is_known = (
            last == known if isinstance(known, int) else torch.zeros_like(run, dtype=torch.bool)
        )
        is_padded = bool((is_known.sum() > 1) | (is_known & (run > 2)).any())
        same = last == last.mode().values  # a few texts may end in two equal words
        if 2 * same.sum() > len(last) and len(run[same].unique()) > 1:
            is_padded |= bool(run[same].max() > 2)
        if is_padded:
            warn_once(
                "padding",
                "expected an attention_mask beside sequences that are padded, got none, so that "
                f"padding (id {int(last.mode().values)}) counts as text; try samples with a "
                "variable 'attention_mask', 0 at padding, as tokenizers return it, among the "
                "inputs of the task",
            )
            return


def _first_rows(forward: object, what: object, of_batch: Callable[[], Tensor]) -> Tensor | None:
    """Return numbers of the samples so far, (sample, number); None once these are enough.

    Nobody looks where a model has no values, or where TRAK's methods pass the module itself.
    """
    if not isinstance(forward, Forward):
        return None
    seen = _rows_seen.setdefault(forward.module, {})
    before = seen.get(what)
    if before is not None and len(before) >= _MOST_ROWS:
        return None
    if (rows := of_batch().detach()).is_meta:
        return None
    seen[what] = rows.cpu() if before is None else torch.cat([before, rows.cpu()])
    return seen[what]
