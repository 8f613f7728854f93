"""What people say about samples: a small parquet file beside a store, which several may write."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from trakdask.checks import require_choice, shown
from trakdask.errors import StoreBusyError
from trakdask.files import Folder, explained, location
from trakdask.storage import open
from trakdask.storage.lock import lock
from trakdask.variables import NORM, SAMPLE

KINDS = ("wrong label", "duplicate", "remove")
"""The marks that a sample may have, one or more of them."""

SHORT = {"wrong label": "wrong", "duplicate": "dupl.", "remove": "remove"}
"""What is written on the buttons of the marks."""

_COLUMNS = (SAMPLE, "mark", "who", "time")
_KEY = [SAMPLE, "mark", "who"]
_SUFFIX = ".marks.parquet"
_PATIENCE_S = 10.0
_LOOKED_EVERY_S = 0.1


class Marks:
    """What people say about samples of a store: wrong label, duplicate, or to be removed.

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

    Notes
    -----
    While the file is changed there is a lock beside it, as in stores: ``train.marks.parquet.lock``.
    If its process has ended without removing it, the next writer takes it over.

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

    Then ``td.drop("train.zarr", where=marks.where("remove"))`` leaves out what is marked.
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
        parent, _, self._name = url.rpartition("/")
        self._folder = Folder.at(parent or "/", storage_options)
        self.path: Path | str = Path(url) if self._folder.is_local else url
        if not self._name or (isinstance(self.path, Path) and self.path.is_dir()):
            raise ValueError(f"expected marks in a file, got {url!r}; try 'train{_SUFFIX}'")
        self._require_folder()
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
        """Return the marks of a store: ``train.marks.parquet`` beside ``train.zarr``.

        Raises the errors of :class:`Marks`.
        """
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
        options = self.storage_options
        return Marks(self.path, store=self.store, who=who, storage_options=options)

    # ------------------------------------------------------------------------------------ changes

    def mark(self, samples: Any, label: str) -> int:
        """Mark samples; a sample that this person has marked so keeps its mark as it is.

        Parameters
        ----------
        samples
            What :meth:`ids` has for them: their labels, or rows in the store.
        label
            ``"wrong label"``, ``"duplicate"`` or ``"remove"``.

        Returns
        -------
        How many samples have it from this person that had not.

        Raises
        ------
        TypeError, ValueError
            If samples are neither integers nor text, or not of the kind that is marked in the file
            already; if there is no such mark, or the file is not one of marks, or one of another
            store.
        StoreBusyError
            If another process keeps the file locked for ten seconds.
        OSError
            If the file cannot be written.
        """
        wanted = self._rows(samples, label)
        return self._change(lambda before: _joined(before, wanted))

    def unmark(self, samples: Any, label: str) -> int:
        """Take this person's mark from samples; return how many had it.

        Takes the arguments, and raises the errors, of :meth:`mark`. For another person's mark, call
        ``marks.by("Bob").unmark(...)``.
        """
        wanted = self._rows(samples, label)
        return self._change(lambda before: _without(before, wanted, _KEY))

    def undo(self) -> int:
        """Take back the last change of this object that it has not taken back yet.

        What others have changed since stays as it is.

        Returns
        -------
        How many marks came or went; 0 if there is nothing to take back.
        """
        if not self._done:
            return 0
        added, taken = self._done[-1]
        changed = self._change(lambda before: _joined(_without(before, added, _COLUMNS), taken))
        del self._done[-2 if changed else -1 :]  # the undoing, too, is no change to be undone
        return changed

    # ---------------------------------------------------------------------------------- questions

    def table(self) -> pd.DataFrame:
        """Return all marks, in the order in which they were made.

        Returns
        -------
        One row for each sample, mark and person, with the columns ``sample`` (int64 or text),
        ``mark``, ``who`` and ``time`` (UTC).

        Raises
        ------
        ValueError
            If the file is not one of marks.
        """
        try:
            data = self._folder.read(self._name)
        except FileNotFoundError:
            return _frame(np.empty(0, np.int64), "", "")
        try:
            table = pd.read_parquet(io.BytesIO(data))
        except ValueError as err:
            raise self._foreign(f"{len(data)} bytes that are no parquet ({err})") from err
        if tuple(table) != _COLUMNS:
            raise self._foreign(f"the columns {list(table)}")
        return table

    def samples(self, label: str) -> np.ndarray:
        """Return the samples that anybody has marked so: labels, or rows in the store; (marked,).

        Raises
        ------
        ValueError
            If there is no such mark, or the file is not one of marks.
        """
        _require_kind(label)
        table = self.table()
        return table.loc[table["mark"] == label, SAMPLE].drop_duplicates().to_numpy()

    def ids(self, features: xr.Dataset) -> np.ndarray:
        """Return by what each sample of these features is known here; (sample,).

        Parameters
        ----------
        features
            With labels in the coord ``sample``; else all that :func:`trakdask.open`
            returns of the store.

        Raises
        ------
        ValueError
            If there are no labels, and these are not the features of the store, or are a part of
            them: then nothing says which rows they are.
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
        """Return what :func:`trakdask.drop` takes as ``where=``: true for samples with a mark.

        What was dropped by the same marks before, or is not in the store, is left as it is.

        Raises
        ------
        ValueError
            If there is no such mark; when it is called, the errors of :meth:`ids`, or if the
            samples in the file are of another kind.
        """
        _require_kind(label)

        def chosen(features: xr.Dataset) -> xr.DataArray:
            ids, marked = self.ids(features), self.samples(label)
            if len(marked):
                _require_same_kind(marked, ids)
            return xr.DataArray(np.isin(ids, marked), dims=SAMPLE)

        return chosen

    # ---------------------------------------------------------------------------------- the store

    @cached_property
    def _rows_of(self) -> dict[Any, Any]:
        """The source of the store's samples, and how many there are, with dropped ones."""
        if self.store is None:
            return {}
        try:
            stored = self._opened(self.store)
        except FileNotFoundError:
            return {}
        source = str(stored.attrs.get("source")).partition(" without ")[0]
        return {"source": source, "samples": stored.sizes[SAMPLE]}

    def _opened(self, store: str) -> xr.Dataset:
        return open(store, dropped=True, load_coords=False, storage_options=self.storage_options)

    def _require_same_samples(self, marked: dict[Any, Any]) -> None:
        """Reject marks of rows of other samples; samples may have been appended since."""
        if not marked or not self._rows_of:
            return
        grown = self._rows_of["source"].startswith(f"{marked['source']} + ")
        if (grown or self._rows_of["source"] == marked["source"]) and (
            self._rows_of["samples"] >= marked["samples"]
        ):
            return
        raise ValueError(
            f"expected the marks {str(self.path)!r} to be of the samples in {self.store!r}, "
            f"{self._rows_of}, got marks of the rows of {marked}; try another file, or labels in "
            "the coord 'sample', by which marks stay with their samples"
        )

    # ----------------------------------------------------------------------------------- the file

    def _rows(self, samples: Any, label: str) -> pd.DataFrame:
        _require_kind(label)
        are_several = np.iterable(samples) and not isinstance(samples, str)
        ids = list(samples) if are_several else [samples]
        kind = pd.api.types.infer_dtype(ids, skipna=False)
        if kind not in ("integer", "string", "empty"):
            raise TypeError(
                f"expected samples as integers or as text, got {shown(samples)}; try "
                "marks.ids(features)[[0, 7]]"
            )
        values = np.array(ids, object if kind == "string" else np.int64)
        return _frame(values, label, self.who)

    def _change(self, of: Callable[[pd.DataFrame], pd.DataFrame]) -> int:
        """Write what a function makes of the marks, and remember what came and went."""
        with self._locked() as require_held:
            before = self.table()
            after = of(before)
            if before[SAMPLE].dtype.kind == "i":
                self._require_same_samples(before.attrs)
            added, taken = _without(after, before, _KEY), _without(before, after, _KEY)
            if changed := len(added) + len(taken):
                require_held()
                after.attrs = before.attrs if len(before) else self._rows_of
                self._folder.write(self._name, after.to_parquet(index=False))
                self._done.append((added, taken))
        return changed

    @contextmanager
    def _locked(self) -> Iterator[Callable[[], None]]:
        """Be the only writer of the file, after waiting for others; see :func:`lock`."""
        self._require_folder()
        deadline = time.monotonic() + _PATIENCE_S
        try:
            with ExitStack() as stack:
                while True:
                    try:
                        held = lock(self._folder, "mark samples", name=f"{self._name}.lock")
                        require_held = stack.enter_context(held)
                        break
                    except StoreBusyError:
                        if time.monotonic() > deadline:
                            raise
                        time.sleep(_LOOKED_EVERY_S)
                yield require_held
        except OSError as err:
            raise explained(
                err,
                f"expected to write the marks {str(self.path)!r}, but that failed "
                f"({type(err).__name__}: {err}); try another file",
            ) from err

    def _require_folder(self) -> None:
        if self._folder.is_local and not Path(self._folder.url).is_dir():
            raise FileNotFoundError(
                f"expected marks in a folder that exists, got {str(self.path)!r}; try the path of "
                "the store, as in Marks.beside('train.zarr')",
            )

    def _foreign(self, found: str) -> ValueError:
        return ValueError(
            f"expected marks in {str(self.path)!r}, got {found}; try another file, or deleting it "
            "if its marks are not needed"
        )


