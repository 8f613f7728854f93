"""Views as parts of a URL and back, and the conditions that forms add to them."""

from __future__ import annotations

from typing import get_args
from urllib.parse import urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trakdask as td
from trakdask.attribution.estimators import KINDS
from trakdask.attribution.protocol import Rule
from trakdask.explorer.view import PAGES, MeanTrace, View, damping_of

positions = st.integers(0, 10**9)
views = st.builds(
    View,
    page=st.sampled_from(PAGES), target=positions, sample=positions, first=positions,
    where=st.sampled_from(["", "label == 3", 'source != "a & b=c" and x < 2']),
    targets_where=st.sampled_from(["", 'text == "ü%+"']),
    search=st.text(), sort=st.text(), ascending=st.booleans(),
    k=st.integers(1, 100), group_by=st.text(),
    estimator=st.sampled_from(["", "auto", *KINDS]),
    damping=st.sampled_from(["", "auto", "0.5", "absolute 2.5", "0.5 tr(K)/n"]),
    checkpoints=st.lists(st.text(min_size=1), max_size=3).map(tuple),
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
        ("estimator", "best"), ("damping", "-2"), ("damping", "nan"),
        ("ascending", "yes"), ("first", "1e9"),
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
    assert View.from_query("checkpoints=") == View()  # of a form with every box unticked


def test_damping_of__texts() -> None:
    assert [damping_of(rule) for rule in get_args(Rule)] == list(get_args(Rule))
    assert damping_of(" 0.25") == 0.25
    assert damping_of("absolute 3") == td.Absolute(3.0)
    assert damping_of("0.5 tr(K)/n") == MeanTrace(0.5)
    with pytest.raises(ValueError, match="absolute 1 tr"):
        damping_of("absolute 1 tr(K)/n")
    with pytest.raises(ValueError, match="lots"):
        damping_of("lots")
