"""What a page shows, as one value that a URL holds."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args
from urllib.parse import parse_qs, urlencode

from trakdask.attribution.conditions import Condition
from trakdask.attribution.estimators import Absolute, Damping, Estimator, Rule
from trakdask.checks import shown

__all__ = ["PAGES", "MeanTrace", "View", "damping_of"]

PAGES = ("targets", "target", "sample", "corpus", "new")
_RULES = get_args(Rule)
_TRACE = "tr(K)/n"
MOST_RANKED = 100
"""The largest k of a page."""


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
        One of ``"targets"``, ``"target"``, ``"sample"``, ``"corpus"`` and ``"new"``.
    target, sample
        Positions of the target and of the training sample that are looked at.
    where
        A condition on the metadata of training samples, such as ``label == 3``.
    targets_where
        A condition on the metadata of targets, by their own names.
    search
        Text that the metadata of a target must contain.
    sort, ascending
        The column by which targets are sorted, ``""`` for their order, and its direction.
    first
        Position, in the sorted table, of the first row that is shown.
    k
        How many training samples are ranked.
    group_by
        The coord of the training samples by which scores are summed, ``""`` for none.
    estimator, damping
        As in :func:`trakdask.score`; λ as a text, see :func:`damping_of`. ``""`` is what the
        explorer was opened with.
    checkpoints
        Names of the checkpoints that scores are averaged over; empty for all.
    messages
        What of a URL could not be understood; not part of the URL.
    """

    page: str = "targets"
    target: int = 0
    sample: int = 0
    where: str = ""
    targets_where: str = ""
    search: str = ""
    sort: str = ""
    ascending: bool = True
    first: int = 0
    k: int = 10
    group_by: str = ""
    estimator: str = ""
    damping: str = ""
    checkpoints: tuple[str, ...] = ()
    messages: tuple[str, ...] = field(default=(), compare=False)

    def replace(self, **changes: Any) -> View:
        """Return a view with some fields changed, and without messages."""
        return dataclasses.replace(self, **{"messages": (), **changes})

    def to_query(self) -> str:
        """Return the part of a URL after ``?``, with the fields that are not as in ``View()``.

        Examples
        --------
        >>> View(page="target", target=3).to_query()
        'page=target&target=3'
        """
        return urlencode(self.to_pairs())

    def to_pairs(self) -> list[tuple[str, str]]:
        """Return names and texts of the fields that are not as in ``View()``."""
        return [
            (name, text)
            for name, value in vars(self).items()
            if name != "messages" and value != getattr(_DEFAULT, name)
            for text in _as_text(value)
        ]

    @classmethod
    def from_query(cls, query: str) -> View:
        """Return the view of a URL; what cannot be understood is the default, with a message.

        Names that are not those of fields, such as that of a token, are ignored.

        Examples
        --------
        >>> view = View.from_query("?page=target&target=3&k=many")
        >>> view.target, view.k, len(view.messages)
        (3, 10, 1)
        """
        fields, messages = {}, []
        given = parse_qs(query.removeprefix("?"), keep_blank_values=True)
        for name, texts in given.items():
            if name in _PARSERS:
                try:
                    fields[name] = _PARSERS[name](texts)
                except (ValueError, TypeError) as err:
                    messages.append(f"{name} of the link was left out: {err}")
        return cls(**fields, messages=tuple(messages))


def _as_text(value: object) -> list[str]:
    if isinstance(value, tuple):
        return [str(each) for each in value]
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
            f"expected λ as one of {list(_RULES)}, a number >= 0, 'absolute' and a number, or "
            f"a number and {_TRACE!r}, got {shown(text)}; try auto"
        )
    if of_trace:
        return MeanTrace(value)
    return Absolute(value) if absolute else value


def _integer(low: int, high: float = math.inf) -> Callable[[list[str]], int]:
    def parse(texts: list[str]) -> int:
        text = texts[-1]
        if not text.isdecimal() or not low <= int(text) <= high:
            allowed = f"from {low}" if high == math.inf else f"from {low} to {high}"
            raise ValueError(f"expected a whole number {allowed}, got {shown(text)}")
        return int(text)

    return parse


def _choice(*allowed: str) -> Callable[[list[str]], str]:
    def parse(texts: list[str]) -> str:
        if texts[-1] not in allowed:
            raise ValueError(f"expected one of {list(allowed)}, got {shown(texts[-1])}")
        return texts[-1]

    return parse


def _condition(texts: list[str]) -> str:
    text = texts[-1]
    if not text:
        return text
    try:
        Condition(text)
    except ValueError as err:
        compared = re.sub(r"(?<![=!<>])=(?!=)", "==", text)
        if compared == text:
            raise
        raise ValueError(f"{text!r} has a single =; write {compared!r}") from err
    return text


def _damping(texts: list[str]) -> str:
    if texts[-1]:
        damping_of(texts[-1])
    return texts[-1]


_PARSERS: Mapping[str, Callable[[list[str]], Any]] = {
    "page": _choice(*PAGES),
    "target": _integer(0),
    "sample": _integer(0),
    "where": _condition,
    "targets_where": _condition,
    "search": lambda texts: texts[-1],
    "sort": lambda texts: texts[-1],
    "ascending": lambda texts: _choice("0", "1")(texts) == "1",
    "first": _integer(0),
    "k": _integer(1, MOST_RANKED),
    "group_by": lambda texts: texts[-1],
    "estimator": _choice("", *get_args(Estimator)),
    "damping": _damping,
    "checkpoints": lambda texts: tuple(text for text in texts if text),
}
_DEFAULT = View()
