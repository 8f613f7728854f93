"""Texts token by token: the next token, a label of each, or the tokens of another text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate, logsigmoid

from trakdask.checks import require_integer
from trakdask.models.tasks.logits import (
    MASK,
    ModelTask,
    as_tensors,
    at_least_float32,
    margin,
    one_minus_p,
    option,
    part_of,
    shape_of,
    task,
    warn_of_padding,
    warn_of_probabilities,
)
from trakdask.models.tasks.protocol import Batch, Forward, reject_samples


@task
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
        ``CausalLM.tokens``.
    ignore_index
        Label of positions that are not predicted.
    positional
        Whether the inputs are passed in their order; otherwise by name.
    output
        Name or position of the logits in what the model returns, if that is a mapping, an object or
        a tuple. By default ``logits``, or the first one.

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

    Examples
    --------
    >>> import trakdask as td
    >>> td.tasks.CausalLM().variables, td.tasks.CausalLM(position="token").variables
    (('input_ids', 'attention_mask'), ('input_ids', 'attention_mask', 'token'))
    """

    default_damping: ClassVar[str] = "trace"
    inputs: tuple[str, ...] = ("input_ids", MASK)
    labels: str | None = None
    position: str | None = None
    ignore_index: int = -100
    positional: bool = False
    returned: str | int | None = option(default=None, alias="output")
    _other_variables: ClassVar[tuple[str, ...]] = ("labels", "position")
    _shift: ClassVar[int] = 1
    """How many tokens before its label the logits of a token are."""
    _known: ClassVar[str] = "tokens in 0..{most} (the model's vocabulary)"
    _remedy: ClassVar[str] = "the tokenizer of the training"

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = "try ignore_index=-100"
        require_integer("ignore_index", self.ignore_index, -(2**63), remedy=remedy)

    @property
    def loss_kind(self) -> str:
        """Only the loss of one token is a function of f."""
        return "other" if self.position is None else "cross-entropy"

    @property
    def naming(self) -> tuple[str, ...]:
        """The options that do not change the gradient of a token."""
        return (*super().naming, "ignore_index")

    @property
    def number_variables(self) -> tuple[str, ...]:
        """The variable with the position."""
        return () if self.position is None else (self.position,)

    @property
    def token_variables(self) -> tuple[str, ...]:
        """Names of the variables (batch, tokens)."""
        return self.inputs if self.labels is None else (*self.inputs, self.labels)

    def tokens(self, samples: Mapping[Any, Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """List every predicted token of some sequences, so that each can become a sample.

        Parameters
        ----------
        samples
            The task's variables by name: arrays, tensors or a Dataset.

        Returns
        -------
        ``sequence`` and ``position``, int64, one entry per token: the index of its sequence and its
        position in the sequence, ordered by both.

        Notes
        -----
        This is meant for targets: which training sequences made the model generate this token? The
        features of a sequence's tokens add up to the feature of the sequence. Cost: reads the
        tokens of all samples into memory.

        Examples
        --------
        >>> import numpy as np, trakdask as td
        >>> ids = np.array([[5, 6, 7], [8, 9, 0]])
        >>> samples = {"input_ids": ids, "attention_mask": (ids > 0).astype(int)}
        >>> sequence, position = td.tasks.CausalLM().tokens(samples)
        >>> sequence, position
        (array([0, 0, 1]), array([1, 2, 1]))

        To make each token a sample, repeat the rows of its sequence and add its position. For a
        Dataset this is
        ``samples.isel(sample=sequence).assign_coords(token=("sample", position))``.

        >>> tokens = {name: array[sequence] for name, array in samples.items()}
        >>> tokens["token"] = position
        >>> td.tasks.CausalLM(position="token").variables
        ('input_ids', 'attention_mask', 'token')
        """
        task = self.for_variables({str(name): np.ndim(samples[name]) for name in samples})
        names = [name for name in task.variables if name != task.position]
        predicted = task.predicted(as_tensors(samples, names))
        sequence, index = predicted.cpu().nonzero(as_tuple=True)
        return sequence.numpy(), index.numpy() + task._shift

    def for_variables(self, n_dims: Mapping[str, int]) -> Any:
        """Return the task for samples with some variables, given their numbers of dimensions."""
        task, has_labels = super().for_variables(n_dims), n_dims.get("labels") == 2
        return replace(task, labels="labels") if has_labels and self.labels is None else task

    def output(self, forward: Forward, batch: Batch) -> Tensor:
        """Return the sum of the margins of the predicted tokens, (batch,)."""
        margins, predicted, _ = self._margins(forward, batch)
        # Not times 0, because margins of padding may be infinite, and the product would be NaN.
        return margins.masked_fill(~predicted, 0).sum(1)

    def out_to_loss(self, forward: Forward, batch: Batch) -> Tensor:
        """Return the mean of 1 - p over the predicted tokens, (batch,)."""
        margins, predicted, logits = self._margins(forward, batch)
        self._reject_samples(forward, batch, predicted, logits.shape[2])
        warn_of_probabilities(forward, logits)
        if MASK not in self.inputs:
            # Padding that follows all tokens to predict changes nothing in a causal model.
            is_last = self._labels(batch)[:, -1] != self.ignore_index
            counted = is_last if self._shift else None
            warn_of_padding(forward, batch[self.inputs[0]], counted)
        # Sequences without a token to predict are rejected, but maybe later: until then, 0 / 1.
        total = one_minus_p(margins).masked_fill(~predicted, 0).sum(1)
        return total / predicted.sum(1).clamp(min=1)

    def log_probability(self, forward: Forward, batch: Batch) -> Tensor:
        """Return the sum of log p of the predicted tokens, (batch,)."""
        margins, predicted, _ = self._margins(forward, batch)
        # A margin is log p/(1-p), of which the sigmoid is p.
        return logsigmoid(margins).masked_fill(~predicted, 0).sum(1)

    def predicted(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return which of the tokens 1, 2, ... are predicted, bool (batch, tokens - 1)."""
        labels, shift = self._labels(batch), self._shift
        predicted = labels[:, shift:] != self.ignore_index
        if MASK in self.token_variables:
            attended = batch[MASK] != 0
            before = attended[:, : attended.shape[1] - shift]
            predicted = predicted & attended[:, shift:] & before
        return predicted

    def _margins(self, forward: Forward, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return margins, whether each is predicted, and the logits that they are of.

        The first two are (batch, tokens - 1), or (batch, 1) for a single position.
        """
        # 1. Logits of all tokens, and what they are to predict: those of token t, the label of
        # token t + shift.
        labels, predicted, shift = self._labels(batch), self.predicted(batch), self._shift
        logits = self.logits(forward, batch)
        if logits.ndim != 3 or logits.shape[:2] != labels.shape or logits.shape[2] < 2:
            raise ValueError(
                f"expected logits (batch, tokens, vocabulary) for labels {tuple(labels.shape)}, "
                f"got {shape_of(logits)}; try wrapping the model, or a task of your own"
            )
        target = labels[:, shift:].long()
        logits = logits[:, : labels.shape[1] - shift]
        # 2. Of these a single one, if the task is about one: index is its place among the predicted
        # ones. Places that do not exist are clamped for gather, and not predicted.
        if self.position is not None:  # select before the logits are copied
            index = batch[self.position].long()[:, None] - shift
            valid = index.clamp(0, target.shape[1] - 1)
            logits = torch.take_along_dim(logits, valid[..., None], dim=1)
            target = torch.take_along_dim(target, valid, dim=1)
            predicted = torch.take_along_dim(predicted, valid, dim=1) & (valid == index)
        # `out_to_loss` rejects tokens that are out of range; here they would crash a CUDA kernel.
        target = target.masked_fill(~predicted, 0).clamp(0, logits.shape[2] - 1)
        return margin(logits, target), predicted, logits

    def _reject_samples(
        self, forward: Forward, batch: Batch, predicted: Tensor, vocabulary: int
    ) -> None:
        """Reject sequences without a token to predict, with unknown ones, or that are too long."""
        labels, name = self._labels(batch), self.labels or self.inputs[0]
        # Messages are functions, because each number in them is read from the device.
        attended = batch[MASK] != 0 if MASK in self.inputs else torch.ones_like(labels)
        shift = self._shift
        lengths = attended.sum(1)
        # With rotary positions the model would compute something for longer sequences, too.
        most = getattr(getattr(forward.module, "config", None), "max_position_embeddings", None)
        unknown = ((labels < 0) | (labels >= vocabulary))[:, shift:]

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
                f"expected {self._known.format(most=vocabulary - 1)} in {name!r}, got "
                f"{int(labels[row, index + shift])} at sample {{sample}}, token {index + shift}; "
                f"try {self._remedy}, or ignore_index={self.ignore_index} as label"
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
        if labels.ndim != 2 or labels.shape[1] <= self._shift or labels.is_floating_point():
            raise ValueError(
                f"expected integers (batch, {self._shift + 1} or more tokens) in {name!r}, got "
                f"{labels.dtype} of shape {tuple(labels.shape)}; try padding the sequences to one "
                "length"
            )
        return labels


@task
class TokenClassification(CausalLM):
    """A label of each token, such as the part of speech or the name that a word belongs to.

    Every labelled token t is a classification with the margin m_t = log p_t/(1-p_t) of its label.
    As in :class:`CausalLM`, f = Σ m_t, and Q = mean_t(1 - p_t).

    Parameters
    ----------
    inputs, position, ignore_index, positional, output
        As in :class:`CausalLM`.
    labels
        Name of the variable with the class of each token (batch, tokens), or ``ignore_index``.

    Raises
    ------
    ValueError
        When run, as :class:`CausalLM`.

    Notes
    -----
    A token counts if it is not masked, and its label is not ``ignore_index``. The loss
    ℓ = Σ log(1 + exp(-m_t)) is not a function of f alone; see :class:`MultiLabel` for what Q is
    then. With ``position`` f is the margin of one token, and the loss is.

    References
    ----------
    Park et al. 2023, section 5.2 (every token a classification).

    Examples
    --------
    >>> import trakdask as td
    >>> td.tasks.TokenClassification(labels="tags").variables
    ('input_ids', 'attention_mask', 'tags')
    """

    labels: str | None = "labels"
    _shift: ClassVar[int] = 0
    _known: ClassVar[str] = "classes in 0..{most} (those of the model)"
    _remedy: ClassVar[str] = "labels that start at 0"


@task
class Segmentation(TokenClassification):
    """A class of each pixel of an image; as :class:`TokenClassification`, with pixels as tokens.

    Parameters
    ----------
    inputs, position, positional, output
        As in :class:`CausalLM`; models of torchvision return their logits as
        ``output="out"``. The position of a pixel counts row by row.
    labels
        Name of the variable with the class of each pixel (batch, rows, columns), or
        ``ignore_index``.
    ignore_index
        Label of pixels that do not count.

    Raises
    ------
    ValueError
        When run, as :class:`CausalLM`, or if logits are not (batch, classes, rows, columns).

    Notes
    -----
    Logits of fewer rows and columns are interpolated to those of the labels, as in the losses of
    transformers.

    References
    ----------
    Park et al. 2023, section 3.3, for a single pixel.

    Examples
    --------
    Which pixels of a digit are ink?

    >>> import torch, trakdask as td
    >>> digits, _ = td.examples.digits()
    >>> samples = digits.assign(labels=(digits.image[:, 0] > 0.5).astype(int))
    >>> td.Model(torch.nn.Conv2d(1, 2, 3, padding=1), task=td.tasks.Segmentation())
    <trakdask.Model: 1 checkpoint, Segmentation, 20 of 20 parameters>
    """

    inputs: tuple[str, ...] = ("image",)
    ignore_index: int = 255
    positional: bool = True

    @property
    def token_variables(self) -> tuple[str, ...]:
        """None: no mask marks padding."""
        return ()

    def logits(self, forward: Forward, batch: Batch) -> Tensor:
        """Return the logits of each pixel, (batch, pixels, classes)."""
        logits, size = super().logits(forward, batch), batch[str(self.labels)].shape[1:]
        if logits.ndim != 4 or len(size) != 2:
            raise ValueError(
                f"expected logits (batch, classes, rows, columns), and labels without classes, got "
                f"{shape_of(logits)} and {shape_of(batch[str(self.labels)])}; try wrapping the "
                "model, or labels.argmax(1) if they are one-hot"
            )
        if logits.shape[2:] != size:
            logits = interpolate(logits, size=tuple(size), mode="bilinear", align_corners=False)
        return logits.flatten(2).transpose(1, 2)

    def _labels(self, batch: Mapping[str, Tensor]) -> Tensor:
        return super()._labels({str(self.labels): batch[str(self.labels)].flatten(1)})


@task
class Seq2Seq(CausalLM):
    """A text from another one, such as a translation or a summary, by T5, BART and the like.

    For every token t of the answer, m_t = log p_t/(1-p_t) is its margin, given the text and the
    tokens before it. As in :class:`CausalLM`, f = Σ m_t, and Q = mean_t(1 - p_t).

    Parameters
    ----------
    inputs, position, ignore_index, output
        As in :class:`CausalLM`; inputs are those of the encoder.
    labels
        Name of the variable with the tokens of the answer (batch, tokens), or ``ignore_index``. The
        model gets them as ``labels``, and makes the inputs of its decoder of them.
    positional
        Whether the inputs are passed in their order; labels are passed by name.

    Raises
    ------
    ValueError
        When run, as :class:`CausalLM`.

    Notes
    -----
    As in the losses of transformers, padding of the answer counts, unless its labels are
    ``ignore_index``.

    References
    ----------
    Park et al. 2023, section 5.3, has this output for T5.

    Examples
    --------
    >>> import trakdask as td
    >>> td.tasks.Seq2Seq().variables
    ('input_ids', 'attention_mask', 'labels')
    """

    labels: str | None = "labels"
    _shift: ClassVar[int] = 0

    @property
    def token_variables(self) -> tuple[str, ...]:
        """None: answers have tokens of their own, so that padding is not cut."""
        return ()

    def logits(self, forward: Forward, batch: Batch) -> Tensor:
        """Return the logits of the tokens of the answer, (batch, tokens, vocabulary)."""
        result = self._call(forward, batch, labels=self._labels(batch).long())
        return at_least_float32(part_of(result, self.returned))


@task
class QuestionAnswering(ModelTask):
    """The answer to a question as a part of a text, from its first token to its last one.

    The first token and the last one are a classification each, of all tokens. The output is the sum
    of both margins log p/(1-p), f = m_start + m_end, and Q = 1 - (p_start + p_end)/2.

    Parameters
    ----------
    inputs
        Names of the variables that the model takes, each (batch, tokens). Samples without an
        ``"attention_mask"`` are not padded.
    start, end
        Names of the variables (batch,) with the positions of the first and the last token.
    positional
        Whether the inputs are passed in their order; otherwise by name.
    output
        Names or positions of both logits (batch, tokens) in what the model returns.

    Raises
    ------
    TypeError, ValueError
        If an option is invalid. When run, if logits are not (batch, tokens), or a position is not
        among them.

    Notes
    -----
    The loss is the sum of two cross-entropies, ℓ = Σ log(1 + exp(-m)); transformers have half of
    it. Q is the number for which Q·∇f is nearest to -∇ℓ as vectors in the space of the margins.

    References
    ----------
    Park et al. 2023, section 3.3, for a single classification.

    Examples
    --------
    >>> import trakdask as td
    >>> td.tasks.QuestionAnswering().variables
    ('input_ids', 'attention_mask', 'start_positions', 'end_positions')
    """

    default_estimator: ClassVar[str] = "soft"
    loss_kind: ClassVar[str] = "other"
    inputs: tuple[str, ...] = ("input_ids", MASK)
    start: str = "start_positions"
    end: str = "end_positions"
    positional: bool = False
    returned: Any = option(default=None, alias="output")
    _other_variables: ClassVar[tuple[str, ...]] = ("start", "end")

    def output(self, forward: Forward, batch: Batch) -> Tensor:
        """Return the sum of both margins, (batch,)."""
        return self._margins(self._logits(forward, batch), batch).sum(1)

    def out_to_loss(self, forward: Forward, batch: Batch) -> Tensor:
        """Return the mean of 1 - p of both, (batch,)."""
        logits = self._logits(forward, batch)
        n = logits.shape[2]
        for name in (self.start, self.end):
            at = batch[name]
            reject_samples(
                (at < 0) | (at >= n),
                lambda row, name=name, at=at: (
                    f"expected a position in 0..{n - 1} in {name!r}, got {int(at[row])} at sample "
                    "{sample}; try leaving such samples out"
                ),
            )
        warn_of_probabilities(forward, logits)
        if MASK not in self.inputs:
            warn_of_padding(forward, batch[self.inputs[0]])
        return one_minus_p(self._margins(logits, batch)).mean(1)

    def _margins(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the margins of the first and the last token, (batch, 2)."""
        positions = torch.stack([batch[self.start], batch[self.end]], 1).long()
        return margin(logits, positions.clamp(0, logits.shape[2] - 1))

    def _logits(self, forward: Forward, batch: Batch) -> Tensor:
        """Return the logits of the first and the last token, (batch, 2, tokens)."""
        result = self._call(forward, batch)
        # A named tuple has names, which tell more than its order.
        is_plain = isinstance(result, (tuple, list)) and not hasattr(result, "start_logits")
        names = self.returned or ((0, 1) if is_plain else ("start_logits", "end_logits"))
        start, end = (part_of(result, name) for name in names)
        if start.ndim != 2 or start.shape != end.shape:
            raise ValueError(
                f"expected logits (batch, tokens) of the first and of the last token, got "
                f"{shape_of(start)} and {shape_of(end)}; try output=(names of both), or wrapping "
                "the model"
            )
        return at_least_float32(torch.stack([start, end], 1))
