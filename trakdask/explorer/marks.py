"""Marks of samples: one table in a small parquet file beside a store."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from trakdask.checks import require_choice, shown
from trakdask.errors import StoreBusyError
from trakdask.explorer.computing import compute
from trakdask.files import Folder, location, naming
from trakdask.storage.lock import lock
from trakdask.storage.reading import open
from trakdask.variables import NORM, SAMPLE

KINDS = ("wrong label", "duplicate", "remove")
"""The marks that a sample may have, one or more of them."""

_SUFFIX = ".marks.parquet"
_PATIENCE_S = 10.0
_LOOKED_EVERY_S = 0.1


class Marks:
    """Marks of samples of a store: wrong label, duplicate, or to be removed.

    The marks are one small parquet file with a row for each sample and mark, which
    :func:`pandas.read_parquet` reads. Several processes may change it at the same time.

    Parameters
    ----------
    path
        The file, by its path or URL. It is written at the first mark.
    store
        Folder or URL of the store that the samples are in. A sample is known by its label in the
        coord ``sample``; without such labels by its row in the store, which counts dropped samples,
        too, so that it stays the same when samples are dropped or appended. The file records which
        samples the rows refer to. Marks are therefore not shown on another store that happens to
        have the same path.
    storage_options
        Options with which fsspec opens the URLs of the file and of the store.

    Raises
    ------
    TypeError, ValueError
        If the path is no path, or names a folder.
    FileNotFoundError
        If it is in a folder of this machine that does not exist.

    Examples
    --------
    >>> import tempfile
    >>> marks = Marks(f"{tempfile.mkdtemp()}/train.marks.parquet")
    >>> marks.mark([7, 2], "wrong label"), marks.mark(2, "remove", note="blank")
    (2, 1)
    >>> marks.mark(7, "wrong label", label="cat")
    1
    >>> marks.table().values.tolist()[:2]
    [[7, 'wrong label', 'cat', ''], [2, 'wrong label', '', '']]
    >>> marks.undo(), marks.undo(), marks.samples("remove").tolist()
    (1, 1, [])

    Then ``td.drop("train.zarr", where=marks.where("remove"))`` leaves out the marked samples.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        store: str | os.PathLike[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = location(path)
        self.store = None if store is None else location(store)
        self.storage_options = storage_options
        parent, _, self._name = self.path.rpartition("/")
        self._folder = Folder.at(parent or "/", storage_options)
        if not self._name or (self._folder.is_local and os.path.isdir(self.path)):
            raise ValueError(f"expected marks in a file, got {self.path!r}; try 'train{_SUFFIX}'")
        if self._folder.is_local and not os.path.isdir(self._folder.url):
            raise FileNotFoundError(
                f"expected marks in a folder that exists, got {self.path!r}; try the path of the "
                "store, as in Marks.beside('train.zarr')"
            )
        # For each change: the label and note of each mark before and after; None for no mark.
        self._done: list[dict[Any, Any]] = []

    @classmethod
    def beside(
        cls, store: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
    ) -> Marks:
        """Return the marks of a store: ``train.marks.parquet`` beside ``train.zarr``."""
        path = location(store).rstrip("/").removesuffix(".zarr") + _SUFFIX
        return cls(path, store=store, storage_options=storage_options)

    def __repr__(self) -> str:
        if self.store is not None and self.path == Marks.beside(self.store).path:
            return f"Marks.beside({self.store!r})"
        store = "" if self.store is None else f", store={self.store!r}"
        return f"Marks({self.path!r}{store})"

    def mark(
        self, samples: Any, mark: str, *, label: str | None = None, note: str | None = None
    ) -> int:
        """Mark samples; those that are marked so already may get another label or note.

        Parameters
        ----------
        samples
            The labels or rows by which :meth:`ids` knows them.
        mark
            ``"wrong label"``, ``"duplicate"`` or ``"remove"``.
        label
            The corrected label, as text; without it, a label that is there stays.
        note
            What you want to remember; without it, a note that is there stays.

        Returns
        -------
        How many samples got the mark, or another label or note.

        Raises
        ------
        TypeError, ValueError
            If samples are neither integers nor text, or the file knows its samples by the other of
            the two; if label or note is no text; if there is no such mark, or the file has no
            marks, or marks of another store.
        StoreBusyError
            If another process keeps the file locked for ten seconds.
        OSError
            If the file cannot be written.
        """
        texts = {name: x for name, x in (("label", label), ("note", note)) if x is not None}
        for name, text in texts.items():
            if not isinstance(text, str):
                raise TypeError(f"expected the {name} as text, got {shown(text)}; try {name}='3'")
        wanted, empty = _keys(samples, mark), {"label": "", "note": ""}
        return self._change(lambda marks: {key: marks.get(key, empty) | texts for key in wanted})

    def unmark(self, samples: Any, mark: str) -> int:
        """Take a mark from samples; return how many had it.

        Takes the first two arguments, and raises the errors, of :meth:`mark`.
        """
        wanted = _keys(samples, mark)
        return self._change(lambda marks: dict.fromkeys(wanted))

    def undo(self) -> int:
        """Take back the last change of this object that it has not taken back yet.

        Changes that others have made since then stay as they are. Returns how many marks changed,
        0 if there is nothing to take back.
        """
        if not self._done:
            return 0
        # Only where the mark is still as this change has left it.
        done = self._done[-1]
        count = self._change(
            lambda marks: {k: old for k, (old, new) in done.items() if marks.get(k) == new}
        )
        del self._done[-2 if count else -1 :]  # the undoing, too, is no change to be undone
        return count

    def table(self) -> pd.DataFrame:
        """Return all marks, in the order in which they were made.

        Returns
        -------
        One row for each sample and mark, with the columns ``sample`` (int64 or text), ``mark``,
        ``label``, the corrected label, and ``note``, both text that may be empty. A file that has
        no marks raises a ValueError.
        """
        try:
            table = pd.read_parquet(io.BytesIO(self._folder.read(self._name)))
            marks = table[[SAMPLE, "mark"]]
        except FileNotFoundError:
            return _table({})
        except (KeyError, ValueError) as err:
            raise ValueError(
                f"expected marks in {self.path!r}, got another file ({err}); try another path"
            ) from err
        # Former tables have a row per person, and neither label nor note.
        marks = marks.assign(label=table.get("label", ""), note=table.get("note", ""))
        return marks.drop_duplicates([SAMPLE, "mark"], ignore_index=True)

    def samples(self, mark: str) -> np.ndarray:
        """Return the samples with a mark: labels, or rows in the store; (marked,)."""
        _require_kind(mark)
        table = self.table()
        return table.loc[table["mark"] == mark, SAMPLE].to_numpy()

    def ids(self, features: xr.Dataset) -> np.ndarray:
        """Return the label, or the row in the store, of each sample of these features; (sample,).

        Parameters
        ----------
        features
            With labels in the coord ``sample``; else all that :func:`trakdask.open`
            returns of the store.

        Raises
        ------
        ValueError
            If there are no labels, and these are not the features of the store, or are a part of
            them: then it is unknown which rows they are.
        """
        if SAMPLE in features.coords:
            return np.asarray(features[SAMPLE].values)
        if self.store is not None:
            self._require_same_samples(self.table().attrs)
            stored = self._opened(self.store)
            lazy = [ds[NORM].data for ds in (stored, features) if NORM in ds]
            norm, *others = compute(*lazy)
            # Norms tell whether these are all samples of the store, with dropped ones, or all that
            # are left.
            for rows in np.arange(len(norm)), np.flatnonzero(~stored["dropped"].values):
                if others and np.array_equal(norm[rows], others[0], equal_nan=True):
                    return rows
        raise ValueError(
            f"expected features with labels in the coord {SAMPLE!r}, or all that td.open returns "
            f"of the store {self.store!r}, got {features.sizes[SAMPLE]} samples without labels; "
            "try td.open again, Marks(path, store=...) or "
            "features.assign_coords(sample=('sample', names))"
        )

    def where(self, mark: str) -> Callable[[xr.Dataset], xr.DataArray]:
        """Return the ``where=`` with which :func:`trakdask.drop` leaves out samples with a mark.

        Samples that were dropped before, or are not in the store, do not matter.

        Raises
        ------
        ValueError
            If there is no such mark; when it is called, the errors of :meth:`ids`, or if the
            samples in the file are of another kind.
        """
        _require_kind(mark)

        def chosen(features: xr.Dataset) -> xr.DataArray:
            ids, marked = self.ids(features), self.samples(mark)
            _require_same_kind([*marked[:1].tolist(), *ids[:1].tolist()])
            return xr.DataArray(np.isin(ids, marked), dims=SAMPLE)

        return chosen

    @cached_property
    def _rows_of(self) -> dict[Any, Any]:
        """The source of the store's samples, and how many there are, with dropped ones."""
        if self.store is None:
            return {}
        try:
            stored = self._opened(self.store)
        except FileNotFoundError:
            return {}
        return {"source": str(stored.attrs.get("source")), "samples": stored.sizes[SAMPLE]}

    def _opened(self, store: str) -> xr.Dataset:
        return open(store, dropped=True, load_coords=False, storage_options=self.storage_options)

    def _require_same_samples(self, marked: dict[Any, Any]) -> None:
        """Reject marks of rows of other samples; samples may have been appended since."""
        if not marked or not self._rows_of:
            return
        source, n = self._rows_of["source"], self._rows_of["samples"]
        # An append adds its source to that of the store, after a plus sign.
        is_same = source == marked["source"] or source.startswith(f"{marked['source']} + ")
        if not is_same or n < marked["samples"]:
            raise ValueError(
                f"expected the marks {self.path!r} to be of the samples in {self.store!r}, "
                f"{self._rows_of}, got marks of the rows of {marked}; try another file, or labels "
                "in the coord 'sample', by which marks stay with their samples"
            )

    def _change(self, of: Callable[[dict[Any, Any]], dict[Any, Any]]) -> int:
        """Let marks have the texts that a function of all marks returns; None takes them away.

        Where others write, or have taken the lock away, this is done again, for some seconds.
        """
        deadline, name = time.monotonic() + _PATIENCE_S, f"{self._name}.lock"
        while True:
            try:
                with (
                    naming(self.path, "try another file"),
                    lock(self._folder, "mark samples", name) as require_held,
                ):
                    # 1. What others have written since is the table that is changed.
                    before = self.table()
                    if before[SAMPLE].dtype.kind == "i":
                        self._require_same_samples(before.attrs)
                    marks = before.set_index([SAMPLE, "mark"]).to_dict("index")
                    # 2. Only differences count, and can be undone.
                    wanted = {key: x for key, x in of(marks).items() if marks.get(key) != x}
                    if wanted:
                        after = _table({k: x for k, x in (marks | wanted).items() if x is not None})
                        after.attrs = before.attrs if len(before) else self._rows_of
                        # 3. Nobody may have taken the lock away, who would write at the same time.
                        require_held()
                        self._folder.write(self._name, after.to_parquet(index=False))
                        self._done.append({k: (marks.get(k), x) for k, x in wanted.items()})
                    return len(wanted)
            except StoreBusyError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_LOOKED_EVERY_S)


