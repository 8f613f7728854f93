"""The layers of a model: which modules to hook, and the engine that suits them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from trakdask.models.attention import projections
from trakdask.models.rules import (
    CHANNEL_NORMS,
    CONVOLUTIONS,
    SLICEABLE,
    TRANSPOSED,
    GradientRule,
    rules_of,
)
from trakdask.models.tasks import Task, TrakTask

# Layers whose result at one token depends on several, or that have no axis of tokens.
_ACROSS_TOKENS = (
    *(nn.MultiheadAttention, nn.RNNBase, nn.SyncBatchNorm),
    *(CONVOLUTIONS + TRANSPOSED + CHANNEL_NORMS),
)


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
        The batch axis of each input and of each output of each call, in order, once they are known;
        None for what has no batch axis.
    attention
        Path of the ``nn.MultiheadAttention`` whose projection this is, which is no module.
    """

    path: str
    selected: dict[str, str]
    parameters: dict[str, str]
    rules: Mapping[str, GradientRule]
    calls: tuple[tuple[list[int | None], list[int | None]], ...] = ()
    attention: str | None = None


def hookable_layers(
    module: nn.Module, names: Sequence[str]
) -> tuple[tuple[HookedLayer, ...], tuple[str, ...]]:
    """Find the modules to hook for the selected parameters; tied weights belong to several.

    Returns
    -------
    The modules, and the selected parameters that hooks cannot handle. These belong directly to
    modules that also have children with parameters, so that only the module's own code determines
    how the parameter is used. (Children without parameters, such as activations, are hooked with
    their parent.)
    """
    canonical = {id(tensor): name for name, tensor in module.named_parameters()}
    # 1. Modules, each once, and parents first. Some use the parameters of their children without
    # calling these, which then belong to them.
    containers = (nn.ParameterDict, nn.ParameterList)
    hookable: list[tuple[str, nn.Module, dict[str, str]]] = []
    rest, inside = set[str](), set[int]()
    for path, part in module.named_modules():
        children = list(part.children())
        whole = (
            isinstance(part, nn.MultiheadAttention)
            or bool(getattr(part, "lora_magnitude_vector", None))  # DoRA of PEFT
            or any(isinstance(c, containers) and len(c) for c in children)
        )
        is_inside = id(part) in inside
        if whole or is_inside:
            inside.update(map(id, children))
        if is_inside:
            continue
        all_names = {
            name: canonical[id(tensor)]
            for name, tensor in part.named_parameters(recurse=whole, remove_duplicate=False)
        }
        # Children with parameters must be hooked, too, and do not show how the module's own ones
        # are used. A parametrization returns a weight, which has no batch axis to hook.
        has_below = any(True for child in children for _ in child.parameters())
        if not whole and (has_below or isinstance(part, ParametrizationList)):
            rest |= set(all_names.values()) & set(names)
        else:
            hookable.append((path, part, all_names))
    # 2. Their rules. A projection of attention is a layer of its own.
    layers = []
    for path, submodule, all_names in hookable:
        # A weight that is tied to one that hooks cannot handle is not handled by them either.
        selected = {i: name for i, name in all_names.items() if name in names and name not in rest}
        rules = rules_of(submodule)
        parts = projections(submodule)
        for part, of_part in parts.items():
            own = {i: name for i, name in selected.items() if i in of_part}
            if own:
                inner = f"{path}.{part}" if path else part
                layers.append(HookedLayer(inner, own, own, of_part, attention=path))
        if selected and not parts:
            fits = set(selected) <= set(rules)
            layers.append(HookedLayer(path, selected, all_names, rules if fits else {}))
    return tuple(layers), tuple(name for name in names if name in rest)


def require_layers_of_tokens(module: nn.Module, names: Sequence[str]) -> None:
    """Reject models whose gradients are known not to be sums over tokens.

    Raises
    ------
    ValueError
        If a selected parameter belongs to a layer that looks at several tokens at once, or to a
        module with further modules inside: hooks do not see how it uses the parameter.
    """
    layers, rest = hookable_layers(module, names)
    bad = [f"{name!r}, which a module with others inside uses" for name in rest]
    for layer in layers:
        submodule = module.get_submodule(layer.path) if layer.attention is None else None
        if isinstance(submodule, _ACROSS_TOKENS):
            bad.append(
                f"{layer.path!r}, {type(submodule).__name__}, which looks at several tokens at once"
            )
    if bad:
        raise ValueError(
            "expected layers that treat tokens one by one, as parts='token' needs, got "
            f"{bad[0]}; try td.Model(..., parameters=...) without it, or modules as parts="
        )


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
    layers, rest = hookable_layers(module, names)
    if not layers:
        return "vmap", "no selected parameter belongs to a layer of its own"
    if rest:
        others = f"all but {len(rest)} of {len(names)} selected parameters"
        return "hooks", f"{others} belong to layers: {rest[0]}"
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
    layers, rest = hookable_layers(module, tuple(sizes))
    rules = rules_by_parameter(layers)
    held = [sizes[name] for name in rules if not rules[name] <= SLICEABLE]
    return max([*held, sum(sizes[name] for name in rest)])
