"""Calls of layers: their batch axes, and gradients of those without rules, call by call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from trakdask.models.independence import once_per_task, repeated
from trakdask.models.layers import HookableLayers, Layer, hookable_layers
from trakdask.models.tasks import Batch, Forward, Task
from trakdask.models.torch_internals import tree_flatten, tree_leaves, tree_unflatten, version_of

CallAxes = tuple[list[int | None], list[int | None]]
"""The batch axis of each input and of each output of a call; None if it has no batch axis."""
Axes = dict[str, list[CallAxes]]
"""The axes of each call of a layer, by the path of the layer."""
_Shape = tuple[int, ...] | None
_CallShapes = tuple[list[_Shape], list[_Shape]]


def hook_plan(
    forward: Forward, task: Task, batch: Batch, names: tuple[str, ...]
) -> tuple[HookableLayers, Axes]:
    """Return the layers to hook, and the batch axes of all of their inputs and outputs.

    A batch axis is one whose length changes with the batch size. (A length alone is not enough,
    since a sequence may be as long as the batch.) So the first sample is run, repeated two and
    three times, once for each model, task and kind of batch.
    """

    def plan() -> tuple[HookableLayers, Axes]:
        hookable = hookable_layers(forward.module, names)
        # Not one and two samples: models may squeeze the axis of a single one.
        runs = (partial(task.output, forward, repeated(batch, n)) for n in (2, 3))
        two, three = (_call_shapes(run, forward.module, hookable.layers) for run in runs)
        for path, calls in two.items():
            if len(calls) != len(three[path]):
                raise ValueError(
                    f"expected as many calls of layer {path!r} for a batch of any size, as "
                    f"gradients='hooks' needs, got {len(calls)} for two samples and "
                    f"{len(three[path])} for three (does the model loop over samples?); try "
                    "gradients='loop'"
                )
        return hookable, {
            path: [_batch_axes(*shapes) for shapes in zip(calls, three[path], strict=True)]
            for path, calls in two.items()
        }

    return once_per_task("hook plan", forward, task, batch, names, plan)


def _call_shapes(
    run: Callable[[], object], module: nn.Module, layers: Sequence[Layer]
) -> Mapping[str, list[_CallShapes]]:
    """Return the shapes of the inputs and outputs of every call of the layers during ``run()``."""
    shapes: dict[str, list[_CallShapes]] = {layer.path: [] for layer in layers}

    def hook_of(layer: Layer) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            shapes[layer.path].append((_shapes((args, kwargs)), _shapes(output)))

        return hook

    with hooked(module, layers, hook_of), torch.no_grad():
        run()
    return shapes


def _shapes(values: Any) -> list[_Shape]:
    leaves = tree_leaves(values)
    return [tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves]


def _batch_axes(two: _CallShapes, three: _CallShapes) -> CallAxes:
    inputs, outputs = (
        [_differing(a, b) for a, b in zip(*shapes, strict=True)]
        for shapes in zip(two, three, strict=True)
    )
    return inputs, outputs


def _differing(left: _Shape, right: _Shape) -> int | None:
    """Return the first axis whose length differs, if there is one."""
    if left is None or right is None or len(left) != len(right):
        return None
    return next((axis for axis, (a, b) in enumerate(zip(left, right, strict=True)) if a != b), None)


@contextmanager
def hooked(
    module: nn.Module, layers: Sequence[Layer], hook_of: Callable[[Layer], Callable[..., Any]]
) -> Iterator[None]:
    """Register a hook on the forward pass of each layer while the ``with`` body runs."""
    handles = [
        module.get_submodule(layer.path).register_forward_hook(hook_of(layer), with_kwargs=True)
        for layer in layers
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


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

    layer: Layer
    module: nn.Module
    inputs: Any  # (args, kwargs)
    version: int
    buffers: Mapping[str, Tensor]
    in_axes: list[int | None]
    out_axes: list[int | None]

    def input(self, n_samples: int) -> Tensor:
        """Return the first input, with the batch axis first, or as it is if it has none."""
        leaf: Tensor = first_leaf(*self.inputs)
        axis = self.in_axes[0]
        if version_of(leaf) != self.version:
            raise RuntimeError(
                f"expected the input of layer {self.layer.path!r} as the layer used it, got one "
                "that was changed in place afterwards; try x = x + y instead of x += y, or "
                "gradients='vmap'"
            )
        return leaf if axis is None else batch_first(leaf, axis, n_samples)


def batch_first(value: Tensor, axis: int, n_samples: int) -> Tensor:
    """Return a tensor with one entry per sample along its first axis.

    Models flatten batch and positions into one axis, for example in front of experts.

    Examples
    --------
    >>> batch_first(torch.zeros(6, 4), 0, 2).shape, batch_first(torch.zeros(4, 2), 1, 2).shape
    (torch.Size([2, 3, 4]), torch.Size([2, 4]))
    """
    if value.shape[axis] != n_samples:
        value = _split(value, axis, n_samples)
    return value.movedim(axis, 0) if axis else value


def _split(value: Tensor, axis: int, n_samples: int) -> Tensor:
    """Split the batch axis into two: the samples, and the rows of each sample, mostly one."""
    if value.shape[axis] % n_samples:
        raise RuntimeError(
            f"expected as many rows of a layer's input or output for every sample, got "
            f"{value.shape[axis]} rows for {n_samples} samples; try gradients='loop'"
        )
    split: Tensor = value.unflatten(axis, (n_samples, -1))
    return split


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
        leaf if axis is None else _split(leaf, axis, n_samples)
        for leaf, axis in zip(leaves, call.in_axes, strict=True)
    ]
    weights = [_split(delta, axes[i], n_samples) for i, delta in used.items()]

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
    except RuntimeError:  # some operators, such as those of RNNs, cannot be vectorized
        rows = [
            one(selected, _sample(inputs, call.in_axes, i), _sample(weights, out_axes, i))
            for i in range(n_samples)
        ]
        return {name: torch.stack([row[name] for row in rows]) for name in selected}


def _sample(values: Sequence[Any], axes: Sequence[int | None], i: int) -> list[Any]:
    return [x if a is None else x.select(a, i) for x, a in zip(values, axes, strict=True)]
