"""Parts of gradient computers: parameters by name, checks, and gradients by vmap."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _NormBase

from trakdask.models.gradients import require_same_as_loop
from trakdask.models.tasks import Batch, Forward
from trakdask.models.tasks.logits import shape_of
from trakdask.trak.batched_tasks import BatchedTask, batched_task
from trakdask.trak.modelout_functions import (
    AbstractModelOutput,
    IterativeImageClassificationModelOutput,
)

__all__ = [
    "checked_outputs",
    "differentiable",
    "loss_gradient",
    "named",
    "require_evaluation",
    "require_output_of_batch",
    "require_output_of_sample",
    "selected_parameters",
    "vectorise",
    "why_hooks_differ",
    "widest",
]


def vectorise(
    modelout: Any,
    forward: Forward,
    batch: Sequence[Any],
    names: Sequence[str],
    sink: Callable[[str, Tensor], None],
) -> None:
    """Pass per-sample gradients to a sink, vectorised by ``torch.func.vmap``.

    Parameters
    ----------
    modelout
        Object with ``get_output(model, weights, buffers, *sample)``, which returns a scalar.
    forward
        Model, weights and buffers.
    batch
        The arguments of ``get_output``, with samples along the first axis.
    names
        Parameters to differentiate with respect to.
    sink
        Receives each gradient, (batch, numel), in the order of the names.
    """

    def output_of_one(selected: dict[str, Tensor], *sample: Any) -> Tensor:
        weights = {**forward.parameters, **selected}
        output = modelout.get_output(forward.module, weights, forward.buffers, *sample)
        if not (isinstance(output, Tensor) and output.ndim == 0):
            raise ValueError(
                f"expected a scalar tensor from {type(modelout).__name__}.get_output, which is "
                f"called with one sample, got {shape_of(output)}; try returning output.sum()"
            )
        return output

    selected = {name: forward.parameters[name] for name in names}
    in_dims = (None, *[0] * len(batch))
    every = torch.func.vmap(torch.func.grad(output_of_one), in_dims=in_dims, randomness="different")
    with sdpa_kernel(SDPBackend.MATH):  # vmap would run other backends sample by sample
        gradients = every(selected, *batch)
    for name in names:
        gradient = gradients.pop(name)
        sink(name, gradient.reshape(len(gradient), -1))


def require_output_of_sample(modelout: object) -> None:
    """Reject the built-in output that takes whole batches."""
    if type(modelout) is IterativeImageClassificationModelOutput:
        raise TypeError(
            "expected an output that takes one sample at a time, got "
            "IterativeImageClassificationModelOutput; try TRAKer(..., "
            "gradient_computer=IterativeGradientComputer), or task='image_classification'"
        )


def require_output_of_batch(modelout: object) -> None:
    """Reject the built-in outputs that take one sample."""
    if batched_task(modelout) is not None:
        raise TypeError(
            f"expected an output that takes whole batches, got {type(modelout).__name__}; try "
            "task='iterative_image_classification', or gradient_computer=FunctionalGradientComputer"
        )


def checked_outputs(outputs: object, size: int, modelout: Any) -> Tensor:
    """Return the outputs of a batch as (batch,); reject values of any other form."""
    if isinstance(outputs, Tensor) and outputs.shape in ((size,), (size, 1)):
        return outputs.reshape(size)
    raise ValueError(
        f"expected one number per sample from {type(modelout).__name__}.get_output, shape "
        f"({size},), got {shape_of(outputs)}; try summing over the other axes"
    )


def loss_gradient(
    modelout: Any,
    model: nn.Module,
    weights: Mapping[str, Tensor] | None,
    buffers: Mapping[str, Tensor] | None,
    batch: Iterable[Any],
) -> Tensor:
    """Return the out-to-loss gradients; gradients are enabled for outputs of your own only."""
    is_built_in = type(modelout).__module__ == AbstractModelOutput.__module__
    with torch.set_grad_enabled(torch.is_grad_enabled() and not is_built_in):
        gradients: Tensor = modelout.get_out_to_loss_grad(model, weights, buffers, batch)
    return gradients.detach()


def why_hooks_differ(
    forward: Forward, task: BatchedTask, few: Batch, names: tuple[str, ...]
) -> str:
    """Return why hooks fail or disagree with one backward pass per sample; "" if they agree."""
    try:
        with torch.enable_grad():
            require_same_as_loop("hooks", forward, task, few, names)
    except Exception as err:  # vmap runs instead, and raises an error if it fails, too
        return f"{type(err).__name__}: {err}"
    return ""


def selected_parameters(
    weights: Mapping[str, Tensor], names: Sequence[str] | None
) -> dict[str, Tensor]:
    """Return the parameters to differentiate with respect to, in the order of the model."""
    if names is None:
        return dict(weights)
    for name in names:
        if name not in weights:
            near = difflib.get_close_matches(name, list(weights), n=3, cutoff=0.3)
            raise ValueError(
                f"expected names of the model's {len(weights)} parameters in grad_wrt, got "
                f"{name!r}; try {near or list(weights)[:3]}"
            )
    if not names:
        raise ValueError(
            "expected at least one name in grad_wrt, got []; try grad_wrt=None for all"
        )
    return {name: tensor for name, tensor in weights.items() if name in names}


def widest(tensors: Iterable[Tensor], at_least: torch.dtype | None = None) -> torch.dtype:
    """Return the dtype to which the dtypes of all tensors are promoted."""
    dtypes = [tensor.dtype for tensor in tensors]
    return reduce(torch.promote_types, dtypes if at_least is None else [at_least, *dtypes])


def named(task: BatchedTask, batch: Sequence[Tensor]) -> Batch:
    """Return the tensors of a batch by name."""
    if len(batch) != len(task.names):
        raise TypeError(
            f"expected a batch of {len(task.names)} tensors ({', '.join(task.names)}), got "
            f"{len(batch)}; try featurize(batch=({', '.join(task.names)}), ...)"
        )
    return Batch(zip(task.names, batch, strict=True))


def require_evaluation(model: nn.Module) -> None:
    """Reject layers that would mix the samples of a batch and update their own statistics."""
    for name, part in model.named_modules():
        if isinstance(part, _NormBase) and part.training and part.running_mean is not None:
            raise RuntimeError(
                f"expected batch normalisation in evaluation mode, got layer {name!r} "
                f"({type(part).__name__}) in training mode, where samples have no gradients of "
                "their own; try model.eval()"
            )


@contextmanager
def differentiable(model: nn.Module, selected: Sequence[Tensor]) -> Iterator[None]:
    """Let autograd differentiate with respect to the selected parameters only, frozen or not."""
    wanted = {id(parameter) for parameter in selected}
    changed = [p for p in model.parameters() if p.requires_grad != (id(p) in wanted)]
    for parameter in changed:
        parameter.requires_grad_(not parameter.requires_grad)
    try:
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(not parameter.requires_grad)
