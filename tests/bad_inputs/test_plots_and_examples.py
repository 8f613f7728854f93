"""Bad inputs of plots.* and examples.*."""

from __future__ import annotations

import numpy as np

import trakdask as td
from tests.bad_inputs.bad_input import changed, one_test

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
)
ROWS = [
    *changed("plots.damping", damping_without_curve, ("no curve", {}, ValueError, ["curve"])),
    *changed(
        "plots.gallery", gallery,
        ("too few images", {"images": IMAGES[:1]}, IndexError, ["images=", "got 1"]),
        ("too few targets' images", {"target_images": IMAGES[:1]}, IndexError, ["target_images=", "got 1", "sample 3"]),
        ("no targets", {"targets": []}, ValueError, ["at least one", "targets=[0]"]),
        ("targets that are not there", {"targets": [0, 99]}, IndexError, ["below 4", "got 99"]),
    ),
    *changed("examples.digits", td.examples.digits, *SPLIT),
]  # fmt: skip

test_bad_input = one_test(ROWS)
