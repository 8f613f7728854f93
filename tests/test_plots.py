"""Pictures: what is drawn, for whom, and in which order."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from matplotlib.figure import Figure

import trakdask as td
from trakdask.testing import simulate_features

FEATURES = simulate_features(n_samples=30, proj_dim=6)
TARGETS = simulate_features(n_samples=8, proj_dim=6, seed=1)
SCORES = td.score(FEATURES, TARGETS)
IMAGES = np.arange(30)[:, None, None] * np.ones((30, 4, 4))


def drawn(figure: Figure) -> list[float]:
    return [float(ax.images[0].get_array().ravel()[0]) for ax in figure.axes if ax.images]


@pytest.mark.parametrize("form", ["grey", "channel first", "channel last", "rgb"])
def test_gallery__draws_target_helpful_harmful(form: str) -> None:
    images = {
        "grey": IMAGES,
        "channel first": IMAGES[:, None],
        "channel last": IMAGES[..., None],
        "rgb": np.repeat(IMAGES[:, None], 3, 1) / 30,
    }[form]
    helpful, harmful = td.top_k(SCORES, 4), td.top_k(SCORES, 4, largest=False)
    figure = td.plots.gallery(helpful, harmful, images, images, targets=[5, 2], n_shown=3)
    if form == "rgb":
        assert len(drawn(figure)) == 14
        return
    expected = []
    for target in (5, 2):
        sides = [side.position.values[target, :3] for side in (helpful, harmful)]
        expected += [target, *sides[0], *sides[1]]
    assert drawn(figure) == expected


def test_gallery__leaves_missing_ranks_empty() -> None:
    top = td.top_k(SCORES, 20, where=lambda tile: tile.label == tile.target_label)
    figure = td.plots.gallery(top, top, IMAGES, IMAGES, targets=[0], n_shown=20)
    assert len(drawn(figure)) == 1 + 2 * 15


def test_gallery__computes_drawn_targets_only() -> None:
    assert len(drawn(td.plots.gallery(*[td.top_k(SCORES, 2)] * 2, IMAGES, IMAGES))) == 6 * 5


def test_gallery__refused() -> None:
    top = td.top_k(SCORES, 4)
    with pytest.raises(ValueError, match=r"'label'.*got 'digit'"):
        td.plots.gallery(top, top, IMAGES, IMAGES, label="digit")
    with pytest.raises(ValueError, match=r"target in \[0, 8\), got 99"):
        td.plots.gallery(top, top, IMAGES, IMAGES, targets=[0, 99, -1])
    with pytest.raises(ValueError, match=r"target in \[0, 3\), got 3"):
        td.plots.gallery(top, top, IMAGES, IMAGES[:3], targets=[3])
    with pytest.raises(ValueError, match=r"got 1 images and the ranked sample \d+"):
        td.plots.gallery(top, top, IMAGES[:1], IMAGES)


@pytest.mark.parametrize(
    ("values", "exponent"), [([3e-4, -2e-5], -4), ([-12.0], 1), ([0.0], 0), ([np.nan, 1.0], 0)]
)
def test_power_of_ten(values: list[float], exponent: int) -> None:
    assert td.plots.power_of_ten(xr.DataArray(values)) == exponent


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


def test_lds__of_several_scores_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'lds' .*got \('target', 'estimator'\)"):
        td.plots.lds(lds_result(2))


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
        td.plots.damping(td.damping(FEATURES, damping=td.Absolute(1)))
