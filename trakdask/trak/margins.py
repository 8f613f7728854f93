"""Margins of classifiers, and the checks of their logits and labels."""

from __future__ import annotations

from torch import Tensor

from trakdask.models.tasks.logits import at_least_float32, margin

__all__ = ["checked_labels", "margins", "require_labels", "text_inputs"]


def margins(logits: Tensor, labels: Tensor) -> Tensor:
    """Return each sample's margin in the dtype of the logits, computed in at least float32."""
    labels = checked_labels(logits, labels)
    return margin(at_least_float32(logits), labels).to(logits.dtype)


def checked_labels(logits: object, labels: Tensor) -> Tensor:
    """Check types and shapes, but not values, which vmap hides; return the labels as int64."""
    if not isinstance(logits, Tensor):
        raise TypeError(
            f"expected the model to return a tensor of logits, got {type(logits).__name__}; try "
            "wrapping it in a module that returns model(...).logits"
        )
    if logits.ndim != 2 or logits.shape[1] < 2:
        raise ValueError(
            "expected the model to return logits (batch, classes) with 2 classes or more, got "
            f"shape {tuple(logits.shape)}; try wrapping it in a module that returns these"
        )
    if labels.shape != logits.shape[:1] or labels.is_floating_point():
        raise ValueError(
            f"expected integer labels of shape {tuple(logits.shape[:1])}, got {labels.dtype} of "
            f"shape {tuple(labels.shape)}; try labels.argmax(-1) if they are one-hot vectors"
        )
    return labels.long()


def require_labels(logits: Tensor, labels: Tensor) -> None:
    """Reject labels that are not classes; the message names the first."""
    n = logits.shape[-1]
    wrong = ((labels < 0) | (labels >= n)).nonzero()
    if len(wrong):
        sample = int(wrong[0, 0])
        raise ValueError(
            f"expected labels in 0..{n - 1} ({n} classes), got {int(labels[sample])} at sample "
            f"{sample} of the batch; try leaving such samples out"
        )


def text_inputs(
    input_ids: Tensor, token_type_ids: Tensor, attention_mask: Tensor
) -> dict[str, Tensor]:
    """Return the inputs with the names that models of transformers expect."""
    return {
        "input_ids": input_ids,
        "token_type_ids": token_type_ids,
        "attention_mask": attention_mask,
    }
