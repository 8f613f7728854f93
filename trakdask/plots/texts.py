"""Tokens coloured by their scores: HTML for notebooks, figures for everything else."""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
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
        Title and tokens of each row.
    unit
        Scores are written in units of this power of ten.
    """

    rows: tuple[tuple[str, tuple[_Word, ...]], ...]
    unit: int

    def __repr__(self) -> str:
        return "\n\n".join(_plain_row(title, words, self.unit) for title, words in self.rows)

    def _repr_html_(self) -> str:
        rows = "".join(_html_row(title, words, self.unit) for title, words in self.rows)
        style = "font-family:monospace;line-height:1.6"
        return f'<div style="{style}">{rows}{_legend(self.unit)}</div>'

    def figure(self) -> Figure:
        """Draw the rows with matplotlib, for a PNG: ``plot.figure().savefig("words.png")``.

        Raises
        ------
        ImportError
            If matplotlib is missing: install ``trakdask[plots]``.
        """
        cells = list(_cells(self.rows))
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
    titles = [""] * len(scores) if label is None else scores[label].values.tolist()
    values = scores.values.astype(np.float64)
    largest = float(np.max(np.abs(values), where=np.isfinite(values), initial=0.0)) or 1.0
    strengths = np.where(np.isfinite(values), values, 0) / largest
    unit = power_of_ten(scores)
    rows = [
        (
            f"{title}   {np.nansum(row) / 10.0**unit:+.2f}".strip(),
            tuple(map(_Word, map(str, words), row.tolist(), strength.tolist())),
        )
        for title, words, row, strength in zip(titles, texts, values, strengths, strict=True)
    ]
    return TextPlot(tuple(rows), unit)


def _plain_row(title: str, words: tuple[_Word, ...], unit: int) -> str:
    strongest = sorted(words, key=lambda word: -abs(word.strength))[:_N_STRONGEST]
    named = (f"{_visible(w.text).strip()!r} {w.score / 10.0**unit:+.2f}" for w in strongest)
    texts = "".join(_visible(word.text) for word in words).strip()
    return f"{title}\n{texts}\nstrongest, in 1e{unit}: {', '.join(named)}".strip()


def _html_row(title: str, words: tuple[_Word, ...], unit: int) -> str:
    spans = "".join(
        f'<span title="{word.score / 10.0**unit:+.3f}" style="background:{_rgba(word.strength)}">'
        f"{html.escape(_visible(word.text))}</span>"
        for word in words
    )
    return (
        f'<div style="margin-top:0.6em"><b>{html.escape(title)}</b></div>'
        f'<div style="white-space:pre-wrap;overflow-wrap:anywhere">{spans}</div>'
    )


def _legend(unit: int) -> str:
    return (
        '<div style="margin-top:0.6em;opacity:0.7">scores in units of '
        f"10<sup>{unit}</sup>: green helped, red harmed</div>"
    )


def _rgba(strength: float) -> str:
    color = (GREEN if strength > 0 else RED).lstrip("#")
    red, green, blue = (int(color[i : i + 2], 16) for i in (0, 2, 4))
    return f"rgba({red},{green},{blue},{abs(strength) * _STRONGEST:.3f})"


def _visible(word: str) -> str:
    """Return a text in which line ends and control characters can be seen."""
    shown = "".join(
        character if character == "\n" or character.isprintable() else "·" for character in word
    )
    return shown.replace("\n", "↵\n")


def _cells(
    rows: tuple[tuple[str, tuple[_Word, ...]], ...],
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
        color, alpha = GREEN if strength > 0 else RED, abs(strength) * _STRONGEST
        cell = (x, y + 0.05), _width(character), 0.9
        ax.add_patch(Rectangle(*cell, facecolor=color, alpha=alpha, linewidth=0, antialiased=False))
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