def _keys(samples: Any, mark: str) -> list[tuple[int | str, str]]:
    """Return each of some labels or rows with a mark."""
    _require_kind(mark)
    are_several = np.iterable(samples) and not isinstance(samples, str)
    ids = list(samples) if are_several else [samples]
    # Also of lists of objects, where numpy would make texts of numbers beside texts.
    kind = pd.api.types.infer_dtype(ids, skipna=False)
    if kind not in ("integer", "string", "empty"):
        raise TypeError(
            f"expected samples as integers or as text, got {shown(samples)}; try "
            "marks.ids(features)[[0, 7]]"
        )
    return [(str(name) if kind == "string" else int(name), mark) for name in ids]


def _table(marks: Mapping[tuple[int | str, str], Mapping[str, str]]) -> pd.DataFrame:
    """Return marks as a table, in which integers are int64 also if there is none."""
    samples = [sample for sample, _ in marks]
    _require_same_kind(samples)
    rows = [(mark, texts["label"], texts["note"]) for (_, mark), texts in marks.items()]
    table = pd.DataFrame(rows, columns=["mark", "label", "note"])
    # Of no samples, numpy would make float64.
    is_text = samples and isinstance(samples[0], str)
    table.insert(0, SAMPLE, np.array(samples, object if is_text else np.int64))
    return table


def _require_kind(mark: object) -> None:
    require_choice("the mark", mark, KINDS, remedy=f"try {KINDS[0]!r}")


def _require_same_kind(samples: list[int | str]) -> None:
    """Reject samples that are known by text beside others that are known by numbers."""
    other = [sample for sample in samples if type(sample) is not type(samples[0])]
    if other:
        raise TypeError(
            f"expected samples of the kind that is marked already, such as {samples[0]!r}, got "
            f"{other[0]!r}; try Marks with another file"
        )
