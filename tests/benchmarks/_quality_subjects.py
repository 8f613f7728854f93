"""More tasks of the quality benchmark: regression on tables, and a language model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import _quality_tasks
import numpy as np
import torch
import xarray as xr
from _quality_tasks import N_WORDS, Data, Subject, Transformer, perceptron, text
from numpy.typing import NDArray
from torch import Tensor, nn

import trakdask as td

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


# --- models ---------------------------------------------------------------------------------------


class LanguageModel(Transformer):
    """The transformer of the classification task, with a logit for every next word."""

    def __init__(self, width: int = 40) -> None:
        super().__init__(width)
        self.head = nn.Linear(width, N_WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        x = self.blocks(self.words(tokens) + self.positions(positions))
        return self.head(self.norm(x))


# --- data -----------------------------------------------------------------------------------------


def diabetes() -> Data:
    """Split the 442 patients of scikit-learn into 342 to train on and 100 targets."""
    from sklearn.datasets import load_diabetes  # optional, as in trakdask.examples

    table = load_diabetes()
    return _standardised(table.data, table.target, n_target=100)


def surface() -> Data:
    """Draw a function of six numbers with interactions, steps and noise."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (1150, 6))
    y = np.sin(4 * x[:, 0] * x[:, 1]) + np.abs(x[:, 2] - x[:, 3]) + (x[:, 4] > 0) * x[:, 5]
    return _standardised(x, y + 0.1 * rng.standard_normal(len(y)), n_target=150)


def _standardised(x: NDArray[Any], y: NDArray[Any], n_target: int) -> Data:
    """Split rows at random; the training rows' mean and deviation scale all."""
    order = np.random.default_rng(0).permutation(len(y))
    train, target = order[n_target:], order[:n_target]
    both = ((a - a[train].mean(axis=0)) / a[train].std(axis=0) for a in (x, y))
    rows, values = (a.astype(np.float32) for a in both)
    return (rows[train], values[train]), (rows[target], values[target])


# --- tasks ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Regression(Subject):
    """One number per row, with half the squared error; the output is the prediction."""

    task: ClassVar[str | td.tasks.Task] = "regression"
    skill: ClassVar[str] = "R²"

    def samples(self, part: int) -> xr.Dataset:
        rows, values = self.data()[part]
        return td.from_arrays({"x": rows, "y": values}, chunks=512)

    def train(self, mask: NDArray[np.bool_] | None, seed: int) -> dict[str, Tensor]:
        return fit(self, mask, seed, squared_error)

    def outputs(self, state: dict[str, Tensor]) -> NDArray[np.float64]:
        return self._predictions(state, 1)

    def skill_of(self, state: dict[str, Tensor], part: int) -> float:
        values = self.data()[part][1]
        residual = values - self._predictions(state, part)
        return float(1 - residual.var() / values.var())

    def _predictions(self, state: dict[str, Tensor], part: int) -> NDArray[np.float64]:
        return applied(self, state, part)[:, 0].numpy()


@dataclass(frozen=True)
class Language(Subject):
    """The next word; the output is the sum of the margins of a snippet's words."""

    task: ClassVar[str | td.tasks.Task] = td.tasks.CausalLM(inputs=("input_ids",), positional=True)
    skill: ClassVar[str] = "nats per word"

    def samples(self, part: int) -> xr.Dataset:
        tokens, package = self.data()[part]
        return td.from_arrays({"input_ids": tokens}, coords={"package": package}, chunks=512)

    def train(self, mask: NDArray[np.bool_] | None, seed: int) -> dict[str, Tensor]:
        return fit(self, mask, seed, next_word)

    def outputs(self, state: dict[str, Tensor]) -> NDArray[np.float64]:
        log_p = self._log_p(state, 1)
        return (log_p - torch.log(-torch.expm1(log_p))).sum(1).numpy()

    def skill_of(self, state: dict[str, Tensor], part: int) -> float:
        return float(-self._log_p(state, part).mean())

    def _log_p(self, state: dict[str, Tensor], part: int) -> Tensor:
        """Log-probabilities of the words after the first, (snippet, word - 1)."""
        tokens = torch.from_numpy(self.data()[part][0])
        logits = applied(self, state, part)[:, :-1]
        return logits.log_softmax(2).gather(2, tokens[:, 1:, None])[:, :, 0]


def squared_error(model: nn.Module, rows: Tensor, values: Tensor) -> Tensor:
    return (model(rows)[:, 0] - values).square().mean() / 2


def next_word(model: nn.Module, tokens: Tensor, _: Tensor) -> Tensor:
    logits = model(tokens)[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def fit(
    subject: Subject, mask: NDArray[np.bool_] | None, seed: int, loss_of: Loss
) -> dict[str, Tensor]:
    """Train as examples.train_classifier does, with another loss."""
    rows = slice(None) if mask is None else mask
    inputs, values = (torch.from_numpy(array[rows]) for array in subject.data()[0])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = subject.build().train()
        steps(model, subject, lambda batch: loss_of(model, inputs[batch], values[batch]), inputs)
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def steps(
    model: nn.Module, subject: Subject, loss_of: Callable[[Tensor], Tensor], inputs: Tensor
) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=subject.lr)
    steps = -(-len(inputs) // subject.batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=subject.lr, epochs=subject.epochs, steps_per_epoch=steps
    )
    for _ in range(subject.epochs):
        for batch in torch.randperm(len(inputs)).split(subject.batch_size):
            optimizer.zero_grad()
            torch.autograd.backward(loss_of(batch))
            optimizer.step()
            schedule.step()


def applied(subject: Subject, state: dict[str, Tensor], part: int) -> Tensor:
    """Return what the model makes of training samples (0) or targets (1), in float64."""
    model = subject.build().eval()
    model.load_state_dict(state)
    with torch.no_grad():
        return model(torch.from_numpy(subject.data()[part][0])).double()


SUBJECTS = _quality_tasks.SUBJECTS | {
    subject.name: subject
    for subject in (
        Regression(
            "diabetes", perceptron((10, 64, 64, 1)), functools.cache(diabetes), 40, 100,
            batch_size=32,
        ),
        Regression("surface", perceptron((6, 64, 64, 1)), functools.cache(surface), 60, 100),
        Language("language", LanguageModel, functools.cache(text), 8, 100),
    )
}  # fmt: skip
