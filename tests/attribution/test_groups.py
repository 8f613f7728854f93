"""Numbers of groups against those of pandas, in pieces of any size."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from trakdask.attribution import groups

WORDS = np.array(["b", "", "a", "b", "ä", "c", "a"], np.dtypes.StringDType())
TIMES = np.array(["2026-01-02", "NaT", "2025-01-01", "2026-01-02"], "datetime64[ns]")


@pytest.mark.parametrize("rows", [1, 2, 3, 100])
@pytest.mark.parametrize(
    "values",
    [
        WORDS,
        TIMES,
        np.array([3, 1, 3, -2, 7], np.int8),
        np.array([np.nan, 2.5, -0.5, np.nan, 2.5]),
        np.array([True, False, True]),
        np.array([np.nan, np.nan]),
        np.arange(1000) % 300,
        np.empty(0),
        np.array([2**63 + 1, 0], np.uint64),
    ],
    ids=lambda values: f"{values.dtype}-{len(values)}",
)
def test_group_codes__are_those_of_pandas(
    values: np.ndarray, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "_ROWS_AT_ONCE", rows)
    codes, found = groups.group_codes(values)
    expected_codes, expected = pd.factorize(values, sort=True)
    np.testing.assert_array_equal(codes, expected_codes)
    np.testing.assert_array_equal(found, np.asarray(expected))
    assert found.dtype == np.asarray(expected).dtype
    assert codes.dtype.kind == "i"


def test_group_codes__take_few_bytes() -> None:
    codes, _ = groups.group_codes(np.arange(10**5) % 100)
    assert codes.dtype == np.int8


@pytest.mark.parametrize("by", [np.zeros(3), ["label", "source"], None])
def test_require_group_coord__values_in_place_of_a_name(by: object) -> None:
    with pytest.raises(ValueError, match=r"assign_coords.*and by='group'"):
        groups.require_group_coord(by, ["label", "source"], [])
    assert groups.require_group_coord("label", ["label", "source"], []) == "label"
