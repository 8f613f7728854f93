"""Tokens coloured by their scores: HTML for notebooks, figures for everything else."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from html import escape
from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from trakdask.plots.figures import GREEN, RED, new_figure, power_of_ten
from trakdask.variables import TARGET_PREFIX

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_STRONGEST = 0.55
"""Opacity of the largest score. The text keeps the colour of the page, and must stay legible."""

_N_STRONGEST = 3

_COLUMNS, _POINTS, _FONT = 92, 8.0, "DejaVu Sans Mono"
_CELL = (0.602 * _POINTS / 72, 1.75 * _POINTS / 72)
"""Width and height of a character of this font, in inches."""

_MARGIN = 0.15


@dataclass(frozen=True)
class _Word:
    text: str
    score: float
    strength: float  # from -1 to 1


@dataclass(frozen=True, repr=False)
class TextPlot:
    """Rows of coloured tokens: HTML in a notebook, and a figure anywhere else.

    Printed, it is the texts with the strongest tokens of each.

    Parameters
    ----------
    rows
        Label and tokens of each row.
    unit
        Scores are written in units of this power of ten.
    """

    rows: tuple[tuple[str, tuple[_Word, ...]], ...]
    unit: int

    def __repr__(self) -> str:
        return "\n\n".join(self._plain_row(*row) for row in self.rows)

    def _repr_html_(self) -> str:
        rows = "".join(self._html_row(*row) for row in self.rows)
        return (
            f'<div style="font-family:monospace;line-height:1.6">{rows}'
            '<div style="margin-top:0.6em;opacity:0.7">scores in units of '
            f"10<sup>{self.unit}</sup>: green helped, red harmed</div></div>"
        )

    def figure(self) -> Figure:
        """Draw the rows with matplotlib, for a PNG: ``plot.figure().savefig("words.png")``.

        Raises
        ------
        ImportError
            If matplotlib is missing: install ``trakdask[plots]``.
        """
        titled = [(self._title(label, words), words) for label, words in self.rows]
        cells = list(_cells(titled))
        n_lines = 1 + max((y for y, *_ in cells), default=0)
        width, height = _COLUMNS * _CELL[0] + 2 * _MARGIN, n_lines * _CELL[1] + 2 * _MARGIN
        figure = new_figure(width, height)
        x, y = _MARGIN / width, _MARGIN / height
        ax = figure.add_axes((x, y, 1 - 2 * x, 1 - 2 * y))
        ax.set(xlim=(0, _COLUMNS), ylim=(n_lines, 0))
        ax.set_axis_off()
        for cell in cells:
            _draw(ax, *cell)
        return figure

    def _title(self, label: str, words: tuple[_Word, ...]) -> str:
        """Return what is above a row: its label, and the sum of its scores."""
        total = sum(word.score for word in words if math.isfinite(word.score))
        return f"{label}   {total / 10.0**self.unit:+.2f}".strip()

    def _plain_row(self, label: str, words: tuple[_Word, ...]) -> str:
        strongest = sorted(words, key=lambda word: -abs(word.strength))[:_N_STRONGEST]
        scores = (
            f"{_visible(w.text).strip()!r} {w.score / 10.0**self.unit:+.2f}" for w in strongest
        )
        texts = "".join(_visible(word.text) for word in words).strip()
        title = self._title(label, words)
        return f"{title}\n{texts}\nstrongest, in 1e{self.unit}: {', '.join(scores)}"

    def _html_row(self, label: str, words: tuple[_Word, ...]) -> str:
        spans = "".join(
            f'<span title="{word.score / 10.0**self.unit:+.3f}" '
            f'style="background:{_color(word.strength)}">{escape(_visible(word.text))}</span>'
            for word in words
        )
        return (
            f'<div style="margin-top:0.6em"><b>{escape(self._title(label, words))}</b></div>'
            f'<div style="white-space:pre-wrap;overflow-wrap:anywhere">{spans}</div>'
        )


def text(scores: xr.DataArray, *, label: str | None = None) -> TextPlot:
    """Colour the tokens of some sequences by their scores: green helped, red harmed.

    Parameters
    ----------
    scores
        Scores of tokens, (sample, token) or (target, token), with the coord ``text`` (or
        ``target_text``) of :func:`~trakdask.score_parts`: one sequence per row. Computed here.
    label
        Name of a coord of the sequences, written above each row.

    Returns
    -------
    The plot: HTML where a notebook shows it, in which each token has its score as a tooltip;
    ``figure()`` is a matplotlib Figure of it. The colour is as strong as the score is large
    compared with the largest of all rows. Above each row are its label and the sum of its scores.

    Raises
    ------
    KeyError
        If the scores have no texts, or there is no such label.

    Examples
    --------
    >>> words = xr.DataArray([[0.5, -0.2]], dims=("sample", "token"))
    >>> words = words.assign_coords(text=(("sample", "token"), [["a", "<b>"]]))
    >>> "&lt;b&gt;" in text(words)._repr_html_()
    True
    """
    texts = scores["text" if "text" in scores.coords else f"{TARGET_PREFIX}text"].values
    labels = [""] * len(scores) if label is None else map(str, scores[label].values.tolist())
    values = scores.values.astype(np.float64)
    largest = float(np.max(np.abs(values), where=np.isfinite(values), initial=0.0)) or 1.0
    strengths = np.where(np.isfinite(values), values, 0) / largest
    rows = zip(texts.astype(str).tolist(), values.tolist(), strengths.tolist(), strict=True)
    words = [tuple(map(_Word, *row)) for row in rows]
    return TextPlot(tuple(zip(labels, words, strict=True)), power_of_ten(scores))


def _color(strength: float) -> str:
    """Return green or red, the more opaque the stronger, as ``#rrggbbaa``."""
    return f"{GREEN if strength > 0 else RED}{round(abs(strength) * _STRONGEST * 255):02x}"


