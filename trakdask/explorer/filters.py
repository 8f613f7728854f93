"""Conditions that a page puts together from a column, a sign and a value."""

from __future__ import annotations

from urllib.parse import parse_qs

import pandas as pd

from trakdask.explorer.state import View

__all__ = ["FORM_FIELDS", "SIGNS", "condition_of", "joined", "with_filter"]

FORM_FIELDS = ("filter_name", "filter_sign", "filter_value", "filter_of")
"""Inputs of a form that adds a condition to a view."""

SIGNS = {
    "==": "is",
    "!=": "is not",
    "contains": "contains",
    ">=": "is at least",
    "<=": "is at most",
}


def condition_of(table: pd.DataFrame, name: str, sign: str, text: str) -> str:
    """Return a condition on a column, with the text as a value of its type.

    Raises
    ------
    ValueError
        If there is no such column, or the text is no such value.

    Examples
    --------
    >>> condition_of(pd.DataFrame({"label": [3], "source": ["web"]}), "label", ">=", "3")
    'label >= 3'
    >>> condition_of(pd.DataFrame({"source": ["web"]}), "source", "contains", "we")
    "'we' in source"
    """
    if name not in table or not name.isidentifier():
        names = [each for each in table if str(each).isidentifier()]
        raise ValueError(f"expected one of the columns {names}, got {name!r}")
    if sign == "contains":
        return f"{text!r} in {name}"
    kind = table[name].dtype.kind
    if kind == "b":
        return name if (text.lower() in ("true", "1")) == (sign == "==") else f"not {name}"
    if kind not in "iuf":
        return f"{name} {sign} {text!r}"
    try:
        return f"{name} {sign} {float(text):g}" if kind == "f" else f"{name} {sign} {int(text)}"
    except ValueError as err:
        raise ValueError(f"expected a number beside {name}, got {text!r}; try 3") from err


def joined(where: str, condition: str) -> str:
    """Return both conditions as one.

    Examples
    --------
    >>> joined("a == 1 or b == 2", "c == 3")
    '(a == 1 or b == 2) and c == 3'
    """
    if not where or where == condition:
        return condition
    return f"{f'({where})' if ' or ' in where else where} and {condition}"


def with_filter(query: str, view: View, samples: pd.DataFrame, targets: pd.DataFrame) -> View:
    """Return a view with the condition that the form in a query adds, if there is one."""
    given = {name: texts[-1] for name, texts in parse_qs(query.removeprefix("?")).items()}
    name, sign, text, of = (given.get(each, "") for each in FORM_FIELDS)
    if not name or sign not in SIGNS or not text:
        return view
    is_of_targets = of == "targets_where"
    try:
        condition = condition_of(targets if is_of_targets else samples, name, sign, text)
    except ValueError as err:
        return view.replace(messages=(*view.messages, str(err)))
    field = "targets_where" if is_of_targets else "where"
    return view.replace(messages=view.messages, **{field: joined(getattr(view, field), condition)})
