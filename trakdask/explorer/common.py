"""Parts that several pages share: rows, neighbours in a list, bars, lists of samples."""

from __future__ import annotations

import numpy as np
import pandas as pd

from trakdask.explorer.attributions import Attributions
from trakdask.explorer.conditions import ConditionError, condition_mask
from trakdask.explorer.html import plain_message, render
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


def bars(
    attributions: Attributions, view: View, table: pd.DataFrame, *, is_share: bool = False
) -> str:
    """Return sums of scores by group, or shares, as bars with intervals."""
    half = _MOST_GROUPS // 2
    ends = table if len(table) <= _MOST_GROUPS else pd.concat([table[:half], table[-half:]])
    return render(
        "groups", attributions, view, table=ends, left_out=len(table) - len(ends),
        digits=1 if is_share else decimals(table["score"]), is_share=is_share,
        largest=float((ends["score"].abs() + ends["spread"].fillna(0)).max()),
    )  # fmt: skip


def histogram(attributions: Attributions, view: View, *, name: str = "") -> str:
    """Return how scores, or the values by which training samples are ordered, are distributed."""
    questions = attributions.questions
    name = name or order(attributions, view, "ranking")
    bins = questions.histogram(view, name)
    return render("histogram", view, name=name.replace("_", "-"), bins=bins)


# ---------------------------------------------------------------- lists of training samples


def order(attributions: Attributions, view: View, section: str) -> str:
    """Return the value by which a list of training samples is sorted; "" for their order."""
    return attributions.questions.training.loss if view.order == "loss" else view.order


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
            ranking = questions.ranking(view, order(attributions, view, name))
            return ranking.index.to_numpy()
        case "duplicates":
            return questions.duplicates(view)["sample"].to_numpy()
        case "marked":
            return marked(attributions)["position"].unique()
    raise ValueError(f"There are no samples to mark in {name!r:.60}.")


def marked_at_once(attributions: Attributions, view: View, name: str) -> np.ndarray:
    """Return the samples that a button below a section marks: all but the first of duplicates."""
    if name == "duplicates":
        table = attributions.questions.duplicates(view)
        return table["sample"][table["group"].duplicated()].to_numpy()
    return samples_of(attributions, view, name)
