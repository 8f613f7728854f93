"""Explain why a model fails on a batch: which layer fails, and on which input."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from trakdask.models.tasks import Batch, Forward, Task
from trakdask.models.tasks.protocol import SampleError

__all__ = ["explain"]

_Call = tuple[str, nn.Module, list[Tensor]]
"""Path of a module, the module, and the tensors it was called with."""


def explain(err: Exception, forward: Forward, task: Task, batch: Batch) -> Exception | None:
    """Return an error that says what is wrong with the input or the model; None if unknown.

    Parameters
    ----------
    err
        The error that a pass through the model raised.
    forward, task, batch
        The model, its task, and the samples.

    Notes
    -----
    Runs the model once more on the batch, without gradients, to see which layer fails.
    """
    if "modified by an inplace operation" in str(err):
        return ValueError(
            "expected a model that does not overwrite tensors of its backward pass, got one that "
            f"does so in place ({_first_line(err)}); try nn.ReLU(inplace=False), and y = y + x "
            "instead of y += x"
        )
    if "saved tensor hooks" in str(err) or "Tensor on device meta" in str(err):
        return ValueError(
            "expected a model whose layers do not run again in the backward pass, got one that "
            f"checkpoints its activations ({_first_line(err)}); try the model without it, such as "
            "after model.gradient_checkpointing_disable(): activations of one micro-batch are all "
            "that is kept"
        )
    calls, failure = _calls_at_failure(forward, task, batch)
    if failure is None or not calls:
        return None
    path, module, inputs = calls[-1]
    if isinstance(module, nn.Embedding) and isinstance(failure, IndexError):
        return _of_embedding(path, module, inputs[0], len(next(iter(batch.values()))))
    if (mismatch := _of_dtypes(path, module, inputs, batch)) is not None:
        return mismatch
    where = f"layer {path!r}" if path else "the model"
    given = ", ".join(_shown(tensor) for tensor in inputs)
    variables = ", ".join(f"{name} {_shown(tensor)}" for name, tensor in batch.items())
    why = f"{type(failure).__name__}: {_first_line(failure)}"
    return ValueError(
        f"expected an input that {where}, {_described(module)}, can process, got {given} from "
        f"the variables {variables} ({why}); try {_advice(path, module, failure)}"
    )


def _calls_at_failure(
    forward: Forward, task: Task, batch: Batch
) -> tuple[list[_Call], Exception | None]:
    """Return the calls that had not returned when the model failed, the outermost first."""
    calls: list[_Call] = []

    def enter(path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            calls.append((path, module, tensors))

        return hook

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        calls.pop()

    handles = []
    for path, module in forward.module.named_modules():
        handles.append(module.register_forward_pre_hook(enter(path), with_kwargs=True))
        handles.append(module.register_forward_hook(leave))
    try:
        with torch.no_grad():
            task.output(forward, batch)
    except Exception as err:
        return calls, err
    finally:
        for handle in handles:
            handle.remove()
    return calls, None


def _of_embedding(path: str, layer: nn.Embedding, ids: Tensor, size: int) -> Exception | None:
    n = layer.num_embeddings
    bad = ((ids < 0) | (ids >= n)).nonzero()
    if not len(bad):
        return None
    value = int(ids[tuple(bad[0])])
    if len(ids) != size:  # positions, which all samples share
        return ValueError(
            f"expected positions in 0..{n - 1} (layer {path!r} has {n} rows), got {value}; try "
            f"cutting sequences to {n} tokens"
        )
    return SampleError(
        f"expected ids in 0..{n - 1} (layer {path!r} has {n} rows), got {value} at sample "
        "{sample}; try the tokenizer that the model was trained with, or leaving the sample out",
        int(bad[0, 0]),
    )


def _of_dtypes(
    path: str, module: nn.Module, inputs: list[Tensor], batch: Batch
) -> Exception | None:
    """Compare the dtype of the first input with that of the layer's own parameters."""
    needed = next((p.dtype for p in module.parameters(recurse=False)), None)
    if isinstance(module, nn.Embedding) or needed is None or not inputs:
        return None
    given = inputs[0].dtype
    if given == needed or torch.is_autocast_enabled(inputs[0].device.type):
        return None
    names = [name for name, tensor in batch.items() if tensor.dtype == given]
    name = names[0] if names else next(iter(batch))
    return ValueError(
        f"expected {needed} at layer {path!r}, {_described(module)}, got {_shown(inputs[0])}; try "
        f"samples.assign({name}=samples[{name!r}].astype({str(needed).removeprefix('torch.')!r}))"
    )


def _advice(path: str, module: nn.Module, failure: Exception) -> str:
    if isinstance(failure, TypeError) and not path:
        return (
            f"naming its arguments in the task: forward takes {inspect.signature(module.forward)}"
        )
    return "samples whose variables have the shapes that the model was built for"


def _described(module: nn.Module) -> str:
    return f"{type(module).__name__}({module.extra_repr()})"


def _shown(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _first_line(err: Exception) -> str:
    lines = str(err).splitlines()
    return lines[0][:200] if lines else ""
