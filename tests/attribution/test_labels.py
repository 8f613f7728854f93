"""Dimensions, coords and attrs of scores, for samples and targets with and without parts."""

from __future__ import annotations

import json

import numpy as np
import pytest
import xarray as xr

import trakdask as td
from trakdask.attribution.scores import (
    labels_of_samples,
    labels_of_scores,
    labels_of_targets,
    require_flag,
    score_attrs,
)
from trakdask.testing import simulate_features


def side(n: int, part: str | None, **coords: object) -> xr.Dataset:
    """Features with the label of each sample, and the text of each part."""
    ds = simulate_features(n, 3, 2).assign_coords(coords)
    if part is not None:
        dims = ("sample", part, "proj_dim", "checkpoint")
        text = np.array([[f"{i}.{j}" for j in range(4)] for i in range(n)])
        names = xr.Variable(("sample", part), text, {"unit": "word"})
        ds = ds.assign(feature=(dims, np.ones((n, 4, 3, 2)))).assign_coords(text=names)
    return ds.assign_coords({part: list("abcd")}) if part == "module" else ds


@pytest.mark.parametrize(
    ("of_part", "part"),
    [(None, None), ("token", None), ("module", None), (None, "token"), (None, "module")],
)
def test_labels_of_scores__are_those_of_both_sides(of_part: str | None, part: str | None) -> None:
    dims, coords = labels_of_scores(side(5, of_part), side(2, part))
    expected = {"label": ("sample",), "target_label": ("target",)}
    if of_part:
        expected |= {"text": ("sample", of_part)}
    if part:
        expected |= {"target_text": ("target", part)}
    expected |= {dim: (dim,) for dim in (of_part, part) if dim and dim.endswith("module")}
    assert dims == tuple(filter(None, ("sample", of_part, "target", part)))
    found = xr.Dataset(coords=coords)
    assert {name: coord.dims for name, coord in found.coords.items()} == expected
    if part:
        assert found.target_text[1, 3] == "1.3"
        assert found.target_text.attrs == {"unit": "word"}
    if of_part:
        assert found.coords["text"][4, 0] == "4.0"
    if part == "module":
        assert found.module.values.tolist() == list("abcd")


def test_labels_of_samples__and_of_targets_alone() -> None:
    dims, coords = labels_of_samples(side(5, "token"))
    assert dims == ("sample", "token")
    assert set(coords) == {"label", "text"}
    dims, coords = labels_of_targets(side(2, "token"))
    assert dims == ("target", "token")
    assert set(coords) == {"target_label", "target_text"}


def test_labels_of_scores__one_name_for_both_sides_is_refused() -> None:
    taken = side(5, None, target_label=("sample", np.arange(5)))
    with pytest.raises(ValueError, match="target_label"):
        labels_of_scores(taken, side(2, None))


def test_score_attrs__say_how_both_sides_were_made() -> None:
    training, targets = side(5, None), side(2, None)
    attrs = score_attrs(training, targets, {"estimator": "trak"}, may_have_failed=False)
    assert json.loads(attrs["projector"]) == {"kind": "simulated", "proj_dim": 3}
    assert json.loads(attrs["checkpoint_ids"]) == {"c0": 0, "c1": 1}
    assert {"task": "simulated", "estimator": "trak"}.items() <= attrs.items()
    assert attrs["source"] == training.attrs["source"]
    assert attrs["target_source"] == targets.attrs["source"]
    assert attrs["trakdask_version"] == td.__version__
    assert not {"parameters", "target_on_error"} & set(attrs)
    failing = score_attrs(training, targets, {}, may_have_failed=True)
    assert failing["target_on_error"] == "record"


@pytest.mark.parametrize("value", [1, None, "yes", [True]])
def test_require_flag__refuses_anything_else(value: object) -> None:
    require_flag("average", np.True_)
    with pytest.raises(TypeError, match="average"):
        require_flag("average", value)
