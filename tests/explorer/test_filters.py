"""Conditions that are put together from a form."""

from __future__ import annotations

from urllib.parse import urlencode

import numpy as np
import pandas as pd
import pytest

import trakdask as td
from trakdask.explorer.filters import condition_of, joined, with_filter
from trakdask.explorer.metadata import condition_mask, few_values, metadata, searched
from trakdask.explorer.state import View

QUOTED = "we'b\" and \\ <b>"
TABLE = pd.DataFrame(
    {
        "label": [1, 2, 3, 3],
        "size": [0.5, 1.5, 2.5, np.nan],
        "source": ["web", "book", QUOTED, "Web"],
        "is_old": [True, False, True, True],
        "not a name": [1, 2, 3, 4],
    }
)


@pytest.mark.parametrize(
    ("name", "sign", "text", "rows"),
    [
        ("label", "==", "3", [2, 3]), ("label", "!=", "3", [0, 1]), ("label", ">=", "2", [1, 2, 3]),
        ("size", "<=", "1.5", [0, 1]), ("source", "==", QUOTED, [2]),
        ("source", "!=", "web", [1, 2, 3]),
        ("source", "contains", "eb", [0, 3]), ("source", "contains", "b\" and \\ <", [2]),
        ("is_old", "==", "True", [0, 2, 3]), ("is_old", "==", "False", [1]),
        ("is_old", "!=", "True", [1]),
    ],
)  # fmt: skip
def test_condition_of__selects_rows(name: str, sign: str, text: str, rows: list[int]) -> None:
    condition = condition_of(TABLE, name, sign, text)
    assert np.flatnonzero(condition_mask(TABLE, condition, "sample")).tolist() == rows
    both = joined("label == 3 or label == 2", condition)
    expected = [row for row in rows if row > 0]
    assert np.flatnonzero(condition_mask(TABLE, both, "sample")).tolist() == expected


@pytest.mark.parametrize(("name", "text"), [("label", "many"), ("not a name", "1"), ("gone", "1")])
def test_condition_of__what_is_none(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"{text}|{name}"):
        condition_of(TABLE, name, "==", text)


def query(**given: str) -> str:
    return urlencode({f"filter_{name}": text for name, text in given.items()})


def test_with_filter__adds_to_the_condition_of_samples_or_targets() -> None:
    asked = query(name="label", sign=">=", value="2", of="where")
    view = with_filter(asked, View(where="label == 3"), TABLE, TABLE)
    assert view.where == "label == 3 and label >= 2"
    asked = query(name="label", sign="==", value="2", of="targets_where")
    assert with_filter(asked, View(), TABLE, TABLE).targets_where == "label == 2"


def test_with_filter__says_what_is_wrong() -> None:
    asked = query(name="label", sign="==", value="many", of="where")
    view = with_filter(asked, View(target=3), TABLE, TABLE)
    assert view == View(target=3)
    assert "many" in view.messages[0]
    assert with_filter("page=corpus", View(), TABLE, TABLE) == View()


def test_searched__looks_at_texts_in_any_case() -> None:
    assert searched(TABLE, "WEB").index.tolist() == [0, 3]
    assert searched(TABLE, "<b>").index.tolist() == [2]
    assert len(searched(TABLE, "")) == 4
    assert searched(TABLE, "3").empty


def test_few_values__are_columns_to_group_by() -> None:
    assert few_values(TABLE, 3) == ["label", "size", "is_old"]


def test_metadata__has_the_coords_of_samples_alone() -> None:
    table = metadata(td.testing.simulate_features(5, 4, 2))
    assert list(table) == ["label"]
    assert table["label"].tolist() == [0, 1, 0, 1, 0]
