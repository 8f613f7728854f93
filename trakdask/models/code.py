"""Fingerprints of the code that computes gradients, which may change under an unchanged name."""

from __future__ import annotations

import dis
import hashlib
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from types import CodeType, FunctionType
from typing import Any

from torch import nn

__all__ = ["code_digests"]

_LIBRARIES = {"torch", "trakdask", *sys.stdlib_module_names}
"""Packages whose code is known by their version."""

_PLAIN = (type(None), bool, int, float, str)
"""Types of values whose ``repr`` is the same in every process."""


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
    classes of all modules; ``"task"``; and ``"build"``, if that is a function.

    Notes
    -----
    What is hashed are instructions, not source code, which may be missing, or newer than what runs.
    So comments, docstrings and line numbers make no difference. Neither do paths and addresses.
    Values that functions read from elsewhere, other than default arguments and attributes of
    classes, are not seen.
    """
    layout = [(name, type(part).__name__) for name, part in module.named_modules()]
    digests = {
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "modules": _hashed(map(repr, layout)),
        "task": _hashed(_of_class(type(task))),
    }
    while isinstance(build, partial):
        build = build.func
    if isinstance(build, FunctionType):
        digests["build"] = _hashed(_of_functions([build], ()))
    classes: dict[str, list[type]] = {}
    for kind in {type(part) for part in module.modules() if not _is_library(type(part).__module__)}:
        classes.setdefault(kind.__name__, []).append(kind)
    for name, kinds in sorted(classes.items()):
        digests[name] = _hashed(sorted(_hashed(_of_class(kind)) for kind in kinds))
    return digests


def _is_library(module: object) -> bool:
    return str(module).partition(".")[0] in _LIBRARIES


def _of_class(kind: type) -> Iterator[str]:
    bases = [base for base in kind.__mro__ if not _is_library(base.__module__)]
    for name, value in sorted(vars(kind).items()) if bases else ():
        if isinstance(value, _PLAIN) and not name.startswith("__"):
            yield f"{name} = {value!r}"
    methods = [_function(value) for _, value in sorted(vars(kind).items())] if bases else []
    yield from _of_functions([method for method in methods if method], bases)


def _of_functions(functions: list[FunctionType], classes: Iterable[type]) -> Iterator[str]:
    """Yield the instructions of functions, and of those that they call by name."""
    for function in functions:  # which grows meanwhile
        code = function.__code__
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        yield repr([value for value in defaults if isinstance(value, _PLAIN)])
        yield _instructions(code)
        # What a constructor calls mostly makes weights, which checkpoints replace.
        names = ["__init__"] if function.__name__ == "__init__" else _names(code)
        called = [getattr(function, "__wrapped__", None)]
        for name in names:
            nearby = function.__globals__.get(name)
            same_file = getattr(nearby, "__module__", None) == function.__module__
            called += [*(vars(each).get(name) for each in classes), same_file and nearby]
        for each in map(_function, called):
            if each and each not in functions:
                functions.append(each)


def _function(value: Any) -> FunctionType | None:
    """Return the function in a method, a property or a decorator of a library, if there is one."""
    value = getattr(value, "fget", None) or getattr(value, "__func__", None) or value
    while isinstance(value, FunctionType) and _is_library(value.__globals__.get("__name__")):
        value = getattr(value, "__wrapped__", None)
    return value if isinstance(value, FunctionType) else None


def _names(code: CodeType) -> list[str]:
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return [*code.co_names, *(name for each in inner for name in _names(each))]


@lru_cache(maxsize=4096)
def _instructions(code: CodeType) -> str:
    """Return instructions with their constants and names in place of numbers."""
    return "\n".join(
        f"{each.opname} {_constant(each.argval)}" for each in dis.get_instructions(code)
    )


def _constant(value: Any) -> str:
    if isinstance(value, CodeType):
        return _instructions(value)
    if isinstance(value, frozenset):  # its order differs between processes
        return repr(sorted(map(repr, value)))
    return repr(value)


def _hashed(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(f"{text}\0".encode())
    return digest.hexdigest()[:16]
