"""Content hashes of objects, equal in every process."""

from __future__ import annotations

import hashlib
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import numpy as np

from trakdask.execution.memory_maps import is_plain_array, memmap_place

__all__ = ["fingerprint", "unpicklable"]

_COPIED_BYTES = 64 * 1024**2


def fingerprint(obj: Any) -> str:
    """Hash the content of an object, equally in every process.

    Parameters
    ----------
    obj
        Anything that cloudpickle can pickle.

    Returns
    -------
    64 hexadecimal digits.

    Raises
    ------
    TypeError
        If the object cannot be pickled.

    Notes
    -----
    Arrays and tensors count by dtype, shape and values. What an installed module defines counts
    by its name, what a notebook or script defines counts by its code. A read-only ``np.memmap``
    counts by path, size and modification time of its file. Sets of strings have no fixed order,
    so neither have the fingerprints of objects that hold them. Nothing is copied: the pickle is
    hashed as it is made.

    Examples
    --------
    >>> import numpy as np
    >>> fingerprint(np.arange(3)) == fingerprint(np.arange(6)[::2] // 2)
    True
    """
    if is_plain_array(obj):
        return _array_digest(obj)
    writer = _HashWriter()
    try:
        _FingerprintPickler(writer, protocol=5).dump(obj)
    except Exception as err:
        raise unpicklable(obj, err) from err
    return writer.digest.hexdigest()


def unpicklable(obj: Any, err: Exception) -> TypeError:
    """Say that an object cannot travel, and what can in its place."""
    return TypeError(
        f"{type(obj).__name__} object cannot be pickled ({err!r}); needed an object that can be "
        "sent to other processes. Pass a zero-argument callable that returns it instead."
    )


class _HashWriter:
    def __init__(self) -> None:
        self.digest = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return len(data)


def _array_digest(array: np.ndarray[Any, Any]) -> str:
    digest = hashlib.sha256()
    if (place := memmap_place(array)) is not None:
        status = os.stat(place[0])
        digest.update(repr((place, status.st_size, status.st_mtime_ns)).encode())
        return digest.hexdigest()
    digest.update(repr((array.dtype.str, array.shape)).encode())
    for part in _contiguous_parts(array):
        digest.update(part.data)
    return digest.hexdigest()


def _contiguous_parts(array: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
    """Bytes of an array in C order; what is not contiguous is copied 64 MiB at a time."""
    if array.flags.c_contiguous:
        yield array.reshape(-1).view(np.uint8)
        return
    rows = max(1, _COPIED_BYTES // max(1, array[:1].nbytes))
    for start in range(0, len(array), rows):
        yield np.ascontiguousarray(array[start : start + rows]).reshape(-1).view(np.uint8)


class _FingerprintPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler whose bytes say what an object is, and not how or where it was made.

    cloudpickle's own bytes do: random class ids, file names of notebook cells, torch's addresses.
    They are only hashed and never loaded, so reductions need not be invertible.
    """

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")  # no object is a tensor before torch is imported
        if torch is not None and isinstance(obj, torch.Tensor):
            flat = obj.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            return _reduced("tensor", (str(obj.dtype), tuple(obj.shape), _array_digest(flat)))
        if is_plain_array(obj):
            return _reduced("array", _array_digest(obj))
        if isinstance(obj, types.CodeType):
            return _reduced("code", _code_state(obj))
        if isinstance(obj, types.FunctionType) and not _is_importable(obj):
            return _reduced(obj.__qualname__, _function_state(obj))
        if isinstance(obj, type) and not _is_importable(obj):
            return _reduced(obj.__qualname__, _class_state(obj))
        return super().reducer_override(obj)


def _stub(name: str) -> None:
    """Stand in a hashed pickle for the function that would rebuild the object."""


def _reduced(name: str, state: Any) -> tuple[Callable[[str], None], tuple[str], Any]:
    # As state and not as argument: pickle then knows the object before it meets it again inside.
    return _stub, (name,), state


def _is_importable(obj: Any) -> bool:
    module = sys.modules.get(obj.__module__ or "")
    if module is None or module.__name__ == "__main__":
        return bool(obj.__module__ == "builtins")
    found: Any = module
    for part in obj.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is obj


def _code_state(code: types.CodeType) -> Any:
    constants = [
        sorted(map(repr, const)) if isinstance(const, frozenset) else const
        for const in code.co_consts
    ]
    return code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars


def _function_state(function: types.FunctionType) -> Any:
    cells = [_cell_contents(cell) for cell in function.__closure__ or ()]
    names = sorted(_names(function.__code__) & function.__globals__.keys())
    used = [(name, function.__globals__[name]) for name in names]
    return function.__code__, function.__defaults__, function.__kwdefaults__, cells, used


def _cell_contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty: its variable is not bound yet
        return None


def _names(code: types.CodeType) -> set[str]:
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


_NOT_CONTENT = frozenset({
    "__annotations__", "__dict__", "__doc__", "__firstlineno__", "__module__", "__parameters__",
    "__static_attributes__", "__weakref__", "_abc_impl",
})  # fmt: skip
_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)


def _class_state(cls: type) -> Any:
    own = {
        name: value
        for name, value in sorted(vars(cls).items())
        if name not in _NOT_CONTENT and not isinstance(value, _DESCRIPTORS)
    }
    return cls.__bases__, own
