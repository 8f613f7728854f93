"""Curves and dots show the numbers of the result."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

import trakdask as td


@pytest.mark.parametrize("methods", [["worse", "good"], ["good"]])
def test_lds__draws_every_target_in_order(methods: list[str]) -> None:
    rng = np.random.default_rng(0)
    scores = xr.DataArray(rng.standard_normal((30, 8)), dims=("sample", "target"))
    masks = td.evaluate.subsets(30, 20)
    clean = xr.dot(masks, scores, dim="sample").expand_dims(seed=2)
    noise = rng.standard_normal((2, 20, 8))
    both = {"good": scores, "worse": scores + rng.standard_normal((30, 8))}
    result = td.evaluate.lds(both, masks, clean + noise, resamples=20).compute()
    shown = result.sel(estimator=methods if len(methods) > 1 else methods[0])
    (ax,) = td.plots.lds(shown).axes
    for i, name in enumerate(methods):
        one = result.sel(estimator=name).sortby("lds")
        for line, expected in zip(ax.lines[3 * i :], (one.ceiling, one["lds"]), strict=False):
            np.testing.assert_array_equal(line.get_ydata(), expected)
        assert ax.lines[3 * i + 2].get_ydata()[0] == float(one.lds_mean)
        assert f"{float(one.lds_mean):.2f}" in ax.get_xticklabels()[i].get_text()
    assert len(ax.get_legend().get_texts()) == 3
    (ax,) = td.plots.lds(shown.assign(ceiling=shown.ceiling * np.nan)).axes
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["LDS", "mean"]


def test_damping__curves_and_choice() -> None:
    curve, grade = 0.9 - (np.arange(17) - 8.0) ** 2 / 200, np.linspace(0.5, 0.1, 17)
    numbers = {"relative": 10.0**0.5, "peak": curve.max(), "threshold": curve.max() - 0.02}
    chosen = xr.Dataset(
        {"curve": ("rho", curve), "grade": ("rho", grade), "rule": "completeness, targets"},
        {"relative_damping": ("rho", 10.0 ** np.linspace(-2, 2, 17))},
    )
    chosen = chosen.assign(numbers).swap_dims(rho="relative_damping").chunk()
    (ax,) = td.plots.damping(chosen).axes
    line, graded, *_ = ax.lines
    np.testing.assert_array_equal(line.get_ydata(), curve)
    np.testing.assert_array_equal(graded.get_ydata(), grade)
    assert ax.get_xscale() == "log"
    assert "3.16 tr(K)/n by completeness, targets" in ax.get_title()
    (ax,) = td.plots.damping(chosen.assign(grade=chosen.grade * np.nan)).axes
    _, at_choice, point = ax.lines
    np.testing.assert_allclose(at_choice.get_xdata(), 10**0.5)
    np.testing.assert_allclose(point.get_ydata(), curve[10])


N = 40
RNG = np.random.default_rng(0)
LABEL = RNG.integers(2, size=N)


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


@pytest.fixture(scope="module")
def graded() -> xr.Dataset:
    features, targets = (
        td.testing.simulate_features(n_samples=40, proj_dim=5, n_checkpoints=4, seed=seed)
        for seed in range(2)
    )
    masks = td.evaluate.subsets(40, 4).rename(subset="checkpoint")
    features = features.assign(trained_on=masks)
    estimators = {"cosines": "grad_cos", "products": "grad_dot"}
    return td.evaluate.cross_validate(features, targets, estimators)


def test_grades_and_differences_are_those_of_the_result(graded) -> None:
    (ax,) = td.plots.cross_validation(graded).axes
    (points, *_), *_ = ax.containers
    np.testing.assert_allclose(points.get_xdata(), graded.lds_mean)
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert names == ["without one checkpoint", "grade ± its error"]
    first, second = (label.get_text() for label in ax.get_yticklabels())
    assert first == f"cosines\n{float(graded.lds_mean[0]):.2f}"
    grade, difference = float(graded.lds_mean[1]), float(graded.difference[1])
    assert second.startswith(f"products\n{grade:.2f} ({difference:+.3f} ± ")
    one = graded.isel(estimator=0, drop=True).drop_vars(["difference", "difference_error"])
    (ax,) = td.plots.cross_validation(one).axes
    (label,) = ax.get_yticklabels()
    assert label.get_text() == f"scores\n{float(one.lds_mean):.2f}"
