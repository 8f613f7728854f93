"""Causal language models: the next token, of whole sequences or token by token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import logsigmoid

from trakdask.checks import require_integer
from trakdask.models.tasks.logits import (
    MASK,
    ModelTask,
    as_tensors,
    call_model,
    margin,
    one_minus_p,
    shape_of,
    without_absent_mask,
)
from trakdask.models.tasks.protocol import Batch, Forward, reject_samples


@dataclass(frozen=True)
class CausalLM(ModelTask):
    """Next-token prediction, per sequence or per token.

    For every predicted token t, m_t = log p_t/(1-p_t) is the margin of the actual token. The output
    is the sum f = Σ m_t of these margins, and Q = mean_t(1 - p_t).

    Parameters
    ----------
    inputs
        Names of the variables that the model takes, each (batch, tokens); the first one holds the
        token ids. An ``"attention_mask"`` among them marks the padding of a sequence; samples that
        have none are not padded.
    labels
        Name of the variable with the token to predict at each position, or ``ignore_index`` (as in
        transformers, not shifted). By default ``labels``, if the samples have such a variable
        (sample, tokens), and else the token ids.
    position
        Name of an integer variable (batch,) with the position of the only token that is attributed;
        then f = m_t and Q = 1 - p_t. The token at position 0 is never predicted. See
        :func:`expand_tokens`.
    ignore_index
        Label of positions that are not predicted.
    positional
        Whether the inputs are passed in their order; otherwise by name.

    Raises
    ------
    ValueError
        When run, if logits are not (batch, tokens, vocabulary), labels are not (batch, tokens),
        tokens to predict are not in the vocabulary, a sequence has no token to predict (all of it
        is padding, or all labels are ``ignore_index``), or is longer than the model's
        ``config.max_position_embeddings``.

    Notes
    -----
    A token is predicted if its label is not ``ignore_index``, and it and the token before it are
    not masked. Other tokens contribute exactly nothing, whether padding is on the left or on the
    right. A sequence without predicted tokens is an error. (Padding on the left shifts absolute
    positions, so models that use these need ``position_ids`` among the inputs.) The model does not
    compute on padding on the right that all sequences of a micro-batch share; sequences of similar
    length are computed together.

    The output is the sum of the margins, not their mean, so that all tokens have the same weight in
    sequences of any length, as in the training loss of a batch, and the feature of a sequence is
    the sum of the features of its tokens. The loss ℓ = Σ log(1 + exp(-m_t)) is not a function of f
    alone. Q is the number for which Q·∇f is nearest to -∇ℓ as vectors in the space of the margins:
    (1 - p_t)_t projected on (1, ..., 1).

    For ``gradients="vmap"`` build a model of transformers with ``attn_implementation="eager"``.

    Cost: one more copy of the logits (batch, tokens, vocabulary). With ``position``, every token
    takes a forward and a backward pass of its whole sequence.

    References
    ----------
    Park et al. 2023, section 5.2 (language models: every token a classification). bergson's
    ``trak`` has the same Q.
    """

    default_damping: ClassVar[str] = "trace"
    inputs: tuple[str, ...] = ("input_ids", MASK)
    labels: str | None = None
    position: str | None = None
    ignore_index: int = -100
    positional: bool = False
    _other_variables: ClassVar[tuple[str, ...]] = ("labels", "position")

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = "try ignore_index=-100"
        require_integer("ignore_index", self.ignore_index, -(2**63), remedy=remedy)

    @property
    def token_variables(self) -> tuple[str, ...]:
        """Names of the variables (batch, tokens)."""
        return self.inputs if self.labels is None else (*self.inputs, self.labels)

    def for_variables(self, n_dims: Mapping[str, int]) -> CausalLM:
        """Return the task for samples with some variables, given their numbers of dimensions."""
        has_labels = self.labels is None and n_dims.get("labels") == 2
        inputs = self.inputs if self.positional else without_absent_mask(self.inputs, n_dims)
        return replace(self, inputs=inputs, labels="labels" if has_labels else self.labels)

    def output(self, forward: Forward, batch: Batch) -> Tensor:
        """Return the sum of the margins of the predicted tokens, (batch,)."""
        margins, predicted, _ = self._margins(forward, batch)
        return margins.masked_fill(~predicted, 0).sum(1)

    def out_to_loss(self, forward: Forward, batch: Batch) -> Tensor:
        """Return the mean of 1 - p over the predicted tokens, (batch,)."""
        margins, predicted, vocabulary = self._margins(forward, batch)
        self._reject_samples(forward, batch, predicted, vocabulary)
        total = one_minus_p(margins).masked_fill(~predicted, 0).sum(1)
        return total / predicted.sum(1).clamp(min=1)

    def log_probability(self, forward: Forward, batch: Batch) -> Tensor:
        """Return the sum of log p of the predicted tokens, (batch,)."""
        margins, predicted, _ = self._margins(forward, batch)
        return logsigmoid(margins).masked_fill(~predicted, 0).sum(1)

    def predicted(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return which of the tokens 1, 2, ... are predicted, bool (batch, tokens - 1)."""
        labels = self._labels(batch)
        predicted = labels[:, 1:] != self.ignore_index
        if MASK in self.inputs:
            attended = batch[MASK] != 0
            predicted = predicted & attended[:, 1:] & attended[:, :-1]
        return predicted

    def _margins(self, forward: Forward, batch: Batch) -> tuple[Tensor, Tensor, int]:
        """Return margins, whether each is predicted, and the size of the vocabulary.

        The first two are (batch, tokens - 1), or (batch, 1) for a single position.
        """
        labels, predicted = self._labels(batch), self.predicted(batch)
        logits = call_model(forward, batch, self.inputs, self.positional)
        if logits.ndim != 3 or logits.shape[:2] != labels.shape or logits.shape[2] < 2:
            raise ValueError(
                f"expected logits (batch, tokens, vocabulary) for labels {tuple(labels.shape)}, "
                f"got {shape_of(logits)}; try wrapping the model, or a task of your own"
            )
        vocabulary = logits.shape[2]
        target = labels[:, 1:].long()
        logits = logits[:, :-1]
        if self.position is not None:  # select before the logits are copied
            index = batch[self.position].long()[:, None] - 1
            valid = index.clamp(0, target.shape[1] - 1)
            logits = torch.take_along_dim(logits, valid[..., None], dim=1)
            target = torch.take_along_dim(target, valid, dim=1)
            predicted = torch.take_along_dim(predicted, valid, dim=1) & (valid == index)
        # `out_to_loss` rejects tokens that are out of range; here they would crash a CUDA kernel.
        target = target.masked_fill(~predicted, 0).clamp(0, vocabulary - 1)
        return margin(logits, target), predicted, vocabulary

    def _reject_samples(
        self, forward: Forward, batch: Batch, predicted: Tensor, vocabulary: int
    ) -> None:
        """Reject sequences without a token to predict, with unknown ones, or that are too long."""
        labels, name = self._labels(batch), self.labels or self.inputs[0]
        attended = batch[MASK] != 0 if MASK in self.inputs else torch.ones_like(labels)
        lengths = attended.sum(1)
        # With rotary positions the model would compute something for longer sequences, too.
        most = getattr(getattr(forward.module, "config", None), "max_position_embeddings", None)
        unknown = ((labels < 0) | (labels >= vocabulary))[:, 1:]

        def no_token(row: int) -> str:
            at = self.position
            place = f" at {at!r} = {int(batch[at][row])}" if at is not None else ""
            return (
                f"expected a token to predict{place}, got {int(lengths[row])} tokens, "
                f"{int((labels[row] == self.ignore_index).sum())} labels {self.ignore_index}, at "
                "sample {sample}; try leaving such samples out, or on_error='record'"
            )

        reject_samples(~predicted.any(1), no_token)
        reject_samples(
            self.predicted(batch) & unknown,
            lambda row, index: (
                f"expected tokens in 0..{vocabulary - 1} (the model's vocabulary) in {name!r}, got "
                f"{int(labels[row, index + 1])} at sample {{sample}}, token {index + 1}; try the "
                f"tokenizer of the training, or ignore_index={self.ignore_index} as label"
            ),
        )
        if isinstance(most, int) and most > 0:
            reject_samples(
                lengths > most,
                lambda row: (
                    f"expected at most {most} tokens (the model's max_position_embeddings), got "
                    f"{int(lengths[row])} at sample {{sample}}; try truncate=True in "
                    "td.from_dataframe, or shorter sequences"
                ),
            )

    def _labels(self, batch: Mapping[str, Tensor]) -> Tensor:
        name = self.labels or self.inputs[0]
        labels = batch[name]
        if labels.ndim != 2 or labels.shape[1] < 2 or labels.is_floating_point():
            raise ValueError(
                f"expected integers (batch, 2 or more tokens) in {name!r}, got {labels.dtype} of "
                f"shape {tuple(labels.shape)}; try padding the sequences to one length"
            )
        return labels


