"""The view of a page, as one value that a URL holds, and conditions on tables, which views have."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from keyword import iskeyword
from typing import Any
from urllib.parse import parse_qs, urlencode

import numpy as np
import pandas as pd
import xarray as xr

from trakdask.attribution.conditions import Condition
from trakdask.variables import SAMPLE, TARGET, TARGET_PREFIX

PAGES = ("targets", "target", "sample", "corpus", "new", "marks")
ROWS = 24
"""Rows of a page of a table."""

_MOST_RANKED, _MOST_ROWS = 100, 10**12
LISTS = {
    "helpful": "target", "harmful": "target", "ranking": "corpus", "duplicates": "corpus",
    "marked": "marks",
}  # fmt: skip
"""Sections that list training samples, and their pages."""

_CHOICES = {
    "page": PAGES, "ascending": ("0", "1"), "order": ("loss", "self_influence", ""),
    "of": ("", *LISTS),
}  # fmt: skip
_CONDITIONS = ("where", "targets_where")


@dataclass(frozen=True)
class View:
    """The content of a page: its kind, its target or sample, and what is selected.

    Parameters
    ----------
    page
        One of ``"targets"``, ``"target"``, ``"sample"``, ``"corpus"``, ``"new"`` and
        ``"marks"``.
    target, sample
        Positions of the target and of the training sample that are looked at.
    where
        A condition on the metadata of training samples, such as ``label == 3``. It may also name
        ``loss``, ``output``, ``self_influence``, and ``mark``, all marks of a sample in a text. On
        the page of a target it may name ``score``.
    targets_where
        A condition on the table of targets: their metadata, by their own names, and the model's
        predictions, as in ``predicted != label``.
    search
        Text that the metadata of a target must contain.
    sort, ascending
        The column by which targets are sorted, ``""`` for their order, and its direction. By
        default the targets come first that the model is most wrong about.
    first
        Position, in the sorted table, of the first row that is shown.
    order
        The order of all training samples: ``"loss"``, ``"self_influence"``, or ``""``.
    of
        The section from which a training sample was opened, such as ``"helpful"``: "Next" then
        goes on in its order. ``""`` is the order of the store.
    k
        How many training samples are ranked.
    group_by
        The coord of the training samples by which scores are summed, ``""`` for none.
    errors
        Errors of a URL: a sentence by the name of the field. They are not part of the URL.
    """

    page: str = "targets"
    target: int = 0
    sample: int = 0
    where: str = ""
    targets_where: str = ""
    search: str = ""
    sort: str = "loss"
    ascending: bool = False
    first: int = 0
    order: str = "loss"
    of: str = ""
    k: int = 12
    group_by: str = ""
    errors: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def name(self) -> str:
        """A title in a word or two: the page, and which target or sample.

        Examples
        --------
        >>> View(page="target", target=3).name
        'target 3'
        """
        position = {"target": self.target, "sample": self.sample}.get(self.page)
        return self.page if position is None else f"{self.page} {position}"

    def replace(self, **changes: Any) -> View:
        """Return a view with some fields changed, and without errors.

        Another page begins at its first row, without a list of samples, and without a condition
        that it cannot evaluate: only the page of a target has a ``score``.
        """
        page = changes.get("page", self.page)
        if page != self.page:
            where = changes.get("where", self.where)
            # The page of a sample has the list of the target from which it was opened.
            is_foreign = page not in ("target", "sample") and "score" in re.findall(r"\w+", where)
            changes = {"first": 0, "of": "", **changes, "where": "" if is_foreign else where}
        return dataclasses.replace(self, **{"errors": {}, **changes})

    def rows(self, table: pd.DataFrame) -> pd.DataFrame:
        """Return the rows of a table that are on this page of it."""
        return table.iloc[self.first : self.first + ROWS]

    def within(self, table: pd.DataFrame) -> View:
        """Return the view of the last rows of a table if ``first`` is beyond them."""
        last = max(len(table) - 1, 0) // ROWS * ROWS
        return dataclasses.replace(self, first=min(self.first, last))

    def to_query(self) -> str:
        """Return the part of a URL after ``?``, with the fields that are not as in ``View()``.

        Examples
        --------
        >>> View(page="target", target=3).to_query()
        'page=target&target=3'
        """
        return urlencode(self.to_pairs())

    def to_pairs(self, without: Collection[str] = ()) -> list[tuple[str, str]]:
        """Return names and texts of the fields that are not as in ``View()``, but for some."""
        return [
            (name, str(int(value) if isinstance(value, bool) else value))
            for name, value in vars(self).items()
            if name not in ("errors", *without) and value != getattr(_DEFAULT, name)
        ]

    @classmethod
    def from_query(cls, query: str) -> View:
        """Return the view of a URL.

        A field that cannot be understood has its default, with an error. But a condition stays as
        it was typed, beside its error. Other names, such as the name of a token, are ignored.

        Examples
        --------
        >>> view = View.from_query("?page=target&target=3&k=many")
        >>> view.target, view.k, view.errors["k"]
        (3, 12, "This must be a whole number from 1 to 100, not 'many'.")
        """
        fields: dict[str, Any] = {}
        errors = {}
        # Bytes that are no text become characters that _value_of refuses.
        given = parse_qs(query.removeprefix("?"), keep_blank_values=True, errors="surrogateescape")
        for name, texts in given.items():
            if name in vars(_DEFAULT) and name != "errors":
                try:
                    if len(texts) > 1:
                        raise ValueError(f"This must be given once, not {len(texts)} times.")
                    fields[name] = _value_of(name, texts[0])
                except ValueError as err:
                    errors[name] = str(err)[:1].upper() + str(err)[1:]
                    if name in _CONDITIONS:
                        # Characters that are no text cannot be sent to a browser, even in a
                        # message.
                        fields[name] = texts[-1].encode(errors="replace").decode()
        return cls(**fields, errors=errors)


_DEFAULT = View()


def _value_of(name: str, text: str) -> Any:
    """Return the value of a field of a view from the text of a URL."""
    if text not in _CHOICES.get(name, (text,)):
        names = ", ".join(choice for choice in _CHOICES[name] if choice)
        raise ValueError(f"This must be one of {names}, not {text!r:.60}.")
    if re.search("[\0\ud800-\udfff]", text):
        raise ValueError(f"This has characters that are no text: {text!r:.60}.")
    if name in _CONDITIONS and text:
        Condition(text)
    # By the default's type; a bool is an int, too, and comes first.
    match getattr(_DEFAULT, name):
        case bool():
            return text == "1"
        case int():
            low, high = (1, _MOST_RANKED) if name == "k" else (0, _MOST_ROWS)
            # Python refuses to read numbers of more than 4300 digits.
            if not re.fullmatch(r"\d{1,15}", text) or not low <= int(text) <= high:
                raise ValueError(
                    f"This must be a whole number from {low} to {high:,}, not {text!r:.60}."
                )
            return int(text)
    return text


# ---------------------------------------------------------------------------------- conditions


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
    # A condition on the target alone has no dimension of samples.
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
    # Each term once: a link may add what is there already.
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
