"""Conditions on tables: which rows meet them, and how links put them together."""

from __future__ import annotations

import ast
from collections.abc import Hashable
from functools import lru_cache
from keyword import iskeyword

import numpy as np
import pandas as pd
import xarray as xr

from trakdask.attribution.conditions import Condition
from trakdask.variables import SAMPLE, TARGET, TARGET_PREFIX


def condition_mask(
    table: pd.DataFrame, condition: str, target: pd.DataFrame | None = None
) -> np.ndarray:
    """Return for which rows of a table a condition on its columns is true; "" is for all of them.

    It may also name the columns of one target, whose names then begin with ``target_``.

    Raises
    ------
    ValueError
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
    mask = Condition(condition)(xr.Dataset(coords=coords))
    return np.broadcast_to(mask.isel({TARGET: 0}, missing_dims="ignore").values, len(table))


def is_name(text: str) -> bool:
    """Return whether a condition can name a column.

    Examples
    --------
    >>> is_name("größe"), is_name("my column"), is_name("class")
    (True, False, False)
    """
    return text.isidentifier() and not iskeyword(text)


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
        tree = Condition(where).tree
    except ValueError:
        return ()
    # "a and b and c" is one node; only of parentheses, an "and" has an "and" inside.
    parts = [tree]
    if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And):
        parts = tree.values
    texts = [(ast.unparse(part), isinstance(part, ast.BoolOp)) for part in parts]
    return tuple(f"({text})" if is_whole else text for text, is_whole in texts)
