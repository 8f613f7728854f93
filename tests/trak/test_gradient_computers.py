"""Gradient computers against a loop of ``backward()``, and against the TRAK package."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.models.engines import backward
from tests.trak._models import (
    Classifier,
    Pair,
    built,
    images,
    margin_of,
    pair_batch,
    texts,
    untrained,
)
from trakdask.models.tasks import Batch
from trakdask.trak.gradient_computers import FunctionalGradientComputer, IterativeGradientComputer
from trakdask.trak.modelout_functions import (
    CLIPModelOutput,
    ImageClassificationModelOutput,
    IterativeImageClassificationModelOutput,
    TextClassificationModelOutput,
)

N = 6
TOLERANCE = {torch.bfloat16: 0.1, torch.float32: 1e-5, torch.float64: 1e-12}
SELECTIONS: dict[str, Callable[[list[str]], list[str] | None]] = {
    "all": lambda names: None,
    "last two, reversed": lambda names: names[-2:][::-1],
    "one": lambda names: names[:1],
}


class OwnImageOutput(ImageClassificationModelOutput):
    """A subclass, which no engine may take for the built-in output: it negates the margin."""

    @staticmethod
    def get_output(model: Any, weights: Any, buffers: Any, image: Any, label: Any) -> Tensor:
        return -ImageClassificationModelOutput.get_output(model, weights, buffers, image, label)


def computer(kind: Any, module: nn.Module, task: Any, grad_wrt: Any = None, **kwargs: Any) -> Any:
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    dim = sum(sizes[name] for name in (sizes if grad_wrt is None else grad_wrt))
    arguments = {"grad_dim": dim, "dtype": torch.float16, "device": "cpu", **kwargs}
    return kind(model=module, task=task, grad_wrt=grad_wrt, **arguments)


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    scale = float(expected.abs().max())
    assert float((found.double() - expected.double()).abs().max()) <= tolerance * max(scale, 1e-3)


def by_backward(
    module: nn.Module, batch: list[Tensor], all_at_once: bool = False
) -> dict[str, Tensor]:
    *inputs, labels = batch

    def output_of(module: nn.Module, one: Batch) -> Tensor:
        i = int(one["i"])
        rows = slice(None) if all_at_once else slice(i, i + 1)
        logits = module(*(part[rows] for part in inputs))
        return margin_of(logits[i if all_at_once else 0], int(labels[i]))

    return backward(module, output_of, Batch(i=torch.arange(len(labels))))[0]


def flat(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([g.reshape(len(g), -1) for g in gradients.values()], 1)


def engine(caplog: pytest.LogCaptureFixture) -> str:
    return caplog.messages[-1].removeprefix("Gradients by ").split(":")[0]


# ------------------------------------------------------------------------------------ functional


@pytest.mark.parametrize(
    ("model", "dtype", "selection"),
    [
        *((model, torch.float64, "all") for model in ("mlp", "normed", "scaled", "text")),
        *(("normed", torch.float32, selection) for selection in SELECTIONS),
        ("mlp", torch.bfloat16, "all"),
    ],
)
def test_compute_per_sample_grad__is_backward_sample_by_sample(
    model: str, dtype: torch.dtype, selection: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "GradientComputer")
    task: Any = ImageClassificationModelOutput()
    if model == "text":
        module, batch = untrained(Classifier, dtype), texts(N)
        task = TextClassificationModelOutput()
    else:
        module, batch = built(model, dtype), images(N, dtype=dtype)
    expected = by_backward(module, batch)
    names = SELECTIONS[selection](list(expected))
    chosen = {name: g for name, g in expected.items() if names is None or name in names}
    functional = computer(FunctionalGradientComputer, module, task, names)
    gradients = functional.compute_per_sample_grad(batch)
    assert list(gradients) == list(chosen)
    for name, gradient in gradients.items():
        assert gradient.dtype == dtype
        assert not gradient.requires_grad
        assert_close(gradient.reshape(N, -1), expected[name], TOLERANCE[dtype])
    assert engine(caplog) == "hooks"
    if model != "text" and dtype != torch.bfloat16:
        batches = IterativeImageClassificationModelOutput()
        iterative = computer(IterativeGradientComputer, module, batches, names)
        found = iterative.compute_per_sample_grad(batch)
        assert found.dtype == dtype
        assert_close(found, flat(chosen), TOLERANCE[dtype])


@pytest.mark.parametrize(
    "prepare", ["a subclass", "a method of its own", "training mode", "hooks that fail"]
)
def test_compute_per_sample_grad__by_vmap_is_the_same(
    prepare: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG, "GradientComputer")
    module, batch = built("mlp"), images(N)
    expected = by_backward(module, batch)
    task, sign = ImageClassificationModelOutput(), 1
    if prepare == "a subclass":
        task, sign = OwnImageOutput(), -1
    elif prepare == "a method of its own":
        task.get_output, sign = OwnImageOutput.get_output, -1  # type: ignore[method-assign]
    elif prepare == "training mode":
        module.train()
    else:
        monkeypatch.setattr("trakdask.models.hooks.rules_by_parameter", lambda layers: 1 / 0)
    gradients = computer(FunctionalGradientComputer, module, task).compute_per_sample_grad(batch)
    assert_close(flat(gradients), sign * flat(expected), 1e-5)
    assert ("ZeroDivisionError" in caplog.text) == (prepare == "hooks that fail")
    assert bool(caplog.messages) == (prepare == "hooks that fail")  # else they are not even tried


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # without setup_context, which vmap needs
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * gradient


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.rnn = built("mlp"), nn.GRU(3, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return Squared.apply(self.net(x))


@pytest.mark.parametrize("task", [ImageClassificationModelOutput, OwnImageOutput])
def test_compute_per_sample_grad__by_the_loop_where_vmap_fails(
    task: Any, caplog: pytest.LogCaptureFixture
) -> None:
    module, batch = Custom().eval(), images(N)
    expected = by_backward(module, batch)
    functional = computer(FunctionalGradientComputer, module, task())
    for _ in range(2):
        gradients = functional.compute_per_sample_grad(batch)
        sign = -1 if task is OwnImageOutput else 1
        assert_close(flat(gradients), sign * flat(expected), 1e-6)
    if task is OwnImageOutput:  # hooks run the other one
        assert caplog.messages[0].startswith(
            "Gradients by loop, which is slow, because vmap failed"
        )
        assert len(caplog.messages) == 1
    functional = computer(FunctionalGradientComputer, module.train(), task())
    with pytest.raises(RuntimeError, match="setup_context"):
        functional.compute_per_sample_grad(batch)


def test_warns__of_embeddings_of_another_checkpoint() -> None:
    module, batch = untrained(Pair), pair_batch(N)
    task = CLIPModelOutput(simulated_batch_size=4)
    functional = computer(FunctionalGradientComputer, module, task)
    task.get_embeddings(module, [pair_batch(8, seed=5)], batch_size=8, embedding_dim=5)
    functional.load_model_params(module)
    functional.compute_per_sample_grad(batch)  # no warning: a warning is an error in these tests
    module.load_state_dict({name: 1.1 * t for name, t in module.state_dict().items()})
    functional.load_model_params(module)
    with pytest.warns(UserWarning, match="get_embeddings"):
        functional.compute_per_sample_grad(batch)
    functional.compute_per_sample_grad(batch)  # once per checkpoint


# ------------------------------------------------------------------------------------- iterative


def test_iterative__outputs_that_depend_on_the_whole_batch() -> None:
    """Batch normalisation in training mode: as one call of ``get_output`` sees it."""
    module, batch = built("normed").train(), images(N)
    expected = by_backward(module, batch, all_at_once=True)
    iterative = computer(
        IterativeGradientComputer, module, IterativeImageClassificationModelOutput()
    )
    assert_close(iterative.compute_per_sample_grad(batch), flat(expected), 1e-4)


# --------------------------------------------------------------------------- the original, beside


@pytest.mark.parametrize(
    ("selection", "temperature"), [("all", None), ("last two, reversed", 0.5), ("one", 3.0)]
)
@pytest.mark.parity
def test_parity__functional_pairs(
    selection: str, temperature: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With as many negatives as there are embeddings, the original's draw does not matter."""
    outputs = pytest.importorskip("trak.modelout_functions")
    original = pytest.importorskip("trak.gradient_computers").FunctionalGradientComputer
    monkeypatch.setattr(Tensor, "cuda", lambda self: self)
    module, batch = untrained(Pair), pair_batch(N)
    names = SELECTIONS[selection]([name for name, _ in module.named_parameters()])
    made = []
    for kind, output in (
        (FunctionalGradientComputer, CLIPModelOutput),
        (original, outputs.CLIPModelOutput),
    ):
        task = output(temperature=temperature, simulated_batch_size=8)
        task.get_embeddings(module, [pair_batch(8, seed=5)], batch_size=8, embedding_dim=5, size=8)
        made.append(computer(kind, module, task, names))
    ours, theirs = made
    with sdpa_kernel(SDPBackend.MATH):
        found, expected = (c.compute_per_sample_grad(batch) for c in made)
    assert list(found) == list(expected)
    assert_close(flat(found), flat(expected).detach(), 1e-5)
    # The store of the original cannot take (batch,).
    assert_close(ours.compute_loss_grad(batch), theirs.compute_loss_grad(batch)[:, None], 1e-6)
    assert set(vars(theirs)) <= set(vars(ours))
