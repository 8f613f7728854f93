"""Calls of layers: their batch axes, and their gradients by autograd, for layers without a rule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from trakdask.models.attention import visible
from trakdask.models.independence import allowed_error, once_per_task, repeated
from trakdask.models.layers import CallAxes, HookedLayer, HookPlan, hookable_layers
from trakdask.models.tasks import Batch, Forward, Task
from trakdask.torch_internals import (
    fake_tensor_mode,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
    version_of,
)

# Relative error that no reordering stays below: other rows are as far away as they are long.
# Rounding errors are far below, but can grow from layer to layer, and in half precision a layer's
# input is known to three digits.
_ROUGHLY = 0.05

_Shapes = list[tuple[int, ...]]
_CallShapes = tuple[_Shapes, _Shapes]


def hook_plan(forward: Forward, task: Task, batch: Batch, names: tuple[str, ...]) -> HookPlan:
    """Return the layers to hook, with the batch axes of all inputs and outputs of their calls.

    A batch axis is one whose length changes with the batch size. (A length alone is not enough,
    since a sequence may be as long as the batch.) So the first sample is run, repeated two and
    three times, once for each model, task and kind of batch.
    """

    def find() -> HookPlan:
        plan = hookable_layers(forward.module, names)
        copied = tuple(name for name in plan.rest if _can_be_copied(forward, task, batch, name))
        rest = tuple(name for name in plan.rest if name not in copied)
        # Not one and two samples: models may squeeze the axis of a single one.
        runs = (
            partial(task.output, with_copies(forward, copied, n), repeated(batch, n))
            for n in (2, 3)
        )
        two, three = (_call_shapes(run, forward.module, plan.layers) for run in runs)
        # Whether a layer is called more often for more samples, the collector notices.
        layers = [
            replace(layer, calls=tuple(map(_call_axes, two[layer.path], three[layer.path])))
            for layer in plan.layers
        ]
        return HookPlan(tuple(layers), rest, copied)

    return once_per_task("hook plan", forward, task, batch, names, find)


def with_copies(forward: Forward, names: Sequence[str], n: int) -> Forward:
    """Return the model with a copy of some parameters for each of n samples.

    Class tokens and positions have a first axis of length 1, which meets the axis of samples; the
    scales of channels have none.
    """
    tensors = {name: forward.parameters[name].detach() for name in names}
    return forward.with_parameters({name: _copies(t, n) for name, t in tensors.items()})


def _copies(tensor: Tensor, n: int) -> Tensor:
    one = tensor if tensor.shape[:1] == (1,) else tensor[None]
    return one.expand(n, *one.shape[1:])


def _can_be_copied(forward: Forward, task: Task, batch: Batch, name: str) -> bool:
    """Return whether each sample is computed with its own copy of a parameter.

    Copies of different values show it: each sample has the output of a model with its copy.
    """
    parameter = forward.parameters[name].detach()
    values = [parameter, 1.5 * parameter + 0.1]
    with suppress(Exception), torch.no_grad():  # of a shape that the model does not take
        alone = [
            float(task.output(forward.with_parameters({name: value}), repeated(batch, 1)))
            for value in values
        ]
        rows = torch.cat([_copies(value, 1) for value in (*values, parameter)])
        together = task.output(forward.with_parameters({name: rows}), repeated(batch, 3))
        expected = together.new_tensor([*alone, alone[0]])
        allowed = allowed_error([parameter]) * float(expected.abs().max())
        return bool(((together - expected).abs() <= allowed).all())
    return False


def _call_shapes(
    run: Callable[[], object], module: nn.Module, layers: Sequence[HookedLayer]
) -> Mapping[str, list[_CallShapes]]:
    """Return the shapes of the inputs and outputs of every call of the layers during ``run()``."""
    shapes: dict[str, list[_CallShapes]] = {layer.path: [] for layer in layers}

    def hook_of(layer: HookedLayer) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            shapes[layer.path].append((_shapes((args, kwargs)), _shapes(output)))

        return hook

    with hooked(module, layers, hook_of), torch.no_grad():
        run()
    return shapes


def _shapes(values: Any) -> _Shapes:
    # Other values than tensors have no axes, and are passed to all samples alike.
    leaves = tree_leaves(values)
    return [tuple(leaf.shape) if isinstance(leaf, Tensor) else () for leaf in leaves]


def _call_axes(two: _CallShapes, three: _CallShapes) -> CallAxes:
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
        What is differentiated, with respect to which parameters.
    inputs
        Tensors without values, of one sample each; sequences are the first of them.
    """
    layers, shapes_of = hookable_layers(module, names).layers, {}
    n_tokens = next(iter(inputs.values())).shape[1]
    with suppress(Exception), fake_tensor_mode():
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


def is_by_token(value: Tensor, axis: int | None, n_samples: int, n_tokens: int) -> bool:
    """Return whether a tensor that a layer took or returned has a value for each token."""
    return by_sample(value, axis, n_samples).shape[:2] == (n_samples, n_tokens)


def by_sample(value: Tensor, axis: int | None, n_samples: int) -> Tensor:
    """Return a tensor of a call, (samples, ...); one that all samples share is expanded."""
    if axis is not None:
        return batch_first(value, axis, n_samples)
    alone = value if value.shape[:1] == (1,) else value[None]
    return alone.expand(n_samples, *alone.shape[1:])


