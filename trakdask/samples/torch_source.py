"""Create samples from a map-style torch Dataset, read by index range inside tasks."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
import xarray as xr

from trakdask.checks import import_callable
from trakdask.samples.coords import fields_as_coords, to_numpy
from trakdask.samples.datasets import assemble
from trakdask.samples.fingerprints import fingerprint
from trakdask.samples.sources import fields_of, lazy_fields, read, require_samples


def from_torch(
    dataset: Any,
    *,
    names: str | Sequence[str | None],
    coords: Mapping[str, Any] | pd.DataFrame | Sequence[str] | None = None,
    chunks: int | Literal["auto"] = "auto",
    collate_fn: Callable[[list[Any]], Any] | None = None,
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
        As in :func:`from_arrays`.
    collate_fn
        As of :class:`torch.utils.data.DataLoader`: from a list of items to a batch, whose fields
        ``names`` are then about. It is called with one item at a time, so that a sample does not
        depend on its neighbours, and must return the same shapes for all. So it pads texts to one
        length: ``DataCollatorWithPadding(tokenizer, "max_length", 128)`` of transformers.

    Returns
    -------
    Dataset as of :func:`from_arrays`. Python integers become int64, floats float32.

    Raises
    ------
    TypeError
        If the dataset is iterable only, cannot be pickled, or has fields that are not numeric, or
        ``chunks`` is not an integer.
    ValueError
        If it is empty, its items do not have the named fields, ``collate_fn`` returns a batch that
        is not of one sample, or for the reasons given in :func:`from_arrays`. When computed, if
        an item has another shape or dtype than item 0.
    RuntimeError
        If reading or collating a sample fails, item 0 here and others when computed; the message
        names it.

    Notes
    -----
    Nothing is computed; only item 0 is read here, for shapes and dtypes (all items if ``coords``
    names fields). Each block is read once for all variables that are computed together. A process
    reads one sample at a time, because datasets need not be thread-safe. Items must not be random,
    so turn augmentation off. (Item 0 is read repeatedly to check this, and a ``UserWarning`` is
    issued if it differs.) In ``attrs["source"]`` a dataset and ``collate_fn`` are identified by
    their pickled content, and a callable that returns a dataset by its code or name and the
    dataset's length and first item. Tokenizers change when they are used: set ``attrs["source"]``
    to a name of your own if the samples are to be recognised although something else was tokenized
    before.

    Examples
    --------
    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> dataset = TensorDataset(torch.zeros(5, 3), torch.arange(5))
    >>> train = from_torch(dataset, names=("x", "label"), chunks=2)
    >>> train.x.chunks, train.label.values.tolist()
    (((2, 2, 1), (3,)), [0, 1, 2, 3, 4])

    Items that differ in length, and a function that pads them:

    >>> def pad(items):
    ...     ids = torch.zeros(len(items), 4, dtype=int)
    ...     for row, item in zip(ids, items):
    ...         row[: len(item["ids"])] = torch.tensor(item["ids"])
    ...     return {"input_ids": ids, "attention_mask": ids > 0}
    >>> texts = [{"ids": [5, 7]}, {"ids": [6, 9, 8]}]
    >>> train = from_torch(texts, names=["input_ids", "attention_mask"], collate_fn=pad)
    >>> train.input_ids.values.tolist()
    [[5, 7, 0, 0], [6, 9, 8, 0]]
    """
    fields = (names,) if isinstance(names, str) or not isinstance(names, Iterable) else tuple(names)
    chosen = [name for name in fields if name is not None]
    are_names = all(isinstance(name, str) for name in chosen)
    if not chosen or not are_names or len(set(chosen)) < len(chosen):
        raise ValueError(
            "expected a different name for each field of an item, or None to leave it out, got "
            f"names={names!r}; try names=('image', 'label')"
        )
    source = _Items(dataset, fields, collate_fn)
    as_coords = fields_as_coords(coords, source.fields)
    variables = {n: lazy for n, lazy in lazy_fields(source, chunks).items() if n not in as_coords}
    source.warn_if_random()  # after hashing the content, because reading may change a dataset
    values = read(source, 0, len(source), as_coords) if as_coords else coords
    return assemble(variables, values, chunks)


