"""What of a store is shown: all that is complete, and nothing of an append that was cut short."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trakdask.errors import IncompleteFeaturesError
from trakdask.files import Folder
from trakdask.storage.coords import by_source
from trakdask.storage.edits import Edit, latest
from trakdask.storage.parts import count, pieces, unmade
from trakdask.storage.piece import ASSIGNED, DROPS, Piece
from trakdask.storage.runs import has_ended

__all__ = ["State", "require_settled", "state"]


@dataclass(frozen=True)
class State:
    """What a store holds by now.

    Parameters
    ----------
    shown
        Its pieces, but those that are still being appended.
    checkpoints
        Names of the checkpoints that all samples have.
    drop, assigned
        The last edits of these kinds, if any.
    unfinished
        What is missing of an append, and how to finish it; "" where nothing is.
    counts
        Whether that append is among the pieces, and has blocks already.
    """

    shown: list[Piece]
    checkpoints: list[str]
    drop: Edit | None
    assigned: Edit | None
    unfinished: str
    counts: bool


def state(place: Folder, *, require_complete: bool = True) -> State:
    """Find what a store holds.

    Raises
    ------
    FileNotFoundError
        If there is no such store.
    IncompleteFeaturesError
        If blocks are missing that do not belong to an append that was cut short.
    """
    found, drop, assigned = pieces(place), latest(place, DROPS), latest(place, ASSIGNED)
    unfinished, shown = "", found
    if require_complete:
        edits = [edit for edit in (drop, assigned) if edit is not None]
        covered = max([1, *(edit.pieces for edit in edits)])
        shown = _complete(found, covered)
        unfinished = _missing_blocks(place, found[len(shown) :]) if shown != found else ""
    names = _common_checkpoints(shown)
    unfinished = unfinished or _missing_checkpoints(place, shown, names)
    counts = bool(unfinished)
    if not unfinished and (parts := unmade(place)):
        unfinished = (
            f"the append in {parts[0].url!r} has no blocks yet. Try the td.save(..., "
            "append_dim=...) that began it, or td.verify(store, repair=True) to give it up"
        )
    return State(shown, names, drop, assigned, unfinished, counts)


def require_settled(place: Folder, found: State, what: str) -> None:
    """Refuse to edit a store while an append to it has blocks, but not all.

    Raises
    ------
    IncompleteFeaturesError
        With what to do first.
    """
    if found.counts:
        raise IncompleteFeaturesError(
            f"expected a store without unfinished appends for {what}, got {place.url!r}, where "
            f"{found.unfinished}"
        )


def _complete(found: Sequence[Piece], covered: int) -> list[Piece]:
    """Return the pieces before the first that lacks blocks, if that is one being appended.

    Nothing is appended after an append that was cut short, and no edit covers it.
    """
    counts = [count(piece) for piece in found]
    lacking = [number for number, (done, total) in enumerate(counts) if done < total]
    if not lacking:
        return list(found)
    first = lacking[0]
    is_append = first >= covered and lacking == list(range(first, len(found)))
    if not is_append or any(has_ended(piece) for piece in found[first:]):
        done, total = (sum(numbers) for numbers in zip(*counts, strict=True))
        url, dim = found[0].place.url, ", append_dim=..." if first else ""
        raise IncompleteFeaturesError(
            f"expected a complete store, got {done} of {total} blocks in {url!r} (some are missing "
            f"in {found[first].place.url!r}), and the rest would read as NaN; try "
            f"td.save(features, {url!r}{dim}) to compute what is missing, or td.open({url!r}, "
            "require_complete=False) to look at it"
        )
    return list(found[:first])


def _missing_blocks(place: Folder, lacking: Sequence[Piece]) -> str:
    piece = lacking[0]
    done, total = count(piece)
    return (
        f"the append in {piece.place.url!r}, of the source {piece.spec.get('source')!r:.60} at the "
        f"checkpoints {list(piece.spec['checkpoints'])}, has {done} of {total} blocks. Try "
        f"td.save(features, {place.url!r}, append_dim=...) with these features to finish it, or "
        f"delete {piece.place.url!r} to give it up"
    )


def _common_checkpoints(shown: Sequence[Piece]) -> list[str]:
    rows = [
        [name for piece in row for name in piece.spec["checkpoints"]] for row in by_source(shown)
    ]
    return [name for name in rows[0] if all(name in row for row in rows)]


def _missing_checkpoints(place: Folder, shown: Sequence[Piece], names: Sequence[str]) -> str:
    every = list(dict.fromkeys(name for piece in shown for name in piece.spec["checkpoints"]))
    for row in by_source(shown):
        here = {name for piece in row for name in piece.spec["checkpoints"]}
        if missing := [name for name in every if name not in here]:
            return (
                f"the samples of the source {row[0].spec.get('source')!r:.60} have no features of "
                f"the checkpoints {missing}. Try td.save(td.featurize(samples, model), "
                f"{place.url!r}, append_dim='checkpoint') with these samples"
            )
    return ""
