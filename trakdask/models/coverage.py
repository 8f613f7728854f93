"""Choose the modules to hook so that all selected parameters get their gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

__all__ = ["HookableLayers", "Layer", "hookable_layers"]

_WHOLE = (nn.MultiheadAttention,)
"""Classes of modules that use the parameters of their children without calling the children."""


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
    whole = _is_whole(module)
    yield path, module, whole
    for name, child in () if whole else module.named_children():
        yield from _submodules(child, f"{path}.{name}" if path else name)


def _is_mixed(module: nn.Module) -> bool:
    """Return whether a module with parameters of its own has children that must be hooked, too.

    What a parametrization returns is a weight, which has no batch axis, so it cannot be hooked.
    """
    below = (tensor for child in module.children() for tensor in child.parameters())
    return isinstance(module, ParametrizationList) or next(below, None) is not None


def _is_whole(module: nn.Module) -> bool:
    """Return whether a module uses the parameters of its children without calling the children."""
    if isinstance(module, _WHOLE):
        return True
    is_dora = bool(getattr(module, "lora_magnitude_vector", None))  # of PEFT
    containers = (nn.ParameterDict, nn.ParameterList)
    return is_dora or any(isinstance(c, containers) and len(c) for c in module.children())
