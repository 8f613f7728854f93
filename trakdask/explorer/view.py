"""What a page shows, as one value that a URL holds, and the conditions that its forms make."""

from __future__ import annotations

import ast
import dataclasses
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args
from urllib.parse import parse_qs, urlencode

import pandas as pd

from trakdask.attribution.conditions import Condition
from trakdask.attribution.estimators import KINDS, Absolute, Damping, Rule

__all__ = [
    "CONDITION_FIELDS",
    "PAGES",
    "SIGNS",
    "MeanTrace",
    "View",
    "column_condition",
    "damping_of",
    "has_terms",
    "joined",
    "toggled",
    "with_condition",
    "without",
]

PAGES = ("targets", "target", "sample", "corpus", "map", "new", "marks")
_RULES = get_args(Rule)
_TRACE = "tr(K)/n"
_LIMITS = {"k": (1, 100)}
"""The smallest and the largest value of a number; of others from 0 on."""

_CHOICES = {"page": PAGES, "estimator": ("", "auto", *KINDS), "ascending": ("0", "1")}
_CONDITIONS = ("where", "targets_where", "marks_where")

_COMPUTED = {
    "score": ("target",),
    **dict.fromkeys(("self_influence", "map_x", "map_y"), ("corpus", "map")),
}
"""Columns that conditions on training samples may name on some pages only."""

CONDITION_FIELDS = ("filter_name", "filter_sign", "filter_value", "filter_of")
"""Inputs of a form that adds a condition to a view."""

_CONDITION_HINT = 'Write it like label == 3 and source != "web".'

SIGNS = {
    "==": "is",
    "!=": "is not",
    "contains": "contains",
    ">=": "is at least",
    "<=": "is at most",
}


@dataclass(frozen=True)
class MeanTrace:
    """A damping λ_c of each checkpoint in units of tr(K_c)/n, in which its curve is drawn."""

    value: float


@dataclass(frozen=True)
class View:
    """What a page shows: which page, of which target or sample, and how scores are made.

    Parameters
    ----------
    page
        One of ``"targets"``, ``"target"``, ``"sample"``, ``"corpus"``, ``"map"``, ``"new"`` and
        ``"marks"``.
    target, sample
        Positions of the target and of the training sample that are looked at.
    where
        A condition on the metadata of training samples, such as ``label == 3``. It may name
        ``score`` on the page of a target; on that of all training samples and on the map
        ``self_influence``, and the place on the map as ``map_x`` and ``map_y``.
    targets_where
        A condition on the table of targets: their metadata, by their own names, and what the model
        says about them, as in ``predicted != label``.
    marks_where
        A condition on the table of marks, such as ``who == "Ada" and mark == "remove"``.
    search
        Text that the metadata of a target must contain.
    sort, ascending
        The column by which targets are sorted, ``""`` for their order, and its direction. By
        default the targets come first that the model is most wrong about.
    first
        Position, in the sorted table, of the first row that is shown.
    k
        How many training samples are ranked.
    group_by
        The coord of the training samples by which scores are summed, ``""`` for none.
    colour
        What colours the map: a coord of the training samples, ``"score"`` for the target, or
        ``"mark"``; ``""`` is the label of a classifier, or else the first coord that is fit for it.
    estimator, damping
        As in :func:`trakdask.score`; λ as a text, see :func:`damping_of`. ``""`` is what the
        explorer was opened with.
    checkpoints
        Names of the checkpoints that scores are averaged over; empty for all.
    errors
        What of a URL could not be understood: a sentence by the name of the field. Not part of the
        URL.
    """

    page: str = "targets"
    target: int = 0
    sample: int = 0
    where: str = ""
    targets_where: str = ""
    marks_where: str = ""
    search: str = ""
    sort: str = "loss"
    ascending: bool = False
    first: int = 0
    k: int = 10
    group_by: str = ""
    colour: str = ""
    estimator: str = ""
    damping: str = ""
    checkpoints: tuple[str, ...] = ()
    errors: Mapping[str, str] = field(default_factory=dict, compare=False)

    def replace(self, **changes: Any) -> View:
        """Return a view with some fields changed, and without errors.

        Another page begins at its first row, and without a condition that it cannot evaluate.
        """
        page = changes.get("page", self.page)
        if page != self.page:
            where = changes.get("where", self.where)
            names = re.findall(r"\w+", where)
            is_foreign = any(name in names and page not in of for name, of in _COMPUTED.items())
            changes = {"first": 0, **changes, "where": "" if is_foreign else where}
        return dataclasses.replace(self, **{"errors": {}, **changes})

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
            (name, text)
            for name, value in vars(self).items()
            if name not in ("errors", *without) and value != getattr(_DEFAULT, name)
            for text in _as_text(value)
        ]

    @classmethod
    def from_query(cls, query: str) -> View:
        """Return the view of a URL; what cannot be understood is the default, with an error.

        But a condition stays as it was typed, beside its error. Names that are not those of fields,
        such as that of a token, are ignored.

        Examples
        --------
        >>> view = View.from_query("?page=target&target=3&k=many")
        >>> view.target, view.k, view.errors["k"]
        (3, 10, "This must be a whole number from 1 to 100, not 'many'.")
        """
        fields: dict[str, Any] = {}
        errors = {}
        for name, texts in parse_qs(query.removeprefix("?"), keep_blank_values=True).items():
            if name in vars(_DEFAULT) and name != "errors":
                try:
                    fields[name] = _value_of(name, texts)
                except ValueError as err:
                    errors[name] = str(err)
                    if name in _CONDITIONS:
                        fields[name] = texts[-1]
        return cls(**fields, errors=errors)


