"""Causal language models: the next token, of whole sequences or token by token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trakdask.models.tasks.logits import (
    as_names,
    as_tensors,
    call_model,
    check_variable,
    margin,
    one_minus_p,
    shape_of,
)
from trakdask.models.tasks.protocol import Batch, Forward, SampleError

__all__ = ["CausalLM", "expand_tokens"]

_MASK = "attention_mask"


@dataclass(frozen=True)
class CausalLM:
    """Next-token prediction, per sequence or per token.

    Of every predicted token t, m_t = log p_t/(1-p_t) is the margin of the token that is there. The
    output is their sum f = Σ m_t, and Q = mean_t(1 - p_t).

    Parameters
    ----------
    inputs
        Names of the variables that the model takes, each (batch, tokens); the first one holds the
        token ids. An ``"attention_mask"`` among them says where a sequence is padded.
    labels
        Name of the variable with the token to predict at each place, or ``ignore_index`` (as in
        transformers, not shifted). By default the token ids.
    position
        Name of an integer variable (batch,): only the token at this place (the first is 0, which
        nothing predicts) is the output, f = m_t and Q = 1 - p_t. See :func:`expand_tokens`.
    ignore_index
        Label of places that are not predicted.
    positional
        Pass the inputs in their order instead of by name.

    Raises
    ------
    ValueError
        When run, if logits are not (batch, tokens, vocabulary), labels not (batch, tokens), or
        tokens to predict not in the vocabulary.

    Notes
    -----
    A token is predicted if its label is not ``ignore_index``, and it and the token before it are
    attended to; others add exactly nothing, on whichever side the padding is. A sequence without
    any has f = 0, Q = 0 and no gradient. (Padding on the left shifts absolute positions: such
    models need ``position_ids`` among the inputs.)

    The sum, not the mean: tokens weigh alike in sequences of any length, as they do in the training
    loss of a batch, and the feature of a sequence is the sum of the features of its tokens. The
    loss ℓ = Σ log(1 + exp(-m_t)) is not a function of f alone. Q is the number for which Q·∇f is
    nearest to -∇ℓ as vectors in the space of the margins: (1 - p_t)_t projected on (1, ..., 1).

    For ``gradients="vmap"`` build a model of transformers with ``attn_implementation="eager"``.

    Cost: one more copy of the logits (batch, tokens, vocabulary); per token, a forward and backward
    pass of the whole sequence for each.

    References
    ----------
    Park et al. 2023, section 5.2 (language models: every token a classification). bergson's
    ``trak`` has the same Q.
    """

    inputs: tuple[str, ...] = ("input_ids", _MASK)
    labels: str | None = None
    position: str | None = None
    ignore_index: int = -100
    positional: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", as_names(self.inputs))
        check_variable(self.labels, "labels", optional=True)
        check_variable(self.position, "position", optional=True)
        if isinstance(self.ignore_index, bool) or not isinstance(self.ignore_index, int):
            raise TypeError(
                f"expected an integer as ignore_index, got {self.ignore_index!r}; try "
                "ignore_index=-100."
            )

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of the variables that the task reads."""
        names = (*self.inputs, self.labels, self.position)
        return tuple(dict.fromkeys(name for name in names if name is not None))

    def output(self, forward: Forward, batch: Batch) -> Tensor:
        """Return the sum of the margins of the predicted tokens, (batch,)."""
        margins, predicted, _ = self._margins(forward, batch)
        return margins.masked_fill(~predicted, 0).sum(1)

    def out_to_loss(self, forward: Forward, batch: Batch) -> Tensor:
        """Return the mean of 1 - p over the predicted tokens, (batch,)."""
        margins, predicted, vocabulary = self._margins(forward, batch)
        self._require_tokens(batch, vocabulary)
        total = one_minus_p(margins).masked_fill(~predicted, 0).sum(1)
        return total / predicted.sum(1).clamp(min=1)

    def predicted(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return which of the tokens 1, 2, ... are predicted, bool (batch, tokens - 1)."""
        labels = self._labels(batch)
        predicted = labels[:, 1:] != self.ignore_index
        if _MASK in self.inputs:
            attended = batch[_MASK] != 0
            predicted = predicted & attended[:, 1:] & attended[:, :-1]
        return predicted

    def _margins(self, forward: Forward, batch: Batch) -> tuple[Tensor, Tensor, int]:
        """Margins and whether they count, both (batch, tokens - 1), or (batch, 1) at a position.

        The third is the size of the vocabulary.
        """
        labels, predicted = self._labels(batch), self.predicted(batch)
        logits = call_model(forward, batch, self.inputs, self.positional)
        if logits.ndim != 3 or logits.shape[:2] != labels.shape or logits.shape[2] < 2:
            raise ValueError(
                f"expected logits (batch, tokens, vocabulary) for labels of shape "
                f"{tuple(labels.shape)}, got {shape_of(logits)} from the model; try wrapping the "
                "model, or a task of your own."
            )
        vocabulary = logits.shape[2]
        target = labels[:, 1:].long()
        logits = logits[:, :-1]
        if self.position is not None:  # one token's logits, before they are copied
            place = batch[self.position].long()[:, None] - 1
            near = place.clamp(0, target.shape[1] - 1)
            logits = torch.take_along_dim(logits, near[..., None], dim=1)
            target = torch.take_along_dim(target, near, dim=1)
            predicted = torch.take_along_dim(predicted, near, dim=1) & (near == place)
        # Tokens out of range are refused by `out_to_loss`; here they would stop a GPU.
        target = target.masked_fill(~predicted, 0).clamp(0, vocabulary - 1)
        return margin(logits, target), predicted, vocabulary

    def _require_tokens(self, batch: Batch, vocabulary: int) -> None:
        """Refuse tokens to predict that the model has no logit of."""
        labels = self._labels(batch)
        bad = self.predicted(batch) & ((labels < 0) | (labels >= vocabulary))[:, 1:]
        if bool(bad.any()):
            row, place = bad.nonzero()[0].tolist()
            name = self.inputs[0] if self.labels is None else self.labels
            raise SampleError(
                f"expected tokens in 0..{vocabulary - 1} (the model's vocabulary) in {name!r}, got "
                f"{int(labels[row, place + 1])} at sample {{sample}}, token {place + 1}; try "
                f"ignore_index={self.ignore_index} as the label of what is not predicted, or the "
                "tokenizer that the model was trained with.",
                row,
            )

    def _labels(self, batch: Mapping[str, Tensor]) -> Tensor:
        name = self.inputs[0] if self.labels is None else self.labels
        labels = batch[name]
        if labels.ndim != 2 or labels.shape[1] < 2 or labels.is_floating_point():
            raise ValueError(
                f"expected integer tokens (batch, tokens) with at least 2 tokens in {name!r}, got "
                f"{labels.dtype} of shape {tuple(labels.shape)}; try padding the sequences to one "
                "length."
            )
        return labels


def expand_tokens(
    samples: Mapping[Any, Any], task: CausalLM | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """List every predicted token of some sequences, to make each of them a sample.

    Parameters
    ----------
    samples
        The task's variables by name: arrays, tensors or a Dataset.
    task
        Says which tokens are predicted; ``CausalLM()`` unless given.

    Returns
    -------
    ``sequence`` and ``position``, int64, one entry per token: which sequence, and which place in
    it, ordered by sequence and place.

    Notes
    -----
    Meant for targets: which sequences of the training set made the model write this token? The
    features of one sequence's tokens add up to the feature of the sequence. Cost: reads all of the
    samples' tokens into memory.

    Examples
    --------
    >>> ids = np.array([[5, 6, 7], [8, 9, 0]])
    >>> samples = {"input_ids": ids, "attention_mask": (ids > 0).astype(int)}
    >>> sequence, position = expand_tokens(samples)
    >>> sequence, position
    (array([0, 0, 1]), array([1, 2, 1]))

    As samples, each with the rows of its sequence and its own place. Of a Dataset, they are
    ``samples.isel(sample=sequence).assign_coords(token=("sample", position))``.

    >>> tokens = {name: array[sequence] for name, array in samples.items()} | {"token": position}
    >>> CausalLM(position="token").variables
    ('input_ids', 'attention_mask', 'token')
    """
    task = CausalLM() if task is None else task
    if not isinstance(task, CausalLM):
        raise TypeError(
            f"expected td.tasks.CausalLM as task, got {task!r}; try task=td.tasks.CausalLM(...)."
        )
    names = [name for name in task.variables if name != task.position]
    predicted = task.predicted(as_tensors(samples, names))
    sequence, place = predicted.cpu().nonzero(as_tuple=True)
    return sequence.numpy(), place.numpy() + 1
