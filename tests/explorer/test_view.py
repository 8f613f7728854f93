"""Views as parts of a URL and back, and the conditions that forms add to them."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trakdask.explorer.view import PAGES, View

positions = st.integers(0, 10**9)
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"))
views = st.builds(
    View,
    page=st.sampled_from(PAGES), target=positions, sample=positions, first=positions,
    where=st.sampled_from(["", "label == 3", 'source != "a & b=c" and x < 2']),
    targets_where=st.sampled_from(["", 'text == "ü%+"']),
    search=texts, sort=texts, ascending=st.booleans(), k=st.integers(1, 100), group_by=texts,
)  # fmt: skip


@given(views)
def test_view__of_its_query_is_the_same(view: View) -> None:
    again = View.from_query(f"?{view.to_query()}")
    assert again == view
    assert again.errors == {}


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("page", "admin"), ("target", "-1"), ("target", "one"), ("k", "0"), ("k", "101"),
        ("order", "best"), ("ascending", "yes"), ("first", "1e9"), ("target", "9" * 5000),
        ("sample", "9" * 16), ("k", "inf"), ("k", "1e400"), ("first", "²"), ("search", "a\0b"),
        ("search", b"\xff"), ("sort", "\0"), ("page", ["corpus", "targets"]), ("k", ["3", "3"]),
    ],
)  # fmt: skip
def test_from_query__leaves_out_what_it_does_not_understand(name: str, bad: Any) -> None:
    view = View.from_query(urlencode({"of": "ranking", name: bad}, doseq=True))
    assert view == View(of="ranking")
    assert list(view.errors) == [name]
    assert view.errors[name].startswith("This ")
    assert len(view.errors[name]) < 150


@pytest.mark.parametrize(
    ("bad", "kept"),
    [
        *((bad, bad) for bad in ("import os", "label ==", "label = 2 and x != 3", "label == 3\0")),
        *((f"label == {digits}", f"label == {digits}") for digits in ("9" * 5000, f"1{'0' * 400}")),
        (b"label == 3\xff", "label == 3?"), (["x == 1", "label == 3"], "label == 3"),
    ],
)  # fmt: skip
def test_from_query__keeps_a_condition_that_is_none_beside_its_error(bad: Any, kept: str) -> None:
    view = View.from_query(urlencode({"where": bad, "targets_where": bad}, doseq=True))
    assert (view.where, view.targets_where) == (kept, kept)
    assert list(view.errors) == ["where", "targets_where"]
