"""Conditions on metadata that are written as text, such as ``label == 3 and source != "web"``."""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from trakdask.variables import SAMPLE, TARGET

_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_KINDS = dict.fromkeys("biuf", "number") | dict.fromkeys("TUO", "text") | {"M": "time"}
_EXAMPLE = 'try a comparison such as: label == 3 and source != "web"'


@dataclass(frozen=True)
class Condition:
    """A condition on coords, which is evaluated on a tile of scores.

    It may contain names of coords, numbers, quoted text and ``True`` or ``False``; the comparisons
    ``== != < <= > >=``, ``in`` and ``not in`` with a list, or with a coord of texts that contain a
    text, as in ``"wiki" in source``; and ``and``, ``or``, ``not`` and parentheses. Text is parsed,
    and never run: anything else is an error.

    Raises
    ------
    ValueError
        If the text is not such a condition. When called: if a name is not one of the tile's coords,
        or values of different kinds are compared.

    Examples
    --------
    >>> tile = xr.Dataset(coords={"label": ("sample", [1, 3, 3]), "row": ("sample", [0, 1, 2])})
    >>> Condition("label == 3 and not row < 2")(tile).values.tolist()
    [False, False, True]
    """

    text: str

    def __post_init__(self) -> None:
        self._parsed()

    def __call__(self, tile: xr.Dataset) -> xr.DataArray:
        """Return for which samples and targets of a tile the condition is true."""
        mask = _Evaluation(self.text, tile).mask(self._parsed())
        if not isinstance(mask, xr.DataArray) or mask.dtype != bool:
            raise ValueError(f"expected comparisons of coords, got {self.text!r:.200}; {_EXAMPLE}")
        return mask

    @property
    def names(self) -> set[str]:
        """The coords that the condition looks at."""
        return {node.id for node in ast.walk(self._parsed()) if isinstance(node, ast.Name)}

    def _parsed(self) -> ast.expr:
        try:
            return ast.parse(self.text.strip(), mode="eval").body
        except (AttributeError, SyntaxError, ValueError, RecursionError, MemoryError) as err:
            raise ValueError(f"expected a condition, got {self.text!r:.200}; {_EXAMPLE}") from err


def selection(scores: xr.DataArray, text: str) -> xr.DataArray | Condition:
    """Return what ``top_k(scores, where=...)`` takes for a condition.

    A condition on the training samples alone becomes a mask over them, so that blocks in which it
    selects nothing are not read; one that also looks at targets is evaluated tile by tile.

    Raises
    ------
    ValueError
        If the text is no condition on the coords of these scores.
    """
    condition = Condition(text)
    first = scores.coords.to_dataset().isel(
        {SAMPLE: slice(1), TARGET: slice(1)}, missing_dims="ignore"
    )
    if condition(_with_positions(first, {})).dims != (SAMPLE,):
        return condition
    return condition(_with_positions(scores.coords.to_dataset(), scores.sizes))


def _with_positions(coords: xr.Dataset, sizes: Mapping[Any, int]) -> xr.Dataset:
    """Return the coords of scores, with positions where samples or targets have no labels."""
    missing = [dim for dim in (SAMPLE, TARGET) if dim not in coords.coords]
    sizes = {**coords.sizes, **sizes}
    return coords.assign_coords({dim: np.arange(sizes.get(dim, 1)) for dim in missing})