def batch_first(value: Tensor, axis: int, n_samples: int) -> Tensor:
    """Return a tensor with one entry per sample along its first axis.

    Models flatten batch and positions into one axis, for example in front of experts.

    Examples
    --------
    >>> batch_first(torch.zeros(6, 4), 0, 2).shape, batch_first(torch.zeros(4, 2), 1, 2).shape
    (torch.Size([2, 3, 4]), torch.Size([2, 4]))
    """
    if value.shape[axis] != n_samples:
        value = split_axis(value, axis, n_samples)
    return value.movedim(axis, 0) if axis else value


def split_axis(value: Tensor, axis: int, n_samples: int) -> Tensor:
    """Split the batch axis into two: the samples, and the rows of each sample, mostly one."""
    if value.shape[axis] % n_samples:
        raise RuntimeError(
            f"expected as many rows of a layer's input or output for every sample, got "
            f"{value.shape[axis]} for {n_samples} samples; try gradients='vmap', or 'loop'"
        )
    split: Tensor = value.unflatten(axis, (n_samples, -1))
    return split


def first_leaf(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the first of the inputs of a module, or None; mostly without torch's slow search."""
    if args and isinstance(args[0], Tensor):
        return args[0]
    return next(iter(tree_leaves((args, kwargs))), None)


def is_floating(value: object) -> bool:
    """Return whether a value is a tensor that can have a gradient."""
    return isinstance(value, Tensor) and value.is_floating_point()


@dataclass(frozen=True)
class Call:
    """One recorded call of a layer: its inputs, buffers and batch axes."""

    layer: HookedLayer
    module: nn.Module
    inputs: Any  # (args, kwargs)
    version: int
    buffers: Mapping[str, Tensor]
    in_axes: list[int | None]
    out_axes: list[int | None]
    by_token: bool = False
    """Whether its gradients are divided among the tokens."""

    def input(self) -> Tensor:
        """Return the first input, which must still have the values that the layer used."""
        leaf: Tensor = first_leaf(*self.inputs)
        if version_of(leaf) != self.version:
            raise RuntimeError(
                f"expected the input of layer {self.layer.path!r} as it was used, got one that was "
                "changed in place; try x = x + y instead of x += y, or gradients='vmap'"
            )
        return leaf

    def has_row(self, row: int, alone: Any, n_samples: int) -> bool:
        """Return whether a row of the first input is the first input of the sample alone."""
        axis = self.in_axes[0]
        if axis is None:
            return True
        in_batch = batch_first(self.input(), axis, n_samples)[row].detach()
        alone = batch_first(alone, axis, 1)[0]
        if alone.shape != in_batch.shape:
            return False
        error = (alone.double() - in_batch.double()).norm()
        return bool(error <= _ROUGHLY * alone.double().norm())


def local_gradients(
    call: Call,
    tensors: Mapping[str, Tensor],
    deltas: Sequence[Tensor | None],
    axes: Sequence[int],
    n_samples: int,
) -> dict[str, Tensor]:
    """Differentiate one module sample by sample, for modules of any kind.

    Parameters
    ----------
    call
        The recorded call of the module.
    tensors
        The parameters and buffers of the module by name.
    deltas, axes
        The gradient of the model output with respect to each tensor that the module returned (None
        for a tensor without effect on the output), and the batch axes of these gradients.
    n_samples
        Batch size.

    Returns
    -------
    The gradient of each selected parameter, (batch, *shape).
    """
    used = {i: delta for i, delta in enumerate(deltas) if delta is not None}
    out_axes = [axes[i] for i in used]
    leaves, spec = tree_flatten(call.inputs)
    # A sample that is taken out along an axis that was split keeps this axis, as the module needs.
    inputs = [
        leaf if axis is None else split_axis(leaf, axis, n_samples)
        for leaf, axis in zip(leaves, call.in_axes, strict=True)
    ]
    weights = [split_axis(delta, axes[i], n_samples) for i, delta in used.items()]

    def weighted_output(
        selected: Mapping[str, Tensor], inputs: list[Any], weights: list[Tensor]
    ) -> Tensor:
        args, kwargs = tree_unflatten(inputs, spec)
        returned = torch.func.functional_call(call.module, {**tensors, **selected}, args, kwargs)
        outputs = [y for y in tree_leaves(returned) if is_floating(y)]
        terms = [(outputs[i] * weight).sum() for i, weight in zip(used, weights, strict=True)]
        total: Tensor = torch.stack(terms).sum()
        return total

    selected = {inside: tensors[inside] for inside in call.layer.selected}
    one = torch.func.grad(weighted_output)
    try:
        with sdpa_kernel(SDPBackend.MATH):  # the only backend that vmap supports
            every = torch.func.vmap(one, in_dims=(None, call.in_axes, out_axes))
            gradients: dict[str, Tensor] = every(selected, inputs, weights)
            return gradients
    except RuntimeError:  # some operators, such as RNNs', cannot be vectorized
        # Slower, but of this layer alone; errors of the layer itself are raised again here.
        rows = [
            one(selected, _sample(inputs, call.in_axes, i), _sample(weights, out_axes, i))
            for i in range(n_samples)
        ]
        return {name: torch.stack([row[name] for row in rows]) for name in selected}


def _sample(values: Sequence[Any], axes: Sequence[int | None], i: int) -> list[Any]:
    return [x if a is None else x.select(a, i) for x, a in zip(values, axes, strict=True)]
