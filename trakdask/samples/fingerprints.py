"""Content hashes of arrays and datasets, equal in every process, and files of memory maps.

``dask.base.tokenize`` gives tensors, and classes of scripts and notebooks, another token in every
process, and other tokens where another package for hashes is installed. With these, no process
could continue the store of another one.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import cloudpickle
import numpy as np

from trakdask.checks import is_tensor


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
    digest = hashlib.sha256()
    file = types.SimpleNamespace(write=digest.update)
    try:
        _Pickler(file, 5, lambda buffer: digest.update(buffer.raw())).dump(obj)
    except Exception as err:
        raise TypeError(
            f"expected an object that can be pickled for the workers, got {type(obj).__name__} "
            f"({err!r}); try a zero-argument callable that returns it"
        ) from err
    return digest.hexdigest()


@dataclass(frozen=True)
class OpenedByTasks:
    """An array that is not sent: the tasks that need some of it open it, where it lies.

    Parameters
    ----------
    open
        Returns the array.
    token
        Identifies its content, by where it lies and when it was changed.
    """

    open: Callable[[], Any]
    token: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def __getitem__(self, rows: Any) -> np.ndarray[Any, Any]:
        # A read-only map is copied, because torch needs arrays that it may write to.
        return np.require(self.open()[rows], requirements=["ENSUREARRAY", "WRITEABLE"])


def mapped(array: np.ndarray[Any, Any]) -> OpenedByTasks | None:
    """Return the file of a read-only memory map, or of a slice of one; None for any other array."""
    root: Any = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    # A writable map can differ from its file, now or later.
    is_of_file = isinstance(root, np.memmap) and isinstance(root.base, mmap.mmap)
    if not is_of_file or root.mode != "r" or root.filename is None:
        return None
    if not array.flags.c_contiguous or array.size == 0:
        return None
    path = os.path.abspath(root.filename)
    offset = root.offset + array.ctypes.data - root.ctypes.data
    where = path, array.dtype.str, offset, array.shape, _version(path)
    return OpenedByTasks(partial(_map, *where), repr(where), array.shape, array.dtype)


def _map(path: str, dtype: str, offset: int, shape: tuple[int, ...], version: Any) -> Any:
    if _version(path) != version:
        raise OSError(
            f"expected {path!r} as it was mapped, but it has changed; try opening it again"
        )
    return np.memmap(path, dtype, "r", offset, shape)


def _version(path: str) -> tuple[int, int]:
    """Return the size in bytes, and the time of the last change as exactly as all disks keep it."""
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns // 1000


def _array_state(array: np.ndarray[Any, Any]) -> Any:
    if (file := mapped(array)) is not None:
        return file.token
    digest = hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return array.dtype.str, array.shape, digest.hexdigest()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler whose output depends on an object's content, not on how or where it was created.

    The output of cloudpickle itself contains random class ids, file names of notebook cells and
    memory addresses of torch. The output here is hashed and never loaded, so the reductions need
    not be invertible.
    """

    def reducer_override(self, obj: Any) -> Any:
        if is_tensor(obj):
            import torch  # there is a tensor, so it is loaded

            flat = obj.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            return _reduced("tensor", (str(obj.dtype), tuple(obj.shape), _array_state(flat)))
        if type(obj) in (np.ndarray, np.memmap) and obj.dtype.kind in "biufcmMSU":
            return _reduced("array", _array_state(obj))
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
    content = {
        name: value
        for name, value in sorted(vars(cls).items())
        if name not in _NOT_CONTENT and not isinstance(value, _DESCRIPTORS)
    }
    return cls.__bases__, content
