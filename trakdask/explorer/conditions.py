"""Conditions on tables: which rows meet them, and how links and forms put them together."""

from __future__ import annotations

import ast
from collections.abc import Hashable, Iterator
from functools import lru_cache
from urllib.parse import parse_qs

import numpy as np
import pandas as pd
import xarray as xr

from trakdask.attribution.conditions import Condition
from trakdask.explorer.view import View
from trakdask.variables import SAMPLE, TARGET, TARGET_PREFIX

CONDITION_FIELDS = ("filter_name", "filter_sign", "filter_value", "filter_of")
"""Inputs of a form that adds a condition to a view."""

SIGNS = {
    "==": "is",
    "!=": "is not",
    "contains": "contains",
    ">=": "is at least",
    "<=": "is at most",
}


class ConditionError(ValueError):
    """A condition cannot be evaluated; the form in which it was typed says why."""


def condition_mask(
    table: pd.DataFrame, condition: str, target: pd.DataFrame | None = None
) -> np.ndarray:
    """Return for which rows of a table a condition on its columns is true; "" is for all of them.

    It may also name the columns of one target, whose names then begin with ``target_``.

    Raises
    ------
    ConditionError
        If it is no condition, or names other columns.

    Examples
    --------
    >>> condition_mask(pd.DataFrame({"label": [1, 3]}), "label == 3").tolist()
    [False, True]
    """
    if not condition:
        return np.ones(len(table), bool)
    coords: dict[Hashable, tuple[str, np.ndarray]] = {SAMPLE: (SAMPLE, table.index.to_numpy())}
    coords |= {name: (SAMPLE, table[name].to_numpy()) for name in table}
    if target is not None:
        target = target.add_prefix(TARGET_PREFIX).rename(columns={TARGET_PREFIX + SAMPLE: TARGET})
        coords |= {name: (TARGET, target[name].to_numpy()) for name in target}
    try:
        mask = Condition(condition)(xr.Dataset(coords=coords))
    except ValueError as err:
        raise ConditionError(str(err)) from err
    return np.broadcast_to(mask.isel({TARGET: 0}, missing_dims="ignore").values, len(table))


def column_condition(table: pd.DataFrame, name: str, sign: str, text: str) -> str:
    """Return a condition on a column, with the text as a value of its type.

    Raises
    ------
    ValueError
        If there is no such column, or the text is no such value.

    Examples
    --------
    >>> column_condition(pd.DataFrame({"label": [3], "source": ["web"]}), "label", ">=", "3")
    'label >= 3'
    >>> column_condition(pd.DataFrame({"source": ["web"]}), "source", "contains", "we")
    "'we' in source"
    """
    if name not in table or not name.isidentifier():
        raise ValueError(f"There is no column {name!r:.60} that a condition can name.")
    if sign == "contains":
        return f"{text!r} in {name}"
    try:
        return f"{name} {sign} {_typed(text, table[name].dtype.kind)!r}"
    except ValueError as err:
        raise ValueError(f"The values of {name} are numbers, and {text!r:.60} is none.") from err


def _typed(text: str, kind: str) -> bool | int | float | str:
    """Return a text as a value of a kind of dtype."""
    match kind:
        case "b":
            return text.lower() in ("true", "yes", "1")
        case "i" | "u":
            return int(text)
        case "f":
            return float(text)
    return text


def joined(where: str, condition: str) -> str:
    """Return both conditions as one.

    Examples
    --------
    >>> joined("a == 1 or b == 2", "c == 3")
    '(a == 1 or b == 2) and c == 3'
    """
    return " and ".join(dict.fromkeys(_terms(where) + _terms(condition)))


def without(where: str, name: str) -> str:
    """Return a condition without the terms that are about a column.

    Examples
    --------
    >>> without("label == 3 and (a == 1 or b == 2) and label < 5", "label")
    '(a == 1 or b == 2)'
    """
    return " and ".join(term for term in _terms(where) if term.split()[0] != name)


def has_terms(where: str, condition: str) -> bool:
    """Return whether all terms of a condition are terms of another one.

    Examples
    --------
    >>> has_terms('label == 3 and source == "web"', "source == 'web'")
    True
    """
    return {*_terms(condition)} <= {*_terms(where)}


def toggled(where: str, condition: str) -> str:
    """Return a condition that says of a column what another one does, or nothing if it did.

    Examples
    --------
    >>> toggled("label == 3 and a == 1", "label == 5")
    'a == 1 and label == 5'
    >>> toggled("label == 3 and a == 1", "label == 3")
    'a == 1'
    """
    others = without(where, condition.split()[0])
    return others if has_terms(where, condition) else joined(others, condition)


@lru_cache(64)  # each link of a page asks for the terms of the same condition
def _terms(where: str) -> tuple[str, ...]:
    """Return the conditions that are joined by and; none if the text is no condition."""
    try:
        return tuple(_joined_by_and(ast.parse(where.strip(), mode="eval").body))
    except (SyntaxError, ValueError):
        return ()


def _joined_by_and(node: ast.expr) -> Iterator[str]:
    match node:
        case ast.BoolOp(op=ast.And(), values=values):
            for value in values:
                yield from _joined_by_and(value)
        case ast.BoolOp():
            yield f"({ast.unparse(node)})"
        case _:
            yield ast.unparse(node)


def with_condition(query: str, view: View, samples: pd.DataFrame, targets: pd.DataFrame) -> View:
    """Return a view with the condition that the form in a query adds, if there is one."""
    texts = {name: values[-1] for name, values in parse_qs(query.removeprefix("?")).items()}
    name, sign, text, of = (texts.get(field, "") for field in CONDITION_FIELDS)
    if not name or sign not in SIGNS or not text:
        return view
    where, table = ("targets_where", targets) if of == "targets_where" else ("where", samples)
    try:
        condition = column_condition(table, name, sign, text)
    except ValueError as err:
        return view.replace(errors={**view.errors, "filter_value": str(err)})
    changed = {where: joined(getattr(view, where), condition)}
    return view.replace(errors=view.errors, **changed)
