"""Pairs of answers, one of which people preferred: DPO, and reward models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import Tensor

from trakdask.checks import require_number
from trakdask.html_tables import HtmlTable
from trakdask.models.tasks.language import CausalLM
from trakdask.models.tasks.logits import MASK, one_minus_p, shape_of, warn_of_padding
from trakdask.models.tasks.protocol import Batch, Forward

_SIDES = ("chosen", "rejected")


@dataclass(frozen=True)
class Preference(HtmlTable):
    """Direct preference optimisation: the answer that people chose against the rejected one.

    The output is β times the log ratio of the two answers, less the ratio by the reference model,
    f = β (log π(chosen) - log π(rejected) - log π_ref(chosen) + log π_ref(rejected)), and
    Q = 1 - σ(f). The loss is log(1 + exp(-f)), so that f is the margin of the choice.

    Parameters
    ----------
    beta
        β, as in training.
    language
        Which variables the model takes, and which tokens count, as in :class:`CausalLM`. The
        samples have each of the variables twice, with the prefixes ``chosen_`` and ``rejected_``:
        ``chosen_input_ids``, and where there are any ``chosen_attention_mask``, and
        ``chosen_labels``, -100 for the tokens of the prompt.
    reference
        Names of the variables (batch,) with log π_ref of the chosen and of the rejected answers, as
        trl names them. Without them, or with ``()``, the reference is left out of f.

    Raises
    ------
    ValueError
        If β is not positive. When run, as :class:`CausalLM` for either answer.

    Notes
    -----
    The reference model does not depend on the weights that are attributed, so its numbers are part
    of the data. Cost: two passes per sample, one for each answer.

    References
    ----------
    Rafailov et al. 2023, "Direct Preference Optimization", equation 7.

    Examples
    --------
    >>> import trakdask as td
    >>> td.tasks.Preference(reference=()).variables  # the reference model is left out
    ('chosen_input_ids', 'chosen_attention_mask', 'rejected_input_ids', 'rejected_attention_mask')
    """

    default_estimator: ClassVar[str] = "soft"
    loss_kind: ClassVar[str] = "cross-entropy"
    naming: ClassVar[tuple[str, ...]] = ("reference",)
    number_variables: ClassVar[tuple[str, ...]] = ()
    beta: float = 0.1
    language: CausalLM = field(default_factory=CausalLM)
    reference: tuple[str, ...] = ("ref_chosen_logps", "ref_rejected_logps")

    def __post_init__(self) -> None:
        require_number("beta", self.beta, remedy="try beta=0.1")

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of the variables that the task reads."""
        names = (f"{side}_{name}" for side in _SIDES for name in self.language.variables)
        return (*names, *self.reference)

    def for_variables(self, n_dims: Mapping[str, int]) -> Preference:
        """Return the task for samples with some variables, given their numbers of dimensions."""
        prefix = f"{_SIDES[0]}_"
        of_one = {n.removeprefix(prefix): d for n, d in n_dims.items() if n.startswith(prefix)}
        # Of samples with one of the two, the other one is reported as missing.
        reference = self.reference if {*self.reference} & {*n_dims} else ()
        return replace(self, language=self.language.for_variables(of_one), reference=reference)

    def output(self, forward: Forward, batch: Batch) -> Tensor:
        """Return β times the log ratio of both answers, (batch,)."""
        chosen, rejected = (self._value(forward, _answers(batch, side)) for side in _SIDES)
        ratio = chosen - rejected
        if self.reference:
            of_chosen, of_rejected = (batch[name].to(ratio) for name in self.reference)
            ratio = ratio - of_chosen + of_rejected
        return self.beta * ratio

    def out_to_loss(self, forward: Forward, batch: Batch) -> Tensor:
        """Return 1 - σ(f), (batch,)."""
        for side in _SIDES:
            self._check(forward, _answers(batch, side))
        return one_minus_p(self.output(forward, batch))

    def _value(self, forward: Forward, answers: Batch) -> Tensor:
        """Return log π of answers, (batch,)."""
        return self.language.log_probability(forward, answers)

    def _check(self, forward: Forward, answers: Batch) -> None:
        # For its checks alone: it rejects samples, and warns of padding and probabilities.
        self.language.out_to_loss(forward, answers)


@dataclass(frozen=True)
class Reward(Preference):
    """A reward model by Bradley and Terry: f = r(chosen) - r(rejected), and Q = 1 - σ(f).

    Parameters
    ----------
    beta
        Factor of f, 1 in training.
    language
        Which variables the model takes, twice, as in :class:`Preference`. The model returns one
        number per sequence, or an object with ``logits``.
    reference
        None, as a reward has no reference model.

    References
    ----------
    Ouyang et al. 2022, equation 1.

    Examples
    --------
    >>> import trakdask as td
    >>> td.tasks.Reward().variables
    ('chosen_input_ids', 'chosen_attention_mask', 'rejected_input_ids', 'rejected_attention_mask')
    """

    beta: float = 1.0
    reference: tuple[str, ...] = ()

    def _value(self, forward: Forward, answers: Batch) -> Tensor:
        reward = self.language.logits(forward, answers)
        if reward.numel() != answers.size:
            raise ValueError(
                f"expected one reward per sequence for a batch of {answers.size}, got "
                f"{shape_of(reward)}; try num_labels=1, or td.tasks.Preference for DPO"
            )
        return reward.reshape(-1)

    def _check(self, forward: Forward, answers: Batch) -> None:
        if MASK not in self.language.inputs:
            warn_of_padding(forward, answers[self.language.inputs[0]])


def _answers(batch: Batch, side: str) -> Batch:
    prefix = f"{side}_"
    return Batch({n.removeprefix(prefix): t for n, t in batch.items() if n.startswith(prefix)})
