"""What may be ranked: conditions as text, such as ``label == 3 and source != "web"``, and masks.

Masks over tiles of scores are made of such a text, an array, or a function of the coords.
"""

from __future__ import annotations

import ast
import functools
import operator
import re
import sys
import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import dask.array as da
import numpy as np
import pandas as pd
import xarray as xr

from trakdask.arrays.topk import TileMask
from trakdask.attribution.groups import group_codes
from trakdask.checks import nearest
from trakdask.variables import SAMPLE, TARGET, aligned, coords_along, stays_in_store

_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
# By the kind of a dtype: T is numpy's StringDType, and O, objects of Python, is taken for text.
_KINDS = dict.fromkeys("biuf", "number") | dict.fromkeys("TUO", "text") | {"M": "time"}
_EXAMPLE = 'try a comparison such as: label == 3 and source != "web"'
# A comparison may look right in pandas, SQL or C: this is only for the remedy of an error.
_OF_OTHER_LANGUAGES = (
    (r"(?<![=!<>])={1,3}(?!=)", "=="),
    (r"&+|\bAND\b", " and "),
    (r"\|+|\bOR\b", " or "),
    (r"<>", "!="),
    (r"!(?!=)|~|\bNOT\b", " not "),
    (r"\btrue\b", "True"),
    (r"\bfalse\b", "False"),
    (r"[“”„]", '"'),
    ("≠", "!="),
    ("≤", "<="),
    ("≥", ">="),
)
"""What people type from other languages, and what it is here."""

_PARSING = threading.Lock()
"""Python's parser fails in one of two threads that are at it, before 3.11.8 and 3.12.2."""

_MANY = 32
"""Constants that are looked up in a table, which takes as long as so many comparisons."""

_MERGED = {ast.Or: (ast.Eq, ast.In), ast.And: (ast.NotEq, ast.NotIn)}
"""The comparisons of one coord that are one look into a list, however many there are."""


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
    tree: ast.expr = field(init=False, repr=False, compare=False)  # parsed here, and by no task

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "tree", _parsed(self.text.strip()))
        # No text at all; no Python; and nesting too deep for the parser, for which each version of
        # Python has another error.
        except (AttributeError, SyntaxError, ValueError, RecursionError, MemoryError) as err:
            raise self._no_condition() from err
        numbers = (x.value for x in ast.walk(self.tree) if isinstance(x, ast.Constant))
        # numpy cannot compare larger ones, and Python refuses to write those of 4,300 digits.
        if any(isinstance(x, int) and abs(x) > sys.float_info.max for x in numbers):
            raise ValueError(
                f"expected numbers of at most 308 digits in the condition {self.text!r:.200}; "
                f"{_EXAMPLE}"
            )

    def __call__(self, tile: xr.Dataset) -> xr.DataArray:
        """Return for which samples and targets of a tile the condition is true."""
        try:
            # What the parser could still read may be too deep for the recursion here.
            mask = _Evaluation(self.text, tile).mask(self.tree)
        except RecursionError as err:
            raise self._no_condition() from err
        if not isinstance(mask, xr.Variable) or mask.dtype != bool:
            raise ValueError(f"expected comparisons of coords, got {self.text!r:.200}; {_EXAMPLE}")
        return xr.DataArray(mask)

    @property
    def names(self) -> set[str]:
        """The coords that the condition looks at."""
        return {node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name)}

    def _no_condition(self) -> ValueError:
        return ValueError(f"expected a condition, got {self.text!r:.200}; {_spelled(self.text)}")


def _parsed(text: str) -> ast.expr:
    with _PARSING:
        return ast.parse(text, mode="eval").body


def selection(scores: xr.DataArray, text: str) -> xr.DataArray | Condition:
    """Return what ``top_k(scores, where=...)`` takes for a condition.

    A condition on the training samples alone becomes a mask over them, so that blocks in which it
    selects nothing are not read; one that also looks at targets is evaluated tile by tile.

    Raises
    ------
    ValueError
        If the text is no condition on the coords of these scores.
    """
    condition, coords = Condition(text), scores.coords.to_dataset()
    # Samples and targets without labels have their positions.
    missing = [dim for dim in (SAMPLE, TARGET) if dim not in coords.coords]
    coords = coords.assign_coords({dim: np.arange(scores.sizes.get(dim, 1)) for dim in missing})
    # One pair tells the dimensions of the mask, and whether names and kinds are right, before
    # anything is computed.
    first = coords.isel({SAMPLE: slice(1), TARGET: slice(1)}, missing_dims="ignore")
    return condition(coords) if condition(first).dims == (SAMPLE,) else condition


