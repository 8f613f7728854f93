"""Which parameters are attributed to, chosen by name, glob or predicate."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

__all__ = ["Selection", "select_parameters"]

Selection = None | str | Sequence[str] | Callable[[str, Tensor], bool]


def select_parameters(parameters: Mapping[str, Tensor], selection: Selection) -> tuple[str, ...]:
    """Return the names of the selected parameters, in the order of the module.

    Parameters
    ----------
    parameters
        All parameters of the module by name.
    selection
        ``None`` for all, one name or glob (``"layer4.*"``), several of them, or a predicate
        ``(name, parameter) -> bool``.

    Raises
    ------
    ValueError
        If a pattern or the predicate matches nothing, or matches a parameter that is not floating
        point.
    """
    names = _matching(parameters, selection)
    for name in names:
        if not parameters[name].is_floating_point():
            raise ValueError(
                f"parameter {name!r} has dtype {parameters[name].dtype}; needed floating point, "
                "since others have no gradient. Leave it out of parameters=."
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
