"""The code of functions as text, of which hashes are made: by models, tasks and samples."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType
from typing import Any


def codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function, and of the functions inside of it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from codes(inner)


def names_used(code: CodeType) -> list[str]:
    """Return the names that the code of a function looks up outside of it.

    Examples
    --------
    >>> names_used((lambda x: [len(y) for y in sorted(x)]).__code__)
    ['sorted', 'len']
    """
    return [name for each in codes(code) for name in each.co_names]


@lru_cache(maxsize=4096)
def instructions(code: CodeType) -> str:
    """Return instructions with their constants and names in place of numbers.

    Comments, docstrings, paths and line numbers make no difference.

    Examples
    --------
    >>> instructions((lambda x: x + 1).__code__) == instructions((lambda x: x + 1).__code__)
    True
    """
    lines = []
    # `co_code` itself has positions in tables of constants and names, which change with any other
    # constant.
    for step in dis.get_instructions(code):
        value: Any = step.argval
        if isinstance(value, frozenset):  # whose order differs between processes
            value = sorted(map(repr, value))
        text = instructions(value) if isinstance(value, CodeType) else repr(value)
        lines.append(f"{step.opname} {text}")
    return "\n".join(lines)
