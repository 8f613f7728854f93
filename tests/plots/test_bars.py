"""Bars show the scores, their bounds, and whether these contain 0."""

from __future__ import annotations

import json

import matplotlib.pyplot as plt
import numpy as np
import pytest
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

import trakdask as td
from trakdask.plots.figures import GREEN, RED

FEATURES = td.testing.simulate_features(60, 5, 6).assign_coords(
    source=("sample", np.array(["web", "$wiki", "book"] * 20))
)
TARGETS = FEATURES.isel(sample=slice(4))


def drawn(ax: Axes) -> tuple[list[float], np.ndarray, list[str], list[str]]:
    widths = [bar.get_width() for bar in ax.patches]
    ends = np.array([segment[:, 0] for segment in ax.collections[0].get_segments()])
    colors = [to_hex(bar.get_facecolor()) for bar in ax.patches]
    return widths, ends, colors, [text.get_text() for text in ax.get_yticklabels()]


def test_intervals__of_groups_are_sorted_bars() -> None:
    found = td.group_score(FEATURES, TARGETS, "grad_dot", by="source", level=0.9)
    found = found.isel(target=3).compute()
    figure, (first, _) = plt.subplots(1, 2)
    assert td.plots.intervals(found, ax=first) is figure
    widths, ends, colors, names = drawn(first)
    found = found.sortby("score", ascending=False)
    np.testing.assert_allclose(widths, found.score, rtol=1e-5)
    np.testing.assert_allclose(ends, np.stack([found.lower, found.upper], 1), rtol=1e-4)
    assert names == found.source.values.tolist()
    sure = np.where(found.lower > 0, GREEN, np.where(found.upper < 0, RED, to_hex("0.7")))
    assert colors == sure.tolist()


def test_intervals__of_a_ranking_keep_its_order_and_leave_out_nothing_ranked() -> None:
    found = td.score(FEATURES, TARGETS, "grad_dot", level=0.9)
    top = td.top_k(found, 5, rank_by="lower").isel(target=0).compute()
    top["score"][4] = np.nan
    widths, _, _, names = drawn(*td.plots.intervals(top, "source").axes)
    np.testing.assert_allclose(widths, top.score[:4], rtol=1e-5)
    assert names == top.source.values[:4].tolist()


def test_intervals__refuse_what_is_no_row_of_bars_with_bounds() -> None:
    sums = td.group_score(FEATURES, TARGETS, "grad_dot", by="source").isel(target=0)
    shares = td.group_score(FEATURES, TARGETS, "grad_dot", by="source", share=True)
    many = td.group_score(FEATURES, TARGETS, "grad_dot", by="source", level=0.9)
    for given, words in (
        (sums, "'score'.* without; try level=0.9"),
        (shares, "'share'.* without; try level=0.9"),
        (many, r"'target': 4.*isel\(target=0\)"),
    ):
        with pytest.raises(ValueError, match=words):
            td.plots.intervals(given)


def test_weights__are_the_numbers_of_the_projector() -> None:
    groups = {
        "words.$weight": {"weight": 0.5, "share": 0.8, "directions": 30.0, "agreement": 0.2},
        "head.weight": {"weight": 2.0, "share": 0.2, "directions": 9.0, "agreement": 0.8},
    }
    projector = {"kind": "fitted", "steps": [{"kind": "curvature", "weights": groups}]}
    features = FEATURES.assign_attrs(projector=json.dumps(projector))
    share, *others = td.plots.weights(features).axes
    widths = [bar.get_width() for bar in share.patches]
    np.testing.assert_allclose(widths, [0.8, 0.2, 0.2, 0.8])
    assert [text.get_text() for text in share.get_yticklabels()] == list(groups)
    for ax, name in zip(others, ("agreement", "directions", "weight"), strict=True):
        assert ax.get_xlabel() == name
        assert [bar.get_width() for bar in ax.patches] == [g[name] for g in groups.values()]
    with pytest.raises(ValueError, match=r"no fitted step.*weights=True"):
        td.plots.weights(FEATURES)


def test_intervals__of_effects_have_the_mean_of_many_as_a_thick_line() -> None:
    names = ("effect", "lower", "upper", "mean_lower", "mean_upper")
    values = {
        name: ("source", [x + 10, x]) for name, x in zip(names, (2, -1, 5, 1, 3), strict=True)
    }
    attrs = {"level": 0.9, "units": "loss", "sign": "positive: lower without the group"}
    found = xr.Dataset(values, {"source": ["a", "b"]}, attrs)
    (ax,) = td.plots.intervals(found).axes
    assert ax.get_xlabel() == "effect on the loss (positive: lower without the group)"
    thick = next(one for one in ax.collections if one.get_linewidths()[0] == 3)
    np.testing.assert_allclose(
        [segment[:, 0] for segment in thick.get_segments()], [[11, 13], [1, 3]]
    )
