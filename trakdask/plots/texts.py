"""Tokens coloured by their scores: HTML for notebooks, figures for everything else."""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from trakdask.plots.figures import GREEN, RED, new_figure, power_of_ten
from trakdask.variables import TARGET_PREFIX

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["TextPlot", "text"]

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
        lines = list(_lines(self.rows))
        width, height = _COLUMNS * _CELL[0], len(lines) * _CELL[1]
        outer = (width + 2 * _MARGIN, height + 2 * _MARGIN)
        figure = new_figure(*outer)
        place = (_MARGIN / outer[0], _MARGIN / outer[1], width / outer[0], height / outer[1])
        ax = figure.add_axes(place)
        ax.set(xlim=(0, _COLUMNS), ylim=(len(lines), 0))
        ax.set_axis_off()
        for y, line in enumerate(lines):
            _draw_line(ax, y, line)
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
    titles = _titles(scores, label)
    scores = scores.astype(np.float64).compute()
    values = scores.values
    largest = float(np.max(np.abs(values), where=np.isfinite(values), initial=0.0))
    unit = power_of_ten(scores)
    rows = [
        tuple(
            _Word(str(word), float(value), _strength(float(value), largest))
            for word, value in zip(words, numbers, strict=True)
        )
        for words, numbers in zip(texts, values, strict=True)
    ]
    heads = [
        f"{title}   {np.nansum(numbers) / 10.0**unit:+.2f}".strip()
        for title, numbers in zip(titles, values, strict=True)
    ]
    return TextPlot(tuple(zip(heads, rows, strict=True)), unit)


def _titles(scores: xr.DataArray, label: str | None) -> list[str]:
    return [""] * len(scores) if label is None else list(map(str, scores[label].values))


def _strength(value: float, largest: float) -> float:
    return value / largest if largest and np.isfinite(value) else 0.0


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


def _lines(
    rows: tuple[tuple[str, tuple[_Word, ...]], ...],
) -> Iterator[list[tuple[int, _Word | str]]]:
    """Yield what is drawn on each line: pieces of tokens, or a title, each with its column."""
    for number, (title, words) in enumerate(rows):
        if number:
            yield []
        yield [(0, title[:_COLUMNS])]
        yield from _wrapped(words)


def _wrapped(words: tuple[_Word, ...]) -> Iterator[list[tuple[int, _Word | str]]]:
    line: list[tuple[int, _Word | str]] = []
    column = 0
    for word in words:
        for piece in _pieces(_visible(word.text), column):
            if piece is None:
                yield line
                line, column = [], 0
                continue
            line.append((column, _Word(piece, word.score, word.strength)))
            column += _width(piece)
    if line:
        yield line


def _pieces(shown: str, column: int) -> Iterator[str | None]:
    """Split a token at line ends and at the margin; None begins a new line."""
    start, used = 0, column
    if used and used + _width(shown.partition("\n")[0]) > _COLUMNS:
        yield None
        used = 0
    for i, character in enumerate(shown):
        if character == "\n" or used + _width(character) > _COLUMNS:
            yield shown[start:i]
            yield None
            start, used = (i + 1, 0) if character == "\n" else (i, 0)
        used += 0 if character == "\n" else _width(character)
    if start < len(shown):
        yield shown[start:]


def _width(shown: str) -> int:
    """Return the number of columns of a text; characters of East Asia take two."""
    return sum(2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in shown)


def _draw_line(ax: Axes, y: int, line: list[tuple[int, _Word | str]]) -> None:
    from matplotlib.patches import Rectangle  # optional dependency

    for column, piece in line:
        if isinstance(piece, str):
            _draw_characters(ax, column, y, piece, weight="bold")
            continue
        color = GREEN if piece.strength > 0 else RED
        ax.add_patch(
            Rectangle(
                (column, y + 0.05), _width(piece.text), 0.9,
                facecolor=color, alpha=abs(piece.strength) * _STRONGEST, linewidth=0,
            )
        )  # fmt: skip
        _draw_characters(ax, column, y, piece.text)


def _draw_characters(ax: Axes, column: int, y: int, shown: str, **style: Any) -> None:
    """Draw each character in the middle of its cell: how wide words are depends on the dpi."""
    for i, character in enumerate(_drawable(shown)):
        if character != " ":
            ax.text(
                column + i + 0.5, y + 0.5, character,
                family=_FONT, fontsize=_POINTS, ha="center", va="center_baseline",
                parse_math=False, **style,
            )  # fmt: skip


def _drawable(shown: str) -> str:
    """Replace characters that the font lacks, about which matplotlib would warn."""
    return "".join(each if _has_glyph(each) else "□" * _width(each) for each in shown)


@cache
def _has_glyph(character: str) -> bool:
    from matplotlib import font_manager  # optional dependency

    font = font_manager.get_font(font_manager.findfont(_FONT))
    return bool(font.get_char_index(ord(character)))
