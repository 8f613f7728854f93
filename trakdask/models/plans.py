"""Find the modules of a model to hook, and the batch axis of their inputs and outputs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trakdask.models.attention import visible
from trakdask.models.calls import by_sample, is_by_token
from trakdask.models.independence import allowed_error, once_per_task, repeated
from trakdask.models.layers import HookedLayer, hookable_layers
from trakdask.models.tasks import Batch, Forward, Task
from trakdask.torch_internals import fake_tensor_mode, tree_leaves


def hook_plan(
    forward: Forward, task: Task, batch: Batch, names: tuple[str, ...]
) -> tuple[tuple[HookedLayer, ...], tuple[str, ...], tuple[str, ...]]:
    """Return the layers to hook, with the batch axes of all inputs and outputs of their calls.

    A batch axis is one whose length changes with the batch size. (A length alone is not enough,
    since a sequence may be as long as the batch.) So the first sample is run, repeated two and
    three times, once for each model, task and kind of batch.

    Returns
    -------
    The layers, the parameters that hooks cannot handle, and those in addition of which a batch can
    have one copy per sample.
    """

    def find() -> Any:
        found, others = hookable_layers(forward.module, names)
        copied = tuple(name for name in others if _can_be_copied(forward, task, batch, name))
        rest = tuple(name for name in others if name not in copied)
        # Not one and two samples: models may squeeze the axis of a single one.
        runs = (
            partial(task.output, with_copies(forward, copied, n), repeated(batch, n))
            for n in (2, 3)
        )
        two, three = (_call_shapes(run, forward.module, found) for run in runs)
        # Whether a layer is called more often for more samples, the collector notices.
        layers = [
            replace(layer, calls=tuple(map(_call_axes, two[layer.path], three[layer.path])))
            for layer in found
        ]
        return tuple(layers), rest, copied

    layers, rest, by_sample = once_per_task("hook plan", forward, task, batch, names, find)
    return layers, rest, by_sample


def with_copies(forward: Forward, names: Sequence[str], n: int) -> Forward:
    """Return the model with a copy of some parameters for each of n samples.

    Class tokens and positions have a first axis of length 1, which meets the axis of samples; the
    scales of channels have none.
    """
    tensors = {name: forward.parameters[name].detach() for name in names}
    return forward.with_parameters({name: by_sample(t, None, n) for name, t in tensors.items()})


def _can_be_copied(forward: Forward, task: Task, batch: Batch, name: str) -> bool:
    """Return whether f and Q of each sample are computed with its own copy of a parameter.

    Copies of different values show it: each sample has the values of a model with its copy.
    """
    parameter = forward.parameters[name].detach()
    # The second value differs also where the parameter is 0.
    values = [parameter, 1.5 * parameter + 0.1]
    rows = torch.cat([by_sample(value, None, 1) for value in (*values, parameter)])

    def is_own(method: Callable[[Forward, Batch], Tensor]) -> bool:
        alone = [
            float(method(forward.with_parameters({name: value}), repeated(batch, 1)))
            for value in values
        ]
        together = method(forward.with_parameters({name: rows}), repeated(batch, 3))
        expected = together.new_tensor([*alone, alone[0]])
        allowed = allowed_error([parameter]) * float(expected.abs().max())
        return bool(((together - expected).abs() <= allowed).all())

    with suppress(Exception), torch.no_grad():  # of a shape that the model does not take
        return is_own(task.output) and is_own(task.out_to_loss)
    return False


def _call_shapes(
    run: Callable[[], object], module: nn.Module, layers: Sequence[HookedLayer]
) -> Mapping[str, list[Any]]:
    """Return the shapes of the inputs and outputs of every call of the layers during ``run()``."""
    shapes: dict[str, list[Any]] = {layer.path: [] for layer in layers}

    def hook_of(layer: HookedLayer) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            shapes[layer.path].append((_shapes((args, kwargs)), _shapes(output)))

        return hook

    with hooked(module, layers, hook_of), torch.no_grad():
        run()
    return shapes


def _shapes(values: Any) -> list[tuple[int, ...]]:
    # Other values than tensors have no axes, and are passed to all samples alike.
    leaves = tree_leaves(values)
    return [tuple(leaf.shape) if isinstance(leaf, Tensor) else () for leaf in leaves]


def _call_axes(two: Any, three: Any) -> tuple[list[int | None], list[int | None]]:
    """Return the first axis of each tensor of a call whose length differs, if there is one."""
    inputs, outputs = (
        [
            next((axis for axis, (a, b) in enumerate(zip(*pair, strict=False)) if a != b), None)
            for pair in zip(*shapes, strict=True)
        ]
        for shapes in zip(two, three, strict=True)
    )
    return inputs, outputs


@contextmanager
def hooked(
    module: nn.Module,
    layers: Sequence[HookedLayer],
    hook_of: Callable[[HookedLayer], Callable[..., Any]],
) -> Iterator[None]:
    """Register a hook on the forward pass of each layer while the ``with`` body runs."""
    of_attention: dict[str, dict[str, Callable[..., Any]]] = defaultdict(dict)
    with ExitStack() as stack:
        for layer in layers:
            hook = hook_of(layer)
            if layer.attention is not None:
                # All projections of an attention together, since its forward is replaced once.
                of_attention[layer.attention][layer.path.rpartition(".")[2]] = hook
            else:
                part = module.get_submodule(layer.path)
                stack.callback(part.register_forward_hook(hook, with_kwargs=True).remove)
        for path, hooks in of_attention.items():
            stack.enter_context(visible(module.get_submodule(path), hooks))
        yield


def has_pooled_layers(
    module: nn.Module, task: Task, inputs: Mapping[str, Tensor], names: Sequence[str]
) -> bool:
    """Return whether a layer takes or returns something else than a value per token.

    The model runs on tensors without values. If it cannot, the answer is False.

    Parameters
    ----------
    module
        The architecture.
    task, names
        The task to differentiate, and the parameters with respect to which.
    inputs
        Tensors without values, of one sample each; sequences are the first of them.
    """
    layers, shapes_of = hookable_layers(module, names)[0], {}
    n_tokens = next(iter(inputs.values())).shape[1]
    with suppress(Exception), fake_tensor_mode():
        # Tensors of checkpoints are on the meta device. Here they become tensors that seem to be on
        # the CPU, still without values. The module has all others.
        state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        state = {name: torch.empty_like(t, device="cpu") for name, t in state.items() if t.is_meta}
        for n in (2, 3):
            zeros = {k: torch.zeros((n, *v.shape[1:]), dtype=v.dtype) for k, v in inputs.items()}
            run = partial(task.output, Forward(module, state, {}), Batch(zeros))
            shapes_of[n] = _call_shapes(run, module, layers)
        return any(
            not is_by_token(torch.empty(shapes[0], device="meta"), axes[0], 3, n_tokens)
            for layer in layers
            for two, three in zip(shapes_of[2][layer.path], shapes_of[3][layer.path], strict=True)
            for axes, shapes in zip(_call_axes(two, three), three, strict=True)
            if shapes and shapes[0]
        )
    return False
