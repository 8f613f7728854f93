"""Select the parameters whose gradients are features, by name, glob, class or predicate."""

from __future__ import annotations

import difflib
import fnmatch
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence

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
    TypeError
        If the selection is of any other kind.
    ValueError
        If nothing is selected, or a selected parameter is not floating point.
    """
    parameters = dict(module.named_parameters())
    if isinstance(selection, type):
        names = _of_instances(module, parameters, selection)
    else:
        names = _matching(parameters, selection)
    for name in names:
        if not parameters[name].is_floating_point():
            raise ValueError(
                f"expected floating-point parameters, since others have no gradient, got {name!r} "
                f"with dtype {parameters[name].dtype}; try parameters= without it"
            )
    return names


def _of_instances(
    module: nn.Module, parameters: Mapping[str, Tensor], kind: type[nn.Module]
) -> tuple[str, ...]:
    """Return the parameters of modules of a class, and of the modules inside them."""
    instances = [each for each in module.modules() if isinstance(each, kind)]
    own = {id(tensor) for instance in instances for tensor in instance.parameters()}
    names = tuple(name for name, tensor in parameters.items() if id(tensor) in own)
    if not names:
        kinds = sorted({type(each).__name__ for each in module.modules()})
        raise ValueError(
            f"expected a class of modules that have parameters, got parameters={kind.__name__}, "
            f"which selects nothing; try one of those in the model: {kinds[:8]}"
        )
    return names


def _matching(parameters: Mapping[str, Tensor], selection: Selection) -> tuple[str, ...]:
    if selection is None:
        return tuple(parameters)
    if callable(selection):
        try:
            inspect.signature(selection).bind("name", "parameter")
        except TypeError as err:
            raise TypeError(
                f"expected a predicate of name and parameter as parameters, got one that cannot "
                f"take both ({err}); try parameters=lambda name, parameter: ..."
            ) from err
        names = tuple(name for name, value in parameters.items() if selection(name, value))
        if not names:
            raise ValueError(
                "expected a predicate parameters= that selects something, got one that selected "
                f"none of {len(parameters)} parameters; try names such as {list(parameters)[:5]}"
            )
        return names
    patterns = [selection] if isinstance(selection, str) else selection
    if not isinstance(patterns, Iterable) or not all(isinstance(p, str) for p in patterns):
        raise TypeError(
            "expected a name, a glob, a list of these, a class of modules or a predicate as "
            f"parameters, got {selection!r}; try parameters='head.*', or None for all"
        )
    patterns = list(patterns)
    if not patterns:
        raise ValueError(
            "expected at least one name or glob, got parameters=[], which selects nothing; try "
            "parameters=None for all"
        )
    for pattern in patterns:
        _require_match(pattern, parameters)
    return tuple(n for n in parameters if any(fnmatch.fnmatchcase(n, p) for p in patterns))


def _require_match(pattern: str, parameters: Mapping[str, Tensor]) -> None:
    if any(fnmatch.fnmatchcase(name, pattern) for name in parameters):
        return
    inside = [name for name in parameters if pattern and pattern in name]
    near = difflib.get_close_matches(pattern, list(parameters), n=5, cutoff=0.3)
    advice = f"'*{pattern}*'" if inside else f"one of {near or list(parameters)[:5]}"
    raise ValueError(
        f"expected a name or a glob of parameters, got parameters={pattern!r}, which matches none "
        f"of {len(parameters)}; try {advice}"
    )
