"""Curves and dots: what is drawn are the numbers of the result; the unit of scores."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

import trakdask as td


def lds_result() -> xr.Dataset:
    rng = np.random.default_rng(0)
    scores = xr.DataArray(rng.standard_normal((30, 8)), dims=("sample", "target"))
    masks = td.evaluate.subsets(30, 20)
    clean = xr.dot(masks, scores, dim="sample").expand_dims(seed=2)
    noise = rng.standard_normal((2, 20, 8))
    both = {"good": scores, "worse": scores + rng.standard_normal((30, 8))}
    return td.evaluate.lds(both, masks, clean + noise, resamples=20)


@pytest.mark.parametrize("methods", [["worse", "good"], ["good"]])
def test_lds__draws_every_target_in_order(methods: list[str]) -> None:
    result = lds_result().compute()
    shown = result.sel(estimator=methods if len(methods) > 1 else methods[0])
    (ax,) = td.plots.lds(shown).axes
    for i, name in enumerate(methods):
        one = result.sel(estimator=name).sortby("lds")
        for line, expected in zip(ax.lines[3 * i :], (one.ceiling, one["lds"]), strict=False):
            np.testing.assert_array_equal(line.get_ydata(), expected)
        assert ax.lines[3 * i + 2].get_ydata()[0] == float(one.lds_mean)
        assert f"{float(one.lds_mean):.2f}" in ax.get_xticklabels()[i].get_text()
    assert len(ax.get_legend().get_texts()) == 3


def test_removal_curve__starts_with_all_samples() -> None:
    effect = np.arange(10.0)
    scores = xr.DataArray(effect[:, None] * [1, 2], dims=("sample", "target"))

    def train(positions: np.ndarray, seed: int) -> np.ndarray:
        return effect[positions].sum() * np.array([1, 2])

    both = {"right": scores, "wrong": -scores}
    curve = td.evaluate.removal_curve(train, both, [0.2, 0.1])
    (ax,) = td.plots.removal_curve(curve).axes
    ranked, wrong, random = ax.lines
    np.testing.assert_allclose(wrong.get_ydata(), 1.5 * np.array([45, 45, 44]))
    np.testing.assert_allclose(ranked.get_xdata(), [0, 0.1, 0.2])
    np.testing.assert_allclose(ranked.get_ydata(), 1.5 * np.array([45, 36, 28]))
    assert random.get_ydata()[0] == 1.5 * 45
    assert (random.get_ydata()[1:] > ranked.get_ydata()[1:]).all()


def chosen(curve: np.ndarray, relative: float) -> xr.Dataset:
    values = {"relative": relative, "peak": curve.max(), "threshold": curve.max() - 0.02}
    return xr.Dataset(
        {
            **{name: ((), value) for name, value in values.items()},
            "curve": ("relative_damping", curve),
            "rule": ((), "completeness, targets"),
        },
        coords={"relative_damping": 10.0 ** np.linspace(-2, 2, 17)},
    ).chunk()


def test_damping__curve_and_choice() -> None:
    curve = 0.9 - (np.arange(17) - 8.0) ** 2 / 200
    (ax,) = td.plots.damping(chosen(curve, 10.0**0.5)).axes
    line, at_choice, point = ax.lines
    np.testing.assert_array_equal(line.get_ydata(), curve)
    np.testing.assert_allclose(at_choice.get_xdata(), 10**0.5)
    np.testing.assert_allclose(point.get_ydata(), curve[10])
    assert ax.get_xscale() == "log"
    assert "3.16 tr(K)/n by completeness, targets" in ax.get_title()


N, M = 40, 9
RNG = np.random.default_rng(0)
LABEL, TARGET_LABEL = RNG.integers(2, size=N), RNG.integers(2, size=M)
MARKED = TARGET_LABEL == 1
SCORES = xr.DataArray(
    RNG.standard_normal((N, M)) + (LABEL[:, None] == TARGET_LABEL),
    dims=("sample", "target"),
    coords={
        "label": ("sample", LABEL),
        "target_label": ("target", TARGET_LABEL),
        "marked": ("sample", LABEL == 1),
        "target_marked": ("target", MARKED),
    },
)


def test_class_detection__precision_at_each_k() -> None:
    result = td.evaluate.class_detection(SCORES, ks=[5, 1, 20])
    (ax,) = td.plots.class_detection(result).axes
    points, chance = ax.lines[0], ax.lines[-1]
    assert points.get_xdata().tolist() == [1, 5, 20]
    expected = result.precision_mean.sortby("k").values
    np.testing.assert_array_equal(points.get_ydata(), expected)
    assert chance.get_ydata()[0] == float(result.chance.mean())
    assert f"{float(result.auc_mean):.2f}" in ax.get_legend().get_texts()[1].get_text()
    assert "'label'" in ax.get_title()


@pytest.mark.parametrize("methods", [["self-influence", "loss"], None])
def test_mislabelled_curve__of_one_and_of_several_methods(methods: list[str] | None) -> None:
    values = xr.DataArray(RNG.standard_normal((N, 2)), dims=("sample", "method"))
    values = values.assign_coords(method=methods) if methods else values[:, 0]
    curve = td.evaluate.mislabelled_curve(values, LABEL == 1, [0.5, 0.25]).compute()
    (ax,) = td.plots.mislabelled_curve(curve).axes
    found = curve.found.sortby("fraction").transpose(..., "fraction").values
    for line, expected in zip(ax.lines, np.atleast_2d(found), strict=False):
        np.testing.assert_allclose(line.get_xdata(), [0, 0.25, 0.5, 1])
        np.testing.assert_allclose(line.get_ydata(), [0, *expected, 1])
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert [label.split(",")[0] for label in labels[:-2]] == (methods or ["ranked"])
    assert labels[-2:] == ["random order", "best"]
    assert ax.lines[-1].get_ydata()[1] == pytest.approx(float(curve.best.sel(fraction=0.25)))
