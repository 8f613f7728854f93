"""Content hashes of arrays and datasets, equal in every process, and files of memory maps.

``dask.base.tokenize`` gives tensors, and classes of scripts and notebooks, another token in every
process, and other tokens where another package for hashes is installed. With these, no process
could continue the store of another one.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import sys
import time
import types
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np

from trakdask.checks import is_tensor
from trakdask.files import replacing
from trakdask.instructions import codes, instructions, names_used

_NOT_CONTENT = frozenset({
    "__annotations__", "__dict__", "__doc__", "__firstlineno__", "__module__", "__parameters__",
    "__static_attributes__", "__weakref__", "_abc_impl",
})  # fmt: skip
_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)

_LARGE = 2**28
"""The hash of files of so many bytes is kept for other processes: it takes 0.2 s to compute."""

_SETTLED_S = 2.0
"""A file that was changed before has another time of change if it is changed again."""


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
    modules are hashed by name, those defined in a notebook or script by their code. The values of a
    read-only ``np.memmap`` are read once, until its file changes. Sets of strings have no fixed
    order, so the fingerprint of an object that contains one is not reproducible. The pickle is
    hashed as it is produced, so the object is not copied.

    Examples
    --------
    >>> import numpy as np
    >>> fingerprint(np.arange(3)) == fingerprint(np.arange(6)[::2] // 2)
    True
    """
    digest = hashlib.sha256()
    file = types.SimpleNamespace(write=digest.update)
    pickler = _Pickler(file, 5, lambda buffer: digest.update(buffer.raw()))
    try:
        pickler.dump(obj)
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
    # Where a slice begins in the file, by the addresses of the slice and of the whole map.
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
    content, file = partial(_content, array), mapped(array)
    if file is None:
        return array.dtype.str, array.shape, content()
    assert isinstance(file.open, partial)
    status = os.stat(file.open.args[0])
    where = f"{file.token} {status.st_ctime_ns} {status.st_ino}"
    return array.dtype.str, array.shape, _kept(where, array.nbytes, status.st_ctime, content)


def _content(array: np.ndarray[Any, Any]) -> str:
    values = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    return hashlib.sha256(values).hexdigest()


def content_of_folder(folder: str | os.PathLike[str]) -> str:
    """Return the hash of all files in a folder and their names, kept until one of them changes."""
    paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    found = [(str(path.absolute()), path.stat()) for path in paths]
    where = repr([(path, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for path, s in found])

    def content() -> str:
        names = (path.relative_to(folder).as_posix() for path in paths)
        digests = (hashlib.sha256(path.read_bytes()).hexdigest() for path in paths)
        return hashlib.sha256(repr([*zip(names, digests, strict=True)]).encode()).hexdigest()

    n_bytes = sum(status.st_size for _, status in found)
    return _kept(where, n_bytes, max((s.st_ctime for _, s in found), default=0.0), content)


_contents: dict[str, str] = {}
"""Hashes of files, by where they lie and when they were changed."""


def _kept(where: str, n_bytes: int, changed: float, content: Callable[[], str]) -> str:
    """Return a hash of files, which is computed once; of large ones it outlives this process."""
    key = hashlib.sha256(where.encode()).hexdigest()
    if key in _contents:
        return _contents[key]
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    kept = Path(caches, "trakdask", key)
    if n_bytes >= _LARGE:
        with suppress(OSError, ValueError):
            if re.fullmatch("[0-9a-f]{64}", found := kept.read_text("ascii")):
                return found
    found = content()
    if time.time() - changed > _SETTLED_S:
        _contents[key] = found
        if n_bytes >= _LARGE:
            with suppress(OSError), replacing(kept) as new:
                new.write_text(found, "ascii")
    return found


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler whose output depends on an object's content, not on how or where it was created.

    The output of cloudpickle itself contains random class ids, file names of notebook cells and
    memory addresses of torch. The output here is hashed and never loaded, so the reductions need
    not be invertible.
    """

    def reducer_override(self, obj: Any) -> Any:
        if is_tensor(obj):
            import torch  # there is a tensor, so it is loaded

            # As bytes, because numpy has no bfloat16; dtype and shape stand beside them.
            flat = obj.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            return _reduced("tensor", (str(obj.dtype), tuple(obj.shape), _array_state(flat)))
        if type(obj) in (np.ndarray, np.memmap) and obj.dtype.kind in "biufcmMSU":
            return _reduced("array", _array_state(obj))
        if (content := _content_of_files(obj)) is not None:
            return _reduced(type(obj).__qualname__, content)
        if isinstance(obj, types.CodeType):
            # Instructions name the arguments, but not in the order of the call.
            return _reduced("code", (instructions(obj), [each.co_varnames for each in codes(obj)]))
        if isinstance(obj, types.FunctionType) and not _is_importable(obj):
            return _reduced(obj.__qualname__, _function_state(obj))
        if isinstance(obj, type) and not _is_importable(obj):
            content = {
                name: value
                for name, value in sorted(vars(obj).items())
                if name not in _NOT_CONTENT and not isinstance(value, _DESCRIPTORS)
            }
            return _reduced(obj.__qualname__, (obj.__bases__, content))
        return super().reducer_override(obj)


def _content_of_files(obj: Any) -> Any:
    """Return the bytes of the files that an object reads, and what else determines its content."""
    if hasattr(type(obj), "content_of_files"):
        return obj.content_of_files()
    if type(obj).__name__ == "MemoryMappedTable":  # of the package datasets
        return np.memmap(obj.path, "u1", "r"), obj.replays
    return None


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
    # Not if its name has got another meaning since, as where a notebook defines it again.
    return definition is obj


def _function_state(function: types.FunctionType) -> Any:
    cells: list[Any] = []
    for cell in function.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # the cell is empty: its variable is not bound yet
            cells.append(None)
    # Globals that the code names. The whole file has more, which may change without an effect.
    known = sorted({*names_used(function.__code__)} & function.__globals__.keys())
    used = [(name, function.__globals__[name]) for name in known]
    return function.__code__, function.__defaults__, function.__kwdefaults__, cells, used
