"""Checks of plain arguments: what they accept, what they return, what they say."""

from __future__ import annotations

import math

import numpy as np
import pytest

from trakdask.checks import require_choice, require_integer, require_number, shown


@pytest.mark.parametrize("value", [3, np.int8(3), np.uint64(3), np.array(3)])
def test_require_integer__accepted(value: object) -> None:
    found = require_integer("k", value, 3, 4, remedy="try k=3")
    assert found == 3
    assert type(found) is int


@pytest.mark.parametrize("value", [2, 4, -1, 2**70])
def test_require_integer__out_of_range(value: int) -> None:
    with pytest.raises(ValueError, match=rf"^expected k in \[3, 4\), got {value}; try k=3$"):
        require_integer("k", value, 3, 4, remedy="try k=3")


@pytest.mark.parametrize("value", [3.0, True, np.True_, "3", None, [3], math.nan, np.array([3, 3])])
def test_require_integer__other_types(value: object) -> None:
    with pytest.raises(TypeError, match=r"^expected an integer for k, got .*; try k=3$"):
        require_integer("k", value, 3, 4, remedy="try k=3")


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), np.array(0.5)])
def test_require_number__accepted(value: object) -> None:
    found = require_number("share", value, low=0, high=1, remedy="try 0.5")
    assert found == 0.5
    assert type(found) is float


@pytest.mark.parametrize("value", [0, 1, -0.1, math.nan, math.inf, -math.inf, 10**400])
def test_require_number__out_of_range(value: float) -> None:
    with pytest.raises((TypeError, ValueError), match=r"share.*, got .*; try 0.5$"):
        require_number("share", value, low=0, high=1, remedy="try 0.5")


@pytest.mark.parametrize("value", [True, "0.5", b"0.5", None, [0.5], 0.5j])
def test_require_number__other_types(value: object) -> None:
    with pytest.raises(TypeError, match=r"^expected a number for share, got .*; try 0.5$"):
        require_number("share", value, low=0, high=1, remedy="try 0.5")


def test_require_choice() -> None:
    require_choice("kind", "a", ("a", "b"), remedy="try 'a'")
    for value in ("c", None, ["a"], np.array(["a", "b"])):
        with pytest.raises(ValueError, match=r"^expected kind to be one of 'a', 'b', got .*; try"):
            require_choice("kind", value, ("a", "b"), remedy="try 'a'")


@pytest.mark.parametrize("value", ["x" * 10**6, np.zeros((99, 99)), {i: i for i in range(999)}])
def test_shown__is_short_and_one_line(value: object) -> None:
    assert len(shown(value)) <= 80
    assert "\n" not in shown(value)
