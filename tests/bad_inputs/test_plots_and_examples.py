"""Bad inputs of plots.*, examples.* and testing.*."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import trakdask as td
from tests.bad_inputs.bad_input import BadInput, check, parametrize

FEATURES = td.testing.simulate_features(20, 4, 1)
IMAGES = np.zeros((20, 4, 4))


def gallery(**changed: object) -> object:
    top = td.top_k(td.score(FEATURES, FEATURES[{"sample": slice(4)}], damping=1.0), 3)
    given = {"helpful": top, "harmful": top, "images": IMAGES, "target_images": IMAGES, **changed}
    return td.plots.gallery(**given)


def damping_without_curve() -> object:
    return td.plots.damping(td.damping(FEATURES, damping=td.Absolute(1.0)))


PLOTS = [
    BadInput("plots.damping", "no curve", lambda _: damping_without_curve(), ValueError, ["curve"]),
    *(
        BadInput("plots.gallery", case, lambda _, c=changed: gallery(**c), error, words)
        for case, changed, error, words in (
            ("too few images", {"images": IMAGES[:1]}, IndexError, ["1"]),
            ("flat images", {"images": IMAGES[:, 0]}, TypeError, ["(4,)"]),
            ("no such colour map", {"cmap": "grai"}, ValueError, ["'grai'"]),
            ("targets that are not there", {"targets": [0, 99]}, IndexError, ["4"]),
            ("unknown label", {"label": "digit"}, KeyError, ["'digit'"]),
            ("n_shown 0", {"n_shown": 0}, ValueError, ["n_shown", "0"]),
            ("n_shown 2.5", {"n_shown": 2.5}, TypeError, ["n_shown", "2.5"]),
        )
    ),
]
EXAMPLES = [
    BadInput(
        f"examples.{name}", case, lambda _, n=name, c=changed: getattr(td.examples, n)(**c), *rest
    )
    for name in ("digits", "digits_arrays")
    for case, changed, *rest in (
        ("no targets", {"n_target": 0}, ValueError, ["n_target", "0", "200"]),
        ("all targets", {"n_target": 1797}, ValueError, ["n_target", "1797"]),
        ("a share", {"n_target": 0.1}, TypeError, ["n_target", "0.1"]),
        ("seed -1", {"seed": -1}, ValueError, ["seed", "-1"]),
    )
]
TESTING = [
    BadInput(
        "testing.simulate_features", case, lambda _, c=changed: td.testing.simulate_features(**c), *rest
    )
    for case, changed, *rest in (
        ("no samples", {"n_samples": 0}, ValueError, ["n_samples", "0", "64"]),
        ("proj_dim -1", {"proj_dim": -1}, ValueError, ["proj_dim", "-1"]),
        ("chunks is a tuple", {"chunks": (8, 8)}, TypeError, ["chunks", "(8, 8)"]),
    )
]  # fmt: skip
ROWS = [*PLOTS, *EXAMPLES, *TESTING]


@parametrize(ROWS)
def test_bad_input(row: BadInput, tmp_path: Path) -> None:
    check(row, tmp_path)
