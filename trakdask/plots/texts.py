"""Tokens coloured by their scores: HTML for notebooks, figures for everything else."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from html import escape
from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from trakdask.plots.figures import GREEN, RED, decimals, new_figure
from trakdask.variables import TARGET_PREFIX

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_STRONGEST = 0.55
"""Opacity of the largest score. The text keeps the colour of the page, and must stay legible."""

_N_STRONGEST = 3

_COLUMNS, _POINTS, _FONT = 92, 8.0, "DejaVu Sans Mono"
_CELL = (0.602 * _POINTS / 72, 1.75 * _POINTS / 72)
"""Width and height of a character of this font, in inches."""

_MARGIN = 0.15

_MASK = "attention_mask"

_OTHERS = "[others]"
"""The text of the last part of a model with layers that see no tokens, such as a pooled head."""


@dataclass(frozen=True, repr=False, eq=False)
class TextPlot:
    """Rows of coloured tokens: HTML in a notebook, and a figure anywhere else.

    Printed, it is the texts with the strongest tokens of each.

    Parameters
    ----------
    labels
        The text above each row, beside the sum of its scores.
    texts, scores
        Text and score of each token, (row, token).
    mask
        Which tokens are shown, (row, token).
    decimals
        How many decimals scores are written with.
    """

    labels: list[str]
    texts: np.ndarray
    scores: np.ndarray
    mask: np.ndarray
    decimals: int

    def __repr__(self) -> str:
        rows = []
        for title, tokens in self._rows():
            strongest = sorted(tokens, key=lambda token: -abs(token[2]))[:_N_STRONGEST]
            words = (f"{_visible(x).strip()!r} {y:+.{self.decimals}f}" for x, y, _ in strongest)
            texts = "".join(_visible(text) for text, *_ in tokens).strip()
            rows.append(f"{title}\n{texts}\nstrongest: {', '.join(words)}")
        return "\n\n".join(rows)

    def _repr_html_(self) -> str:
        rows = ""
        for title, tokens in self._rows():
            spans = "".join(
                f'<span title="{score:+.{self.decimals}f}" style="background:{_color(strength)}">'
                f"{escape(_visible(text))}</span>"
                for text, score, strength in tokens
            )
            rows += (
                f'<div style="margin-top:0.6em"><b>{escape(title)}</b></div>'
                f'<div style="white-space:pre-wrap;overflow-wrap:anywhere">{spans}</div>'
            )
        return (
            f'<div class="trakdask-html" style="font-family:monospace;line-height:1.6">{rows}'
            '<div style="margin-top:0.6em;opacity:0.7">green helped, red harmed</div></div>'
        )

    def figure(self) -> Figure:
        """Draw the rows with matplotlib, for a PNG: ``plot.figure().savefig("words.png")``.

        Raises
        ------
        ImportError
            If matplotlib is missing: install ``trakdask[plots]``.
        """
        cells = list(_cells(self._rows()))
        n_lines = 1 + max((y for y, *_ in cells), default=0)
        width, height = _COLUMNS * _CELL[0] + 2 * _MARGIN, n_lines * _CELL[1] + 2 * _MARGIN
        figure = new_figure(width, height)
        from matplotlib.patches import Rectangle  # optional dependency, which is there now

        left, low = _MARGIN / width, _MARGIN / height
        ax = figure.add_axes((left, low, 1 - 2 * left, 1 - 2 * low))
        ax.set(xlim=(0, _COLUMNS), ylim=(n_lines, 0))
        ax.set_axis_off()
        for y, x, character, strength in cells:
            if strength is not None:
                # Not antialiased: there would be seams between cells.
                cell, color = ((x, y + 0.05), _width(character), 0.9), _color(strength)
                ax.add_patch(Rectangle(*cell, facecolor=color, linewidth=0, antialiased=False))
            if character != " ":
                # In the middle of its cell: how wide words are depends on the dpi.
                ax.text(
                    x + 0.5, y + 0.5, character if _has_glyph(character) else "□",
                    family=_FONT, fontsize=_POINTS, ha="center", va="center_baseline",
                    parse_math=False, weight="bold" if strength is None else "normal",
                )  # fmt: skip
        return figure

    def _rows(self) -> Iterator[tuple[str, list[tuple[str, float, float]]]]:
        """Yield titles and tokens: text, score, strength from -1 to 1."""
        finite = np.where(np.isfinite(self.scores), self.scores, 0)
        # The strongest word that is shown has the full colour. What belongs to no word may count
        # more, and is cut off.
        words = np.where(self.mask & (self.texts != _OTHERS), finite, 0)
        strengths = np.clip(finite / (np.abs(words).max(initial=0.0) or 1.0), -1, 1)
        tokens, totals = zip(self.texts, self.scores, strengths, strict=True), finite.sum(axis=1)
        for label, total, row, shown in zip(self.labels, totals, tokens, self.mask, strict=True):
            columns = (column[shown] for column in row)
            title = f"{label}   {total:+.{self.decimals}f}".strip()
            yield title, list(zip(*columns, strict=True))


def text(scores: xr.DataArray, *, label: str | None = None) -> TextPlot:
    """Colour the tokens of some sequences by their scores: green helped, red harmed.

    Parameters
    ----------
    scores
        Scores of tokens, (sample, token) or (target, token), with the coord ``text`` (or
        ``target_text``) of :func:`~trakdask.score_parts`: one sequence per row. Computed here.
        Tokens that the coord ``attention_mask`` marks as padding are left out.
    label
        Name of a coord of the sequences, written above each row.

    Returns
    -------
    The plot: HTML where a notebook shows it, in which each token has its score as a tooltip;
    ``figure()`` is a matplotlib Figure of it. The colour is as strong as the score is large
    compared with the largest of all words. The part ``"[others]"`` is no word: it has at most the
    colour of the strongest word. Above each row are its label and the sum of its scores.

    Raises
    ------
    KeyError
        If the scores have no texts, or there is no such label.

    Examples
    --------
    .. plot::
        :include-source:

        >>> import trakdask as td, xarray as xr
        >>> scores = xr.DataArray([[0, 0.003, 0, -0.008, 0, -0.024]], dims=("sample", "token"))
        >>> words = [["the ", "film ", "was ", "dull ", "on ", "friday"]]
        >>> scores = scores.assign_coords(text=(scores.dims, words), label=("sample", ["bad"]))
        >>> figure = td.plots.text(scores, label="label").figure()
    """
    # A training sample that was selected may have a text, too: one for all tokens of the targets.
    is_of_samples = "text" in scores.coords and scores["text"].dims == scores.dims
    prefix = "" if is_of_samples else TARGET_PREFIX
    texts, mask = scores[f"{prefix}text"].values, np.ones(scores.shape, bool)
    if f"{prefix}{_MASK}" in scores.coords:
        mask = scores[f"{prefix}{_MASK}"].values != 0
    labels = [""] * len(scores) if label is None else [str(value) for value in scores[label].values]
    return TextPlot(labels, texts, scores.values.astype(np.float64), mask, decimals(scores))


def _color(strength: float) -> str:
    """Return green or red, the more opaque the stronger, as ``#rrggbbaa``."""
    return f"{GREEN if strength > 0 else RED}{round(abs(strength) * _STRONGEST * 255):02x}"


