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

from trakdask.execution.memory_maps import is_plain_array, memmap_location

__all__ = ["fingerprint", "unpicklable"]

_COPIED_BYTES = 64 * 1024**2


def fingerprint(obj: Any) -> str:
    """Hash the content of an object; the result is the same in every process.

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
    Arrays and tensors are hashed by dtype, shape and values. Functions and classes of installed
    modules are hashed by name, those defined in a notebook or script by their code. A read-only
    ``np.memmap`` is hashed by the path, size and modification time of its file. Sets of strings
    have no fixed order, so the fingerprint of an object that contains one is not reproducible. The
    pickle is hashed as it is produced, so the object is not copied.

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
    """Return the error for an object that cannot be sent to other processes."""
    return TypeError(
        f"expected an object that can be pickled and sent to other processes, got "
        f"{type(obj).__name__} object, which cannot be pickled ({err!r}); try a zero-argument "
        "callable that returns it"
    )


class _HashWriter:
    def __init__(self) -> None:
        self.digest = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return len(data)


def _array_digest(array: np.ndarray[Any, Any]) -> str:
    digest = hashlib.sha256()
    if (location := memmap_location(array)) is not None:
        status = os.stat(location[0])
        digest.update(repr((location, status.st_size, status.st_mtime_ns)).encode())
        return digest.hexdigest()
    digest.update(repr((array.dtype.str, array.shape)).encode())
    for block in _contiguous_blocks(array):
        digest.update(block.data)
    return digest.hexdigest()


def _contiguous_blocks(array: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the bytes of an array in C order, copying at most 64 MiB at a time if needed."""
    if array.flags.c_contiguous:
        yield array.reshape(-1).view(np.uint8)
        return
    rows = max(1, _COPIED_BYTES // max(1, array[:1].nbytes))
    for start in range(0, len(array), rows):
        yield np.ascontiguousarray(array[start : start + rows]).reshape(-1).view(np.uint8)


class _FingerprintPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler whose output depends on an object's content, not on how or where it was created.

    The output of cloudpickle itself contains random class ids, file names of notebook cells and
    memory addresses of torch. The output here is hashed and never loaded, so the reductions need
    not be invertible.
    """

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")  # no tensors can exist before torch is imported
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
    """Stand in for the function that would rebuild the object; the pickle is never loaded."""


def _reduced(name: str, state: Any) -> tuple[Callable[[str], None], tuple[str], Any]:
    # Passed as state, not as an argument: pickle then memoizes the object before it pickles the
    # state, so an object that refers to itself does not recurse forever.
    return _stub, (name,), state


def _is_importable(obj: Any) -> bool:
    module = sys.modules.get(obj.__module__ or "")
    if module is None or module.__name__ == "__main__":
        return bool(obj.__module__ == "builtins")
    definition: Any = module
    for name in obj.__qualname__.split("."):
        definition = getattr(definition, name, None)
    return definition is obj


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
    except ValueError:  # the cell is empty: its variable is not bound yet
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
