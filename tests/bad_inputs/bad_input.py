"""The row of a table of bad inputs, and the one test that each row is given to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class BadInput:
    """A call that must fail, the error it must raise, and what the message must say.

    Parameters
    ----------
    function
        Name of the public function, class or method under ``trakdask``, as a user types it:
        ``"featurize"``, ``"evaluate.lds"``, ``"Model"``.
    case
        The mistake, in a few words.
    call
        Makes the call. It is given an empty folder.
    error
        The exception type, which ``pytest.raises`` compares with subclasses allowed.
    words
        Texts that the message must contain: the offending value, where it is, what to type.
    """

    function: str
    case: str
    call: Callable[[Path], object]
    error: type[Exception]
    words: Sequence[str]

    def __post_init__(self) -> None:
        assert self.words, f"{self}: a row without words accepts any message"


def rows(function: str, error: type[Exception], *cases: tuple[Any, ...]) -> list[BadInput]:
    """Return the rows of a function that raise one kind of error: (case, call, word, ...) each."""
    return [BadInput(function, case, call, error, words) for case, call, *words in cases]


def row(
    function: str, case: str, call: Callable[[], object], error: type[Exception], *words: str
) -> BadInput:
    """Return a row whose call needs no folder."""
    return BadInput(function, case, lambda _: call(), error, words)


def changed(function: str, call: Callable[..., object], *cases: Any) -> list[BadInput]:
    """Return the rows of a call that is good but for (case, changed arguments, error, words)."""
    return [
        BadInput(function, case, lambda _, options=options: call(**options), error, words)
        for case, options, error, words in cases
    ]


def parametrize(rows: Iterable[BadInput]) -> pytest.MarkDecorator:
    """Return the decorator that gives a test one row at a time, as its argument ``row``."""
    rows = list(rows)
    names = [f"{row.function}-{row.case.replace(' ', '_')}" for row in rows]
    assert len(set(names)) == len(names), "two rows of one table have the same name"
    return pytest.mark.parametrize("row", rows, ids=names)


def one_test(rows: Iterable[BadInput]) -> Callable[[BadInput, Path], None]:
    """Return the test of a module, which is given one row at a time."""

    @parametrize(rows)
    def test_bad_input(row: BadInput, tmp_path: Path) -> None:
        check(row, tmp_path)

    return test_bad_input


def check(row: BadInput, folder: Path) -> None:
    """Fail unless the call raises the error of the row, with all of its words."""
    with pytest.raises(row.error) as caught:
        row.call(folder)
    message = str(caught.value)
    missing = [word for word in row.words if word not in message]
    assert not missing, f"{message!r} does not contain {missing}"