def _visible(word: str) -> str:
    """Return a text in which line ends and control characters can be seen."""
    shown = "".join(
        character if character == "\n" or character.isprintable() else "·" for character in word
    )
    return shown.replace("\n", "↵\n")


def _cells(
    rows: Iterable[tuple[str, tuple[_Word, ...]]],
) -> Iterator[tuple[int, int, str, float | None]]:
    """Yield line, column, character and strength, None for titles; lines end at the margin."""
    y = 0
    for title, words in rows:
        yield from ((y, x, character, None) for x, character in enumerate(title[:_COLUMNS]))
        x, y = 0, y + 1
        for word in words:
            shown = _visible(word.text)
            if x and x + sum(map(_width, shown.partition("\n")[0])) > _COLUMNS:
                x, y = 0, y + 1
            for character in shown:
                if character == "\n" or x + _width(character) > _COLUMNS:
                    x, y = 0, y + 1
                if character != "\n":
                    yield y, x, character, word.strength
                    x += _width(character)
        y += 2


def _width(character: str) -> int:
    """Return the number of columns of a character; those of East Asia take two."""
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _draw(ax: Axes, y: int, x: int, character: str, strength: float | None) -> None:
    """Draw a character in the middle of its cell: how wide words are depends on the dpi."""
    from matplotlib.patches import Rectangle  # optional dependency

    if strength is not None:
        cell, color = ((x, y + 0.05), _width(character), 0.9), _color(strength)
        ax.add_patch(Rectangle(*cell, facecolor=color, linewidth=0, antialiased=False))
    if character != " ":
        ax.text(
            x + 0.5, y + 0.5, character if _has_glyph(character) else "□",
            family=_FONT, fontsize=_POINTS, ha="center", va="center_baseline", parse_math=False,
            weight="bold" if strength is None else "normal",
        )  # fmt: skip


@cache
def _has_glyph(character: str) -> bool:
    from matplotlib import font_manager  # optional dependency

    font = font_manager.get_font(font_manager.findfont(_FONT))
    return bool(font.get_char_index(ord(character)))
