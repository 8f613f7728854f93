"""The layers of a model: which modules to hook, and the batch axes of their calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from trakdask.models.batch_axes import is_by_token
from trakdask.models.independence import once_per_task, repeated
from trakdask.models.rules import CHANNEL_NORMS, CONVOLUTIONS, SLICEABLE, GradientRule, rules_of
from trakdask.models.tasks import Batch, Forward, Task, TrakTask
from trakdask.torch_internals import fake_tensor_mode, tree_leaves

# Layers whose result at one token depends on several, or that have no axis of tokens.
_ACROSS_TOKENS = (
    *(nn.MultiheadAttention, nn.RNNBase, nn.SyncBatchNorm),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(CONVOLUTIONS + CHANNEL_NORMS),
)

CallAxes = tuple[list[int | None], list[int | None]]
"""The batch axis of each input and of each output of a call; None if it has no batch axis."""
_Shapes = list[tuple[int, ...]]
_CallShapes = tuple[_Shapes, _Shapes]


@dataclass(frozen=True)
class HookedLayer:
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
    rules
        The rule of each selected parameter, by its name inside; empty if one of them has none.
    calls
        The batch axes of each call, in order, once they are known.
    """

    path: str
    selected: dict[str, str]
    parameters: dict[str, str]
    rules: Mapping[str, GradientRule]
    calls: tuple[CallAxes, ...] = ()


@dataclass(frozen=True)
class HookPlan:
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

    layers: tuple[HookedLayer, ...]
    rest: tuple[str, ...]


def hookable_layers(module: nn.Module, names: Sequence[str]) -> HookPlan:
    """Find the modules to hook for the selected parameters; tied weights belong to several."""
    canonical: dict[int, str] = {}
    for name, tensor in module.named_parameters():
        canonical.setdefault(id(tensor), name)
    hookable: list[tuple[str, nn.Module, dict[str, str]]] = []
    rest = set()
    for path, submodule, whole in _submodules(module):
        all_names = {
            inside: canonical[id(tensor)]
            for inside, tensor in submodule.named_parameters(recurse=whole, remove_duplicate=False)
        }
        if not whole and _is_mixed(submodule):
            rest |= set(all_names.values()) & set(names)
        else:
            hookable.append((path, submodule, all_names))
    layers = []
    for path, submodule, all_names in hookable:
        # A weight that is tied to one that hooks cannot handle is not handled by them either.
        selected = {i: name for i, name in all_names.items() if name in names and name not in rest}
        rules = rules_of(submodule)
        if selected:
            fits = set(selected) <= set(rules)
            layers.append(HookedLayer(path, selected, all_names, rules if fits else {}))
    return HookPlan(tuple(layers), tuple(name for name in names if name in rest))


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
        module with further modules inside: hooks do not see how it uses the parameter.
    """
    plan = hookable_layers(module, names)
    bad = [f"{name!r}, which a module with others inside uses" for name in plan.rest]
    for layer in plan.layers:
        submodule = module.get_submodule(layer.path)
        if isinstance(submodule, _ACROSS_TOKENS):
            bad.append(
                f"{layer.path!r}, {type(submodule).__name__}, which looks at several tokens at once"
            )
    if bad:
        raise ValueError(
            "expected layers that treat tokens one by one, as parts='token' needs, got "
            f"{bad[0]}; try td.Model(..., parameters=...) without it, or modules as parts="
        )


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


def rules_by_parameter(layers: Sequence[HookedLayer]) -> dict[str, set[GradientRule | None]]:
    """Return the rules for the uses of each parameter; None where there is none that fits."""
    rules: dict[str, set[GradientRule | None]] = defaultdict(set)
    for layer in layers:
        for inside, name in layer.selected.items():
            rules[name].add(layer.rules.get(inside))
    return rules


def choose_engine(module: nn.Module, task: Task, names: Sequence[str]) -> tuple[str, str]:
    """Return the engine that ``gradients="auto"`` chooses, and the reason."""
    if isinstance(task, TrakTask):
        return "vmap", "the task hands the model one sample at a time"
    plan = hookable_layers(module, names)
    if not plan.layers:
        return "vmap", "no selected parameter belongs to a layer of its own"
    if plan.rest:
        others = f"{len(plan.rest)} of {len(names)} parameters"
        return "hooks", f"{others} by vmap: {plan.rest[0]}"
    return "hooks", "all selected parameters belong to layers"


def elements_at_once(engine: str, module: nn.Module, sizes: Mapping[str, int]) -> int:
    """Return how many gradient elements of a sample an engine holds in memory at once.

    Parameters
    ----------
    engine
        Name of the engine.
    module
        The model.
    sizes
        Number of elements of each selected parameter.
    """
    if engine not in ("hooks", "tokens"):
        return sum(sizes.values())
    plan = hookable_layers(module, tuple(sizes))
    rules = rules_by_parameter(plan.layers)
    held = [sizes[name] for name in rules if not rules[name] <= SLICEABLE]
    return max([*held, sum(sizes[name] for name in plan.rest)])


def hook_plan(forward: Forward, task: Task, batch: Batch, names: tuple[str, ...]) -> HookPlan:
    """Return the layers to hook, with the batch axes of all inputs and outputs of their calls.

    A batch axis is one whose length changes with the batch size. (A length alone is not enough,
    since a sequence may be as long as the batch.) So the first sample is run, repeated two and
    three times, once for each model, task and kind of batch.
    """

    def find() -> HookPlan:
        plan = hookable_layers(forward.module, names)
        # Not one and two samples: models may squeeze the axis of a single one.
        runs = (partial(task.output, forward, repeated(batch, n)) for n in (2, 3))
        two, three = (_call_shapes(run, forward.module, plan.layers) for run in runs)
        # Whether a layer is called more often for more samples, the collector notices.
        layers = [
            replace(layer, calls=tuple(map(_call_axes, two[layer.path], three[layer.path])))
            for layer in plan.layers
        ]
        return replace(plan, layers=tuple(layers))

    return once_per_task("hook plan", forward, task, batch, names, find)


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
    handles = [
        module.get_submodule(layer.path).register_forward_hook(hook_of(layer), with_kwargs=True)
        for layer in layers
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
