"""Gradient computers against a loop of ``backward()``, and against those of the TRAK package."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.trak._models import (
    CLASSES,
    IMAGE_MODELS,
    Classifier,
    N,
    Pair,
    Scaled,
    backward_one_by_one,
    image_batch,
    made,
    margin_of,
    mlp,
    pair_batch,
    text_batch,
)
from trakdask.trak.gradient_computers import FunctionalGradientComputer, IterativeGradientComputer
from trakdask.trak.modelout_functions import (
    AbstractModelOutput,
    CLIPModelOutput,
    ImageClassificationModelOutput,
    IterativeImageClassificationModelOutput,
    TextClassificationModelOutput,
)

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
SELECTIONS: dict[str, Callable[[list[str]], list[str] | None]] = {
    "all": lambda names: None,
    "last two, reversed": lambda names: names[-2:][::-1],
    "one": lambda names: names[:1],
}


dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
selections = pytest.mark.parametrize("selection", list(SELECTIONS))


class OwnImageOutput(ImageClassificationModelOutput):
    """A subclass, which no engine may take for the built-in output: it negates the margin."""

    @staticmethod
    def get_output(model: Any, weights: Any, buffers: Any, image: Any, label: Any) -> Tensor:
        return -ImageClassificationModelOutput.get_output(model, weights, buffers, image, label)


class SquaredNorm(AbstractModelOutput):
    """Written for the TRAK package, but without ``__init__``."""

    @staticmethod
    def get_output(model: Any, weights: Any, buffers: Any, x: Tensor, label: Tensor) -> Tensor:
        return torch.func.functional_call(model, (weights, buffers), x[None]).square().sum()

    def get_out_to_loss_grad(self, model: Any, weights: Any, buffers: Any, batch: Any) -> Tensor:
        x, _ = batch
        return torch.func.functional_call(model, (weights, buffers), x).sum(1)


def computer(kind: Any, module: nn.Module, task: Any, grad_wrt: Any = None, **kwargs: Any) -> Any:
    own = dict(module.named_parameters())
    dim = sum(own[name].numel() for name in (own if grad_wrt is None else grad_wrt))
    given = {"grad_dim": dim, "dtype": torch.float16, "device": "cpu", **kwargs}
    return kind(model=module, task=task, grad_wrt=grad_wrt, **given)


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    scale = float(expected.abs().max())
    assert float((found.double() - expected.double()).abs().max()) <= tolerance * max(scale, 1e-3)


def by_backward(module: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
    def output_of(i: int) -> Tensor:
        *inputs, labels = batch
        return margin_of(module(*(part[i : i + 1] for part in inputs))[0], int(labels[i]))

    return backward_one_by_one(module, output_of, len(batch[0]))


def flat(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([g.reshape(len(g), -1) for g in gradients.values()], 1)


def engine(caplog: pytest.LogCaptureFixture) -> str:
    return caplog.messages[-1].removeprefix("Gradients by ").split(":")[0]


# ------------------------------------------------------------------------------------ functional


@dtypes
@selections
@pytest.mark.parametrize(
    ("model", "is_iterative"),
    [*((model, i) for model in IMAGE_MODELS for i in (False, True)), ("text", False)],
)
def test_compute_per_sample_grad__is_backward_sample_by_sample(
    model: str,
    dtype: torch.dtype,
    selection: str,
    is_iterative: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "GradientComputer")
    if model == "text":
        module, batch = made(Classifier, dtype), text_batch()
    else:
        build, shape = IMAGE_MODELS[model]
        module, batch = made(build, dtype), image_batch(shape, dtype)
    expected = by_backward(module, batch)
    names = SELECTIONS[selection](list(expected))
    chosen = {name: g for name, g in expected.items() if names is None or name in names}
    if is_iterative:
        task: Any = IterativeImageClassificationModelOutput()
        iterative = computer(IterativeGradientComputer, module, task, names)
        found = iterative.compute_per_sample_grad(batch)
        assert found.dtype == dtype
        assert_close(found, flat(chosen), TOLERANCE[dtype])
        return
    is_text = model == "text"
    task = TextClassificationModelOutput() if is_text else ImageClassificationModelOutput()
    functional = computer(FunctionalGradientComputer, module, task, names)
    gradients = functional.compute_per_sample_grad(batch)
    assert list(gradients) == list(chosen)
    for name, gradient in gradients.items():
        assert gradient.dtype == dtype
        assert not gradient.requires_grad
        assert_close(gradient, expected[name], TOLERANCE[dtype])
    assert engine(caplog) == "hooks"


@pytest.mark.parametrize(
    "prepare", ["a subclass", "a method of its own", "training mode", "hooks that fail"]
)
def test_compute_per_sample_grad__by_vmap_is_the_same(
    prepare: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG, "GradientComputer")
    module, batch = made(mlp), image_batch((12,))
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
    found = computer(FunctionalGradientComputer, module, task).compute_per_sample_grad(batch)
    for name, gradient in found.items():
        assert_close(gradient, sign * expected[name], 1e-5)
    if prepare == "hooks that fail":
        assert "ZeroDivisionError" in caplog.text
    else:
        assert not caplog.messages  # hooks are not even tried


def test_compute_per_sample_grad__a_model_that_mixes_samples_is_not_hooked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Without running statistics, a batch is normalised by itself; the original sees one sample."""
    caplog.set_level(logging.DEBUG, "GradientComputer")
    build = lambda: nn.Sequential(  # noqa: E731
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.Flatten(),
        nn.Linear(64, CLASSES),
    )
    module, batch = made(build), image_batch((3, 6, 6))
    expected = by_backward(module, batch)
    found = computer(
        FunctionalGradientComputer, module, ImageClassificationModelOutput()
    ).compute_per_sample_grad(batch)
    assert_close(flat(found), flat(expected), 1e-5)
    assert engine(caplog) == "vmap"


