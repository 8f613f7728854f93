"""Bad inputs of plots.*, examples.* and testing.*."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import trakdask as td
from tests.bad_inputs.bad_input import BadInput, changed, check, parametrize

FEATURES = td.testing.simulate_features(20, 4, 1)
IMAGES = np.zeros((20, 4, 4))


def gallery(**options: object) -> object:
    top = td.top_k(td.score(FEATURES, FEATURES[{"sample": slice(4)}], td.Trak(damping=1.0)), 3)
    given = {"helpful": top, "harmful": top, "images": IMAGES, "target_images": IMAGES, **options}
    return td.plots.gallery(**given)


def damping_without_curve() -> object:
    return td.plots.damping(td.damping(FEATURES, td.Trak(damping=td.Absolute(1.0))))


SPLIT = (
    ("no targets", {"n_target": 0}, ValueError, ["n_target", "0"]),
    ("all targets", {"n_target": 5000}, ValueError, ["n_target", "5000"]),
    ("a share", {"n_target": 0.1}, TypeError, ["n_target", "0.1"]),
    ("seed -1", {"seed": -1}, ValueError, ["seed", "-1"]),
)
ROWS = [
    *changed("plots.damping", damping_without_curve, ("no curve", {}, ValueError, ["curve"])),
    *changed(
        "plots.gallery", gallery,
        ("too few images", {"images": IMAGES[:1]}, IndexError, ["1"]),
        ("flat images", {"images": IMAGES[:, 0]}, TypeError, ["(4,)"]),
        ("no such colour map", {"cmap": "grai"}, ValueError, ["'grai'"]),
        ("targets that are not there", {"targets": [0, 99]}, IndexError, ["4"]),
        ("unknown label", {"label": "digit"}, KeyError, ["'digit'"]),
        ("n_shown 0", {"n_shown": 0}, ValueError, ["n_shown", "0"]),
        ("n_shown 2.5", {"n_shown": 2.5}, TypeError, ["n_shown", "2.5"]),
    ),
    *changed("examples.digits", td.examples.digits, *SPLIT),
    *changed("examples.digits_arrays", td.examples.digits_arrays, *SPLIT),
    *changed("examples.mnist", td.examples.mnist, *SPLIT),
    *changed(
        "testing.simulate_features", td.testing.simulate_features,
        ("no samples", {"n_samples": 0}, ValueError, ["n_samples", "0"]),
        ("proj_dim -1", {"proj_dim": -1}, ValueError, ["proj_dim", "-1"]),
        ("chunks is a tuple", {"chunks": (8, 8)}, TypeError, ["chunks", "(8, 8)"]),
    ),
]  # fmt: skip


@parametrize(ROWS)
def test_bad_input(row: BadInput, tmp_path: Path) -> None:
    check(row, tmp_path)
