"""Tasks with known answers: one of many classes, one of two, several labels, or a number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from trakdask.checks import require_number, shown
from trakdask.models.tasks.logits import (
    MASK,
    ModelTask,
    margin,
    one_minus_p,
    option,
    shape_of,
    task,
    warn_of_padding,
    warn_of_probabilities,
)
from trakdask.models.tasks.protocol import Batch, Forward, reject_samples


@task
class Classification(ModelTask):
    """Classification of rows of a table, or of anything else, into two or more classes.

    The output is the margin log p/(1-p) of the correct class, f = logit_y - logsumexp(other
    logits); Q = 1 - p, with p the softmax at ``temperature`` (the margin has no temperature).

    Parameters
    ----------
    inputs
        Names of the variables that the model takes, each (batch, ...).
    label
        Name of the integer classes (batch,).
    temperature
        Divides the logits in Q only.
    positional
        Whether the inputs are passed in their order; otherwise by name.
    weights
        Weights of the classes in the loss, as torch's ``cross_entropy`` takes them; Q has them as a
        factor. The default estimator is then ``"trak"``, since Q is no probability.
    output
        Name or position of the logits in what the model returns, if that is a mapping, an object or
        a tuple. By default ``logits``, or the first one.

    Raises
    ------
    TypeError, ValueError
        If an option is invalid. When run, if logits are not (batch, classes), labels are not
        integers below the number of classes, or there is not one weight of each class.

    Notes
    -----
    The cross-entropy is ℓ = log(1 + exp(-f)), hence Q = -dℓ/df at temperature 1. With a weight w of
    the label it is w times that.

    References
    ----------
    Park et al. 2023, section 3.3.

    Examples
    --------
    Four measurements of irises, whose third species counts twice in the loss:

    >>> import torch, trakdask as td
    >>> task = td.tasks.Classification(["x"], weights=[1, 1, 2])
    >>> td.Model(torch.nn.Linear(4, 3), task=task)
    <trakdask.Model: 1 checkpoint, Classification, 15 of 15 parameters>
    """

    label: str = "label"
    temperature: float = 1.0
    positional: bool = True
    weights: Sequence[float] | None = option(default=None)
    returned: str | int | None = option(default=None, alias="output")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("temperature", self.temperature, remedy="try temperature=1.0")
        if self.weights is not None:
            weights = np.asarray(self.weights, np.float64)
            if weights.ndim != 1 or not (np.isfinite(weights) & (weights >= 0)).all():
                raise ValueError(
                    f"expected a finite weight >= 0 of each class, got {shown(self.weights)}; try "
                    "weights=[1.0, 2.0]"
                )
            # As Python's numbers, so that the text of a task is the same whatever array they came
            # from.
            object.__setattr__(self, "weights", tuple(weights.tolist()))

    @property
    def loss_kind(self) -> str:
        """How the loss follows from f, and from Q if it has weights."""
        if self.weights is None:
            return "cross-entropy"
        return "weighted cross-entropy" if self.temperature == 1 else "other"

    @property
    def default_estimator(self) -> str:
        """``"soft"`` where Q is a probability."""
        return "soft" if self.weights is None else "trak"

    def output(self, forward: Forward, batch: Batch) -> Tensor:
        """Return the margin of the correct class, (batch,)."""
        return margin(*self._logits(forward, batch))

    def out_to_loss(self, forward: Forward, batch: Batch) -> Tensor:
        """Return 1 - p of the correct class times its weight, (batch,)."""
        logits, label = self._logits(forward, batch)
        labels, n = batch[self.label], logits.shape[1]
        warn_of_probabilities(forward, logits)
        if self.token_variables and MASK not in self.inputs:
            warn_of_padding(forward, batch[self.inputs[0]])
        reject_samples(
            (labels < 0) | (labels >= n),
            lambda row: (
                f"expected {self.label} in 0..{n - 1} ({n} classes), got {int(labels[row])} at "
                "sample {sample}; try labels that start at 0, or leaving such samples out"
            ),
        )
        # 1 - p at this temperature: the margin of divided logits is not the divided margin.
        q = one_minus_p(margin(logits / self.temperature, label))
        if self.weights is None:
            return q
        if len(self.weights) != n:
            raise ValueError(
                f"expected a weight of each of {n} classes, got {len(self.weights)} weights; try "
                f"weights=[...] with {n} numbers"
            )
        return q * q.new_tensor(self.weights)[label]

    def _logits(self, forward: Forward, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the logits (batch, classes) and the labels (batch,), int64.

        Labels that are out of range are clamped, because they would crash a CUDA kernel, and vmap
        cannot look at values. ``out_to_loss`` rejects them.
        """
        logits = self.logits(forward, batch)
        label = batch[self.label]
        if logits.ndim != 2 or logits.shape[1] < 2 or len(logits) != len(label):
            raise ValueError(
                f"expected logits ({len(label)}, classes) of 2 or more classes, got "
                f"{shape_of(logits)}; try wrapping the model, or td.tasks.BinaryClassification"
            )
        if label.ndim != 1 or label.is_floating_point() or label.is_complex():
            raise ValueError(
                f"expected integer classes (batch,) in {self.label!r}, got {label.dtype} of shape "
                f"{tuple(label.shape)}; try labels.argmax(1) if they are one-hot, or .astype(int)"
            )
        return logits, label.long().clamp(0, logits.shape[1] - 1)


