"""Columns of length 1 in 8 bits, against loops in float64."""

from __future__ import annotations

import numpy as np
import pytest

from trakdask.projection.companding import encoded, widened


def columns(width: int = 4096) -> np.ndarray:
    """Return columns like components: of equal elements, with one large one, of 0, of noise."""
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((width, 4))
    matrix[:, 0], matrix[0, 1], matrix[:, 2] = 1, 20, 0
    lengths = np.linalg.norm(matrix, axis=0)
    return matrix / np.where(lengths > 0, lengths, 1)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_codes__are_the_rounded_roots_of_elements(dtype: str) -> None:
    matrix = columns().astype(dtype)
    codes = encoded(matrix)
    assert codes.dtype == np.int8
    for code, column in zip(codes.T, matrix.T.astype(float), strict=True):
        largest = np.abs(column).max() or 1
        roots = 127 * np.sqrt(np.abs(column) / largest) * np.sign(column)
        assert np.abs(code - roots).max() < 0.5 + 1e-4
    assert np.abs(codes).max(axis=0).tolist() == [127, 127, 0, 127]


def test_columns__of_codes_have_length_1_and_turn_by_little() -> None:
    matrix = columns()
    codes = encoded(matrix)
    found = widened(codes)
    assert found.dtype == np.float32
    for code, column, expected in zip(codes.T, found.T, matrix.T, strict=True):
        squares = np.array([int(q) * abs(int(q)) for q in code], float)
        length = np.sqrt(sum(square**2 for square in squares)) or 1
        np.testing.assert_allclose(column, squares / length, rtol=1e-6)
        assert np.linalg.norm(column - expected) < 0.02
    np.testing.assert_array_equal(widened(codes[:, [1, 3], None])[:, 0, 0], found[:, 1])


def test_columns__that_are_no_codes_stay_what_they_are() -> None:
    halves = columns().astype("f2")
    np.testing.assert_array_equal(widened(halves), halves)
    assert widened(halves).dtype == np.float32
    for dtype in ("f4", "f8", "i8"):
        values = np.arange(3).astype(dtype)
        assert widened(values) is values
