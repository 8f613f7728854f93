"""Modules of models: check them, select their parameters, identify their code.

Code may change under an unchanged name, so features record a fingerprint of what computed them.
"""

from __future__ import annotations

import difflib
import dis
import fnmatch
import hashlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from types import CellType, FunctionType, ModuleType
from typing import Any

from torch import nn
from torch.jit import ScriptModule

from trakdask.instructions import codes, instructions, names_used

# Packages whose code is known by their version.
_LIBRARIES = {"torch", "trakdask", *sys.stdlib_module_names}

# Types of values whose ``repr`` is the same in every process.
_PLAIN = (type(None), bool, int, float, str)

_OUTSIDE_OF_CALLS = ("__init__", "__repr__", "__str__", "extra_repr")


def require_plain(module: nn.Module) -> None:
    """Reject modules whose parameters cannot be replaced in a call."""
    for path, part in module.named_modules():
        kind, where = type(part), f"layer {path!r}" if path else "the model"
        if isinstance(part, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            raise TypeError(
                f"expected a model in one process on one device, got {where} of class "
                f"{kind.__name__}; try the module inside it, its attribute module"
            )
        if isinstance(part, ScriptModule):
            raise TypeError(
                f"expected a model that runs as Python code, got {where} of TorchScript; try the "
                "module that was scripted or traced, with the state_dict() of this one as its "
                "checkpoint"
            )
        if kind.__module__.startswith(("bitsandbytes", "torch.ao.nn.quantized")):
            raise TypeError(
                f"expected plain tensors as weights, got {where} of class {kind.__name__}, which "
                "is quantised; try the model before quantisation: for an adapter, the base model "
                "in bfloat16, without quantization_config (the adapter's file is the same)"
            )


def select_parameters(module: nn.Module, selection: Any) -> tuple[str, ...]:
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
    if selection is None:
        names = tuple(parameters)
    elif isinstance(selection, type):  # also the parameters of modules inside of its instances
        instances = (part for part in module.modules() if isinstance(part, selection))
        # By identity: a tied weight is listed under its first name only, which may be elsewhere.
        ids = {id(tensor) for instance in instances for tensor in instance.parameters()}
        names = tuple(name for name, tensor in parameters.items() if id(tensor) in ids)
    elif callable(selection):
        names = tuple(name for name, tensor in parameters.items() if selection(name, tensor))
    else:
        names = _matching(tuple(parameters), selection)
    if selection is not None and not names:
        classes = sorted({type(part).__name__ for part in module.modules()})
        raise ValueError(
            f"expected parameters= to select something, got {selection!r}, which selects none of "
            f"{len(parameters)}; try None for all, one of {list(parameters)[:5]}, or one of the "
            f"classes {classes[:8]}"
        )
    for name in names:
        if not parameters[name].is_floating_point():
            raise ValueError(
                f"expected floating-point parameters, got {name!r} with dtype "
                f"{parameters[name].dtype}, which has no gradient; try parameters= without it"
            )
    return names


def _matching(names: Sequence[str], selection: str | Sequence[str]) -> tuple[str, ...]:
    patterns = [selection] if isinstance(selection, str) else selection
    if not isinstance(patterns, Iterable) or not all(isinstance(p, str) for p in patterns):
        raise TypeError(
            "expected a name, a glob, a list of these, a class of modules or a predicate as "
            f"parameters, got {selection!r}; try parameters='head.*', or None for all"
        )
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            is_inside = any(pattern and pattern in name for name in names)
            near = difflib.get_close_matches(pattern, names, n=5, cutoff=0.3)
            advice = f"'*{pattern}*'" if is_inside else f"one of {near or list(names)[:5]}"
            raise ValueError(
                f"expected a name or a glob of parameters, got {pattern!r}, which "
                f"matches none of {len(names)}; try {advice}"
            )
    return tuple(n for n in names if any(fnmatch.fnmatchcase(n, p) for p in patterns))


def code_digests(module: nn.Module, task: object, build: object = None) -> dict[str, str]:
    """Return digests of the code of a model's modules, its task, and the function that builds it.

    Parameters
    ----------
    module, task
        The model and its task.
    build
        The function that returns the model; anything else has no digest.

    Returns
    -------
    By name of the class: a digest of its methods, and of the methods and functions that these call
    by name, in other classes or in the same file. In addition ``"python"``, the version that has
    compiled the code, without which digests cannot be compared; ``"modules"``, of the names and
    classes of all modules; ``"task"``; ``"build"``, if that is a function; and ``"arguments"``, of
    the order in which all of these functions take their arguments, if there are any.

    Notes
    -----
    Instructions are hashed, not source code, which may be missing, or newer than the code that
    runs. So comments, docstrings and line numbers make no difference. Neither do paths and
    addresses. Values that functions read from elsewhere are not seen, except default arguments and
    attributes of classes.
    """
    orders: list[str] = []
    layout = [(name, type(part).__name__) for name, part in module.named_modules()]
    digests = {
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "modules": _hashed(map(repr, layout)),
        "task": _hashed(_of_class(type(task), orders)),
    }
    while isinstance(build, partial):
        build = build.func
    if isinstance(build, FunctionType):
        digests["build"] = _hashed(_of_functions([build], (), orders))
    classes: dict[str, list[type]] = {}
    for kind in {type(part) for part in module.modules() if not is_library(type(part).__module__)}:
        # Classes of different files may have the same name.
        classes.setdefault(kind.__name__, []).append(kind)
    for name, kinds in sorted(classes.items()):
        digests[name] = _hashed(sorted(_hashed(_of_class(kind, orders)) for kind in kinds))
    # Instructions name the arguments, but not in the order of the call. That has a digest of its
    # own, because stores that were written before it can then still be compared by the others.
    return {**digests, "arguments": _hashed(sorted(orders))} if orders else digests


def is_library(module: object) -> bool:
    """Return whether a module of Python is known by its version: of torch, or of Python itself."""
    return str(module).partition(".")[0] in _LIBRARIES


def _of_class(kind: type, orders: list[str]) -> Iterator[str]:
    bases = [base for base in kind.__mro__ if not is_library(base.__module__)]
    for name, value in sorted(vars(kind).items()) if bases else ():
        # What a task says of its loss may be added later. Older digests have the only old value.
        is_said = name == "loss_kind" and value != "squared error"
        if isinstance(value, _PLAIN) and not name.startswith("__") and not is_said:
            yield f"{name} = {value!r}"
    methods = [_function(value) for _, value in sorted(vars(kind).items())] if bases else []
    yield from _of_functions([method for method in methods if method], bases, orders)


def _of_functions(
    functions: list[FunctionType], classes: Iterable[type], orders: list[str]
) -> Iterator[str]:
    """Yield the instructions of functions, and of those that they call by name; note arguments."""
    for function in functions:  # which grows meanwhile
        code = function.__code__
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        yield repr([value for value in defaults if isinstance(value, _PLAIN)])
        yield instructions(code)
        each = [c.co_varnames[: c.co_argcount + c.co_kwonlyargcount] for c in codes(code)]
        orders.append(repr(each))
        # A constructor mostly calls functions that make weights, which checkpoints replace.
        names = ["__init__"] if function.__name__ == "__init__" else names_used(code)
        called = [getattr(function, "__wrapped__", None)]
        for name in names:
            nearby = function.__globals__.get(name)
            same_file = getattr(nearby, "__module__", None) == function.__module__
            called += [*(vars(cls).get(name) for cls in classes), same_file and nearby]
        for callee in map(_function, called):
            if callee and callee not in functions:
                functions.append(callee)


def _function(value: Any) -> FunctionType | None:
    """Return the function in a method, a property or a decorator of a library, if there is one."""
    value = getattr(value, "fget", None) or getattr(value, "__func__", None) or value
    while isinstance(value, FunctionType) and is_library(value.__globals__.get("__name__")):
        value = getattr(value, "__wrapped__", None)
    return value if isinstance(value, FunctionType) else None


def names_read(module: nn.Module, functions: Iterable[FunctionType]) -> tuple[set[str], set[str]]:
    """Return what the code reads that a call of a module may run: names of attributes, and texts.

    Parameters
    ----------
    module
        The module.
    functions
        The functions in its attributes and hooks.
    """
    names, texts, seen = set[str](), set[str](), set[FunctionType]()
    kinds = {kind for part in module.modules() for kind in type(part).__mro__}
    methods = (v for kind in kinds for n, v in vars(kind).items() if n not in _OUTSIDE_OF_CALLS)
    own = {*functions, *filter(None, map(_function, methods))}
    # Functions whose code may run: methods of the modules, and all that these reach by a name,
    # through globals, closures, imported modules, classes and decorators.
    todo: list[Any] = [*own]
    while todo:
        function = _function(todo.pop())
        if function is None or function in seen or is_library(function.__module__):
            continue
        if function not in own and "-packages" in function.__code__.co_filename:
            continue  # installed packages do not know the attributes of other ones
        seen.add(function)
        for code in codes(function.__code__):
            steps = dis.get_instructions(code)
            names |= {s.argval for s in steps if s.opname in ("LOAD_ATTR", "LOAD_METHOD")}
            texts |= {text for text in code.co_consts if isinstance(text, str) and text}
        called = names_used(function.__code__)
        near = [function.__globals__.get(name) for name in called]
        near += [c.cell_contents for c in function.__closure__ or () if c != CellType()]
        near += [vars(file).get(n) for file in near if isinstance(file, ModuleType) for n in called]
        near += [v for kind in near if isinstance(kind, type) for v in vars(kind).values()]
        todo += [getattr(function, "__wrapped__", None), *near]
    return names, texts


def _hashed(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        # With an end for each text, because "ab", "c" and "a", "bc" are different code.
        digest.update(f"{text}\0".encode())
    return digest.hexdigest()[:16]
