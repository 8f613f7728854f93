"""The marks that one browser makes, and what its page says of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from trakdask.explorer.marks import Marks
from trakdask.explorer.messages import plain_message
from trakdask.variables import SAMPLE

if TYPE_CHECKING:
    from trakdask.explorer.explorer import Explorer

__all__ = ["SessionMarks", "positions"]


class SessionMarks:
    """The marks of one session, which undoes its own changes only."""

    def __init__(self, explorer: Explorer) -> None:
        self.explorer = explorer
        kept = explorer.marks
        self._own = None if kept is None else kept.by(kept.who)

    def set(self, position: int, label: str, *, wanted: bool) -> str:
        """Let a sample have a mark or not, as wanted; return what is so now, in words.

        What is wanted is said, and not that it changes: two who want the same do not undo it.
        """
        if self._own is None:
            return "No marks are kept here."
        try:
            name = self.explorer.sample_ids[position]
            if wanted:
                self._own.mark([name], label)
                return f"Sample {position} is marked as {label}."
            self._own.unmark([name], label)
            return f"Sample {position} is no longer marked as {label}."
        except Exception as err:
            return plain_message(err)

    def undo(self) -> str:
        """Take back the last change of this session; return what was done, in words."""
        try:
            changed = 0 if self._own is None else self._own.undo()
        except Exception as err:
            return plain_message(err)
        return f"Undone: {changed} mark{'' if changed == 1 else 's'}."

    def marked(self) -> list[str]:
        """Return the positions of marked samples with their marks, such as ``"7 remove"``."""
        return [] if self._own is None else positions(self.explorer, self._own)["key"].tolist()


def positions(explorer: Explorer, marks: Marks) -> pd.DataFrame:
    """Return all marks with the positions of their samples; those of absent samples are left out.

    Of samples that share a label, each has its marks.
    """
    table = marks.table()
    index = pd.Index(explorer.sample_ids)
    found = index.isin(table[SAMPLE]).nonzero()[0]
    if not len(found):  # pandas does not merge labels of one kind with none of another
        return table.iloc[:0].assign(position=[], key=[])
    places = pd.DataFrame({SAMPLE: index[found], "position": found})
    joined = table.merge(places, on=SAMPLE)
    return joined.assign(key=joined["position"].astype(str) + " " + joined["mark"])
