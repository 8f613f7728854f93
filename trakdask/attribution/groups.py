"""Number the groups of samples, also of very many."""

from __future__ import annotations

import numpy as np
import pandas as pd

from trakdask.checks import shown

__all__ = ["group_codes", "require_group_coord"]

_ROWS_AT_ONCE = 2**20


def require_group_coord(by: object, known: list[str], taken: list[str]) -> str:
    """Return the name of the coord that groups are made by, checked.

    Parameters
    ----------
    by
        What the user gave.
    known
        The coords of the training samples.
    taken
        Names that the result has for the targets.

    Raises
    ------
    ValueError
        If it is not one of those known, or is taken.
    """
    if isinstance(by, str) and by in known and by not in taken:
        return by
    raise ValueError(
        f"expected by as the name of one coord of the training samples, which are {sorted(known)}, "
        f"and none of {taken}, which the result has for the targets, got {shown(by)}; try "
        + (
            f"features.assign_coords({by}=('sample', values))"
            if isinstance(by, str)
            else "features.assign_coords(group=('sample', values)), and by='group'"
        )
    )


def group_codes(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of each value's group, -1 where it is missing, and the groups, sorted.

    As ``pandas.factorize(values, sort=True)``, which of text would make 80 bytes per sample.

    Examples
    --------
    >>> codes, groups = group_codes(np.array([3.0, np.nan, 1.0, 3.0]))
    >>> codes.tolist(), groups.tolist()
    ([1, -1, 0, 1], [1.0, 3.0])
    """
    starts = range(0, max(len(values), 1), _ROWS_AT_ONCE)
    parts = [pd.factorize(values[start : start + _ROWS_AT_ONCE]) for start in starts]
    numbers, groups = pd.factorize(np.concatenate([found for _, found in parts]), sort=True)
    numbers = numbers.astype(np.min_scalar_type(-max(len(groups), 1)))
    ends = np.cumsum([len(found) for _, found in parts])
    codes = [
        np.append(own, own.dtype.type(-1))[part]  # the last is that of missing values, -1
        for own, (part, _) in zip(np.split(numbers, ends[:-1]), parts, strict=True)
    ]
    return np.concatenate(codes), np.asarray(groups)
