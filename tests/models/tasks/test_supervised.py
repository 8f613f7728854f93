"""Classification and regression against losses of torch, differentiated along the output."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from trakdask.models.tasks import (
    Batch,
    BinaryClassification,
    MultiRegression,
    Regression,
    TextClassification,
)


class Bag(nn.Module):
    """Mean of token embeddings where the mask is 1, then a linear layer."""

    def __init__(self, n_classes: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 5, dtype=torch.float64)
        self.head = nn.Linear(5, n_classes, dtype=torch.float64)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        weight = attention_mask[..., None].double()
        mean = (self.embed(input_ids) * weight).sum(1) / weight.sum(1)
        return {"logits": self.head(mean)}


def text(n: int = 6) -> Batch:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 11, (n, 7), generator=generator)
    mask = (torch.arange(7) < torch.arange(2, n + 2)[:, None]).long()
    return Batch(input_ids=ids, attention_mask=mask, label=torch.arange(n) % 4)


def net(n_outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, n_outputs)).double()


def numbers(label: Tensor) -> Batch:
    generator = torch.Generator().manual_seed(1)
    return Batch(x=torch.randn(len(label), 3, generator=generator).double(), label=label)


LABELS = torch.tensor([[0, 1, 1], [1, 1, 1], [0, 0, 0], [1, 0, 0]])


def _cross_entropy(logits: Tensor, data: Batch, weight: Tensor | None = None) -> Tensor:
    return functional.cross_entropy(logits, data["label"], weight, reduction="none")


def _by_logit(logits: Tensor, data: Batch) -> Tensor:
    truth = data["label"].double().reshape(logits.shape)
    loss = functional.binary_cross_entropy_with_logits(logits, truth, reduction="none")
    return loss.sum(1)


def _real_numbers() -> Batch:
    several = _several_numbers()
    return Batch(x=several["x"], y=several["y"][:, 0])


def _one_hot(data: Batch) -> Tensor:
    return functional.one_hot(data["label"], 4).double()


def _signs(data: Batch) -> Tensor:
    return (2 * data["label"].double() - 1).reshape(len(data["label"]), -1)


def _of_class(module: nn.Module, sample: Batch) -> Tensor:
    module = module.net if isinstance(module, Parts) else module
    logits = module(sample["input_ids"], sample["attention_mask"])["logits"][0]
    p = logits.softmax(0)[sample["label"][0]]
    return (p / (1 - p)).log()


def _of_labels(module: nn.Module, sample: Batch) -> Tensor:
    p = module(sample["x"])[0].sigmoid()
    p = torch.where(sample["label"][0] == 1, p, 1 - p)
    return (p / (1 - p)).log().sum()


def _prediction(module: nn.Module, sample: Batch) -> Tensor:
    return module(sample["x"])[0, sample["k"][0] if "k" in sample else 0]


def _squares(logits: Tensor, data: Batch) -> Tensor:
    return 0.5 * ((data["y"].reshape(logits.shape) - logits) ** 2).sum(1)


def _minus_squares(module: nn.Module, sample: Batch) -> Tensor:
    return -_squares(module(sample["x"]), sample)[0]


def _several_numbers() -> Batch:
    generator = torch.Generator().manual_seed(2)
    y = torch.randn(4, 3, generator=generator).double()
    return Batch(x=numbers(torch.zeros(4))["x"], y=y, k=torch.tensor([1, 0, 2, 1]))


class Parts(nn.Module):
    """Returns a mapping in which the logits have another name."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Bag()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        logits = self.net(input_ids, attention_mask)["logits"]
        return {"hidden": logits * 2, "scores": logits, "logits": logits[:, :1]}


COLD = TextClassification(temperature=3)
WEIGHTS = [0.5, 3.0, 1.0, 0.0]
weighted = partial(_cross_entropy, weight=torch.tensor(WEIGHTS, dtype=torch.float64))
BINARY, ONE_LABEL = BinaryClassification(), torch.tensor([0, 1, 1, 0])

# Module, task, samples, f by hand, the loss, and how logits rise with f.
CASES = {
    "text": (Bag(), TextClassification(), text(), _of_class, _cross_entropy, _one_hot),
    "text, temperature": (Bag(), COLD, text(), _of_class, _cross_entropy, _one_hot),
    "binary": (net(1), BINARY, numbers(ONE_LABEL), _of_labels, _by_logit, _signs),
    "binary, bool": (net(1), BINARY, numbers(ONE_LABEL.bool()), _of_labels, _by_logit, _signs),
    "binary, float": (net(1), BINARY, numbers(ONE_LABEL.float()), _of_labels, _by_logit, _signs),
    "labels": (net(3), "multi_label", numbers(LABELS), _of_labels, _by_logit, _signs),
    "text, by name": (
        Parts(), TextClassification(output="scores"), text(), _of_class, _cross_entropy, _one_hot,
    ),
    "text, weights": (
        Bag(), TextClassification(weights=WEIGHTS), text(), _of_class, weighted, _one_hot,
    ),
    "several numbers": (
        net(3), "multi_regression", _several_numbers(), _minus_squares, _squares,
        lambda data: None,
    ),
    "one of several numbers": (
        net(3), MultiRegression(column="k"), _several_numbers(), _prediction, _squares,
        lambda data: functional.one_hot(data["k"], 3).double(),
    ),
    "regression": (
        net(1), "regression", _real_numbers(), _prediction, _squares,
        lambda _: torch.ones(4, 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_output__gradients_and_q_which_is_the_slope_of_the_loss(check_gradients, case: str) -> None:
    module, task, data, output, loss, rises_of = CASES[case]
    f, q = check_gradients(module, task, data, output)
    if rises_of(data) is None:  # f is minus the loss
        torch.testing.assert_close(-f, loss(module(data["x"]), data).detach().float())
        assert q.tolist() == [1] * len(f)
        return
    inputs = [data["x"]] if "x" in data else [data["input_ids"], data["attention_mask"]]
    logits = module(*inputs)
    if isinstance(logits, dict):
        logits = logits["scores" if "scores" in logits else "logits"]
    logits = logits.detach()
    rises, temperature = rises_of(data), getattr(task, "temperature", 1)
    epsilon = torch.zeros(len(logits), dtype=torch.float64, requires_grad=True)
    raised = loss(logits / temperature + epsilon[:, None] * rises, data)
    (slope,) = torch.autograd.grad(raised.sum(), epsilon)
    n_margins = LABELS.shape[1] if case == "labels" else 1  # f, a sum of three, rises by 3
    torch.testing.assert_close(q, -slope.float() / n_margins)
    if (
        case.startswith(("text", "binary")) and temperature == 1 and case != "text, weights"
    ):  # then the loss depends on f alone
        torch.testing.assert_close(functional.softplus(-f), raised.detach().float())


def test_text_classification__classes_named_as_in_transformers() -> None:
    task = TextClassification()
    assert task.for_variables({"input_ids": 2, "labels": 1}).label == "labels"
    for names in ({"label": 1, "labels": 1}, {"labels": 2}, {}):
        assert task.for_variables({**names, "attention_mask": 2}) == task
    assert TextClassification(label="mine").for_variables({"labels": 1}).label == "mine"


def test_regression__shapes_of_one_number_per_sample(run) -> None:
    batch = _real_numbers()
    flat = nn.Sequential(net(1), nn.Flatten(0))
    column = Batch(batch, y=batch["y"][:, None])
    expected = run(net(1), "regression", batch)
    for module, samples in ((flat, batch), (net(1), column)):
        _, f, q = run(module, Regression("x"), samples)
        assert torch.equal(f, expected[1])
        assert torch.equal(q, expected[2])
