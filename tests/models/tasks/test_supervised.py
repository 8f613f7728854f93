"""Classification and regression against losses of torch, differentiated along the output."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from trakdask.models.model import Model
from trakdask.models.tasks import (
    Batch,
    BinaryClassification,
    Forward,
    ImageClassification,
    MultiLabel,
    Regression,
    TextClassification,
)
from trakdask.models.tasks.protocol import SampleError


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


def minus_slope(loss_of, rises: Tensor) -> Tensor:
    """-dℓ/dε of each sample while the output rises by ε times ``rises``."""
    epsilon = torch.zeros(len(rises), dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(loss_of(epsilon[:, None] * rises).sum(), epsilon)
    return -slope


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_text_classification__q_is_the_slope_of_the_loss(run, temperature: float) -> None:
    data = text()
    logits = Bag()(data["input_ids"], data["attention_mask"])["logits"].detach() / temperature
    rises = functional.one_hot(data["label"], 4).double()  # of the right logit: f rises as much

    def loss(change: Tensor) -> Tensor:
        return functional.cross_entropy(logits + change, data["label"], reduction="none")

    _, f, q = run(Bag(), TextClassification(temperature=temperature), data)
    torch.testing.assert_close(q, minus_slope(loss, rises).float())
    if temperature == 1:  # then the loss is a function of f
        torch.testing.assert_close(functional.softplus(-f), loss(0 * rises).float())


def test_text_classification__gradients(check_gradients) -> None:
    def output(module: nn.Module, sample: Batch) -> Tensor:
        logits = module(sample["input_ids"], sample["attention_mask"])["logits"][0]
        p = logits.softmax(0)[sample["label"][0]]
        return (p / (1 - p)).log()

    check_gradients(Bag(), TextClassification(), text(), output)


def test_classification__equals_image_classification(run) -> None:
    data, module = numbers(torch.tensor([0, 2, 1])), net(3)
    found = run(module, "classification", data)
    expected = run(module, ImageClassification(image="x"), data)
    for name, gradient in found[0].items():
        assert torch.equal(gradient, expected[0][name])
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[2], expected[2])


def test_binary_classification__q_is_the_slope_of_the_loss(run) -> None:
    data = numbers(torch.tensor([0, 1, 1, 0]))
    logits = net(1)(data["x"]).detach()
    truth = data["label"][:, None].double()

    def loss(change: Tensor) -> Tensor:
        by_logit = functional.binary_cross_entropy_with_logits
        return by_logit(logits + change, truth, reduction="none").sum(1)

    _, f, q = run(net(1), "binary_classification", data)
    torch.testing.assert_close(q, minus_slope(loss, 2 * truth - 1).float())
    torch.testing.assert_close(functional.softplus(-f), loss(0 * truth).float())


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_binary_classification__gradients(check_gradients, dtype: torch.dtype) -> None:
    def output(module: nn.Module, sample: Batch) -> Tensor:
        p = module(sample["x"])[0, 0].sigmoid()
        p = p if sample["label"][0] else 1 - p
        return (p / (1 - p)).log()

    data = numbers(torch.tensor([0, 1, 1, 0]).to(dtype))
    check_gradients(net(1), BinaryClassification(), data, output)


def test_multi_label__q_is_the_slope_of_the_loss_where_all_margins_rise(run) -> None:
    data = numbers(LABELS)
    logits = net(3)(data["x"]).detach()

    def loss(change: Tensor) -> Tensor:
        by_logit = functional.binary_cross_entropy_with_logits
        return by_logit(logits + change, LABELS.double(), reduction="none").sum(1)

    _, _, q = run(net(3), "multi_label", data)
    rises = 2 * LABELS.double() - 1  # f, a sum of three, rises by 3
    torch.testing.assert_close(q, minus_slope(loss, rises).float() / 3)


def test_multi_label__gradients(check_gradients) -> None:
    def output(module: nn.Module, sample: Batch) -> Tensor:
        p = module(sample["x"])[0].sigmoid()
        p = torch.where(sample["label"][0] == 1, p, 1 - p)
        return (p / (1 - p)).log().sum()

    check_gradients(net(3), MultiLabel(), numbers(LABELS), output)


def test_variables__are_checked_by_name() -> None:
    model = Model(net(3), task=MultiLabel(("a", "b"), "c"))
    assert model.task.variables == ("a", "b", "c")
    with pytest.raises(ValueError, match="the variable 'a'"):
        model.task.output(Forward(net(3), {}, {}), Batch(x=torch.ones(1, 3)))


@pytest.mark.parametrize("engine", ["hooks", "vmap", "loop"])
@pytest.mark.parametrize("value", [-1, 3, 7])
def test_classification__label_out_of_range(run, engine: str, value: int) -> None:
    label = torch.tensor([0, value, 2])
    with pytest.raises(SampleError, match=rf"label in 0..2 \(3 classes\), got {value} at") as err:
        run(net(3), ImageClassification(image="x"), numbers(label), engine)
    assert err.value.row == 1
    assert "at sample 31;" in str(err.value.at(31))


def test_text_classification__classes_named_as_in_transformers() -> None:
    task = TextClassification()
    assert task.for_variables({"input_ids": 2, "labels": 1}).label == "labels"
    for names in ({"label": 1, "labels": 1}, {"labels": 2}, {}):
        assert task.for_variables({**names, "attention_mask": 2}) == task
    assert TextClassification(label="mine").for_variables({"labels": 1}).label == "mine"


def real_numbers() -> Batch:
    generator = torch.Generator().manual_seed(2)
    return Batch(x=numbers(torch.zeros(4))["x"], y=torch.randn(4, generator=generator).double())


def test_regression__q_is_minus_the_derivative_of_the_loss(run) -> None:
    batch = real_numbers()
    f = net(1)(batch["x"])[:, 0].detach().requires_grad_()
    (slope,) = torch.autograd.grad((0.5 * (batch["y"] - f) ** 2).sum(), f)
    _, output, q = run(net(1), "regression", batch)
    torch.testing.assert_close(output, f.detach().float())
    torch.testing.assert_close(q, -slope.float())
    assert (q < 0).any()
    assert (q > 0).any()


def test_regression__gradients(check_gradients) -> None:
    def output(module: nn.Module, sample: Batch) -> Tensor:
        return module(sample["x"])[0, 0]

    check_gradients(net(1), Regression(), real_numbers(), output)


def test_regression__shapes_of_one_number_per_sample(run) -> None:
    batch = real_numbers()
    flat = nn.Sequential(net(1), nn.Flatten(0))
    column = Batch(batch, y=batch["y"][:, None])
    expected = run(net(1), "regression", batch)
    for module, samples in ((flat, batch), (net(1), column)):
        _, f, q = run(module, Regression("x"), samples)
        assert torch.equal(f, expected[1])
        assert torch.equal(q, expected[2])
