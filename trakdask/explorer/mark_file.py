"""The file of marks: a table with a row for each sample, mark and person."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from trakdask.checks import require_choice, shown
from trakdask.errors import StoreBusyError
from trakdask.files import Folder, naming
from trakdask.storage.lock import lock
from trakdask.variables import SAMPLE

KINDS = ("wrong label", "duplicate", "remove")
"""The marks that a sample may have, one or more of them."""

COLUMNS = [SAMPLE, "mark", "who", "time"]
KEY = [SAMPLE, "mark", "who"]
"""The columns in which two marks differ."""

_PATIENCE_S = 10.0
_LOOKED_EVERY_S = 0.1


@dataclass(frozen=True)
class MarkFile:
    """A parquet file of marks, by its folder and its name; it need not exist."""

    folder: Folder
    name: str

    def read(self) -> pd.DataFrame:
        """Return all marks, in the order in which they were made; see :meth:`Marks.table`."""
        try:
            content = io.BytesIO(self.folder.read(self.name))
            return pd.read_parquet(content)[COLUMNS]
        except FileNotFoundError:
            return made([], KINDS[0], "")
        except (KeyError, ValueError) as err:
            raise ValueError(
                f"expected marks in '{self.folder.url}/{self.name}', got another file ({err}); try "
                "another path"
            ) from err

    @contextmanager
    def locked(self) -> Iterator[Callable[[], None]]:
        """Be the only writer of the file, after waiting for others; see :func:`lock`."""
        deadline = time.monotonic() + _PATIENCE_S
        with ExitStack() as stack:
            stack.enter_context(naming(f"{self.folder.url}/{self.name}", "try another file"))
            while True:
                try:
                    held = lock(self.folder, "mark samples", name=f"{self.name}.lock")
                    require_held = stack.enter_context(held)
                    break
                except StoreBusyError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(_LOOKED_EVERY_S)
            yield require_held

    def write(self, table: pd.DataFrame) -> None:
        """Replace the file; its ``attrs`` are kept in it."""
        self.folder.write(self.name, table.to_parquet(index=False))


def made(samples: Any, label: str, who: str) -> pd.DataFrame:
    """Return the marks that a person makes now, of labels or rows.

    Raises
    ------
    TypeError, ValueError
        If samples are neither integers nor text, or there is no such mark.
    """
    require_kind(label)
    are_several = np.iterable(samples) and not isinstance(samples, str)
    ids = list(samples) if are_several else [samples]
    kind = pd.api.types.infer_dtype(ids, skipna=False)
    if kind not in ("integer", "string", "empty"):
        raise TypeError(
            f"expected samples as integers or as text, got {shown(samples)}; try "
            "marks.ids(features)[[0, 7]]"
        )
    values = pd.unique(np.array(ids, object if kind == "string" else np.int64))
    time = pd.Timestamp.now("UTC").as_unit("us")
    return pd.DataFrame({SAMPLE: values, "mark": label, "who": who, "time": time})


def joined(rows: pd.DataFrame, more: pd.DataFrame) -> pd.DataFrame:
    """Return rows, and more rows that are not among them."""
    if not len(rows) or not len(more):
        return rows if len(rows) else more
    require_same_kind(rows[SAMPLE].to_numpy(), more[SAMPLE].to_numpy())
    return pd.concat([rows, more]).drop_duplicates(KEY, ignore_index=True)


def without(rows: pd.DataFrame, others: pd.DataFrame, names: Collection[str] = KEY) -> pd.DataFrame:
    """Return the rows that are not among the others, by the columns of these names."""
    keys = (pd.MultiIndex.from_frame(table[list(names)]) for table in (rows, others))
    return rows[~next(keys).isin(next(keys))]


def require_kind(label: object) -> None:
    """Reject a mark that is none."""
    require_choice("the mark", label, KINDS, remedy=f"try {KINDS[0]!r}")


def require_same_kind(before: np.ndarray, ids: np.ndarray) -> None:
    """Reject samples that are known by text beside others that are known by numbers."""
    if (before.dtype.kind in "iu") != (ids.dtype.kind in "iu"):
        raise TypeError(
            f"expected samples of the kind that is marked already, such as {before[0]!r}, got "
            f"{ids[0]!r}; try Marks with another file"
        )