class _Items:
    """A dataset that each process opens once, and reads in one thread at a time."""

    def __init__(
        self,
        opener: Any,
        names: tuple[str | None, ...],
        collate_fn: Callable[[list[Any]], Any] | None,
    ) -> None:
        self.opener, self.names, self.collate_fn = opener, names, collate_fn
        self._lock, self._dataset = threading.Lock(), _open(opener)
        self._n = len(self._dataset)
        require_samples(self._n, "the dataset")
        item = self._item(0)
        self.fields = fields_of(item)
        # The code of a function alone does not determine the dataset that it returns.
        self.first = "" if self._dataset is opener else fingerprint((self._n, item))

    def __len__(self) -> int:
        return self._n

    def __getstate__(self) -> dict[str, Any]:
        # Locks cannot be pickled, and each process opens the dataset for itself.
        return self.__dict__ | {"_lock": None, "_dataset": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def rows(self, start: int, stop: int) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """Yield the samples ``start:stop``, one at a time."""
        with self._lock:
            self._dataset = _open(self.opener) if self._dataset is None else self._dataset
        for index in range(start, stop):
            # Item by item, so that a thread with a small block does not wait for a large one.
            with self._lock:
                item = self._item(index)
            yield index, item

    def warn_if_random(self) -> None:
        """Warn if item 0 differs when it is read again, as with random augmentation.

        It is read three more times, which detects a random flip three times out of four.
        """
        first, *others = (
            {name: value.tobytes() for name, value in self._item(0).items()} for _ in range(3)
        )
        if changed := [name for name in first if any(first[name] != o[name] for o in others)]:
            warnings.warn(
                f"expected a dataset whose items are not random, got another {changed[0]!r} when "
                "item 0 was read again, so that features would differ between runs; try the "
                "dataset without random augmentation",
                UserWarning,
                stacklevel=3,
            )

    def _item(self, index: int) -> dict[str, np.ndarray]:
        """Return the fields of a sample, each (1, ...)."""
        how = f"dataset[{index}]" if self.collate_fn is None else f"collate_fn([dataset[{index}]])"
        try:
            item = self._dataset[index]
            item = item if self.collate_fn is None else self.collate_fn([item])
        except Exception as err:
            raise RuntimeError(
                f"expected an item for sample {index} of the {type(self._dataset).__name__}, got "
                f"{err!r}; try {how}"
            ) from err
        if not isinstance(item, Mapping):
            fields = item if isinstance(item, tuple | list) else (item,)
            if len(fields) != len(self.names):
                raise ValueError(
                    f"expected {len(self.names)} fields in sample {index}, for the names "
                    f"{self.names}, got {len(fields)}; try a name for every field, or None for some"
                )
            item = dict(zip(self.names, fields, strict=True))
        wanted = [name for name in self.names if name is not None]
        if missing := [name for name in wanted if name not in item]:
            raise ValueError(
                f"expected the key {missing[0]!r} in sample {index}, got {list(item)}; try one of "
                "them"
            )
        values = {name: item[name] for name in wanted}
        # Numbers of Python get the dtypes that torch would give them: a float is float32.
        arrays = {
            name: to_numpy(f"variable {name!r} of sample {index}", value, _DTYPES.get(type(value)))
            for name, value in values.items()
        }
        if self.collate_fn is None:
            return {name: array[None] for name, array in arrays.items()}
        for name, array in arrays.items():
            if array.shape[:1] != (1,):
                raise ValueError(
                    f"expected a batch of one from collate_fn, got shape {array.shape} in variable "
                    f"{name!r} of sample {index}; try torch.utils.data.default_collate"
                )
        return arrays


_DTYPES: Mapping[type, type] = {bool: np.bool_, int: np.int64, float: np.float32}
"""The dtypes of Python's numbers."""


def _open(opener: Any) -> Any:
    """Return a dataset, from itself, a function that returns it, or the function's name."""
    dataset = opener
    if isinstance(opener, str):
        dataset = import_callable(opener, "dataset")()
    # A dataset may be callable itself, and a class has the ``__getitem__`` of its instances.
    elif callable(opener) and (isinstance(opener, type) or not hasattr(opener, "__getitem__")):
        dataset = opener()
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(
            "expected a map-style dataset, whose items are read by index, got "
            f"{type(dataset).__name__}; try loader.dataset, or list(dataset)"
        )
    return dataset
