"""Choose the modules to hook, and find out along which axes their inputs hold the samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from trakdask.models.independence import once_per_task, repeated
from trakdask.models.rules import BATCH_NORMS, CONVOLUTIONS, INSTANCE_NORMS
from trakdask.models.tasks import Batch, Forward, Task
from trakdask.models.torch_internals import tree_leaves

CallAxes = tuple[list[int | None], list[int | None]]
"""The batch axis of each input and of each output of a call; None if it has no batch axis."""
Axes = dict[str, list[CallAxes]]
"""The axes of each call of a layer, by the path of the layer."""
_Shape = tuple[int, ...] | None
_CallShapes = tuple[list[_Shape], list[_Shape]]

# Layers whose result at one token depends on several, or that have no axis of tokens.
_ACROSS_TOKENS = (
    *(nn.MultiheadAttention, nn.RNNBase, nn.GroupNorm, nn.SyncBatchNorm),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(CONVOLUTIONS + BATCH_NORMS + INSTANCE_NORMS),
)


@dataclass(frozen=True)
class Layer:
    """A module whose parameter gradients are computed from its inputs and output gradients.

    Mostly a layer of the model. Modules that use the parameters of their children without calling
    them, such as ``nn.MultiheadAttention``, are one layer together with these.

    Parameters
    ----------
    path
        Name of the module in the model.
    selected
        Selected parameters of the module: name inside the module -> name in the model.
    parameters
        All parameters of the module, likewise.
    """

    path: str
    selected: dict[str, str]
    parameters: dict[str, str]


@dataclass(frozen=True)
class HookableLayers:
    """How the gradients of the selected parameters of a model are computed.

    Parameters
    ----------
    layers
        The modules to hook.
    rest
        Selected parameters that hooks cannot handle. They belong directly to modules that also have
        children with parameters, so that only the module's own code determines how the parameter is
        used. (Children without parameters, such as activations, are part of what is hooked.)
    """

    layers: tuple[Layer, ...]
    rest: tuple[str, ...]


def hookable_layers(module: nn.Module, names: Sequence[str]) -> HookableLayers:
    """Find the modules to hook for the selected parameters; tied weights belong to several."""
    canonical: dict[int, str] = {}
    for name, tensor in module.named_parameters():
        canonical.setdefault(id(tensor), name)
    layers, rest = [], set()
    for path, submodule, whole in _submodules(module):
        all_names = {
            inside: canonical[id(tensor)]
            for inside, tensor in submodule.named_parameters(recurse=whole, remove_duplicate=False)
        }
        selected = {inside: name for inside, name in all_names.items() if name in names}
        if selected and not whole and _is_mixed(submodule):
            rest |= set(selected.values())
        elif selected:
            layers.append(Layer(path, selected, all_names))
    hooked = [
        replace(layer, selected={i: name for i, name in layer.selected.items() if name not in rest})
        for layer in layers
    ]
    selected_layers = tuple(layer for layer in hooked if layer.selected)
    return HookableLayers(selected_layers, tuple(name for name in names if name in rest))


def _submodules(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield the path of each module, the module, and whether its children belong to it."""
    whole = _uses_parameters_of_children(module)
    yield path, module, whole
    for name, child in () if whole else module.named_children():
        yield from _submodules(child, f"{path}.{name}" if path else name)


def _is_mixed(module: nn.Module) -> bool:
    """Return whether a module with parameters of its own has children that must be hooked, too.

    What a parametrization returns is a weight, which has no batch axis, so it cannot be hooked.
    """
    below = (tensor for child in module.children() for tensor in child.parameters())
    return isinstance(module, ParametrizationList) or next(below, None) is not None


def _uses_parameters_of_children(module: nn.Module) -> bool:
    """Return whether a module uses the parameters of its children without calling the children."""
    is_dora = bool(getattr(module, "lora_magnitude_vector", None))  # of PEFT
    containers = (nn.ParameterDict, nn.ParameterList)
    return (
        isinstance(module, nn.MultiheadAttention)
        or is_dora
        or any(isinstance(c, containers) and len(c) for c in module.children())
    )


def require_layers_of_tokens(module: nn.Module, names: Sequence[str]) -> None:
    """Reject models whose gradients are known not to be sums over tokens.

    Raises
    ------
    ValueError
        If a selected parameter belongs to a layer that looks at several tokens at once, or to a
        module with further modules inside, of which hooks do not see how it uses the parameter.
    """
    hookable = hookable_layers(module, names)
    bad = [f"{name!r}, which a module with others inside uses" for name in hookable.rest]
    for layer in hookable.layers:
        submodule = module.get_submodule(layer.path)
        if isinstance(submodule, _ACROSS_TOKENS):
            bad.append(
                f"{layer.path!r}, {type(submodule).__name__}, which looks at several tokens at "
                "once, or has no axis of tokens"
            )
    if bad:
        raise ValueError(
            "expected parameters of layers that treat tokens one by one, as parts='token' needs, "
            f"got {bad[0]}; try td.Model(..., parameters=...) without it, or names of modules as "
            "parts="
        )


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
