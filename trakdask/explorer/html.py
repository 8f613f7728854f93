"""HTML by templates, which escape all text, and how numbers are written on pages."""

from __future__ import annotations

import math
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from trakdask._version import __version__
from trakdask.errors import BlockError, IncompleteFeaturesError
from trakdask.explorer.marks import KINDS
from trakdask.explorer.new_targets import MOST_BYTES
from trakdask.explorer.questions import LEVEL
from trakdask.explorer.tables import records
from trakdask.explorer.view import LISTS, ROWS, has_terms, is_name, toggled
from trakdask.plots.figures import decimals

_FOLDER = Path(__file__).parent
STYLE = (_FOLDER / "explorer.css").read_text("utf-8")

_LARGE = 10_000
"""Numbers that are larger are shown with all digits: they may be names of something."""

_MOST_CHARACTERS = 400
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

# ------------------------------------------------------------------------------------ numbers


def number(x: float, digits: int = 3) -> str:
    """Return a number as a text of few characters.

    Examples
    --------
    >>> number(1234567.0), number(0.000123456), number(float("nan"))
    ('1.23 × 10⁶', '0.000123', '–')
    """
    if x is None or not math.isfinite(x):
        return "–"
    mantissa, _, exponent = f"{x:.{digits}g}".partition("e")
    power = f" × 10{str(int(exponent)).translate(_SUPERSCRIPT)}" if exponent else ""
    return mantissa.replace("-", "−") + power


def signed(x: float, error: float, digits: int) -> str:
    """Return a number with its sign, and as many digits as two of its error, if it has one.

    Examples
    --------
    >>> signed(0.27883, 0.05582, 3), signed(-0.0012345, float("nan"), 5)
    ('+0.279 ± 0.056', '−0.00123')
    """
    if not math.isfinite(x):
        return "–"
    if not error > 0:
        return f"{x:+,.{digits}f}".replace("-", "−", 1)
    digits = decimals(error, digits=2)
    return f"{x:+,.{digits}f} ± {error:,.{digits}f}".replace("-", "−", 1)


def value(x: Any) -> str:
    """Return a value of metadata as text, shortened.

    Examples
    --------
    >>> value(3.14159), value(20240131.0), value(np.int64(3)), value(np.True_), value(None)
    ('3.142', '20240131', '3', 'yes', '–')
    """
    if isinstance(x, (float, np.floating)):
        real = float(x)
        return number(real, 4 if abs(real) < _LARGE else 12)
    if isinstance(x, (bool, np.bool_)):
        return "yes" if x else "no"
    if x is None or x is pd.NaT:
        return "–"
    text = str(x).removesuffix(" 00:00:00")
    return text if len(text) <= 80 else f"{text[:79]}…"


def count(n: int, what: str) -> str:
    """Return how many there are of something.

    Examples
    --------
    >>> count(1, "checkpoint"), count(2000, "target")
    ('1 checkpoint', '2,000 targets')
    """
    return f"{n:,} {what}{'' if n == 1 else 's'}"


# ------------------------------------------------------------------------------------- errors


def plain_message(err: BaseException) -> str:
    """Return an error as a sentence for people.

    Examples
    --------
    >>> plain_message(FileNotFoundError("train.zarr/c/0"))
    'The store could not be read (train.zarr/c/0). Is it still there?'
    >>> plain_message(ValueError("expected one of the names ['a', 'b'], got 'c'; try 'a'"))
    "Expected one of the names ['a', 'b'], got 'c'; try 'a'"
    """
    text = " ".join(str(err).split())
    text = text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"
    if type(err).__name__ == "KilledWorker":  # of distributed, which is slow to import
        return (
            "A worker process ended while it computed this. Try again; if it happens again, the "
            "workers may need more memory."
        )
    if isinstance(err, IncompleteFeaturesError):
        return (
            "A part of the store is gone. If the store was changed since the explorer was opened, "
            "open it again; else td.verify(store) says how to restore it."
        )
    if isinstance(err, OSError):
        return f"The store could not be read ({text}). Is it still there?"
    if isinstance(err, MemoryError):
        return "There was not enough memory for this."
    if not isinstance(err, (ValueError, TypeError, BlockError)):
        return f"This could not be computed ({text}). The log of the server says more."
    return text[:1].upper() + text[1:]


# ---------------------------------------------------------------------------------- templates


LIVE = ContextVar("live", default=True)
"""Whether pages have forms, buttons, links and advice on them; a file that is saved has none."""


def render(name: str, /, *context: Any, **contents: Any) -> Markup:
    """Return the HTML that a macro of the templates makes of contents, which it escapes."""
    macro = getattr(_templates().get_template("pages.html").module, name)
    return Markup(macro(*context, **contents))


@cache
def _templates() -> Environment:
    templates = Environment(
        loader=FileSystemLoader(_FOLDER / "templates"), auto_reload=False,
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined,
    )  # fmt: skip
    templates.filters |= {
        "condition": _condition, "number": number, "signed": signed, "value": value,
    }  # fmt: skip
    templates.tests["name"] = is_name
    # What may change is a function: globals are values of the time when templates are loaded, once.
    templates.globals |= {
        "KINDS": KINDS, "LEVEL": LEVEL, "LISTS": LISTS, "MOST_BYTES": MOST_BYTES, "ROWS": ROWS,
        "count": count, "decimals": decimals, "has_terms": has_terms, "live": LIVE.get,
        "now": partial(datetime.now, UTC), "rows": records, "toggled": toggled,
        "version": __version__,
    }  # fmt: skip
    return templates


def _condition(x: Any, name: str) -> str:
    """Return the condition that a column has a value, or lacks it; "" if there is none.

    Examples
    --------
    >>> _condition(np.int64(3), "label"), _condition(pd.Timestamp("2024-06-01"), "day")
    ('label == 3', "day == '2024-06-01'")
    >>> _condition(float("nan"), "age"), _condition("a", "class"), _condition(None, "age")
    ('age != age', '', '')
    """
    x = value(x) if isinstance(x, pd.Timestamp) else getattr(x, "item", lambda: x)()
    # x != x for NaN and NaT, as in the condition that finds them: no value equals these.
    if not is_name(name) or not (x != x or isinstance(x, (bool, int, float, str))):
        return ""
    return f"{name} == {x!r}" if x == x else f"{name} != {name}"