@pytest.mark.parametrize("kind", [FunctionalGradientComputer, IterativeGradientComputer])
def test_init__grad_wrt_names_parameters(kind: Any) -> None:
    module = made(mlp)
    given = {"grad_dim": 1, "dtype": torch.float16, "device": "cpu"}
    task = SquaredNorm()
    with pytest.raises(ValueError, match=r"'0.wieght'.*'0.weight'"):
        kind(model=module, task=task, grad_wrt=["0.wieght"], **given)
    with pytest.raises(ValueError, match="grad_wrt"):
        kind(model=module, task=task, grad_wrt=[], **given)
    once = kind(model=module, task=task, grad_wrt=iter(["0.bias", "2.bias"]), **given)
    assert once.grad_wrt == ["0.bias", "2.bias"]


@pytest.mark.parametrize("task", [ImageClassificationModelOutput(0.5), SquaredNorm()])
def test_stream_per_sample_grad__hands_on_the_same(task: AbstractModelOutput) -> None:
    module, batch = made(Scaled), image_batch((12,))
    functional = computer(FunctionalGradientComputer, module, task)
    expected = functional.compute_per_sample_grad(batch)
    found: dict[str, Tensor] = {}

    def sink(name: str, gradient: Tensor, first: int | None = None) -> None:
        assert (first or 0) == (found[name].shape[1] if name in found else 0)
        found[name] = torch.cat([found[name], gradient], 1) if first else gradient.clone()
        gradient.zero_()  # the sink owns it until it returns

    q = functional.stream_per_sample_grad(batch, sink)
    assert set(found) == set(expected)
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name].reshape(N, -1))
    if isinstance(task, SquaredNorm):
        assert q is None
    else:
        torch.testing.assert_close(q, functional.compute_loss_grad(batch))