_DEFAULT = View()


def _as_text(value: object) -> list[str]:
    if isinstance(value, tuple):
        return [str(text) for text in value]
    return [str(int(value) if isinstance(value, bool) else value)]


def damping_of(text: str) -> Damping | MeanTrace:
    """Return the damping λ that a text stands for.

    A rule; a number, relative to tr(K²)/tr(K); ``absolute 2.5``; or ``2.5 tr(K)/n``.

    Raises
    ------
    ValueError
        If it is none of them.

    Examples
    --------
    >>> damping_of("0.03"), damping_of("absolute 2.5").value
    (0.03, 2.5)
    >>> damping_of("1.5 tr(K)/n")
    MeanTrace(value=1.5)
    """
    if text in _RULES:
        return text  # type: ignore[return-value]
    text = text.strip()
    absolute, of_trace = text.startswith("absolute"), text.endswith(_TRACE)
    try:
        value = float(text.removeprefix("absolute").removesuffix(_TRACE))
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf or (absolute and of_trace):
        raise ValueError(
            f"λ must be one of {', '.join(_RULES)}, or a number such as 0.03, absolute 2.5 or "
            f"0.5 {_TRACE}, not {text!r:.60}."
        )
    if of_trace:
        return MeanTrace(value)
    return Absolute(value) if absolute else value


def _value_of(name: str, texts: list[str]) -> Any:
    """Return what the texts of a URL stand for, as a value of a field of a view."""
    text, default = texts[-1], getattr(_DEFAULT, name)
    if text not in _CHOICES.get(name, (text,)):
        names = ", ".join(choice for choice in _CHOICES[name] if choice)
        raise ValueError(f"This must be one of {names}, not {text!r:.60}.")
    if name in _CONDITIONS and text:
        _require_condition(text)
    if name == "damping" and text:
        damping_of(text)
    match default:
        case tuple():
            return _ticked(texts)
        case bool():
            return text == "1"
        case int():
            return _whole_number(text, *_LIMITS.get(name, (0, math.inf)))
    return text


def _whole_number(text: str, low: int, high: float) -> int:
    if not text.isdecimal() or not low <= int(text) <= high:
        allowed = f"of at least {low}" if high == math.inf else f"from {low} to {high}"
        raise ValueError(f"This must be a whole number {allowed}, not {text!r:.60}.")
    return int(text)


def _require_condition(text: str) -> None:
    try:
        Condition(text)
    except ValueError as err:
        compared = re.sub(r"(?<![=!<>])=(?!=)", "==", text)
        hint = _CONDITION_HINT if compared == text else f"Write == instead of =: {compared}"
        raise ValueError(f"This is not a condition. {hint}") from err


def _ticked(texts: list[str]) -> tuple[str, ...]:
    names = tuple(text for text in texts if text)
    if not names:  # the form sends an empty text beside the boxes that are ticked
        raise ValueError("Tick at least one checkpoint. Until then, this page uses all of them.")
    return names


# --------------------------------------------------------------------------------- conditions


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
    """Return a condition without those of its terms that are about a column.

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


def _terms(where: str) -> list[str]:
    """Return the conditions that are joined by and; none of what is no condition."""
    try:
        node = ast.parse(where.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return []
    match node:
        case ast.BoolOp(op=ast.And(), values=values):
            return [term for value in values for term in _terms(ast.unparse(value))]
        case ast.BoolOp():
            return [f"({ast.unparse(node)})"]
    return [ast.unparse(node)]


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
