"""Parts that several pages share: rows, neighbours in a list, bars, lists of samples."""

from __future__ import annotations

import numpy as np
import pandas as pd

from trakdask.explorer.attributions import Attributions
from trakdask.explorer.conditions import ConditionError, condition_mask
from trakdask.explorer.html import count, plain_message, render, value
from trakdask.explorer.tables import ROWS
from trakdask.explorer.view import View
from trakdask.plots.figures import decimals

_MOST_GROUPS = 24


def checked(
    view: View, field: str, table: pd.DataFrame, target: pd.DataFrame | None = None
) -> View:
    """Return a view with the error of its condition, for the form in which it is typed."""
    if field in view.errors:
        return view
    try:
        condition_mask(table[:1], getattr(view, field), target)
    except ConditionError as err:
        return view.replace(errors={**view.errors, field: plain_message(err)})
    return view


def shown(table: pd.DataFrame, view: View) -> pd.DataFrame:
    """Return the rows of a table that are on the page of a view."""
    return table.iloc[view.first : view.first + ROWS]


def grouped(attributions: Attributions, view: View) -> View:
    """Return a view that groups by some column, or by "" if none is fit for it."""
    names = attributions.questions.groupings
    return view if view.group_by in names else view.replace(group_by=(*names, "")[0])


def neighbours(positions: np.ndarray, at: int, n: int) -> dict[str, int]:
    """Return which positions come before and after one in a list, and its place there.

    A position that is not in the list has its place among all n.
    """
    if at not in positions:
        positions = np.arange(n)
    place = int(np.flatnonzero(positions == at)[0])
    around = {"previous": place - 1, "next": place + 1}
    found = {name: int(positions[i]) for name, i in around.items() if 0 <= i < len(positions)}
    return {**found, "place": place, "total": len(positions)}


def bars(attributions: Attributions, view: View, table: pd.DataFrame, *, what: str = "") -> str:
    """Return what groups did, as bars with intervals: sums of scores, shares, or effects.

    ``what`` are effects on, in words; without it these are sums, or of many targets shares.
    """
    half = _MOST_GROUPS // 2
    ends = table if len(table) <= _MOST_GROUPS else pd.concat([table[:half], table[-half:]])
    # An effect on the loss harmed where it is positive.
    sign = -1 if what and view.page == "targets" else 1
    return render(
        "groups", attributions, view, table=ends, left_out=len(table) - len(ends), sign=sign,
        digits=decimals(table["score"]), what=what,
        sentences=_sentences(table, view.group_by, what) if what else [],
        largest=float((ends["score"].abs() + ends["spread"].fillna(0)).max()),
    )  # fmt: skip


def _sentences(table: pd.DataFrame, by: str, what: str) -> list[str]:
    """Return in words the effects of the groups at both ends, and how many are of unknown sign."""
    is_sure, sentences = table["score"].abs() > table["spread"], []
    for sign, way in ((1, "lower"), (-1, "higher")):
        found = table[is_sure & (sign * table["score"] > 0)]
        if found.empty:
            continue
        row = found.iloc[int((sign * found["score"]).argmax())]
        effect, half = abs(row["score"]), row["spread"]
        digits = decimals(half, digits=2)
        low, middle, high = (f"{x:,.{digits}f}" for x in (effect - half, effect, effect + half))
        name = f"{by} {value(row[by])}"
        sentences.append(f"Without {name}, {what} would be {middle} {way} ({low} to {high}).")
    unsure = table[~is_sure & table["score"].notna()]
    if len(unsure) == 1:
        name = f"{by} {value(unsure[by].iloc[0])}"
        sentences.append(f"The effect of {name} cannot be told from zero.")
    elif len(unsure):
        sentences.append(f"The effects of {count(len(unsure), 'group')} cannot be told from zero.")
    return sentences


# ---------------------------------------------------------------- lists of training samples


def marked(attributions: Attributions) -> pd.DataFrame:
    """Return all marks of the training samples, newest first."""
    return attributions.questions.marked().iloc[::-1].reset_index(drop=True)


def samples_of(attributions: Attributions, view: View, name: str) -> np.ndarray:
    """Return the positions of the training samples that a section is about.

    They are in the order of the section.

    Raises
    ------
    ValueError
        If this is no such section.
    """
    questions = attributions.questions
    match name:
        case "helpful" | "harmful":
            return questions.top(view, largest=name == "helpful")["sample"].to_numpy()
        case "ranking":
            return questions.ranking(view).index.to_numpy()
        case "duplicates":
            return questions.duplicates()["sample"].to_numpy()
        case "marked":
            return marked(attributions)["position"].unique()
    raise ValueError(f"There are no samples to mark in {name!r:.60}.")


def marked_at_once(attributions: Attributions, view: View, name: str) -> np.ndarray:
    """Return the samples that a button below a section marks: all but the first of duplicates."""
    if name == "duplicates":
        table = attributions.questions.duplicates()
        return table["sample"][table["group"].duplicated()].to_numpy()
    return samples_of(attributions, view, name)