@dataclass(frozen=True)
class WrongClass:
    """How likely the likeliest wrong class of a task is among the wrong ones; Q of the task.

    The output is log r_k = logit_k - logsumexp(logits of wrong classes), for the wrong class k with
    the largest logit. It is 0 for two classes.
    """

    of: Classification

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of the variables that the task reads."""
        return self.of.variables

    def output(self, forward: Forward, batch: Batch) -> Tensor:
        """Return log r of the likeliest wrong class, (batch,)."""
        logits, label = self.of._logits(forward, batch)
        # (batch, classes), where the right class has no part in the maximum and in the sum.
        wrong = logits.scatter(-1, label[..., None], -torch.inf)
        return wrong.amax(-1) - wrong.logsumexp(-1)

    def out_to_loss(self, forward: Forward, batch: Batch) -> Tensor:
        """Return Q of the task, (batch,)."""
        return self.of.out_to_loss(forward, batch)


class ImageClassification(Classification):
    """Classification of images, or of any other single tensor, into two or more classes.

    Output and Q are the same as :class:`Classification`'s.

    Parameters
    ----------
    temperature
        Divides the logits in Q only.
    image, label
        Names of the variables: model input (batch, ...) and integer class (batch,).
    weights, output
        As in :class:`Classification`.

    Raises
    ------
    ValueError
        As :class:`Classification`.

    References
    ----------
    Park et al. 2023, section 3.3; traker's ``ImageClassificationModelOutput``.

    Examples
    --------
    >>> import trakdask as td
    >>> train, test = td.examples.digits()  # with the variable image and the coordinate label
    >>> model = td.Model(td.examples.digits_mlp(), task=td.tasks.ImageClassification())
    >>> td.featurize(train, model).sizes["sample"]
    1597
    """

    def __init__(
        self,
        temperature: float = 1.0,
        image: str = "image",
        label: str = "label",
        *,
        weights: Sequence[float] | None = None,
        output: str | int | None = None,
    ) -> None:
        super().__init__((image,), label, temperature, weights=weights, output=output)


@task
class TextClassification(Classification):
    """Classification of token sequences into two or more classes.

    As :class:`Classification`, with the names of variables that models of transformers take.

    Parameters
    ----------
    inputs
        Names of the variables that the model takes, each (batch, tokens). Samples without an
        ``"attention_mask"`` are not padded.
    label
        Name of the integer classes (batch,). By default also ``labels``, as transformers names
        them, if there is no ``label``.
    temperature
        Divides the logits in Q only.
    positional
        Whether the inputs are passed in their order; otherwise by name.
    weights, output
        As in :class:`Classification`.

    Raises
    ------
    TypeError, ValueError
        If an option is invalid. When run, if logits are not (batch, classes), or labels are not
        integers below the number of classes.

    Notes
    -----
    Models of transformers take their inputs by name and return an object with ``logits``. Padding
    is ignored only if the model gets an attention mask. Encoders of transformers 5 branch on the
    values of that mask, so vmap cannot run them: use ``gradients="loop"``, or omit the mask if
    nothing is padded.

    References
    ----------
    Park et al. 2023, section 3.3; traker's ``TextClassificationModelOutput``, whose inputs are
    ``("input_ids", "token_type_ids", "attention_mask")``, by name.

    Examples
    --------
    >>> import trakdask as td
    >>> td.tasks.TextClassification().variables
    ('input_ids', 'attention_mask', 'label')
    """

    inputs: tuple[str, ...] = ("input_ids", "attention_mask")
    positional: bool = False

    @property
    def token_variables(self) -> tuple[str, ...]:
        """Names of the variables (batch, tokens)."""
        return self.inputs

    def for_variables(self, n_dims: Mapping[str, int]) -> Any:
        """Return the task for samples with some variables, given their numbers of dimensions.

        Classes are read from ``labels``, as transformers names them, if there is no ``label``.
        """
        task = super().for_variables(n_dims)
        # Not where the user has named another variable, nor labels of tokens, which have two axes.
        is_there = self.label in n_dims or self.label != "label" or n_dims.get("labels") != 1
        return task if is_there else replace(task, label="labels")


@task
class MultiLabel(ModelTask):
    """Several independent yes-or-no labels per sample, one logit each.

    With the signed logits m_k (z_k for label 1, -z_k for label 0), which are log p_k/(1-p_k) of the
    true answers, the output is their sum f = Σ m_k, and Q = mean_k(1 - p_k).

    Parameters
    ----------
    inputs
        Names of the variables that the model takes.
    label
        Name of the labels (batch, labels), 0 or 1, of any dtype.
    positional
        Whether the inputs are passed in their order; otherwise by name.
    output
        Name or position of the logits in what the model returns, if that is a mapping, an object or
        a tuple. By default ``logits``, or the first one.

    Raises
    ------
    ValueError
        When run, if logits and labels differ in shape, or a label is not 0 or 1.

    Notes
    -----
    The loss ℓ = Σ log(1 + exp(-m_k)) is not a function of f alone, so it has no derivative with
    respect to f. Q is the number for which Q·∇f is nearest to -∇ℓ as vectors in the space of the
    m_k: (1 - p_k)_k projected on (1, ..., 1). It is the derivative of -ℓ with respect to f if all
    m_k increase equally, and exact for one label. To attribute labels separately, make
    (sample, label) pairs the samples of a :class:`BinaryClassification`.

    References
    ----------
    Park et al. 2023, section 3, for a single label.

    Examples
    --------
    Is a digit even, and is it above 4?

    >>> import numpy as np, trakdask as td
    >>> digits, _ = td.examples.digits()
    >>> answers = np.stack([digits.label % 2 == 0, digits.label > 4], axis=1)
    >>> samples = digits.assign(answers=(("sample", "question"), answers))
    >>> td.tasks.MultiLabel(["image"], label="answers").variables
    ('image', 'answers')
    """

    default_estimator: ClassVar[str] = "soft"
    loss_kind: ClassVar[str] = "other"
    label: str = "label"
    positional: bool = True
    returned: str | int | None = option(default=None, alias="output")

    def output(self, forward: Forward, batch: Batch) -> Tensor:
        """Return the sum of the signed logits, (batch,)."""
        return self._signed_logits(*self._shaped(forward, batch)).sum(1)

    def out_to_loss(self, forward: Forward, batch: Batch) -> Tensor:
        """Return the mean of 1 - p over the labels, (batch,)."""
        label = batch[self.label]
        reject_samples(
            (label != 0) & (label != 1),
            lambda *place: (
                f"expected 0 or 1 in {self.label!r}, got {label[place].item()} at sample "
                "{sample}; try (labels > 0).astype(int) for signs, or task='classification'"
            ),
        )
        logits, label = self._shaped(forward, batch)
        signed = self._signed_logits(logits, label)
        warn_of_probabilities(forward, logits, is_softmax=False)
        return one_minus_p(signed).mean(1)

    def _signed_logits(self, logits: Tensor, label: Tensor) -> Tensor:
        """Return the logits of the true answers, (batch, labels)."""
        if logits.ndim != 2 or logits.shape != label.shape:
            raise ValueError(
                f"expected logits and labels of one shape (batch, labels), got "
                f"{tuple(logits.shape)} and {tuple(label.shape)} in {self.label!r}; try wrapping "
                "the model so that it returns one logit per label"
            )
        return logits * (2 * label.to(logits.dtype) - 1)

    def _shaped(self, forward: Forward, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.logits(forward, batch), batch[self.label]


class BinaryClassification(MultiLabel):
    """Classification into two classes by a single logit.

    The output is the signed logit, f = z for label 1 and -z for label 0, which is log p/(1-p) of
    the true class; Q = 1 - p. It is a :class:`MultiLabel` with one label.

    Parameters
    ----------
    inputs
        Names of the variables that the model takes.
    label
        Name of the labels (batch,), 0 or 1, of any dtype.
    positional
        Whether the inputs are passed in their order; otherwise by name.
    output
        As in :class:`MultiLabel`.

    Raises
    ------
    ValueError
        When run, if there is not one logit and one label per sample, or a label is not 0 or 1.

    Notes
    -----
    The binary cross-entropy is ℓ = log(1 + exp(-f)), hence Q = -dℓ/df = 1/(1 + exp(f)).

    References
    ----------
    Park et al. 2023, section 3 (logistic regression).

    Examples
    --------
    >>> import torch, trakdask as td
    >>> digits, _ = td.examples.digits()
    >>> samples = digits.assign_coords(even=digits.label % 2 == 0)
    >>> network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 1))
    >>> td.Model(network, task=td.tasks.BinaryClassification(["image"], label="even"))
    <trakdask.Model: 1 checkpoint, BinaryClassification, 65 of 65 parameters>
    """

    default_estimator: ClassVar[str] = "trak"
    loss_kind: ClassVar[str] = "cross-entropy"

    def _shaped(self, forward: Forward, batch: Batch) -> tuple[Tensor, Tensor]:
        logits, label = super()._shaped(forward, batch)
        return (
            _per_sample(logits, len(label), "the model's output")[:, None],
            _per_sample(label, len(label), repr(self.label))[:, None],
        )


@task
class Regression(ModelTask):
    """Regression on one number per sample with half the squared error, ℓ = ½ (y - ŷ)².

    The output is the prediction f = ŷ, and Q = -dℓ/df = y - ŷ.

    Parameters
    ----------
    inputs
        Names of the variables that the model takes.
    target
        Name of the true values (batch,).
    positional
        Whether the inputs are passed in their order; otherwise by name.
    output
        Name or position of the predictions in what the model returns, if that is a mapping, an
        object or a tuple. By default ``logits``, or the first one.

    Raises
    ------
    ValueError
        When run, if there is not one prediction and one true value per sample.

    Notes
    -----
    Unlike 1 - p, Q has a sign: a sample whose prediction is too high (Q < 0) lowers the predictions
    of similar samples. A score > 0 still means that training on the sample raised f of the target.
    A loss without the factor ½ doubles Q, which changes no ranking.

    References
    ----------
    Park et al. 2023, section 3: f is the model output, Q the derivative of the loss with respect to
    it.

    Examples
    --------
    The petal width of an iris from its other three sizes:

    >>> import torch, trakdask as td
    >>> td.Model(torch.nn.Linear(3, 1), task=td.tasks.Regression(["sizes"], target="width"))
    <trakdask.Model: 1 checkpoint, Regression, 4 of 4 parameters>
    """

    default_damping: ClassVar[str] = "trace"
    loss_kind: ClassVar[str] = "squared error"
    target: str = "y"
    positional: bool = True
    returned: str | int | None = option(default=None, alias="output")
    _other_variables: ClassVar[tuple[str, ...]] = ("target",)

    def output(self, forward: Forward, batch: Batch) -> Tensor:
        """Return the prediction, (batch,)."""
        predicted = self.logits(forward, batch)
        return _per_sample(predicted, len(batch[self.target]), "the model's output")

    def out_to_loss(self, forward: Forward, batch: Batch) -> Tensor:
        """Return the true value minus the prediction, (batch,)."""
        predicted = self.output(forward, batch)
        return _per_sample(batch[self.target], len(predicted), repr(self.target)) - predicted


@task
class MultiRegression(ModelTask):
    """Regression on several numbers per sample, with half the sum of squared errors as loss ℓ.

    The output is f = -ℓ = -½ Σ_k (y_k - ŷ_k)², and Q = 1, so that the gradient of a training sample
    is the one that it has in training. With ``column`` it is one prediction, f = ŷ_k, and
    Q = y_k - ŷ_k; targets of the one kind fit training samples of the other.

    Parameters
    ----------
    inputs
        Names of the variables that the model takes.
    target
        Name of the true values (batch, ...), of the shape of the predictions.
    column
        Name of an integer variable (batch,) with the only number to explain, counted from 0.
    positional
        Whether the inputs are passed in their order; otherwise by name.
    output
        As in :class:`Regression`.

    Raises
    ------
    ValueError
        When run, if predictions and true values differ in shape, or there is no such column.

    Notes
    -----
    A sum of predictions would say nothing: errors of opposite signs would cancel in Q.

    References
    ----------
    Park et al. 2023, section 3: f is any scalar of the model, Q the derivative of the loss with
    respect to it.

    Examples
    --------
    Both sizes of the petal from both sizes of the sepal; targets ask for one, by ``which``:

    >>> import torch, trakdask as td
    >>> network = torch.nn.Linear(2, 2)
    >>> model = td.Model(network, task=td.tasks.MultiRegression(["sepal"], "petal"))
    >>> of_one = td.Model(network, task=td.tasks.MultiRegression(["sepal"], "petal", "which"))
    """

    default_damping: ClassVar[str] = "trace"
    target: str = "y"
    column: str | None = None
    positional: bool = True
    returned: str | int | None = option(default=None, alias="output")
    _other_variables: ClassVar[tuple[str, ...]] = ("target", "column")

    @property
    def loss_kind(self) -> str:
        """Of one column it is a squared error."""
        return "minus output" if self.column is None else "squared error"

    def output(self, forward: Forward, batch: Batch) -> Tensor:
        """Return minus the loss, or one prediction, (batch,)."""
        predicted, error = self._predicted(forward, batch)
        return -(error**2).sum(1) / 2 if self.column is None else self._at(predicted, batch)

    def out_to_loss(self, forward: Forward, batch: Batch) -> Tensor:
        """Return 1, or the error of one prediction, (batch,)."""
        predicted, error = self._predicted(forward, batch)
        if self.column is None:
            return torch.ones_like(error[:, 0])
        columns, n = batch[self.column], predicted.shape[1]
        reject_samples(
            (columns < 0) | (columns >= n),
            lambda row: (
                f"expected {self.column} in 0..{n - 1} ({n} predictions), got "
                f"{int(columns[row])} at sample {{sample}}; try columns that start at 0"
            ),
        )
        return self._at(error, batch)

    def _at(self, values: Tensor, batch: Batch) -> Tensor:
        # Clamped, because vmap cannot look at values; ``out_to_loss`` rejects what is out of range.
        column = batch[str(self.column)].long().clamp(0, values.shape[1] - 1)
        return values.gather(1, column[:, None])[:, 0]

    def _predicted(self, forward: Forward, batch: Batch) -> tuple[Tensor, Tensor]:
        predicted, true = self.logits(forward, batch), batch[self.target]
        if predicted.ndim < 2 or predicted.shape != true.shape:
            raise ValueError(
                f"expected predictions and true values of one shape (batch, numbers), got "
                f"{tuple(predicted.shape)} and {tuple(true.shape)} in {self.target!r}; try "
                "task='regression' for one number, or wrapping the model"
            )
        return predicted.flatten(1), (true - predicted).flatten(1)


def _per_sample(values: Tensor, size: int, what: str) -> Tensor:
    """Return one number per sample, (batch,), from (batch,) or (batch, 1)."""
    if values.shape not in ((size,), (size, 1)):
        raise ValueError(
            f"expected one number per sample for a batch of {size}, got {what} of shape "
            f"{tuple(values.shape)}; try another task, or wrapping the model"
        )
    return values.reshape(size)
