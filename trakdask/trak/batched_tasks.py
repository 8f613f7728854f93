"""The built-in model outputs in the batched form that the engines of ``trakdask.models`` use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from trakdask.models.tasks import Batch, Forward
from trakdask.trak.margins import margins, require_labels
from trakdask.trak.modelout_functions import (
    CLIPModelOutput,
    ImageClassificationModelOutput,
    TextClassificationModelOutput,
)
from trakdask.trak.pairs import matches, negatives

__all__ = ["BatchedTask", "batched_task"]


class BatchedTask(Protocol):
    """The batched form of a built-in output, as the engines of :mod:`trakdask.models` use it."""

    names: tuple[str, ...]
    """Names of the tensors of a batch, in their order."""

    def output(self, forward: Forward, batch: Batch) -> Tensor:
        """Return the model output of each sample, (batch,)."""

    def out_to_loss(self, forward: Forward, batch: Batch) -> Tensor:
        """Return the derivative of the loss of each sample, (batch,)."""

    def require_valid(self, forward: Forward, batch: Batch) -> None:
        """Reject invalid values in a batch for which the model failed."""


class _OfImages:
    names: tuple[str, ...] = ("image", "label")

    def __init__(self, modelout: ImageClassificationModelOutput) -> None:
        self._modelout = modelout

    def output(self, forward: Forward, batch: Batch) -> Tensor:
        return margins(forward(batch["image"]), batch["label"])

    def out_to_loss(self, forward: Forward, batch: Batch) -> Tensor:
        return self._modelout.one_minus_p(forward(batch["image"]), batch["label"])[:, 0]

    def require_valid(self, forward: Forward, batch: Batch) -> None:
        with torch.no_grad():
            require_labels(forward(batch["image"][:1]), batch["label"])


class _OfTexts:
    names: tuple[str, ...] = ("input_ids", "token_type_ids", "attention_mask", "label")

    def __init__(self, modelout: TextClassificationModelOutput) -> None:
        self._modelout = modelout

    def output(self, forward: Forward, batch: Batch) -> Tensor:
        return margins(self._logits(forward, batch), batch["label"])

    def out_to_loss(self, forward: Forward, batch: Batch) -> Tensor:
        return self._modelout.one_minus_p(self._logits(forward, batch), batch["label"])[:, 0]

    def require_valid(self, forward: Forward, batch: Batch) -> None:
        with torch.no_grad():
            one = Batch({name: tensor[:1] for name, tensor in batch.items()})
            require_labels(self._logits(forward, one), batch["label"])

    def _logits(self, forward: Forward, batch: Batch) -> Tensor:
        logits: Tensor = forward(**{name: batch[name] for name in self.names[:3]})
        return logits


class _OfPairs:
    names: tuple[str, ...] = ("image", "text")

    def __init__(self, modelout: CLIPModelOutput) -> None:
        self._modelout = modelout

    def output(self, forward: Forward, batch: Batch) -> Tensor:
        image, text, _ = forward(**batch)
        return matches(image, text, *negatives(self._modelout))

    def out_to_loss(self, forward: Forward, batch: Batch) -> Tensor:
        return self._modelout.one_minus_p(forward(**batch))[:, 0]

    def require_valid(self, forward: Forward, batch: Batch) -> None:
        pass  # no values of images and texts are invalid


_BATCHED: dict[type, Callable[[Any], BatchedTask]] = {
    ImageClassificationModelOutput: _OfImages,
    TextClassificationModelOutput: _OfTexts,
    CLIPModelOutput: _OfPairs,
}


def batched_task(modelout: object) -> BatchedTask | None:
    """Return the batched form of a built-in output.

    None for all others, which include subclasses of these and instances with replaced methods.
    """
    batched = _BATCHED.get(type(modelout))
    if batched is None or {"get_output", "get_out_to_loss_grad"} & set(vars(modelout)):
        return None
    return batched(modelout)