def _visible(word: str) -> str:
    """Return a text in which line ends, control characters and tokens without text can be seen."""
    shown = "".join(
        character if character == "\n" or character.isprintable() else "·" for character in word
    )
    return shown.replace("\n", "↵\n") or "·"


def _cells(
    rows: Iterator[tuple[str, list[tuple[str, float, float]]]],
) -> Iterator[tuple[int, int, str, float | None]]:
    """Yield line, column, character and strength, None for titles; lines end at the margin."""
    y = 0
    for title, tokens in rows:
        yield from ((y, x, character, None) for x, character in enumerate(title[:_COLUMNS]))
        x, y = 0, y + 1
        for text, _, strength in tokens:
            shown = _visible(text)
            # A word is not broken, unless it is longer than a line.
            if x and x + sum(map(_width, shown.partition("\n")[0])) > _COLUMNS:
                x, y = 0, y + 1
            for character in shown:
                if character == "\n" or x + _width(character) > _COLUMNS:
                    x, y = 0, y + 1
                if character != "\n":
                    yield y, x, character, strength
                    x += _width(character)
        y += 2


def _width(character: str) -> int:
    """Return the number of columns of a character; characters of East Asia take two."""
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


@cache
def _has_glyph(character: str) -> bool:
    from matplotlib import font_manager  # optional dependency

    # Asked before, since matplotlib warns of each character that a font lacks.
    font = font_manager.get_font(font_manager.findfont(_FONT))
    return bool(font.get_char_index(ord(character)))
