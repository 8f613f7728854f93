"""Cut the padding that all sequences of a batch share, so that nothing is computed on it.

This is padding on the right. Padding on the left stays: without it, tokens would have other
positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trakdask.models.independence import row_of, tolerance
from trakdask.models.tasks import Batch, Forward, Task
from trakdask.models.tasks.logits import MASK

# Tokens that are left of a batch of empty sequences; a next token needs two.
_LEAST = 2


def token_variables(task: Task, arrays: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the variables (batch, tokens) whose padding a mask (batch, tokens) marks."""
    names: tuple[str, ...] = getattr(task, "token_variables", ())
    return names if MASK in names and arrays[MASK].ndim == 2 else ()


def order_by_length(task: Task, arrays: Mapping[str, np.ndarray[Any, Any]]) -> Any:
    """Return the order in which samples are computed: the longest first, (sample,) integers.

    None if the task has no mask of padding.
    """
    if not token_variables(task, arrays):
        return None
    used = arrays[MASK] != 0
    # One more than the last position that is used; argmax finds the first True from the end.
    lengths = np.where(used.any(1), used.shape[1] - used[:, ::-1].argmax(1), 0)
    return np.lexsort((-used.sum(1), -lengths))  # stable; by tokens where padding is on the left


def trimmed(task: Task, batch: Batch) -> Batch:
    """Return the batch without the last tokens that are padding in all of its samples.

    For samples with a mask, of which :func:`ignores_padding` says that the model ignores padding.
    """
    used = (batch[MASK] != 0).any(0).nonzero()
    length = int(used[-1]) + 1 if len(used) else 0
    return _cut(batch, token_variables(task, batch), length)


def _cut(batch: Batch, names: tuple[str, ...], length: int) -> Batch:
    whole, length = batch[MASK].shape[1], max(length, _LEAST)

    def part(name: str, value: Tensor) -> Tensor:
        has_tokens = name in names and value.ndim > 1 and value.shape[1] == whole
        return value[:, :length] if has_tokens else value

    return Batch({name: part(name, value) for name, value in batch.items()})


def ignores_padding(forward: Forward, task: Any, batch: Batch) -> bool:
    """Return whether the logits of a model stay the same if padding is cut.

    The second half of the longest sequence is declared to be padding for that, so that it does not
    matter whether any sequence is padded. A model that ignores its attention mask gives other
    logits without the padding.
    """
    names = token_variables(task, batch)
    if not names:
        return False
    used = batch[MASK] != 0
    row = int(used.sum(1).argmax())
    places = used[row].nonzero()[:, 0]
    if len(places) < 2 * _LEAST:
        return False
    # The same tokens twice, once with the second half as padding, and once without it.
    half = int(places[len(places) // 2])
    shorter = row_of(batch, row)
    shorter[MASK] = shorter[MASK].clone()
    shorter[MASK][:, half:] = 0
    with torch.no_grad():
        whole, cut = (task.logits(forward, b) for b in (shorter, _cut(shorter, names, half)))
    if cut.ndim == 3:  # of tokens; logits at padding on the left do not matter
        kept = used[row, : cut.shape[1]]
        whole, cut = whole[:, : cut.shape[1]][:, kept], cut[:, kept]
    allowed = tolerance(cut.dtype, cut.device.type) * float(cut.abs().max())
    return bool(((whole - cut).abs() <= allowed).all())