def expand_tokens(
    samples: Mapping[Any, Any], task: CausalLM | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """List every predicted token of some sequences, so that each can become a sample.

    Parameters
    ----------
    samples
        The task's variables by name: arrays, tensors or a Dataset.
    task
        Determines which tokens are predicted; ``CausalLM()`` by default.

    Returns
    -------
    ``sequence`` and ``position``, int64, one entry per token: the index of its sequence and its
    position in the sequence, ordered by both.

    Notes
    -----
    This is meant for targets: which training sequences made the model generate this token? The
    features of a sequence's tokens add up to the feature of the sequence. Cost: reads the tokens of
    all samples into memory.

    Examples
    --------
    >>> ids = np.array([[5, 6, 7], [8, 9, 0]])
    >>> samples = {"input_ids": ids, "attention_mask": (ids > 0).astype(int)}
    >>> sequence, position = expand_tokens(samples)
    >>> sequence, position
    (array([0, 0, 1]), array([1, 2, 1]))

    To make each token a sample, repeat the rows of its sequence and add its position. For a Dataset
    this is ``samples.isel(sample=sequence).assign_coords(token=("sample", position))``.

    >>> tokens = {name: array[sequence] for name, array in samples.items()} | {"token": position}
    >>> CausalLM(position="token").variables
    ('input_ids', 'attention_mask', 'token')
    """
    task = CausalLM() if task is None else task
    task = task.for_variables({str(name): np.ndim(samples[name]) for name in samples})
    names = [name for name in task.variables if name != task.position]
    predicted = task.predicted(as_tensors(samples, names))
    sequence, index = predicted.cpu().nonzero(as_tuple=True)
    return sequence.numpy(), index.numpy() + 1
