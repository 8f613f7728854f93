"""Views as parts of a URL and back, and the conditions that forms add to them."""

from __future__ import annotations

from urllib.parse import urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trakdask.explorer.view import PAGES, View

positions = st.integers(0, 10**9)
views = st.builds(
    View,
    page=st.sampled_from(PAGES), target=positions, sample=positions, first=positions,
    where=st.sampled_from(["", "label == 3", 'source != "a & b=c" and x < 2']),
    targets_where=st.sampled_from(["", 'text == "ü%+"']),
    search=st.text(), sort=st.text(), ascending=st.booleans(),
    k=st.integers(1, 100), group_by=st.text(),
)  # fmt: skip


@given(views)
def test_view__of_its_query_is_the_same(view: View) -> None:
    again = View.from_query(f"?{view.to_query()}")
    assert again == view
    assert again.errors == {}


def test_to_query__of_the_default_is_empty() -> None:
    assert View().to_query() == ""
    assert View.from_query("") == View()


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("page", "admin"), ("target", "-1"), ("target", "one"), ("k", "0"), ("k", "101"),
        ("order", "best"), ("ascending", "yes"), ("first", "1e9"),
    ],
)  # fmt: skip
def test_from_query__leaves_out_what_it_does_not_understand(name: str, bad: str) -> None:
    view = View.from_query(urlencode({name: bad, "sample": "7"}))
    assert getattr(view, name) == getattr(View(), name)
    assert view.sample == 7
    assert list(view.errors) == [name]


@pytest.mark.parametrize("bad", ["import os", "label ==", "label = 2 and x != 3"])
def test_from_query__keeps_a_condition_that_is_none_beside_its_error(bad: str) -> None:
    view = View.from_query(urlencode({"where": bad, "targets_where": bad}))
    assert (view.where, view.targets_where) == (bad, bad)
    assert list(view.errors) == ["where", "targets_where"]
    assert bad in view.errors["where"]


def test_from_query__ignores_what_is_not_ours() -> None:
    view = View.from_query("token=abc&errors=x&page=corpus")
    assert (view, view.errors) == (View(page="corpus"), {})


def test_checked__is_the_view_of_a_text_without_errors() -> None:
    assert View.checked("?page=target&target=3") == View(page="target", target=3)
    wrong = View.from_query("k=many")
    assert View.checked(wrong) is wrong  # a page shows its errors
    with pytest.raises(ValueError, match="'k=many': k: This must be a whole number"):
        View.checked("k=many")