def test_warns__of_embeddings_of_another_checkpoint() -> None:
    module, batch = made(Pair), pair_batch()
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
    build, shape = IMAGE_MODELS["batch norm"]
    module, batch = made(build).train(), image_batch(shape)
    expected = backward_one_by_one(
        module, lambda i: margin_of(module(batch[0])[i], int(batch[1][i])), N
    )
    iterative = computer(
        IterativeGradientComputer, module, IterativeImageClassificationModelOutput()
    )
    assert_close(iterative.compute_per_sample_grad(batch), flat(expected), 1e-4)


@pytest.mark.parametrize(
    ("kind", "task", "advice"),
    [
        (FunctionalGradientComputer, IterativeImageClassificationModelOutput(), "Iterative"),
        (IterativeGradientComputer, ImageClassificationModelOutput(), "iterative"),
    ],
)
def test_init__output_for_the_other_computer(kind: Any, task: Any, advice: str) -> None:
    with pytest.raises(TypeError, match=f"try .*{advice}"):
        computer(kind, made(mlp), task)


# --------------------------------------------------------------------------- the original, beside


def pair_of_tasks(name: str, **options: Any) -> tuple[Any, Any]:
    original = pytest.importorskip("trak.modelout_functions")
    ours = pytest.importorskip("trakdask.trak.modelout_functions")
    return getattr(ours, name)(**options), getattr(original, name)(**options)


def assert_parity(
    module: nn.Module, batch: list[Tensor], tasks: tuple[Any, Any], names: Any, tolerance: float
) -> None:
    original = pytest.importorskip("trak.gradient_computers")
    ours = computer(FunctionalGradientComputer, module, tasks[0], names)
    theirs = computer(original.FunctionalGradientComputer, module, tasks[1], names)
    with sdpa_kernel(SDPBackend.MATH):
        found, expected = (c.compute_per_sample_grad(batch) for c in (ours, theirs))
    assert list(found) == list(expected)
    for name in found:
        assert found[name].dtype == expected[name].dtype
        assert_close(found[name], expected[name].detach(), tolerance)
    q, expected_q = (c.compute_loss_grad(batch) for c in (ours, theirs))
    assert q.dtype == expected_q.dtype
    if isinstance(tasks[0], CLIPModelOutput):
        expected_q = expected_q[:, None]  # the store of the original cannot take (batch,)
    is_half = q.dtype.itemsize < 4
    assert_close(q, expected_q.detach(), tolerance if is_half else 1e-6)
    assert set(vars(theirs)) <= set(vars(ours))


@selections
@pytest.mark.parametrize("temperature", [None, 0.5, 3.0])
@pytest.mark.parity
def test_parity__functional_pairs(
    selection: str, temperature: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With as many negatives as there are embeddings, the original's draw does not matter."""
    module = made(Pair)
    names = SELECTIONS[selection]([name for name, _ in module.named_parameters()])
    ours, theirs = pair_of_tasks("CLIPModelOutput", temperature=temperature, simulated_batch_size=8)
    monkeypatch.setattr(Tensor, "cuda", lambda self: self)
    for task in (ours, theirs):
        task.get_embeddings(module, [pair_batch(8, seed=5)], batch_size=8, embedding_dim=5, size=8)
    assert_parity(module, pair_batch(), (ours, theirs), names, 1e-5)


@pytest.mark.parity
def test_parity__custom_outputs() -> None:
    original = pytest.importorskip("trak.modelout_functions")

    class Theirs(original.AbstractModelOutput):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()

        get_output = staticmethod(SquaredNorm.get_output)
        get_out_to_loss_grad = SquaredNorm.get_out_to_loss_grad

    module, batch = made(mlp), image_batch((12,))
    assert_parity(module, batch, (SquaredNorm(), Theirs()), None, 1e-5)
    assert_parity(module, batch, (Theirs(), Theirs()), ["0.bias"], 1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
@pytest.mark.parity
def test_parity__half_precision_models(dtype: torch.dtype) -> None:
    module, batch = made(mlp, dtype), image_batch((12,), dtype)
    tasks = pair_of_tasks("ImageClassificationModelOutput")
    assert_parity(module, batch, tasks, None, 16 * torch.finfo(dtype).eps)
