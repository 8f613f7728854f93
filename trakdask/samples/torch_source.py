"""Samples of a map-style torch Dataset, read by index range inside tasks."""

from __future__ import annotations

import difflib
import pkgutil
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch.utils.data import IterableDataset

from trakdask.samples.blocks import Field, assemble, check_chunks, check_dtype, read_bundle
from trakdask.samples.coords import CoordsLike, normalise_coords
from trakdask.spool import Spooled, fingerprint

__all__ = ["from_torch"]

Array = np.ndarray[Any, Any]


def from_torch(
    dataset: Any,
    *,
    names: str | Sequence[str | None],
    coords: CoordsLike = None,
    chunks: int = 512,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> xr.Dataset:
    """Label a map-style torch Dataset as samples that are read inside tasks.

    Parameters
    ----------
    dataset
        Anything with ``__len__`` and ``__getitem__(index)``; or, for one that is large or cannot be
        pickled, a zero-argument callable or ``"package.module:callable"`` that returns it, called
        once per process. Items are tuples or lists, mappings, or single tensors.
    names
        Name of each field of an item, None for one to leave out; the keys to take of a mapping.
    coords
        As in :func:`from_arrays`.
    chunks
        Samples per block, and so per task.
    shapes
        Shape of one item by name, where that of item 0 is not the right one.

    Returns
    -------
    Dataset as of :func:`from_arrays`. Python integers become int64, floats float32.

    Raises
    ------
    TypeError
        If the dataset is iterable only, cannot be pickled, or has fields that are not numeric.
    ValueError
        If it is empty, its items do not have the named fields, or as in :func:`from_arrays`. When
        computed, if an item's shape or dtype differs from that of item 0.
    RuntimeError
        When computed, if reading a sample fails; the message names it.

    Notes
    -----
    Nothing is computed; item 0 is read here, for shapes and dtypes. One read of a block serves all
    variables that are computed together. A process reads one sample at a time, as datasets are not
    promised to be thread-safe. Items must not depend on chance: switch augmentation off. A
    dataset counts by its pickled content in ``attrs["source"]``, a callable by its code or name,
    and the length and first item of what it returns.

    Examples
    --------
    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> dataset = TensorDataset(torch.zeros(5, 3), torch.arange(5))
    >>> train = from_torch(dataset, names=("x", "label"), chunks=2)
    >>> train.x.chunks, train.label.values.tolist()
    (((2, 2, 1), (3,)), [0, 1, 2, 3, 4])
    """
    size = check_chunks(chunks)
    reader = _DatasetReader(dataset, (names,) if isinstance(names, str) else tuple(names))
    n = reader.probe(dict(shapes or {}))
    variables = read_bundle(Spooled(reader), reader.fields, n, size)
    return assemble(variables, normalise_coords(coords, variables, n))


class _DatasetReader:
    """A dataset that each process opens once, and reads one thread at a time."""

    def __init__(self, given: Any, names: tuple[str | None, ...]) -> None:
        if not any(names):
            raise ValueError(
                f"names is {names}; needed a name for at least one field. Use names=('image', "
                "'label')."
            )
        if len(set(names) - {None}) < len(names) - names.count(None):
            raise ValueError(f"names is {names}; needed each name once. Rename one.")
        self.given = given
        self.names = names
        self.fields: dict[str, Field] = {}
        self.first = ""
        self._lock = threading.Lock()
        self._dataset: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in ("given", "names", "fields", "first")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock(), _dataset=None)

    def probe(self, shapes: dict[str, tuple[int, ...]]) -> int:
        """Learn the fields from item 0; return the number of samples."""
        n = len(self._opened())
        if n == 0:
            raise ValueError(
                "the dataset has 0 samples; needed at least one. Check what it was made from."
            )
        item = self._item(0)
        for name, value in item.items():
            check_dtype(name, value.dtype)
        if unknown := shapes.keys() - item.keys():
            raise ValueError(
                f"shapes has {sorted(unknown)}; needed some of {list(item)}. Rename them."
            )
        self.fields = {
            name: Field(tuple(shapes.get(name) or value.shape), value.dtype)
            for name, value in item.items()
        }
        if self._dataset is not self.given:  # the code alone does not say what it returns
            self.first = fingerprint((n, item))
        return n

    def read(self, start: int, stop: int) -> dict[str, Array]:
        """Read the samples ``start:stop``."""
        block = {
            name: np.empty((stop - start, *field.shape), field.dtype)
            for name, field in self.fields.items()
        }
        with self._lock:
            for index in range(start, stop):
                for name, value in self._item(index).items():
                    self.fields[name].check(name, index, value)
                    block[name][index - start] = value
        return block

    def _opened(self) -> Any:
        if self._dataset is None:
            self._dataset = _open(self.given)
        return self._dataset

    def _item(self, index: int) -> dict[str, Array]:
        try:
            item = self._opened()[index]
        except Exception as err:
            raise RuntimeError(
                f"sample {index} could not be read: {err!r}; needed an item for every index below "
                f"len(dataset). Try dataset[{index}]."
            ) from err
        return {
            name: _to_numpy(name, index, value)
            for name, value in _named(item, self.names, index).items()
        }


def _open(given: Any) -> Any:
    dataset = given
    if isinstance(given, str):
        dataset = pkgutil.resolve_name(given)()
    elif callable(given) and (isinstance(given, type) or not hasattr(given, "__getitem__")):
        dataset = given()
    if isinstance(dataset, IterableDataset) or not (
        hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    ):
        raise TypeError(
            f"dataset is a {type(dataset).__name__}; needed a map-style one, with __len__ and "
            "__getitem__, as blocks are read by index. Use list(dataset), or write the samples to "
            "zarr or parquet first."
        )
    return dataset


def _named(item: Any, names: tuple[str | None, ...], index: int) -> dict[str, Any]:
    wanted = [name for name in names if name is not None]
    if isinstance(item, Mapping):
        for name in wanted:
            if name not in item:
                near = difflib.get_close_matches(name, map(str, item), n=3) or list(item)
                raise ValueError(
                    f"sample {index} has the keys {list(item)}; needed {name!r}. Did you mean one "
                    f"of {near}?"
                )
        return {name: item[name] for name in wanted}
    fields = item if isinstance(item, tuple | list) else (item,)
    if len(fields) != len(names):
        raise ValueError(
            f"sample {index} has {len(fields)} fields; needed {len(names)}, for names {names}. "
            "Name every field, None for one to leave out."
        )
    return {name: field for name, field in zip(names, fields, strict=True) if name is not None}


_PYTHON_DTYPES: Mapping[type, Callable[[Any], Any]] = {
    bool: np.bool_,
    int: np.int64,
    float: np.float32,
}


def _to_numpy(name: str, index: int, value: Any) -> Array:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.float() if value.dtype == torch.bfloat16 else value
    elif type(value) in _PYTHON_DTYPES:
        value = _PYTHON_DTYPES[type(value)](value)
    try:
        return np.asarray(value)
    except (TypeError, ValueError) as err:
        raise ValueError(
            f"variable {name!r} of sample {index} is a {type(value).__name__} that numpy cannot "
            f"read ({err}); needed an array of numbers. Convert it in __getitem__."
        ) from err