@dataclass(frozen=True)
class _Evaluation:
    text: str
    tile: xr.Dataset

    def mask(self, node: ast.expr) -> Any:
        """Return the value of a part of a condition, a mask if the condition is one."""
        match node:
            case ast.BoolOp(op=sign, values=values):
                together = operator.and_ if isinstance(sign, ast.And) else operator.or_
                return functools.reduce(together, map(self.mask, _merged(sign, values)))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return ~self.mask(operand)
            case ast.Compare(left=left, ops=signs, comparators=others):
                # As in Python, a < b < c is a < b and b < c.
                pairs = zip(signs, pairwise([left, *others]), strict=True)
                return functools.reduce(operator.and_, (self._compared(s, *p) for s, p in pairs))
        return self._value(node)

    def _compared(self, sign: ast.cmpop, left: ast.expr, right: ast.expr) -> Any:
        match sign, right:
            case ast.NotIn(), _:
                return ~self._compared(ast.In(), left, right)
            # A coord on the right is no list of values: its texts are searched for the one on the
            # left.
            case ast.In(), ast.Name():
                return self._contains(right, left)
            case ast.In(), ast.List(elts=each) | ast.Tuple(elts=each) | ast.Set(elts=each) if each:
                return self._is_in(left, each)
        # What is left: `in` before anything else, an empty list among it, and `is`.
        if type(sign) not in _COMPARISONS:
            raise self._refused("one of == != < <= > >=, or in before a list such as [1, 2]", right)
        values = self._alike(left, right)
        is_of_pairs = sum(np.ndim(value) for value in values) > 1
        if isinstance(sign, ast.Eq | ast.NotEq) and is_of_pairs and _kind(values[0]) == "text":
            # Texts of samples and of targets: n + m are sorted, and n × m numbers compared.
            codes = np.unique(np.concatenate([x.values for x in values]), return_inverse=True)[1]
            parts = np.split(codes, [values[0].size])
            values = values[0].copy(data=parts[0]), values[1].copy(data=parts[1])
        return _COMPARISONS[type(sign)](*values)

    def _is_in(self, left: ast.expr, others: list[ast.expr]) -> Any:
        pairs = [self._alike(left, other) for other in others]
        values, (coord, first) = [value for _, value in pairs], pairs[0]
        is_short = len(values) < _MANY or not isinstance(coord, xr.Variable)
        if is_short or any(isinstance(value, xr.Variable) for value in values):
            masks = (self._compared(ast.Eq(), left, other) for other in others)
            return functools.reduce(operator.or_, masks)
        # Each value that occurs is looked up once, and samples by the number of their value. Values
        # of different kinds have been refused, or made times, above.
        codes, groups = group_codes(coord.values)
        if isinstance(first, np.datetime64):
            known = np.isin(groups, np.array(values))
        else:  # as numpy compares numbers with those of Python: in the precision of the array
            of_kind = groups.dtype.type if groups.dtype.kind == "f" else (lambda value: value)
            wanted = {of_kind(value) for value in values}
            known = np.array([value in wanted for value in groups.tolist()], bool)
        # A missing value has the code -1, which is the last entry: it is in no list.
        return coord.copy(data=np.append(known, False)[codes])

    def _contains(self, name: ast.Name, text: ast.expr) -> xr.Variable:
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
            try:
                values[text] = np.datetime64(values[text])
            except ValueError as err:
                expected, literal = 'a time such as "2024-06-01"', (left, right)[text]
                raise self._refused(expected, literal, "try a date, or a date and a time") from err
        elif kinds[0] != kinds[1]:
            expected = f"two values of one kind, not {kinds[0]} and {kinds[1]}"
            literal = right if isinstance(right, ast.Constant) else left
            remedy = _EXAMPLE  # or what to type in place of a number or a text
            match literal:
                case ast.Constant(value=str() as given):
                    number = given if given.isdecimal() else "a number, such as: label == 3"
                    remedy = f"try {number}"
                case ast.Constant(value=value):
                    remedy = f"try {str(value)!r}"
            raise self._refused(expected, literal, remedy)
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

    def _coord(self, name: str) -> xr.Variable:
        if name not in self.tile.coords:
            names = sorted(map(str, self.tile.coords))
            near = nearest(name, names)
            remedy = f"try the coord {near!r}" if near else f"try one of {names}"
            if name.lower() in ("true", "false"):
                remedy = f"try {name.capitalize()}"
            raise ValueError(
                f"expected names of coords in the condition {self.text!r:.200}, got {name!r}; "
                f"{remedy}, or quotes around text"
            )
        # A copy of an IndexVariable, as of `sample`, with a mask as data would make an index of the
        # mask.
        return self.tile.variables[name].to_base_variable()

    def _refused(self, expected: str, node: ast.expr, remedy: str = _EXAMPLE) -> ValueError:
        if isinstance(node, ast.BinOp | ast.UnaryOp):
            remedy = _spelled(self.text)
        return ValueError(
            f"expected {expected} in the condition {self.text!r:.200}, got "
            f"{ast.unparse(node)!r:.60}; {remedy}"
        )


