"""Which parameters are attributed to, chosen by name, glob or predicate."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

__all__ = ["Selection", "select_parameters"]

Selection = None | str | Sequence[str] | type[nn.Module] | Callable[[str, Tensor], bool]


def select_parameters(module: nn.Module, selection: Selection) -> tuple[str, ...]:
    """Return the names of the selected parameters, in the order of the module.

    Parameters
    ----------
    module
        The model.
    selection
        ``None`` for all, one name or glob (``"layer4.*"``, ``"*lora_*"``), several of them, a class
        of modules (``nn.Linear``) for the parameters of its instances, or a predicate ``(name,
        parameter) -> bool``.

    Raises
    ------
    ValueError
        If nothing is selected, or a parameter that is not floating point.
    """
    parameters = dict(module.named_parameters())
    if isinstance(selection, type):
        names = _of_instances(module, parameters, selection)
    else:
        names = _matching(parameters, selection)
    for name in names:
        if not parameters[name].is_floating_point():
            raise ValueError(
                f"parameter {name!r} has dtype {parameters[name].dtype}; needed floating point, "
                "since others have no gradient. Leave it out of parameters=."
            )
    return names


def _of_instances(
    module: nn.Module, parameters: Mapping[str, Tensor], kind: type[nn.Module]
) -> tuple[str, ...]:
    """Return what belongs to modules of a class, and to the modules inside them."""
    parts = [part for part in module.modules() if isinstance(part, kind)]
    own = {id(tensor) for part in parts for tensor in part.parameters()}
    names = tuple(name for name, tensor in parameters.items() if id(tensor) in own)
    if not names:
        kinds = sorted({type(part).__name__ for part in module.modules()})
        raise ValueError(
            f"parameters={kind.__name__} selects nothing; needed a class of modules with "
            f"parameters. The model has {kinds[:8]}."
        )
    return names


def _matching(parameters: Mapping[str, Tensor], selection: Selection) -> tuple[str, ...]:
    if selection is None:
        return tuple(parameters)
    if callable(selection):
        names = tuple(name for name, value in parameters.items() if selection(name, value))
        if not names:
            raise ValueError(
                f"the predicate parameters= selected none of {len(parameters)} parameters; needed "
                f"at least one. Their names begin with {list(parameters)[:5]}."
            )
        return names
    patterns = [selection] if isinstance(selection, str) else list(selection)
    if not patterns:
        raise ValueError("parameters=[] selects nothing; needed a pattern. Use None for all.")
    for pattern in patterns:
        _require_match(pattern, parameters)
    return tuple(n for n in parameters if any(fnmatch.fnmatchcase(n, p) for p in patterns))


def _require_match(pattern: str, parameters: Mapping[str, Tensor]) -> None:
    if any(fnmatch.fnmatchcase(name, pattern) for name in parameters):
        return
    near = difflib.get_close_matches(pattern, list(parameters), n=5, cutoff=0.3)
    raise ValueError(
        f"parameters={pattern!r} matches none of {len(parameters)} parameters; needed a name or a "
        f"glob such as 'layer4.*'. Near names: {near or list(parameters)[:5]}."
    )
