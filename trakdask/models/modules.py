"""Prepare modules for models, without weights and compiled code, and select their parameters."""

from __future__ import annotations

import difflib
import fnmatch
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

__all__ = [
    "Selection",
    "aliases",
    "overwritten",
    "require_plain",
    "select_parameters",
    "uncompiled",
    "without_weights",
]

Selection = None | str | Sequence[str] | type[nn.Module] | Callable[[str, Tensor], bool]


def require_plain(module: nn.Module) -> None:
    """Reject modules whose parameters have no shapes yet or cannot be replaced in a call."""
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            f"expected an nn.Module from Python code, got {type(module).__name__}; try the module "
            "that was compiled"
        )
    for path, part in module.named_modules():
        if isinstance(part, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            raise TypeError(
                f"expected a model that runs in one process on one device, got {_at(path)} of "
                f"class {type(part).__name__}; try the module inside it, its attribute module"
            )
        if type(part).__module__.split(".")[0] == "bitsandbytes":
            raise TypeError(
                f"expected layers with plain tensors as weights, got layer {path!r} of class "
                f"{type(part).__module__}.{type(part).__name__}, whose quantised weights only "
                "bitsandbytes itself can load and multiply; try building the base model without "
                "quantization_config, in bfloat16 (the adapter's file is the same)"
            )
    for name, tensor in module.named_parameters():
        if nn.parameter.is_lazy(tensor):
            raise ValueError(
                f"expected parameters with shapes, got {name!r} of a lazy module that was never "
                "run; try running the module once in build: module(example_input)"
            )


def _at(path: str) -> str:
    return f"layer {path!r}" if path else "a model"


def uncompiled(module: nn.Module) -> nn.Module:
    """Undo torch.compile: hooks are not called inside of compiled code."""
    for part in module.modules():
        part._compiled_call_impl = None
        original = getattr(part, "_orig_mod", None)
        if isinstance(original, nn.Module):
            part.forward = original.__call__
    return module


def without_weights(module: nn.Module) -> nn.Module:
    """Move the tensors that checkpoints contain to the meta device; tied tensors stay tied."""
    saved = set(module.state_dict())
    empty: dict[int, Tensor] = {}
    for prefix, part in module.named_modules():
        own = {**dict(part.named_parameters("", recurse=False, remove_duplicate=False))}
        own |= dict(part.named_buffers("", recurse=False, remove_duplicate=False))
        for name, tensor in own.items():
            if (f"{prefix}.{name}" if prefix else name) not in saved:
                continue  # a non-persistent buffer, which no checkpoint contains
            if id(tensor) not in empty:
                meta = tensor.detach().to("meta")
                is_parameter = isinstance(tensor, nn.Parameter)
                empty[id(tensor)] = (
                    nn.Parameter(meta, tensor.requires_grad) if is_parameter else meta
                )
            setattr(part, name, empty[id(tensor)])
    return module


def overwritten(module: nn.Module) -> list[str]:
    """Return the parameters that a model changes in its forward pass: embeddings by max_norm."""
    changed = {
        id(part.weight)
        for part in module.modules()
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None
    }
    return [name for name, tensor in module.named_parameters() if id(tensor) in changed]


def aliases(module: nn.Module) -> dict[str, list[str]]:
    """Return all names of each parameter; a file may contain tied weights under any one of them."""
    names: dict[int, list[str]] = {}
    for name, tensor in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(name)
    return {group[0]: group for group in names.values()}


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
