"""Curves: what is drawn from evaluations and from the choice of λ."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

import trakdask as td
from trakdask.testing import simulate_features


def lds_result(n_entries: int = 0) -> xr.Dataset:
    rng = np.random.default_rng(0)
    scores = xr.DataArray(rng.standard_normal((30, 8)), dims=("sample", "target"))
    masks = td.evaluate.subsets(30, 20)
    clean = xr.dot(masks, scores, dim="sample").expand_dims(seed=2)
    noise = rng.standard_normal((2, 20, 8))
    if n_entries:
        scores = scores.expand_dims(estimator=n_entries)
    return td.evaluate.lds(scores, masks, clean + noise, resamples=20)


def test_lds__draws_every_target_in_order() -> None:
    result = lds_result().compute()
    (ax,) = td.plots.lds(result).axes
    ceiling, scores, mean = (line.get_ydata() for line in ax.lines)
    order = np.argsort(result["lds"].values)
    np.testing.assert_array_equal(scores, result["lds"].values[order])
    np.testing.assert_array_equal(ceiling, result.ceiling.values[order])
    assert mean[0] == float(result.lds_mean)


def test_removal_curve__starts_with_all_samples() -> None:
    effect = np.arange(10.0)
    scores = xr.DataArray(effect[:, None] * [1, 2], dims=("sample", "target"))

    def train(positions: np.ndarray, seed: int) -> np.ndarray:
        return effect[positions].sum() * np.array([1, 2])

    curve = td.evaluate.removal_curve(train, scores, [0.2, 0.1])
    (ax,) = td.plots.removal_curve(curve).axes
    ranked, random = ax.lines
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


def test_damping__no_choice_no_mark() -> None:
    (ax,) = td.plots.damping(chosen(np.linspace(0, 0.3, 17), np.nan)).axes
    assert len(ax.lines) == 1


def test_damping__of_the_function_itself() -> None:
    made, targets = simulate_features(60, 6, 3), simulate_features(50, 6, 3, seed=1)
    with pytest.warns(UserWarning, match="instead"):
        figure = td.plots.damping(td.damping(made, estimator="soft", calibrate=targets))
    assert len(figure.axes) == 1


def test_damping__refused_without_a_curve() -> None:
    with pytest.raises(ValueError, match=r"curve.*got .*'absolute'"):
        td.plots.damping(td.damping(simulate_features(30, 6), damping=td.Absolute(1)))
