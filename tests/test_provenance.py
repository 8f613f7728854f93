"""Specs are compared as JSON, field by field, and the first difference is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

import trakdask as td
from trakdask.errors import StoreMismatchError
from trakdask.provenance import as_values, require_comparable, require_same
from trakdask.testing import simulate_features

SPEC = {**as_values(simulate_features().attrs), "parameters": {"w": [2, 3]}}


def test_require_same__order_of_checkpoints_matters() -> None:
    """Checkpoints are paired by position."""
    turned = dict(reversed(SPEC["checkpoints"].items()))
    with pytest.raises(StoreMismatchError, match=r"checkpoints \(their order\): expected"):
        require_same({**SPEC, "checkpoints": turned}, SPEC, what="both")


LM = "CausalLM(inputs=('input_ids', 'mask'), labels=None, position={}, positional={})"


def of_tasks(one: str, two: str) -> None:
    ours, theirs = (simulate_features().assign_attrs(task=task) for task in (one, two))
    require_comparable(ours, theirs)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (LM.format(None, False), LM.format("'token'", False)),
        (LM.format("'place'", False), LM.format("'token'", False)),
        (
            "ImageClassification(inputs=('image',), label='label', positional=True)",
            "ImageClassification(inputs=('x',), label='y', positional=True)",
        ),
        (
            "TextClassification(inputs=('ids', 'attention_mask'), positional=False)",
            "TextClassification(inputs=('ids',), positional=False)",
        ),
        (
            "Regression(inputs=('x',), target='y', positional=True)",
            "Regression(inputs=('x',), target='price', positional=True)",
        ),
        ("Own(position='a')", "Own(position='a')"),
    ],
)
def test_require_comparable__where_the_data_are_makes_no_difference(one: str, two: str) -> None:
    of_tasks(one, two)
    of_tasks(two, one)


@pytest.mark.parametrize(
    ("one", "two", "words"),
    [
        (
            LM.format(None, False),
            LM.format("'token'", True),
            r"task\['positional'\]: expected False, got",
        ),
        (
            "ImageClassification(inputs=('x',), temperature=1.0, positional=True)",
            "ImageClassification(inputs=('y',), temperature=2.0, positional=True)",
            r"task\['temperature'\]: expected 1.0, got 2.0",
        ),
        ("CausalLM(inputs=('a',))", "CausalLM(inputs=('b',))", r"task\['inputs'\]: .*'a'.*'b'"),
        (LM.format(None, False), "Regression()", "expected 'CausalLM', got 'Regression'"),
        ("Own(position='a')", "Own(position='b')", r"task\['position'\]: expected 'a', got 'b'"),
        ("Own(a=1, b=f(2))", "Own(a=1, b=f(3))", r"task\['b'\]: expected 'f\(2\)', got 'f\(3\)'"),
        ("simulated", "Own(", "task: expected 'simulated', got 'Own"),
    ],
)
def test_require_comparable__the_field_that_differs_is_named(one, two, words: str) -> None:
    with pytest.raises(StoreMismatchError, match=words):
        of_tasks(one, two)
    # A store is made with one task, whose fields must all agree.
    with pytest.raises(StoreMismatchError, match="differ in task"):
        require_same({**SPEC, "task": two}, {**SPEC, "task": one}, what="both")


@pytest.mark.filterwarnings("ignore:scores are made from 1 checkpoint")
def test_features__can_be_written_as_netcdf(tmp_path: Path) -> None:
    """Mappings in attrs are JSON text, because netCDF has none."""
    x = np.random.default_rng(0).normal(size=(12, 4)).astype("f4")
    samples = td.from_arrays({"image": x, "label": np.arange(12) % 3})
    model = td.Model(torch.nn.Linear(4, 3), task="image_classification")
    projector = td.curvature(samples, model, leading=2).then(td.SJLT(4))
    features = td.featurize(samples, model, projector)
    features.to_netcdf(tmp_path / "f.nc")
    again = xr.open_dataset(tmp_path / "f.nc")
    assert as_values(again.attrs)["projector"] == projector.spec()
    like = td.featurize(samples, model, like=again)
    np.testing.assert_array_equal(like.feature, features.feature)
