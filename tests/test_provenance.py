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
    projector = td.fits.curvature(samples, model, leading=2).then(td.SJLT(4))
    features = td.featurize(samples, model, projector)
    features.to_netcdf(tmp_path / "f.nc")
    again = xr.open_dataset(tmp_path / "f.nc")
    assert as_values(again.attrs)["projector"] == projector.spec()
    like = td.featurize(samples, model, like=again)
    np.testing.assert_array_equal(like.feature, features.feature)


IDS = np.arange(24).reshape(6, 4) % 7


class Language(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(input_ids))


def older(features: xr.Dataset) -> xr.Dataset:
    """Return features with the attrs of the time when tasks were only text in them."""
    attrs = {k: v for k, v in features.attrs.items() if k not in ("task_fields", "label")}
    if attrs.get("loss_kind") != "squared error":
        attrs.pop("loss_kind", None)
    made = features.copy()
    made.attrs = attrs
    return made


OLDER = {
    "classification": (
        td.tasks.Classification(("input_ids",)), {"label": np.arange(6) % 3}, None,
        "Classification(inputs=('input_ids',), label='label', temperature=1.0, positional=True)",
    ),
    "regression": (
        td.tasks.Regression(("input_ids",)), {"y": np.arange(6.0)}, None,
        "Regression(inputs=('input_ids',), target='y', positional=True)",
    ),
    "a token of a text": (
        td.tasks.CausalLM(("input_ids",)), {"at": np.arange(6) % 3 + 1},
        td.tasks.CausalLM(("input_ids",), position="at"),
        "CausalLM(inputs=('input_ids',), labels=None, position=None, ignore_index=-100, "
        "positional=False)",
    ),
    "preferences": (
        td.tasks.Preference(), {"chosen_input_ids": IDS, "rejected_input_ids": IDS[::-1]}, None,
        "Preference(beta=0.1, language=CausalLM(inputs=('input_ids',), labels=None, position=None, "
        "ignore_index=-100, positional=False), reference=())",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:scores are made from 1 checkpoint")
@pytest.mark.parametrize("case", OLDER)
def test_older_features__are_compared_scored_and_appended_to(case: str, tmp_path: Path) -> None:
    task, arrays, of_targets, text = OLDER[case]
    module = Language()
    if case in ("classification", "regression"):
        module = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(4, 3 if len(case) > 10 else 1)
        )
        arrays = {"input_ids": IDS.astype("f4"), **arrays}
    samples = td.from_arrays({"input_ids": IDS, **arrays})
    model, others = td.Model(module, task=task), td.Model(module, task=of_targets or task)
    train = older(td.featurize(samples, model, projector=td.Identity()).compute())
    assert train.attrs["task"] == text
    targets = td.featurize(samples, others, like=train)
    assert td.score(train, targets, td.Trak(0.1)).shape == (6, 6)
    target = targets if of_targets else train
    if case != "a token of a text":
        loss = [td.metric(ds.output, ds, "loss").values for ds in (target, targets)]
        np.testing.assert_array_equal(*loss)
    else:
        with pytest.raises(ValueError, match="loss_kind is 'other'"):
            td.metric(train.output, train, "loss")
    store = tmp_path / "train.zarr"
    td.save(train, store, progress=False)
    more = td.from_arrays({name: array.values[:4] + 0 for name, array in samples.items()})
    more = td.featurize(more, model, like=td.open(store))
    appended = td.save(more, store, append_dim="sample", progress=False)
    assert appended.sizes["sample"] == 10


def test_require_comparable__options_that_came_later_count() -> None:
    samples = td.from_arrays({"x": np.eye(4, dtype="f4"), "label": np.arange(4) % 3})
    module = torch.nn.Linear(4, 3)
    plain, weighted = (
        td.featurize(samples, td.Model(module, task=task), projector=td.Identity())
        for task in (td.tasks.Classification(), td.tasks.Classification(weights=[1, 2, 3]))
    )
    for before in (plain, older(plain)):
        with pytest.raises(StoreMismatchError, match=r"task\['weights'\]"):
            require_comparable(before, weighted)