def _merged(sign: ast.boolop, values: list[ast.expr]) -> list[ast.expr]:
    """Return terms in which comparisons of one name with many constants are one with a list."""
    # Of "label == 1 or label == 2 or ..." each comparison would make a mask as large as the tile.
    each, together = _MERGED[type(sign)]
    lists: dict[str, list[ast.expr]] = {}
    others: list[ast.expr] = []
    for value in values:
        match value:
            case ast.Compare(ast.Name(id=name), [one], [ast.Constant() as constant]) if (
                type(one) is each
            ):
                lists.setdefault(name, []).append(constant)
            case _:
                others.append(value)
    return others + [
        ast.Compare(ast.Name(name), [together()], [ast.List(constants)])
        for name, constants in lists.items()
    ]


def _spelled(text: object) -> str:
    """Return the remedy of a text that would be a condition with the signs of Python."""
    spelled = str(text)
    for theirs, ours in _OF_OTHER_LANGUAGES:
        spelled = re.sub(theirs, ours, spelled)
    spelled = " ".join(spelled.split())
    try:
        _parsed(spelled)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return _EXAMPLE
    return f"try {spelled:.200}" if spelled != text else _EXAMPLE


def _kind(value: Any) -> str:
    if isinstance(value, xr.Variable):
        return _KINDS.get(value.dtype.kind, str(value.dtype))
    return "text" if isinstance(value, str) else "number"


def columns_along(scores: xr.DataArray, dim: str) -> dict[Hashable, np.ndarray | da.Array]:
    """Return the values of coords: in memory, or as lazy arrays if they stay in a store."""
    sizes = scores.variable.chunksizes[SAMPLE]
    return {
        name: coord.data if stays_in_store(coord, sizes) else coord.values
        for name, coord in coords_along(scores, dim).items()
    }


def mask_of(scores: xr.DataArray, where: Any) -> np.ndarray | TileMask | None:
    """Return None, a mask over samples, or one of tiles."""
    if where is None:
        return None
    if isinstance(where, str):
        where = selection(scores, where)
    if callable(where) and not isinstance(where, (xr.DataArray, np.ndarray)):
        dims: dict[Hashable, str] = {}
        columns: list[tuple[np.ndarray | da.Array, str]] = []
        # Each task gets the parts of these columns that belong to its tile: of a text, only coords
        # that it names, since nobody knows which ones a function reads.
        for dim, axis in ((SAMPLE, "s"), (TARGET, "t")):
            for name, values in columns_along(scores, dim).items():
                if not isinstance(where, Condition) or name in where.names:
                    dims[name] = dim
                    columns.append((values, axis))
        return TileMask(functools.partial(_mask_of_coords, where, dims), tuple(columns))
    if not isinstance(where, xr.DataArray):  # which makes NaN of what a masked array hides
        n_dims = np.ndim(where)  # and keeps the index of what pandas made
        where = xr.DataArray(where, dims=(SAMPLE, TARGET, *range(2, n_dims))[:n_dims])
    # Nullable booleans of pandas have this kind, too, and may be missing.
    is_bool = where.dtype.kind == "b" and (where.dtype == bool or not where.isnull().any())
    if not is_bool or not where.dims or not set(where.dims) <= {SAMPLE, TARGET}:
        raise ValueError(
            f"expected where as bool over samples, or over both of {dict(scores.sizes)}, got "
            f"{where.dtype} over {dict(where.sizes)}; try where=(scores.label == 3), or "
            "where=lambda tile: tile.label == tile.target_label"
        )
    where = aligned(where, scores, what="where")
    if where.dims == (SAMPLE,):
        return where.values
    index = "t" if where.dims == (TARGET,) else "st"
    values = where.transpose(SAMPLE, TARGET, missing_dims="ignore").values
    return TileMask(_broadcast, ((values, index),))


def _mask_of_coords(
    where: Callable[[xr.Dataset], xr.DataArray],
    dims: Mapping[Hashable, str],
    samples: range,
    targets: range,
    *coords: np.ndarray,
) -> np.ndarray:
    """Return a function of the coords of a tile, (sample, target)."""
    pairs = zip(dims.values(), coords, strict=True)
    positions = {SAMPLE: (SAMPLE, np.array(samples)), TARGET: (TARGET, np.array(targets))}
    tile = xr.Dataset(coords=positions | dict(zip(dims, pairs, strict=True)))
    mask = where(tile)
    is_mask = isinstance(mask, xr.DataArray) and mask.dtype == bool
    if not is_mask or any(tile.sizes.get(dim) != size for dim, size in mask.sizes.items()):
        is_array = isinstance(mask, xr.DataArray)
        actual = f"{mask.dtype} over {dict(mask.sizes)}" if is_array else type(mask).__name__
        raise ValueError(
            f"expected the function where= to return a boolean DataArray over the tile's "
            f"{dict(tile.sizes)}, got {actual}; try lambda tile: tile.label == tile.target_label"
        )
    # A mask along one dimension, or none, counts for all of the other.
    whole = mask.variable.set_dims(tile.sizes).transpose(SAMPLE, TARGET)
    return np.asarray(whole.values)


def _broadcast(samples: range, targets: range, mask: np.ndarray) -> np.ndarray:
    """Return a mask over targets, or over both, as (sample, target)."""
    return np.broadcast_to(mask, (len(samples), len(targets)))
