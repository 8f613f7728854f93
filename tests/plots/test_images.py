"""Images as they are drawn: the same pixels, whatever the order of channels and the range."""

from __future__ import annotations

import numpy as np
import pytest

from trakdask.plots.galleries import as_colours

RNG = np.random.default_rng(0)
LAST = RNG.random((2, 6, 5, 3))
LAST[0, 0, 0], LAST[1, 0, 0] = 0, 1  # so that the range is known
FIRST = np.moveaxis(LAST, -1, 1)
MEAN, STD = np.array([0.4, 0.5, 0.6]), np.array([0.2, 0.25, 0.5])


@pytest.mark.parametrize(
    ("images", "tolerance"),
    [
        (LAST, 0),
        (FIRST, 0),
        (FIRST * 2 - 1, 1e-6),
        (FIRST * 255, 1e-6),
        (np.rint(LAST * 255).astype("u1"), 0.002),
        (FIRST * 7 - 3, 1e-6),
    ],
)
def test_as_colours__of_any_range(images: np.ndarray, tolerance: float) -> None:
    for drawn, expected in zip(as_colours(list(images), None), LAST, strict=True):
        np.testing.assert_allclose(drawn, expected, atol=tolerance)


def test_as_colours__undoes_normalization() -> None:
    scale = (MEAN, list(STD))
    for drawn, expected in zip(as_colours(list((LAST - MEAN) / STD), scale), LAST, strict=True):
        np.testing.assert_allclose(drawn, expected, atol=1e-12)
    grey = LAST[..., 0]
    (drawn,) = as_colours([(grey[:1] - 0.3) / 2], (0.3, 2))
    np.testing.assert_allclose(drawn, grey[0])


def test_as_colours__grey_keeps_its_units() -> None:
    grey = RNG.standard_normal((4, 5))
    for image in (grey, grey[None], grey[..., None]):
        (drawn,) = as_colours([image], None)
        np.testing.assert_array_equal(drawn, grey)
