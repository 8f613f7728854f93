"""Matrices whose columns have the length 1, in 8 bits for each element.

Most elements of a principal component are far smaller than its largest one. So the root of an
element is rounded, and not the element: small ones are off by less. The length that a column is
known to have stands for its scale.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_LARGEST = 127


def encoded(matrix: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.int8]:
    """Return codes (row, column): 127 is the largest element of a column, a column of 0 stays 0.

    Examples
    --------
    >>> encoded(np.array([[0.6], [-0.8], [0.0]])).tolist()
    [[110], [-127], [0]]
    """
    lengths = np.abs(matrix)
    largest = lengths.max(axis=0, initial=0)
    roots = np.rint(_LARGEST * np.sqrt(lengths / np.where(largest > 0, largest, 1)))
    return np.copysign(roots, matrix).astype(np.int8)


def widened(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return fitted values as products take them: the columns of codes, and halves as float32.

    A code q stands for sign(q) q², divided by the length of its column, (row, column, ...). Not one
    bit depends on the machine: until the division, all numbers are integers.

    Examples
    --------
    >>> widened(np.array([[110], [-127], [0]], np.int8)).round(2).tolist()
    [[0.6000000238418579], [-0.800000011920929], [0.0]]
    """
    if values.dtype == np.float16:
        return values.astype(np.float32)
    if values.dtype != np.int8:
        return values
    # sign(q) q², since codes are roots. float32 holds it exactly.
    matrix = values * np.abs(values).astype(np.float32)
    squares = np.einsum("r...,r...->...", matrix, matrix, dtype=np.float64)
    matrix /= np.sqrt(np.where(squares > 0, squares, 1)).astype(np.float32)
    return matrix