@dataclass(frozen=True)
class _Evaluation:
    text: str
    tile: xr.Dataset

    def mask(self, node: ast.expr) -> Any:
        """Return the value of a part of a condition, a mask if the condition is one."""
        match node:
            case ast.BoolOp(op=ast.And(), values=values):
                return functools.reduce(operator.and_, map(self.mask, values))
            case ast.BoolOp(op=ast.Or(), values=values):
                return functools.reduce(operator.or_, map(self.mask, values))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return ~self.mask(operand)
            case ast.Compare(left=left, ops=signs, comparators=others):
                pairs = zip(signs, pairwise([left, *others]), strict=True)
                return functools.reduce(operator.and_, (self._compared(s, *p) for s, p in pairs))
        return self._value(node)

    def _compared(self, sign: ast.cmpop, left: ast.expr, right: ast.expr) -> Any:
        match sign, right:
            case ast.NotIn(), _:
                return ~self._compared(ast.In(), left, right)
            case ast.In(), ast.Name():
                return self._contains(right, left)
            case ast.In(), ast.List(elts=others) | ast.Tuple(elts=others) if others:
                masks = (self._compared(ast.Eq(), left, other) for other in others)
                return functools.reduce(operator.or_, masks)
        if type(sign) not in _COMPARISONS:
            raise self._refused("one of == != < <= > >=, or in before a list such as [1, 2]", right)
        values = self._alike(left, right)
        if isinstance(sign, (ast.Eq, ast.NotEq)):
            values = _coded(*values)
        return _COMPARISONS[type(sign)](*values)

    def _contains(self, name: ast.Name, text: ast.expr) -> xr.DataArray:
        coord, part = self._coord(name.id), self._value(text)
        if not isinstance(part, str) or _kind(coord) != "text":
            raise self._refused("quoted text in a coord of texts, or a list such as [1, 2]", name)
        texts = pd.Series(coord.values, dtype=object).astype(str)
        return coord.copy(data=texts.str.contains(part, regex=False).to_numpy(bool))

    def _alike(self, left: ast.expr, right: ast.expr) -> tuple[Any, Any]:
        """Return both sides of a comparison, dates as times beside a coord of times."""
        values = [self._value(left), self._value(right)]
        kinds = [_kind(value) for value in values]
        if sorted(kinds) == ["text", "time"]:
            text = kinds.index("text")
            values[text] = np.datetime64(values[text])
        elif kinds[0] != kinds[1]:
            expected = f"two values of one kind, not {kinds[0]} and {kinds[1]}"
            literal = right if isinstance(right, ast.Constant) else left
            raise self._refused(expected, literal, _of_other_kind(literal))
        return values[0], values[1]

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Name(id=name):
                return self._coord(name)
            case ast.Constant(value=bool() | int() | float() | str() as value):
                return value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
                return -value
        raise self._refused("names of coords, numbers and quoted text", node)

    def _coord(self, name: str) -> xr.DataArray:
        if name not in self.tile.coords:
            raise ValueError(
                f"expected names of coords in the condition {self.text!r}, got {name!r}; try one "
                f"of {sorted(map(str, self.tile.coords))}, or quotes around text"
            )
        return self.tile[name].reset_coords(drop=True)

    def _refused(self, expected: str, node: ast.expr, remedy: str = _EXAMPLE) -> ValueError:
        return ValueError(
            f"expected {expected} in the condition {self.text!r}, got {ast.unparse(node)!r:.60}; "
            f"{remedy}"
        )


def _of_other_kind(node: ast.expr) -> str:
    """Return what to type in place of a number or a text, if a coord has no values of that kind."""
    match node:
        case ast.Constant(value=str() as text):
            return f"try {text}" if text.isdecimal() else "try a number, such as: label == 3"
        case ast.Constant(value=value):
            return f"try {str(value)!r}"
    return _EXAMPLE


def _coded(left: Any, right: Any) -> tuple[Any, Any]:
    """Return numbers in place of texts of samples and of targets, so that pairs are compared fast.

    n + m texts are sorted, and n × m numbers compared.
    """
    if {_kind(left), _kind(right)} != {"text"} or np.ndim(left) + np.ndim(right) < 2:
        return left, right
    texts = np.concatenate([left.values, right.values])
    codes = np.unique(texts, return_inverse=True)[1]
    return left.copy(data=codes[: left.size]), right.copy(data=codes[left.size :])


def _kind(value: Any) -> str:
    if isinstance(value, xr.DataArray):
        return _KINDS.get(value.dtype.kind, str(value.dtype))
    return "text" if isinstance(value, str) else "number"