def _beside(store: str | os.PathLike[str]) -> str:
    return location(store).rstrip("/").removesuffix(".zarr") + _SUFFIX


def _frame(ids: np.ndarray, label: str, who: str) -> pd.DataFrame:
    time = pd.Timestamp.now("UTC").as_unit("us")
    return pd.DataFrame({SAMPLE: pd.unique(ids), "mark": label, "who": who, "time": time})


def _joined(rows: pd.DataFrame, more: pd.DataFrame) -> pd.DataFrame:
    """Return rows, and more rows that are not among them."""
    if not len(rows) or not len(more):
        return rows if len(rows) else more
    _require_same_kind(rows[SAMPLE].to_numpy(), more[SAMPLE].to_numpy())
    return pd.concat([rows, _without(more, rows, _KEY)], ignore_index=True)


def _without(rows: pd.DataFrame, others: pd.DataFrame, names: Collection[str]) -> pd.DataFrame:
    """Return the rows that are not among the others, by the columns of these names."""
    keys = (pd.MultiIndex.from_frame(table[list(names)]) for table in (rows, others))
    return rows[~next(keys).isin(next(keys))]


def _require_kind(label: object) -> None:
    require_choice("the mark", label, KINDS, remedy=f"try {KINDS[0]!r}")


def _require_same_kind(before: np.ndarray, ids: np.ndarray) -> None:
    if (before.dtype.kind in "iu") != (ids.dtype.kind in "iu"):
        raise TypeError(
            f"expected samples known by what is marked already, such as {before[0]!r}, got "
            f"{ids[0]!r}; try Marks with another file"
        )
