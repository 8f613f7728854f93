"""Specs are compared as JSON, field by field, and the first difference is named."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

import trakdask as td
from trakdask.errors import StoreMismatchError
from trakdask.models.tasks.protocol import task_fields
from trakdask.provenance import as_text, as_values, require_comparable, require_same, spec
from trakdask.testing import simulate_features

SPEC = {**as_values(simulate_features().attrs), "parameters": {"w": [2, 3]}}


@pytest.mark.parametrize("name", ["checkpoints", "checkpoint_ids", "fit"])
def test_require_same__names_the_checkpoints_where_one_is_missing(name: str) -> None:
    """Hashes of the weights tell nobody which checkpoint is missing."""
    both, one = {name: {"a": "hash", "b": "hash"}}, {name: {"a": "hash"}}
    words = re.escape(f"{name} (their names): expected ['a', 'b'], got ['a']; try")
    with pytest.raises(StoreMismatchError, match=words):
        require_same({**SPEC, **one}, {**SPEC, **both}, what="both")


def features_of(task: object) -> xr.Dataset:
    """Return features that say what a task is; a text is all that older ones said."""
    said = {"task": task} if isinstance(task, str) else {"task": f"{task}"}
    fields = {} if isinstance(task, str) else {"task_fields": task_fields(task)}
    return simulate_features().assign_attrs(as_text(said | fields))


LM, Images = td.tasks.CausalLM, td.tasks.Classification


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (LM("ids"), LM("ids", position="token")),
        (LM("ids", position="place"), LM("ids", position="token")),
        (Images(("image",)), Images(("x",), label="y")),
        ("Own(position='a')", "Own(position='a')"),
        (f"{Images('image')}", Images(("image",))),
    ],
)
def test_require_comparable__where_the_data_are_makes_no_difference(one, two) -> None:
    require_comparable(features_of(one), features_of(two))
    require_comparable(features_of(two), features_of(one))


@pytest.mark.parametrize(
    ("one", "two", "words"),
    [
        (LM("ids"), LM("ids", positional=True), r"task\['positional'\]: expected False, got"),
        (
            Images(("x",)),
            Images(("y",), temperature=2.0),
            r"'temperature'\]: expected 1.0, got 2.0",
        ),
        (LM("ids"), td.tasks.Regression("ids"), "expected 'CausalLM', got 'Regression'"),
        ("Own(position='a')", "Own(position='b')", r"task: expected .Own.*'a'.*got .Own.*'b'"),
        ("simulated", LM("ids"), "task: expected 'simulated', got .CausalLM"),
        (Images(("x",)), Images(("x",), weights=[1.0, 2.0]), r"task\['weights'\]"),
    ],
)
def test_require_comparable__the_field_that_differs_is_named(one, two, words: str) -> None:
    ours, theirs = features_of(one), features_of(two)
    with pytest.raises(StoreMismatchError, match=words):
        require_comparable(ours, theirs)
    # A store is made with one task, whose fields must all agree.
    with pytest.raises(StoreMismatchError, match="differ in task"):
        require_same({**SPEC, **spec(theirs)}, {**SPEC, **spec(ours)}, what="both")


@pytest.mark.filterwarnings("ignore:scores are made from 1 checkpoint")
def test_features__can_be_written_as_netcdf(tmp_path: Path) -> None:
    """Mappings in attrs are JSON text, because netCDF has none."""
    x = np.random.default_rng(0).normal(size=(12, 4)).astype("f4")
    samples = td.from_arrays({"image": x, "label": np.arange(12) % 3})
    model = td.Model(torch.nn.Linear(4, 3), task="image_classification")
    projector = td.fits.curvature(samples, model, leading=2).then(td.SJLT(4))
    features = td.featurize(samples, model, projector)
    features.to_netcdf(tmp_path / "f.nc")
    again = xr.open_dataset(tmp_path / "f.nc")
    assert as_values(again.attrs)["projector"] == projector.spec()
    like = td.featurize(samples, model, like=again)
    np.testing.assert_array_equal(like.feature, features.feature)


def test_stores__can_be_written_as_netcdf_and_asked_from_there(tmp_path: Path) -> None:
    features = td.testing.simulate_features(n_samples=60, proj_dim=4, n_checkpoints=3)
    saved = td.save(features, tmp_path / "f.zarr", estimator="soft", progress=False)
    saved.to_netcdf(tmp_path / "f.nc")
    again = xr.open_dataset(tmp_path / "f.nc", chunks={"sample": 16, "checkpoint": 1})
    scores = td.score(saved, features).compute()
    scores.to_netcdf(tmp_path / "scores.nc")
    for copy in (again, xr.open_zarr(tmp_path / "f.zarr")):  # whose attrs are not all texts
        np.testing.assert_array_equal(td.score(copy, features).compute(), scores)
    td.gram(features).to_netcdf(tmp_path / "gram.nc")
