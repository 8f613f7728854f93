"""What tasks say of their loss, and warnings of inputs and outputs that cannot be meant."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor, nn

import trakdask as td
from tests.bad_inputs.small_models import After
from trakdask.errors import forget_warnings
from trakdask.explorer.tables import SampleTable
from trakdask.models.tasks.protocol import LOSSES, task_facts

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 4)).astype("f4")
LABEL = np.arange(40) % 3


class Own:
    variables = ("x", "label")

    def output(self, forward: Any, batch: Any) -> Tensor:
        return forward(batch["x"])[:, 0]

    def out_to_loss(self, forward: Any, batch: Any) -> Tensor:
        return batch["label"] - self.output(forward, batch)


class Said(Own):
    loss_kind = "squared error"


class Huber(Said):
    def out_to_loss(self, forward: Any, batch: Any) -> Tensor:
        return super().out_to_loss(forward, batch).clamp(-1, 1)


class Doubled(td.tasks.Classification):
    def output(self, forward: Any, batch: Any) -> Tensor:
        return 2 * super().output(forward, batch)


@dataclasses.dataclass(frozen=True)
class Focal(td.tasks.Classification):
    gamma: float = 2.0

    def out_to_loss(self, forward: Any, batch: Any) -> Tensor:
        return super().out_to_loss(forward, batch) ** self.gamma


class SaidAgain(Doubled):
    loss_kind: ClassVar[str] = "other"


class Named(td.tasks.Classification):
    """Changes neither f nor Q."""


class TrakOutput:
    loss_kind = "cross-entropy"

    def get_output(self, *args: Any) -> Tensor:
        raise NotImplementedError

    get_out_to_loss_grad = get_output


tasks = td.tasks
FACTS = [
    (Own(), None),
    (Huber(), None),
    (Doubled(), None),
    (Focal(), None),
    (SaidAgain(), "other"),
    (Named(), "cross-entropy"),
    (tasks.TrakTask(TrakOutput()), "cross-entropy"),
    (tasks.Classification(weights=[1, 2]), "weighted cross-entropy"),
    (tasks.Classification(weights=[1, 2], temperature=2.0), "other"),
    (tasks.TextClassification(), "cross-entropy"),
    (tasks.BinaryClassification(), "cross-entropy"),
    (tasks.CausalLM(), "other"),
    (tasks.CausalLM(position="at"), "cross-entropy"),
    (tasks.Preference(), "cross-entropy"),
    (tasks.Reward(), "cross-entropy"),
    (tasks.Clip(), "other"),
]


@pytest.mark.parametrize(("task", "loss"), FACTS, ids=[type(task).__name__ for task, _ in FACTS])
def test_task_facts__of_a_loss_are_said_by_who_defines_it(task: Any, loss: str | None) -> None:
    facts = task_facts(task)
    assert facts.get("loss_kind") == loss
    is_classifier = "Classification" in str(type(task).__mro__)
    assert ("label" in facts) == (loss == "cross-entropy" and is_classifier)
    json.dumps(facts)


@pytest.mark.parametrize("name", td.models.tasks.TASKS)
def test_task_facts__each_task_with_a_name_says_its_loss(name: str) -> None:
    assert task_facts(td.models.tasks.TASKS[name]())["loss_kind"] in LOSSES


def features(module: nn.Module, task: Any, **arrays: Any) -> xr.Dataset:
    samples = td.from_arrays({"x": X, "label": LABEL} | arrays)
    model = td.Model(module, task=task)
    return td.featurize(samples, model, projector=td.Identity()).compute()


def advised(made: xr.Dataset, error: Exception) -> float:
    """Return the metric that an error advises, at the mean over checkpoints."""
    metric = eval(str(error).rpartition("metric=")[2])  # as a reader would type it
    return float(td.evaluate.metric(made.output, made, metric).mean())


@pytest.mark.parametrize("task", [Own(), Doubled(), Focal()], ids=lambda task: type(task).__name__)
@pytest.mark.parametrize("metric", ["loss", "accuracy"])
def test_metric__of_a_loss_that_is_not_known_names_the_attribute(task: Any, metric: str) -> None:
    made = features(After(), task)
    with pytest.raises(ValueError, match="says its loss_kind") as raised:
        td.evaluate.metric(made.output, made, metric)
    assert type(task).__name__ in str(raised.value)
    np.testing.assert_allclose(advised(made, raised.value), made.output.values.mean(), rtol=1e-6)
    said = made.assign_attrs(loss_kind="minus output")
    np.testing.assert_allclose(
        td.evaluate.metric(made.output, said, "loss"),
        -made.output.values.mean(0, dtype=np.float64)[:, None],
    )


def test_metric__of_weights_and_several_numbers_is_that_of_torch() -> None:
    module, weights = After(), torch.tensor([0.5, 2.0, 1.0])
    logits, label = module(torch.tensor(X)).detach(), torch.tensor(LABEL)
    made = features(module, tasks.Classification(weights=weights))
    losses = nn.functional.cross_entropy(logits, label, weights, reduction="none")
    found = td.evaluate.metric(made.output, made, "loss")
    np.testing.assert_allclose(found, [[losses.mean()]], rtol=1e-6)
    y = RNG.normal(size=(40, 3)).astype("f4")
    several = features(module, "multi_regression", y=y)
    expected = ((logits.numpy() - y) ** 2).sum(1).mean() / 2
    np.testing.assert_allclose(
        td.evaluate.metric(several.output, several, "loss"), [[expected]], rtol=1e-6
    )
    summed = td.score(several, td.combine(several, metric="loss"), td.Trak(0.1)).values[:, 0]
    apart = td.score(several, several, td.Trak(0.1)).values
    np.testing.assert_allclose(summed, -apart.mean(1), rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="metric='loss', or metric=lambda") as raised:
        td.evaluate.metric(several.output, several, "accuracy")
    np.testing.assert_allclose(
        advised(several, raised.value), several.output.values.mean(), rtol=1e-6
    )


def test_metric__of_combined_targets_has_no_loss() -> None:
    made = features(After(), "classification").assign_coords(group=("sample", LABEL))
    combined = td.combine(made, by="group", how="sum")
    with pytest.raises(ValueError, match="the targets before"):
        td.evaluate.metric(combined.output, combined, "loss")


# --- warnings -------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    forget_warnings()
    yield
    forget_warnings()


def messages(module: nn.Module, task: Any, **arrays: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in (40, 40):  # a second time, to see that it is said once
            samples = td.from_arrays({name: array[:n] for name, array in arrays.items()})
            model = td.Model(module, task=task)
            td.featurize(samples, model, projector=td.Identity()).compute()
    return [str(one.message) for one in caught]


CLASSES, SIGNS = {"x": X, "label": LABEL}, {"x": X, "label": np.stack([LABEL % 2] * 3, 1)}
IDS = RNG.integers(3, 30, (40, 6))
LENGTHS = (np.arange(6) < RNG.integers(2, 7, 40)[:, None]).astype(int)
PADDED = np.where(LENGTHS == 1, IDS, 0)
TEXT = {"input_ids": PADDED, "label": LABEL}
EQUAL = {"input_ids": np.where(IDS > 25, 7, IDS) * (np.arange(6) < 4), "label": LABEL}
COUNTED = {"input_ids": PADDED, "labels": np.where(LENGTHS == 1, PADDED, -100)}
BINARY = {"x": X, "label": LABEL % 2}


class Bag(nn.Module):
    def __init__(self, after: Any = lambda y: y, classes: int = 3, pad: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self.after = nn.Embedding(30, 4), nn.Linear(4, classes), after
        if pad is not None:
            self.config = type("Config", (), {"pad_token_id": pad})

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.after(self.head(self.embed(input_ids).mean(1)))


class EachToken(Bag):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.after(self.head(self.embed(input_ids)))


def softmax(y: Tensor) -> Tensor:
    return y.softmax(-1)


TOKENS, ONE = EachToken(classes=30), After(lambda y: y[:, 0].sigmoid())


WARNED = {
    "classes": (After(softmax), "classification", CLASSES, "sum to 1"),
    "labels": (After(torch.sigmoid), "multi_label", SIGNS, "torch.logit"),
    "one label": (ONE, "binary_classification", BINARY, "sigmoid"),
    "classes, each for itself": (After(torch.sigmoid), "classification", CLASSES, "sigmoid"),
    "next tokens": (EachToken(softmax, 30), "causal_lm", {"input_ids": IDS}, "softmax"),
    "padding": (Bag(), "text_classification", TEXT, "padding (id 0)"),
    "padding that the model names": (Bag(pad=0), "text_classification", EQUAL, "attention_mask"),
    "padding that is predicted": (TOKENS, "causal_lm", {"input_ids": PADDED}, "padding"),
}  # fmt: skip


@pytest.mark.parametrize("case", WARNED)
def test_warning__of_probabilities_or_padding_is_issued_once(case: str) -> None:
    module, task, arrays, word = WARNED[case]
    (message,) = messages(module, task, **arrays)
    assert word in message


QUIET = {
    "small positive logits": (After(lambda y: 0.01 * y + 0.3), "multi_label", SIGNS),
    "logits of a weak signal": (After(lambda y: 0.5 + 0.2 * y.clamp(-2, 2)), "multi_label", SIGNS),
    "log-probabilities": (After(lambda y: y.log_softmax(1)), "classification", CLASSES),
    "a mask": (Bag(), "text_classification", TEXT | {"attention_mask": LENGTHS}),
    "padding that does not count": (TOKENS, "causal_lm", COUNTED),
    "a regression in [0, 1]": (ONE, "regression", {"x": X, "y": X[:, 0]}),
}  # fmt: skip


@pytest.mark.parametrize("case", QUIET)
def test_no_warning__of_what_may_be_meant(case: str) -> None:
    module, task, arrays = QUIET[case]
    assert messages(module, task, **arrays) == []


def test_losses__of_failed_targets_are_left_out_and_the_explorer_shows_the_others() -> None:
    made = features(After(), tasks.Classification(weights=[0.5, 2.0, 1.0]))
    failed = made.where(xr.DataArray(np.arange(40) != 7, dims="sample"))
    found = td.evaluate.metric(failed.output, failed, "loss")
    kept = made.isel(sample=np.delete(np.arange(40), 7))
    np.testing.assert_allclose(found, td.evaluate.metric(kept.output, kept, "loss"), rtol=1e-6)
    shown = SampleTable(failed, failed, "target")
    assert (shown.loss, shown.label) == ("loss", "")
    np.testing.assert_allclose(shown.numbers.loss.mean(), float(found[0, 0]), rtol=1e-6)
