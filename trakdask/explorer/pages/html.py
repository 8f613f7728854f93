"""Escaped HTML of links, numbers, forms, tables and bars. Nothing else writes values into HTML."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
import pandas as pd

from trakdask.explorer.state import View

__all__ = [
    "bars",
    "columns",
    "fields",
    "form",
    "heat_table",
    "histogram",
    "link",
    "note",
    "number",
    "option_field",
    "pager",
    "signed",
    "text_field",
    "tip",
    "unit_of",
    "value",
]


_LARGE = 10_000
"""Numbers that are larger are shown with all digits: they may be names of something."""


def link(view: View, text: object, *, html: str = "", kind: str = "", label: str = "") -> str:
    """Return a link to a view, with a text, or with HTML that is escaped already."""
    shown = html or escape(str(text))
    attrs = f' class="{escape(kind)}"' if kind else ""
    attrs += f' aria-label="{escape(label)}"' if label else ""
    return f'<a href="?{escape(view.to_query())}"{attrs}>{shown}</a>'


def tip(text: str, meaning: str) -> str:
    """Return a word with its meaning as a tooltip, which the keyboard can reach."""
    return (
        f'<span class="tip" tabindex="0" data-tip="{escape(meaning)}" '
        f'aria-label="{escape(f"{text}: {meaning}")}">{escape(text)}</span>'
    )


def note(text: str) -> str:
    """Return a sentence in quiet type."""
    return f'<p class="note">{escape(text)}</p>'


def number(x: float, digits: int = 3) -> str:
    """Return a number as a text of few characters.

    Examples
    --------
    >>> number(1234567.0), number(0.000123456), number(float("nan"))
    ('1.23e+06', '0.000123', '–')
    """
    return "–" if x is None or not math.isfinite(x) else f"{x:.{digits}g}"


def signed(x: float) -> str:
    """Return a number with its sign.

    Examples
    --------
    >>> signed(0.1234), signed(-2.0)
    ('+0.123', '−2')
    """
    return number(x) if not math.isfinite(x) else f"{x:+.3g}".replace("-", "−", 1)


def value(x: Any) -> str:
    """Return a value of metadata as escaped text, shortened.

    Examples
    --------
    >>> value("<b>"), value(3.14159), value(20240131.0), value(np.int64(3))
    ('&lt;b&gt;', '3.142', '20240131', '3')
    """
    if isinstance(x, (float, np.floating)):
        real = float(x)
        return number(real, 4 if abs(real) < _LARGE else 12)
    text = str(x)
    return escape(text if len(text) <= 80 else f"{text[:79]}…")


def unit_of(*values: Iterable[float]) -> int:
    """Return the exponent e for which the largest of ``value / 10**e`` is between 1 and 10.

    Examples
    --------
    >>> unit_of([-0.0034, float("nan")], [0.001])
    -3
    """
    every = np.concatenate([np.asarray(each, np.float64).ravel() for each in values])
    largest = float(np.max(np.abs(every), where=np.isfinite(every), initial=0.0))
    return math.floor(math.log10(largest)) if largest > 0 else 0


def fields(view: View, without: Sequence[str]) -> str:
    """Return hidden inputs that keep a view in a form, but for the fields that it asks for."""
    kept = view.replace(**{name: getattr(View(), name) for name in without})
    return "".join(
        f'<input type="hidden" name="{escape(name)}" value="{escape(text)}">'
        for name, text in kept.to_pairs()
    )


def form(view: View, content: str, names: Sequence[str], *, kind: str = "", button: str) -> str:
    """Return a form that changes some fields of a view; ``content`` are its escaped inputs."""
    return (
        f'<form method="get" class="{escape(kind)}">{fields(view, [*names, "first"])}{content}'
        f"<button>{escape(button)}</button></form>"
    )


def text_field(
    name: str, text: str, label: str, hint: str = "", choices: Iterable[str] = ()
) -> str:
    """Return a labelled input of text, with proposals."""
    proposals = "".join(f'<option value="{escape(each)}">' for each in choices)
    listed = f'<datalist id="list-{name}">{proposals}</datalist>' if proposals else ""
    attrs = f' list="list-{name}"' if proposals else ""
    return (
        f'<label>{label}<input name="{name}" value="{escape(text)}" '
        f'placeholder="{escape(hint)}"{attrs} autocomplete="off">{listed}</label>'
    )


def option_field(
    name: str, chosen: str, label: str, options: Mapping[str, str], *, at_once: bool = True
) -> str:
    """Return a labelled choice; ``options`` are the texts by value."""
    made = "".join(
        f'<option value="{escape(each)}"{" selected" if each == chosen else ""}>'
        f"{escape(text)}</option>"
        for each, text in options.items()
    )
    attrs = " data-at-once" if at_once else ""
    return f'<label>{label}<select name="{name}"{attrs}>{made}</select></label>'


def pager(view: View, shown: int, found: int, rows: int) -> str:
    """Return where a page of a table is in it, and links to the pages before and after."""
    first = view.first
    links = []
    if first:
        links.append(link(view.replace(first=max(0, first - rows)), "← Previous"))
    if first + shown < found:
        links.append(link(view.replace(first=first + rows), "Next →"))
    place = f"{first + 1:,}–{first + shown:,} of {found:,}" if shown else f"none of {found:,}"
    return f'<nav class="pager" aria-label="Pages"><span>{place}</span>{"".join(links)}</nav>'


def bars(rows: Iterable[tuple[str, float, str]]) -> str:
    """Return horizontal bars from a zero line: rows of an escaped name, a value and a remark."""
    rows = list(rows)
    largest = max((abs(x) for _, x, _ in rows if math.isfinite(x)), default=0) or 1
    made = "".join(
        f'<tr><th scope="row">{name}</th><td class="bar"><span class='
        f'"{"helpful" if x > 0 else "harmful"}" style="--length:{_share(x, largest)}"></span></td>'
        f'<td class="num">{signed(x)}</td>'
        f'<td class="num quiet">{escape(remark)}</td></tr>'
        for name, x, remark in rows
    )
    return f'<table class="bars">{made}</table>'


def _share(x: float, largest: float) -> str:
    return f"{abs(x) / largest:.4f}" if math.isfinite(x) else "0"


def columns(
    heights: Sequence[float],
    labels: Sequence[str],
    low: str,
    high: str,
    *,
    marked: int = -1,
    views: Sequence[View] = (),
) -> str:
    """Return upright bars, with the meaning of each as a tooltip, and the ends of their axis.

    With ``views``, each bar is a link to one.
    """
    finite = [x for x in heights if math.isfinite(x)]
    largest = max(finite, default=0) or 1
    made = []
    for i, (x, label) in enumerate(zip(heights, labels, strict=True)):
        share = max(x, 0) / largest if math.isfinite(x) else 0
        kind = "marked" if i == marked else ""
        bar = f'<span class="{kind}" style="--length:{share:.4f}" title="{escape(label)}"></span>'
        made.append(link(views[i], "", html=bar, label=label) if views else bar)
    described = 'role="group"' if views else f'role="img" aria-label="{escape("; ".join(labels))}"'
    return (
        f'<div class="columns" {described}>{"".join(made)}</div>'
        f'<div class="axis"><span>{escape(low)}</span><span>{escape(high)}</span></div>'
    )


def histogram(counts: np.ndarray, edges: np.ndarray, low: str, high: str) -> str:
    """Return bars whose heights are logarithms of counts between neighbouring edges."""
    labels = [
        f"{count:,} samples from {number(first)} to {number(last)}"
        for count, first, last in zip(counts, edges[:-1], edges[1:], strict=True)
    ]
    return columns(np.log1p(counts).tolist(), labels, low, high)


def heat_table(table: pd.DataFrame, unit: int, corner: str) -> str:
    """Return a table of numbers on colours: green above zero, red below."""
    largest = np.nanmax(np.abs(table.to_numpy()), initial=0.0) or 1.0
    head = "".join(f'<th scope="col">{value(name)}</th>' for name in table.columns)
    body = "".join(
        f'<tr><th scope="row">{value(name)}</th>'
        f"{''.join(_heat(x, largest, unit) for x in row)}</tr>"
        for name, row in zip(table.index, table.to_numpy(), strict=True)
    )
    return (
        f'<div class="wide" tabindex="0"><table class="heat"><thead><tr><th>{escape(corner)}</th>'
        f"{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _heat(x: float, largest: float, unit: int) -> str:
    kind = "helpful" if x > 0 else "harmful"
    strength, shown = _share(x, largest), f"{x / 10.0**unit:+.2f}".replace("-", "−")
    return f'<td class="{kind}" style="--strength:{strength}">{shown}</td>'
