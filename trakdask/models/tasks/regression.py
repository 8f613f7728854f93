"""Regression on one number per sample."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from trakdask.html_tables import HtmlTable
from trakdask.models.tasks.logits import as_names, call_model, check_variable, per_sample
from trakdask.models.tasks.protocol import Batch, Forward

__all__ = ["Regression"]


@dataclass(frozen=True)
class Regression(HtmlTable):
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
    """

    inputs: tuple[str, ...] = ("x",)
    target: str = "y"
    positional: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", as_names(self.inputs))
        check_variable(self.target, "target")

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of the variables that the task reads."""
        return (*self.inputs, self.target)

    def output(self, forward: Forward, batch: Batch) -> Tensor:
        """Return the prediction, (batch,)."""
        predicted = call_model(forward, batch, self.inputs, self.positional)
        return per_sample(predicted, len(batch[self.target]), "the model's output")

    def out_to_loss(self, forward: Forward, batch: Batch) -> Tensor:
        """Return the true value minus the prediction, (batch,)."""
        predicted = self.output(forward, batch)
        return per_sample(batch[self.target], len(predicted), repr(self.target)) - predicted
