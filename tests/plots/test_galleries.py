"""Galleries: their pictures, for which targets, and in which order."""

from __future__ import annotations

import pickle

import matplotlib.pyplot as plt
import numpy as np
import pytest
from IPython.core.formatters import DisplayFormatter
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import trakdask as td
from trakdask.plots.galleries import as_colours
from trakdask.testing import simulate_features

FEATURES = simulate_features(n_samples=30, proj_dim=6)
TARGETS = simulate_features(n_samples=8, proj_dim=6, seed=1)
SCORES = td.score(FEATURES, TARGETS)
IMAGES = np.arange(30)[:, None, None] * np.ones((30, 4, 4))


def drawn(figure: Figure) -> list[float]:
    return [float(ax.images[0].get_array().ravel()[0]) for ax in figure.axes if ax.images]


def test_gallery__draws_target_helpful_harmful() -> None:
    helpful, harmful = td.top_k(SCORES, 4), td.top_k(SCORES, 4, largest=False)
    figure = td.plots.gallery(helpful, harmful, IMAGES, IMAGES, targets=[5, 2], n_shown=3)
    expected = []
    for target in (5, 2):
        sides = [side.position.values[target, :3] for side in (helpful, harmful)]
        expected += [target, *sides[0], *sides[1]]
    assert drawn(figure) == expected
    few = td.top_k(SCORES, 20, where="label == target_label")  # and some ranks are missing
    assert len(drawn(td.plots.gallery(few, few, IMAGES, IMAGES, targets=[0], n_shown=20))) == 31
    rgb = np.repeat(IMAGES[:, None], 3, 1) / 30
    figure = td.plots.gallery(helpful, harmful, rgb, rgb, targets=[5, 2], n_shown=3)
    np.testing.assert_allclose(drawn(figure), np.array(expected) / 30)


def test_gallery__says_label_prediction_and_score() -> None:
    top = td.top_k(SCORES, 1).compute()
    labels = TARGETS.label.values
    predictions = np.where(np.arange(8) == 2, labels, labels + 1)
    figure = td.plots.gallery(top, top, IMAGES, IMAGES, targets=[5, 2], predictions=predictions)
    assert "targets" not in figure.texts[0].get_text()
    titles = [ax.get_title() for ax in figure.axes if ax.images]
    assert titles[0] == f"{labels[5]}, read as {labels[5] + 1}"
    assert f"{labels[2]}" in titles  # predicted as labelled
    assert titles[1] == f"{top.label.values[5, 0]}  {top.score.values[5, 0]:+#.2g}"


def test_figures__are_shown_once_by_a_notebook() -> None:
    figure = td.plots.gallery(td.top_k(SCORES, 1), td.top_k(SCORES, 1), IMAGES, IMAGES)
    assert len(drawn(figure)) == 3 * 6
    assert "the first 6 of 8 targets" in figure.texts[0].get_text().replace("\n", " ")
    formatter = DisplayFormatter(active_types=["image/png"])
    formatter.formatters["image/png"].for_type(Figure, lambda _: b"drawn")
    assert plt.gcf() is figure
    for _ in range(2):  # as a result, and when a later cell names it
        assert "image/png" in formatter.format(figure)[0]
        assert not plt.get_fignums()  # the backend would show open figures again
    again = pickle.loads(pickle.dumps(figure))
    assert type(again) is type(figure) is Figure  # by whose name wandb and others know a figure
    assert len(again.axes) == len(figure.axes)


@pytest.mark.parametrize("n_shown", [1, 6])
def test_gallery__texts_do_not_overlap(n_shown: int) -> None:
    names = np.array(["a rather long label of a class", "$5 bill", "unpronounceable" * 3] * 10)
    scores = SCORES.assign_coords(
        name=("sample", names), target_name=("target", names[: SCORES.sizes["target"]])
    )
    helpful, harmful = td.top_k(scores, n_shown), td.top_k(scores, n_shown, largest=False)
    figure = td.plots.gallery(
        helpful, harmful, IMAGES, IMAGES, targets=[0, 1], label="name", n_shown=n_shown
    )
    renderer = FigureCanvasAgg(figure).get_renderer()
    texts = [*figure.texts, *(ax.title for ax in figure.axes)]
    boxes = [each.get_window_extent(renderer) for each in texts if each.get_text()]
    boxes += [ax.get_window_extent(renderer) for ax in figure.axes if ax.images]
    for i, one in enumerate(boxes):
        assert figure.bbox.x0 <= one.x0 <= one.x1 <= figure.bbox.x1
        assert figure.bbox.y0 <= one.y0 <= one.y1 <= figure.bbox.y1
        for other in boxes[:i]:
            assert not one.overlaps(other)


# ----------------- the same pixels, whatever the order of channels and the range

RNG = np.random.default_rng(0)
LAST = RNG.random((2, 6, 5, 3))
LAST[0, 0, 0], LAST[1, 0, 0] = 0, 1  # so that the range is known
FIRST = np.moveaxis(LAST, -1, 1)
GREY = LAST[..., 0]
MEAN, STD = np.array([0.4, 0.5, 0.6]), np.array([0.2, 0.25, 0.5])


@pytest.mark.parametrize(
    ("images", "scale", "expected", "tolerance"),
    [
        (LAST, None, LAST, 0),
        (FIRST, None, LAST, 0),
        (FIRST * 2 - 1, None, LAST, 1e-6),
        (FIRST * 255, None, LAST, 1e-6),
        (np.rint(LAST * 255).astype("u1"), None, LAST, 0.002),
        (FIRST * 7 - 3, None, LAST, 1e-6),
        ((LAST - MEAN) / STD, (MEAN, list(STD)), LAST, 1e-12),
        ((GREY[:, None] - 0.3) / 2, (0.3, 2), GREY, 1e-12),
        (GREY * 7 - 3, None, GREY * 7 - 3, 0),  # grey keeps its units
        (GREY[:, None] * 7, None, GREY * 7, 0),
        (GREY[..., None] * 7, None, GREY * 7, 0),
    ],
)
def test_as_colours__of_any_range(images, scale, expected, tolerance: float) -> None:
    for one, wanted in zip(as_colours(list(images), scale), expected, strict=True):
        np.testing.assert_allclose(one, wanted, atol=tolerance)
