"""Marks of samples: a small parquet file beside a store, which several people may write."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from trakdask.checks import shown
from trakdask.explorer import mark_file as tables
from trakdask.files import Folder, location
from trakdask.storage import open
from trakdask.variables import NORM, SAMPLE

_SUFFIX = ".marks.parquet"


class Marks:
    """Marks of samples of a store: wrong label, duplicate, or to be removed.

    The marks are one small parquet file with a row for each sample, mark and person, which
    :func:`pandas.read_parquet` reads. Several people and processes may change it at the same time.

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
    who
        The name that is written beside each mark; by default none. Marks of others are left as
        they are.
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
    >>> marks = Marks(f"{tempfile.mkdtemp()}/train.marks.parquet", who="Ada")
    >>> marks.mark([7, 2], "wrong label"), marks.mark([2], "remove")
    (2, 1)
    >>> marks.table()[["sample", "mark", "who"]]
       sample         mark  who
    0       7  wrong label  Ada
    1       2  wrong label  Ada
    2       2       remove  Ada
    >>> marks.undo(), marks.samples("remove").tolist()
    (1, [])

    Then ``td.drop("train.zarr", where=marks.where("remove"))`` leaves out the marked samples.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        store: str | os.PathLike[str] | None = None,
        who: str = "",
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(who, str):
            raise TypeError(f"expected who as text, got {shown(who)}; try who='Ada'")
        url = location(path)
        parent, _, name = url.rpartition("/")
        folder = Folder.at(parent or "/", storage_options)
        self._file = tables.MarkFile(folder, name)
        self.path: Path | str = Path(url) if folder.is_local else url
        if not name or (folder.is_local and os.path.isdir(url)):
            raise ValueError(f"expected marks in a file, got {url!r}; try 'train{_SUFFIX}'")
        if folder.is_local and not os.path.isdir(folder.url):
            raise FileNotFoundError(
                f"expected marks in a folder that exists, got {url!r}; try the path of the store, "
                "as in Marks.beside('train.zarr')"
            )
        self.storage_options = storage_options
        self.store = None if store is None else location(store)
        self.who = who
        self._done: list[tuple[pd.DataFrame, pd.DataFrame]] = []

    @classmethod
    def beside(
        cls,
        store: str | os.PathLike[str],
        *,
        who: str = "",
        storage_options: Mapping[str, Any] | None = None,
    ) -> Marks:
        """Return the marks of a store: ``train.marks.parquet`` beside ``train.zarr``."""
        return cls(_beside(store), store=store, who=who, storage_options=storage_options)

    def __repr__(self) -> str:
        who = f", who={self.who!r}" if self.who else ""
        if self.store is None:
            return f"Marks({str(self.path)!r}{who})"
        if str(self.path) == _beside(self.store):
            return f"Marks.beside({self.store!r}{who})"
        return f"Marks({str(self.path)!r}, store={self.store!r}{who})"

    def by(self, who: str) -> Marks:
        """Return the marks in the same file for another person, whose ``undo`` is their own."""
        return Marks(self.path, store=self.store, who=who, storage_options=self.storage_options)

    def mark(self, samples: Any, label: str) -> int:
        """Mark samples; a sample that this person has marked so keeps its mark as it is.

        Parameters
        ----------
        samples
            The labels or rows by which :meth:`ids` knows them.
        label
            ``"wrong label"``, ``"duplicate"`` or ``"remove"``.

        Returns
        -------
        How many samples got the mark from this person.

        Raises
        ------
        TypeError, ValueError
            If samples are neither integers nor text, or the file knows its samples by the other of
            the two; if there is no such mark, or the file has no marks, or marks of another store.
        StoreBusyError
            If another process keeps the file locked for ten seconds.
        OSError
            If the file cannot be written.
        """
        wanted = tables.made(samples, label, self.who)
        return self._change(lambda before: tables.joined(before, wanted))

    def unmark(self, samples: Any, label: str) -> int:
        """Take this person's mark from samples; return how many had it.

        Takes the arguments, and raises the errors, of :meth:`mark`. For another person's mark, call
        ``marks.by("Bob").unmark(...)``.
        """
        wanted = tables.made(samples, label, self.who)
        return self._change(lambda before: tables.without(before, wanted))

    def undo(self) -> int:
        """Take back the last change of this object that it has not taken back yet.

        Changes of others since then stay as they are. Returns how many marks came or went, 0 if
        there is nothing to take back.
        """
        if not self._done:
            return 0
        added, taken = self._done[-1]
        changed = self._change(
            lambda before: tables.joined(tables.without(before, added, tables.COLUMNS), taken)
        )
        del self._done[-2 if changed else -1 :]  # the undoing, too, is no change to be undone
        return changed

    def table(self) -> pd.DataFrame:
        """Return all marks, in the order in which they were made.

        Returns
        -------
        One row for each sample, mark and person, with the columns ``sample`` (int64 or text),
        ``mark``, ``who`` and ``time`` (UTC). A file that has no marks raises a ValueError.
        """
        return self._file.read()

    def samples(self, label: str) -> np.ndarray:
        """Return the samples with a mark, by anybody: labels, or rows in the store; (marked,)."""
        tables.require_kind(label)
        table = self.table()
        return table.loc[table["mark"] == label, SAMPLE].drop_duplicates().to_numpy()

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
            for rows in np.arange(stored.sizes[SAMPLE]), np.flatnonzero(~stored["dropped"].values):
                norm = stored[NORM].isel({SAMPLE: rows})
                if NORM in features and norm.variable.equals(features[NORM].variable):
                    return rows
        raise ValueError(
            f"expected features with labels in the coord {SAMPLE!r}, or all that td.open returns "
            f"of the store {self.store!r}, got {features.sizes[SAMPLE]} samples without labels; "
            "try td.open again, Marks(path, store=...) or "
            "features.assign_coords(sample=('sample', names))"
        )

    def at(self, ids: np.ndarray) -> pd.DataFrame:
        """Return all marks with the ``position`` of their samples among these, see :meth:`ids`.

        Absent samples are left out. Samples that share a label share its marks.
        """
        table, index = self.table(), pd.Index(ids)
        positions = index.isin(table[SAMPLE]).nonzero()[0]
        if not len(positions):  # pandas does not merge labels of one kind with none of another
            return table.iloc[:0].assign(position=[])
        places = pd.DataFrame({SAMPLE: index[positions], "position": positions})
        return table.merge(places, on=SAMPLE)

    def where(self, label: str) -> Callable[[xr.Dataset], xr.DataArray]:
        """Return the ``where=`` with which :func:`trakdask.drop` leaves out samples with a mark.

        Samples that were dropped before, or are not in the store, do not matter.

        Raises
        ------
        ValueError
            If there is no such mark; when it is called, the errors of :meth:`ids`, or if the
            samples in the file are of another kind.
        """
        tables.require_kind(label)

        def chosen(features: xr.Dataset) -> xr.DataArray:
            ids, marked = self.ids(features), self.samples(label)
            if len(marked):
                tables.require_same_kind(marked, ids)
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
        source = str(stored.attrs.get("source"))
        return {"source": source, "samples": stored.sizes[SAMPLE]}

    def _opened(self, store: str) -> xr.Dataset:
        return open(store, dropped=True, load_coords=False, storage_options=self.storage_options)

    def _require_same_samples(self, marked: dict[Any, Any]) -> None:
        """Reject marks of rows of other samples; samples may have been appended since."""
        if not marked or not self._rows_of:
            return
        source, n = self._rows_of["source"], self._rows_of["samples"]
        is_same = source == marked["source"] or source.startswith(f"{marked['source']} + ")
        if not is_same or n < marked["samples"]:
            raise ValueError(
                f"expected the marks {str(self.path)!r} to be of the samples in {self.store!r}, "
                f"{self._rows_of}, got marks of the rows of {marked}; try another file, or labels "
                "in the coord 'sample', by which marks stay with their samples"
            )

    def _change(self, of: Callable[[pd.DataFrame], pd.DataFrame]) -> int:
        """Replace the marks by a function of them, and remember which came and went."""
        with self._file.locked() as require_held:
            before = self.table()
            after = of(before)
            if before[SAMPLE].dtype.kind == "i":
                self._require_same_samples(before.attrs)
            added, taken = tables.without(after, before), tables.without(before, after)
            if changed := len(added) + len(taken):
                require_held()
                after.attrs = before.attrs if len(before) else self._rows_of
                self._file.write(after)
                self._done.append((added, taken))
        return changed


def _beside(store: str | os.PathLike[str]) -> str:
    return location(store).rstrip("/").removesuffix(".zarr") + _SUFFIX
