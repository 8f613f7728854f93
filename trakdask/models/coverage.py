"""Which modules to hook, so that every selected parameter gets its gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

__all__ = ["Coverage", "Unit", "cover"]

_WHOLE = (nn.MultiheadAttention,)
"""Modules that use the parameters of their children without calling them."""


@dataclass(frozen=True)
class Unit:
    """A module whose parameters get their gradients from what it takes in and gives out.

    Parameters
    ----------
    path
        Its name in the model.
    selected
        The model's name of each of its selected parameters, by the name inside the module.
    parameters
        The same of all its parameters.
    """

    path: str
    selected: dict[str, str]
    parameters: dict[str, str]


@dataclass(frozen=True)
class Coverage:
    """How the selected parameters of a model are reached.

    Parameters
    ----------
    units
        Modules to hook.
    rest
        Selected parameters that hooks do not reach: those of modules that also have children, so
        that only the module's own code knows what it does with the parameter.
    """

    units: tuple[Unit, ...]
    rest: tuple[str, ...]


def cover(module: nn.Module, names: Sequence[str]) -> Coverage:
    """Find the modules to hook for the selected parameters; tied weights have several."""
    canonical: dict[int, str] = {}
    for name, tensor in module.named_parameters():
        canonical.setdefault(id(tensor), name)
    units, rest = [], set()
    for path, part, whole in _parts(module):
        own = {
            inside: canonical[id(tensor)]
            for inside, tensor in part.named_parameters(recurse=whole, remove_duplicate=False)
        }
        selected = {inside: name for inside, name in own.items() if name in names}
        if selected and not whole and next(part.children(), None) is not None:
            rest |= set(selected.values())
        elif selected:
            units.append(Unit(path, selected, own))
    hooked = (_without(unit, rest) for unit in units)
    return Coverage(tuple(u for u in hooked if u.selected), tuple(n for n in names if n in rest))


def _parts(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module, bool]]:
    whole = isinstance(module, _WHOLE)
    yield path, module, whole
    for name, child in () if whole else module.named_children():
        yield from _parts(child, f"{path}.{name}" if path else name)


def _without(unit: Unit, names: set[str]) -> Unit:
    left = {inside: name for inside, name in unit.selected.items() if name not in names}
    return Unit(unit.path, left, unit.parameters)
