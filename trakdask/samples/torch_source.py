"""Create samples from a map-style torch Dataset, read by index range inside tasks."""

from __future__ import annotations

import difflib
import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from torch.utils.data import DataLoader, IterableDataset

from trakdask.checks import import_callable
from trakdask.samples.blocks import (
    Field,
    assemble,
    check_chunks,
    check_dtype,
    read_bundle,
    require_samples,
)
from trakdask.samples.coords import (
    CoordsLike,
    fields_as_coords,
    to_numpy,
)
from trakdask.samples.fingerprints import fingerprint

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
    """Create a Dataset of samples from a map-style torch Dataset, read inside tasks.

    Parameters
    ----------
    dataset
        Any object with ``__len__`` and ``__getitem__(index)``. If it is large or cannot be pickled,
        a zero-argument callable or ``"package.module:callable"`` that returns it, called once per
        process. Items are tuples or lists, mappings, or single tensors.
    names
        Name of each field of an item, or None to leave a field out. If items are mappings, the
        keys to use.
    coords
        As in :func:`from_arrays`. A list has some of ``names``, such as ``["label"]``, which become
        coords; every item is read here for that (if the dataset has its labels as an attribute,
        ``coords={"label": dataset.targets}`` is faster).
    chunks
        Samples per block, and thus per task.
    shapes
        Shape of one item by name, for fields whose shape in item 0 is not the right one.

    Returns
    -------
    Dataset as of :func:`from_arrays`. Python integers become int64, floats float32.

    Raises
    ------
    TypeError
        If the dataset is iterable only, cannot be pickled, or has fields that are not numeric.
    ValueError
        If it is empty, its items do not have the named fields, or for the reasons given in
        :func:`from_arrays`. When computed, if an item's shape or dtype differs from that of item 0.
    RuntimeError
        When computed, if reading a sample fails; the message names it.

    Notes
    -----
    Nothing is computed; only item 0 is read here, for shapes and dtypes (all of them if ``coords``
    names fields). Each block is read once
    for all variables that are computed together. A process reads one sample at a time, because
    datasets need not be thread-safe. Items must not be random, so turn augmentation off. (Item 0 is
    read repeatedly to check this, and a ``UserWarning`` is issued if it differs.) In
    ``attrs["source"]`` a dataset is identified by its pickled content, and a callable by its code
    or name and the length and first item of the dataset that it returns.

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
    reader = _DatasetReader(dataset, _check_names(names))
    n = reader.probe(shapes or {})
    chosen = fields_as_coords(coords, reader.fields)
    fields = {name: field for name, field in reader.fields.items() if name not in chosen}
    variables = read_bundle(reader, fingerprint(reader), fields, n, size)
    reader.warn_if_random()  # after hashing the content, because reading may change a dataset
    values = reader.read_fields(chosen, n) if chosen else coords
    return assemble(variables, values)


def _check_names(names: Any) -> tuple[str | None, ...]:
    given = (names,) if isinstance(names, str) or not isinstance(names, Iterable) else tuple(names)
    chosen = [name for name in given if name is not None]
    are_names = all(isinstance(name, str) for name in chosen)
    if not chosen or not are_names or len(set(chosen)) < len(chosen):
        raise ValueError(
            "expected a name of its own for each field of an item, or None to leave it out, got "
            f"names={names!r}; try names=('image', 'label')"
        )
    return given


class _DatasetReader:
    """A dataset that each process opens once, and reads in one thread at a time."""

    def __init__(self, given: Any, names: tuple[str | None, ...]) -> None:
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

    def probe(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Determine the fields from item 0; return the number of samples."""
        n = len(self._opened())
        require_samples(n, "the dataset")
        item = self._item(0)
        for name, value in item.items():
            check_dtype(name, value.dtype)
        if unknown := shapes.keys() - item.keys():
            raise ValueError(
                f"expected shapes of some of {list(item)}, got {sorted(unknown)}; try "
                f"shapes={{{next(iter(item))!r}: ...}}"
            )
        self.fields = {
            name: Field(tuple(shapes.get(name, value.shape)), value.dtype)
            for name, value in item.items()
        }
        if self._dataset is not self.given:  # the code alone does not determine what it returns
            self.first = fingerprint((n, item))
        return n

    def warn_if_random(self) -> None:
        """Warn if item 0 differs when it is read again, as with random augmentation.

        It is read three more times, which detects a random flip three times out of four.
        """
        before = self._item(0)
        for _ in range(2):
            again = self._item(0)
            if changed := [name for name in before if not _equal(before[name], again[name])]:
                warnings.warn(
                    "expected a dataset whose items are not random, got another "
                    f"{changed[0]!r} when item 0 was read again, so that features would differ "
                    "between runs; try the dataset without random augmentation",
                    UserWarning,
                    stacklevel=3,
                )
                return

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

    def read_fields(self, names: list[str], n: int) -> dict[str, Array]:
        """Read some fields of all samples, and keep nothing else of them."""
        rows = (self.read(index, index + 1) for index in range(n))
        kept = [{name: row[name] for name in names} for row in rows]
        return {name: np.concatenate([row[name] for row in kept]) for name in names}

    def _opened(self) -> Any:
        if self._dataset is None:
            self._dataset = _open(self.given)
        return self._dataset

    def _item(self, index: int) -> dict[str, Array]:
        try:
            item = self._opened()[index]
        except Exception as err:
            raise RuntimeError(
                "expected an item for every index below len(dataset), got an error for sample "
                f"{index}: {err!r}; try dataset[{index}]"
            ) from err
        return {
            name: _to_numpy(name, index, value)
            for name, value in _named(item, self.names, index).items()
        }


