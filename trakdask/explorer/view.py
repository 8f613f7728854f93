"""The view of a page, as one value that a URL holds."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args
from urllib.parse import parse_qs, urlencode

from trakdask.attribution.conditions import Condition
from trakdask.attribution.protocol import KINDS, Absolute, Damping, Rule

PAGES = ("targets", "target", "sample", "corpus", "new", "marks")
_RULES = get_args(Rule)
_TRACE = "tr(K)/n"
_MOST_RANKED = 100
LISTS = {
    "helpful": "target", "harmful": "target", "ranking": "corpus", "duplicates": "corpus",
    "marked": "marks",
}  # fmt: skip
"""Sections that list training samples, and their pages."""

_CHOICES = {
    "page": PAGES, "estimator": ("", "auto", *KINDS), "ascending": ("0", "1"),
    "order": ("loss", "self_influence", ""), "of": ("", *LISTS),
}  # fmt: skip
_CONDITIONS = ("where", "targets_where")


@dataclass(frozen=True)
class MeanTrace:
    """A damping λ_c of each checkpoint in units of tr(K_c)/n, in which its curve is drawn."""

    value: float


@dataclass(frozen=True)
class View:
    """The content of a page: its kind, its target or sample, and how its scores are made.

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
    estimator, damping
        As in :func:`trakdask.score`; λ as a text, see :func:`damping_of`. ``""`` is the one with
        which the explorer was opened.
    checkpoints
        Names of the checkpoints that scores are averaged over; empty for all.
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
    estimator: str = ""
    damping: str = ""
    checkpoints: tuple[str, ...] = ()
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
            is_foreign = page not in ("target", "sample") and "score" in re.findall(r"\w+", where)
            changes = {"first": 0, "of": "", **changes, "where": "" if is_foreign else where}
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
        for name, texts in parse_qs(query.removeprefix("?"), keep_blank_values=True).items():
            if name in vars(_DEFAULT) and name != "errors":
                try:
                    fields[name] = _value_of(name, texts)
                except ValueError as err:
                    errors[name] = str(err)[:1].upper() + str(err)[1:]
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
    """Return the value of a field of a view from the texts of a URL."""
    text, default = texts[-1], getattr(_DEFAULT, name)
    if text not in _CHOICES.get(name, (text,)):
        names = ", ".join(choice for choice in _CHOICES[name] if choice)
        raise ValueError(f"This must be one of {names}, not {text!r:.60}.")
    if name in _CONDITIONS and text:
        Condition(text)
    if name == "damping" and text:
        damping_of(text)
    match default:
        case tuple():
            return tuple(text for text in texts if text)
        case bool():
            return text == "1"
        case int():
            return _whole_number(text, *((1, _MOST_RANKED) if name == "k" else (0, math.inf)))
    return text


def _whole_number(text: str, low: int, high: float) -> int:
    if not text.isdecimal() or not low <= int(text) <= high:
        allowed = f"of at least {low}" if high == math.inf else f"from {low} to {high}"
        raise ValueError(f"This must be a whole number {allowed}, not {text!r:.60}.")
    return int(text)
