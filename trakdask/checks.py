"""Checks of plain arguments. Every message reads "expected …, got …; try …"."""

from __future__ import annotations

import difflib
import math
import operator
import pkgutil
import reprlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import numpy as np


def shown(value: object) -> str:
    """Return a short, one-line ``repr`` of an offending value.

    Examples
    --------
    >>> shown("gaussian")
    "'gaussian'"
    >>> len(shown(list(range(1000)))) < 80
    True
    """
    # Stops after a few elements. The `repr` of a list of a million numbers takes 0.2 s.
    text = reprlib.repr(value) if isinstance(value, (list, dict, set, tuple)) else repr(value)
    text = " ".join(text.split())
    return text if len(text) <= 80 else f"{text[:76]} ..."


def is_tensor(value: object) -> bool:
    """Return whether a value is a tensor; without importing torch, which takes a second.

    Examples
    --------
    >>> is_tensor([1.0])
    False
    """
    return isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ()))


def require_integer(
    name: str, value: object, low: int, high: int | None = None, *, remedy: str
) -> int:
    """Return ``value`` as an int in [low, high); NumPy's integers are accepted, booleans are not.

    Raises
    ------
    TypeError
        If the value is not an integer.
    ValueError
        If it is outside the range.

    Examples
    --------
    >>> require_integer("k", 0, 1, remedy="try k=10")
    Traceback (most recent call last):
    ValueError: expected k >= 1, got 0; try k=10
    """
    try:
        # Unlike `int`, this refuses 2.5 and "2". A bool is an int to Python.
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"expected an integer for {name}, got {shown(value)}; {remedy}")
    if number < low or (high is not None and number >= high):
        allowed = f">= {low}" if high is None else f"in [{low}, {high})"
        raise ValueError(f"expected {name} {allowed}, got {number}; {remedy}")
    return number


def require_number(name: str, value: object, *, high: float = math.inf, remedy: str) -> float:
    """Return ``value`` as a finite float strictly between 0 and a bound.

    Raises
    ------
    TypeError
        If the value is not a number.
    ValueError
        If it is NaN, infinite, or outside of these bounds.

    Examples
    --------
    >>> require_number("confidence", 95, high=1, remedy="try confidence=0.95")
    Traceback (most recent call last):
    ValueError: expected a finite number between 0 and 1 for confidence, got 95; try confidence=0.95
    """
    try:
        number = float(value)  # type: ignore[arg-type]
    # An integer of Python may be larger than any float.
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None or isinstance(value, (bool, str, bytes)):
        raise TypeError(f"expected a number for {name}, got {shown(value)}; {remedy}")
    if not (math.isfinite(number) and 0 < number < high):
        raise ValueError(
            f"expected a finite number between 0 and {high:g} for {name}, got {shown(value)}; "
            f"{remedy}"
        )
    return number


def require_flags(**options: object) -> None:
    """Reject options that are neither true nor false: "no" would count as true.

    Examples
    --------
    >>> require_flags(erase="no")
    Traceback (most recent call last):
    TypeError: expected True or False for erase, got 'no'; try erase=True
    """
    for name, value in options.items():
        if not (isinstance(value, int | np.bool_) and value in (0, 1)):
            raise TypeError(
                f"expected True or False for {name}, got {shown(value)}; try {name}=True"
            )


def require_choice(name: str, value: object, choices: Sequence[Any], *, remedy: str) -> None:
    """Reject a value that is not one of the strings in ``choices``.

    Raises
    ------
    ValueError
        If it is not; the message lists the choices, and suggests the one that is spelled most
        like it, or else the remedy.

    Examples
    --------
    >>> require_choice("how", "Mean", ["mean", "sum"], remedy="try how='sum'")
    Traceback (most recent call last):
    ValueError: expected how to be one of 'mean', 'sum', got 'Mean'; try 'mean'
    """
    if not isinstance(value, str) or value not in choices:
        listed = ", ".join(map(repr, choices)) or "none"
        if close := nearest(value, choices):
            remedy = f"try {close!r}"
        raise ValueError(f"expected {name} to be one of {listed}, got {shown(value)}; {remedy}")


def nearest(name: object, names: Iterable[object]) -> str | None:
    """Return the name that is spelled most like another one, None if all are spelled otherwise.

    Examples
    --------
    >>> nearest("Labell", ["label", "source"])
    'label'
    """
    known = {str(each).casefold(): str(each) for each in names}
    close = difflib.get_close_matches(str(name).casefold(), known, 1)
    return known[close[0]] if close else None


def import_callable(path: str, name: str) -> Callable[[], Any]:
    """Return the callable that an option of the form ``"package.module:callable"`` names.

    Parameters
    ----------
    path
        The value of the option.
    name
        The option, for messages.

    Raises
    ------
    ImportError
        If there is no such module, or no such name in it.
    TypeError
        If it is not callable.

    Examples
    --------
    >>> import_callable("collections:OrderedDict", "build")()
    OrderedDict()
    """
    try:
        imported = pkgutil.resolve_name(path)
    # A ValueError is about the form of the name, a TypeError about a value that is no text.
    except (ImportError, AttributeError, TypeError, ValueError) as err:
        remedy = "the callable itself, or an installed module that every worker can import"
        if isinstance(err, AttributeError) and (close := nearest(err.name, dir(err.obj))):
            remedy = repr(f"{path.rpartition(':')[0]}:{close}")
        raise ImportError(
            f"expected {name} = 'package.module:callable' that can be imported, got {path!r}: "
            f"{err}; try {remedy}"
        ) from err
    if not callable(imported):
        raise TypeError(
            f"expected a callable at {name} = {path!r}, got {type(imported).__name__}; try the "
            "name of a function"
        )
    return cast(Callable[[], Any], imported)