def _open(given: Any) -> Any:
    dataset = given
    if isinstance(given, str):
        dataset = import_callable(given, "dataset")()
    elif callable(given) and (isinstance(given, type) or not hasattr(given, "__getitem__")):
        dataset = given()
    advice = "list(dataset), or writing the samples to zarr or parquet first"
    for other, better in _OTHERS.items():
        if isinstance(dataset, other):
            advice = better
    is_map_style = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if isinstance(dataset, (IterableDataset, *_OTHERS)) or not is_map_style:
        raise TypeError(
            "expected a map-style dataset, whose items are read by index, got "
            f"{type(dataset).__name__}; try {advice}"
        )
    return dataset


_OTHERS: Mapping[type, str] = {
    DataLoader: "loader.dataset, whose items are no batches",
    Mapping: "td.from_arrays",
    pd.DataFrame: "td.from_dataframe",
    xr.Dataset: "td.featurize(dataset, ...)",
}


def _equal(left: Array, right: Array) -> bool:
    return left.dtype == right.dtype and np.array_equal(
        left, right, equal_nan=left.dtype.kind in "fc"
    )


def _named(item: Any, names: tuple[str | None, ...], index: int) -> dict[str, Any]:
    wanted = [name for name in names if name is not None]
    if isinstance(item, Mapping):
        for name in wanted:
            if name not in item:
                near = difflib.get_close_matches(name, map(str, item), n=3) or list(item)
                raise ValueError(
                    f"expected the key {name!r} in sample {index}, got {list(item)}; try one of "
                    f"{near}"
                )
        return {name: item[name] for name in wanted}
    fields = item if isinstance(item, tuple | list) else (item,)
    if len(fields) != len(names):
        raise ValueError(
            f"expected {len(names)} fields in sample {index}, for the names {names}, got "
            f"{len(fields)}; try a name for every field, or None to leave a field out"
        )
    return {name: field for name, field in zip(names, fields, strict=True) if name is not None}


_DTYPES = {bool: np.bool_, int: np.int64, float: np.float32}
"""Of numbers of Python."""


def _to_numpy(name: str, index: int, value: Any) -> Array:
    try:
        number = _DTYPES[type(value)](value) if type(value) in _DTYPES else value
        return to_numpy(f"variable {name!r} of sample {index}", number)
    except OverflowError as err:
        raise ValueError(f"variable {name!r} of sample {index}: {value} is too large") from err
