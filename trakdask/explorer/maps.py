"""The points of training samples that are drawn on the map, by colour."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from trakdask.explorer import tables
from trakdask.explorer.attributions import Attributions
from trakdask.explorer.mark_file import KINDS
from trakdask.explorer.view import View

_LEVELS = 4
"""How many strengths of colour helpful and harmful scores have."""

_LARGEST = 0.98
"""The share of points whose scores the strongest colour is beyond."""


@dataclass(frozen=True)
class Points:
    """Points of one colour.

    Parameters
    ----------
    path
        The points, as the path of an SVG.
    samples
        Their positions, in the order of the path.
    kind, style
        Class and style of its colour.
    value
        The value that the samples share; None for all other values.
    count
        How many points there are.
    """

    path: str
    samples: str
    kind: str
    style: str = ""
    value: object = None
    count: int = 0


def colours(attributions: Attributions) -> list[str]:
    """Return what can colour the map: coords with few values, the label first; scores; marks."""
    questions = attributions.questions
    names = sorted(questions.groupings, key=lambda name: name != questions.targets.label)
    return [*names, "score", *(["mark"] if attributions.marks else [])]


def chosen_colour(attributions: Attributions, view: View) -> str:
    """Return the name of the column, or of the scores or marks, that colours the map of a view."""
    names = colours(attributions)
    return view.colour if view.colour in names else names[0]


def layers(attributions: Attributions, view: View) -> Iterator[Points]:
    """Yield the points of the map, lower layers first; pale points are not selected."""
    questions, colour = attributions.questions, chosen_colour(attributions, view)
    if colour == "score":
        values = _strengths(questions.scores(view))
        shown = sorted(values.dropna().unique(), key=abs)
        looks = {x: ("helpful" if x > 0 else "harmful", f"--strength:{abs(x)}") for x in shown}
    else:
        if colour == "mark":
            marked, shown = attributions.questions.marked(), list(KINDS)
            values = marked.drop_duplicates("position", keep="last").set_index("position")["mark"]
        else:
            values = questions.metadata[colour]
            shown = tables.facets(questions.metadata, [colour], "")[0].counts.index.tolist()
        looks = {x: ("value", f"--hue:{360 * i // len(shown)}") for i, x in enumerate(shown)}
    table = questions.map(view).iloc[questions.points].dropna()
    is_selected = np.isin(table.index, questions.selected(view))
    yield Points(*_drawn(table[~is_selected]), "pale")
    table = table[is_selected]
    values = values.reindex(table.index)
    points = table[~values.isin(shown)]
    yield Points(*_drawn(points), "other", count=len(points))
    for x, (kind, style) in looks.items():
        points = table[values == x]
        yield Points(*_drawn(points), kind, style, x, len(points))


def _strengths(scores: np.ndarray) -> pd.Series[float]:
    """Return how strong the colour of each sample's score is, from -1 to 1, in a few steps."""
    largest = np.nanquantile(np.abs(scores), _LARGEST) or 1.0
    return pd.Series(np.rint(_LEVELS * np.clip(scores / largest, -1, 1)) / _LEVELS)


def _drawn(points: pd.DataFrame) -> tuple[str, str]:
    """Return lines without length, which are drawn as points, and the positions of the samples."""
    path = "".join(f"M{x:g} {y:g}h0" for x, y in points.itertuples(index=False))
    return path, " ".join(map(str, points.index))
