"""featurize: labels, provenance, and errors that a user can act on."""

from __future__ import annotations

import re
from pathlib import Path

import cloudpickle
import dask
import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn

import trakdask as td
from trakdask.arrays.weights import row_norms
from trakdask.models import checkpoints
from trakdask.provenance import as_values


def build() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def model(n: int = 2, **options) -> td.Model:
    states = {}
    for seed in range(n):
        torch.manual_seed(seed)
        states[f"c{seed}"] = build().state_dict()
    return td.Model(build, states, **options)


def samples(n: int = 20, chunks: int = 8, **coords) -> xr.Dataset:
    x = np.random.default_rng(0).standard_normal((n, 2, 3)).astype("f4")
    return td.from_arrays({"image": x}, coords={"label": np.arange(n) % 3, **coords}, chunks=chunks)


def test_featurize__labels_chunks_and_provenance() -> None:
    projector = td.Rademacher(proj_dim=32, seed=4)
    features = td.featurize(samples(), model(), projector=projector)
    assert features.feature.dims == ("sample", "proj_dim", "checkpoint")
    assert features.feature.chunks == ((8, 8, 4), (32,), (1, 1))
    assert features.out_to_loss.chunks == ((8, 8, 4), (1, 1))
    assert {str(v.dtype) for v in features.drop_vars("feature_norm").data_vars.values()} == {
        "float32"
    }
    assert features.checkpoint.values.tolist() == ["c0", "c1"]
    np.testing.assert_array_equal(features.label, np.arange(20) % 3)
    assert "sample" not in features.indexes
    attrs = as_values(features.attrs)
    assert attrs["projector"] == projector.spec()
    assert attrs["task"] == repr(td.tasks.ImageClassification())
    assert list(attrs["parameters"]) == ["1.weight", "1.bias", "3.weight", "3.bias"]
    assert attrs["gradients"] == "hooks"
    assert attrs["gradients_reason"] == "all selected parameters belong to layers"
    assert [len(digest) for digest in attrs["checkpoints"].values()] == [64, 64]
    ids = {name: int(digest[:8], 16) for name, digest in attrs["checkpoints"].items()}
    assert attrs["checkpoint_ids"] == ids


def test_featurize__checkpoints_join_in_any_order() -> None:
    """A checkpoint's matrix follows its content, not its place."""
    whole = td.featurize(samples(), model()).feature.values
    torch.manual_seed(1)
    alone = td.featurize(samples(), td.Model(build, {"x": build().state_dict()})).feature.values
    np.testing.assert_array_equal(alone[:, :, 0], whole[:, :, 1])


def test_featurize__one_pass_makes_all_three_variables() -> None:
    calls = []

    class Counting(td.tasks.ImageClassification):
        def out_to_loss(self, forward, batch):
            calls.append(len(batch["image"]))
            return super().out_to_loss(forward, batch)

    features = td.featurize(samples(), model(task=Counting()))
    features.compute(scheduler="sync")
    # The first micro-batch is checked by one more pass, and so is the first larger one.
    assert 6 < sum(n > 2 for n in calls) <= 6 + 2


def test_featurize__norms_are_those_of_features_whatever_the_chunks() -> None:
    for chunks in (8, 3):
        found = td.featurize(samples(chunks=chunks), model(), projector=td.SJLT(32)).compute()
        assert found.feature_norm.dtype == np.float64
        alone = [row_norms(row[None]) for row in found.feature.values]
        np.testing.assert_array_equal(found.feature_norm, np.concatenate(alone))


def test_featurize__compute_reads_the_weights_of_each_checkpoint_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / f"c{seed}.pt" for seed in range(4)]
    for seed, path in enumerate(paths):
        torch.manual_seed(seed)
        torch.save(build().state_dict(), path)
    made = td.Model(build, paths)
    checkpoints._states.by_digest.clear()
    reads = []
    read = checkpoints.read_content
    monkeypatch.setattr(checkpoints, "read_content", lambda path: reads.append(path) or read(path))
    features = td.featurize(samples(32, chunks=2), made, projector=td.Rademacher(proj_dim=4))
    assert features.feature.data.numblocks == (16, 1, 4)
    features.compute(scheduler="threads", num_workers=2)
    assert sorted(reads) == list(map(str, paths))


@pytest.mark.parametrize("chunks", [500, 20])
def test_featurize__graph_holds_weights_and_data_once(chunks: int) -> None:
    big = nn.Linear(1000, 1000)
    x = np.zeros((2000, 1000), "f4")
    data = td.from_arrays({"image": x}, coords={"label": np.zeros(2000, int)}, chunks=chunks)
    features = td.featurize(data, td.Model(big))
    graph = dict(features.feature.__dask_graph__())  # all tasks, as a scheduler has them
    sent = sum(len(cloudpickle.dumps(task)) for task in graph.values())
    assert sent < 12_100_000 + 10_000 * features.feature.data.npartitions


class _WithState(nn.Module):
    """Has a tensor in a buffer, and one that nothing names; layers refuse inputs of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)
        self.register_buffer("scale", torch.full((5,), 2.0), persistent=False)
        self.state = [torch.linspace(0, 1, 5)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second((self.first(x.flatten(1)) * self.scale + self.state[0]).tanh())


@pytest.mark.parametrize("gradients", ["hooks", "vmap", "loop"])
def test_featurize__dtype_is_that_of_all_tensors(gradients: str) -> None:
    torch.manual_seed(0)
    model = td.Model(_WithState())
    options = {"projector": td.Identity(), "gradients": gradients}
    expected = td.featurize(samples(), model, dtype="float64", **options).compute()
    for dtype, tolerance in (("float32", 1e-5), ("bfloat16", 5e-2), ("float16", 1e-2)):
        found = td.featurize(samples(), model, dtype=dtype, **options).compute()
        assert found.attrs["dtype"] == dtype
        assert {str(v.dtype) for v in found.drop_vars("feature_norm").data_vars.values()} == {
            "float32"
        }
        for name in ("feature", "output", "out_to_loss"):
            error = np.linalg.norm(found[name] - expected[name]) / np.linalg.norm(expected[name])
            assert 0 < error < tolerance


@pytest.mark.parametrize(
    ("gradients", "scheduler"), [("hooks", "threads"), ("vmap", "sync"), ("loop", "threads")]
)
def test_featurize__autocast_of_the_caller_goes_with_the_tasks(
    gradients: str, scheduler: str
) -> None:
    options = {"projector": td.Identity(), "gradients": gradients}
    expected = td.featurize(samples(), model(), **options).compute(scheduler=scheduler)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lazy = td.featurize(samples(), model(), **options)
    found = lazy.compute(scheduler=scheduler)
    assert (expected.attrs["autocast"], found.attrs["autocast"]) == ("off", "bfloat16")
    error = np.linalg.norm(found.feature - expected.feature) / np.linalg.norm(expected.feature)
    assert 1e-4 < error < 5e-2
    assert not torch.is_autocast_enabled("cpu")


class _OneByOne(nn.Module):
    """Calls its layer once for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.head(each) for each in x.flatten(1)])


class _FixedNegatives(nn.Module):
    """Compares pictures with texts, and with texts that all samples share."""

    def __init__(self, grad: bool = True) -> None:
        super().__init__()
        self.tower, self.negatives = nn.Linear(6, 3), torch.randn(50, 6)
        self.grad = grad

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tower(x.flatten(1))
        with torch.set_grad_enabled(self.grad and torch.is_grad_enabled()):
            negatives = self.tower(self.negatives)
        return torch.stack([x[:, 0], x[:, 1], (x @ negatives.T).logsumexp(1)], 1)


@pytest.mark.parametrize(
    ("module", "words", "on_error"),
    [
        (_OneByOne, "calls of layer 'head'.*try gradients='vmap', or 'loop'", "record"),
        (_FixedNegatives, "try gradients='vmap', or 'loop'", "raise"),
    ],
)
def test_featurize__model_that_hooks_cannot_follow(
    module, words: str, on_error: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = td.Model(module())
    expected = compute(model, gradients="loop").feature
    found = compute(model, on_error=on_error).feature
    np.testing.assert_allclose(found, expected, atol=1e-5 * abs(expected).max())
    (said,) = (line for line in caplog.messages if line.startswith("gradients by "))
    assert re.match("gradients by vmap, which takes .* as long .*because hooks fail", said)
    with pytest.raises(td.errors.BlockError, match=f"(?s){words}"):  # what was asked for stays
        compute(model, gradients="hooks")


def test_hooks__of_calls_without_gradients() -> None:
    model = td.Model(_FixedNegatives(grad=False))
    found, expected = (compute(model, gradients=engine).feature for engine in ("hooks", "loop"))
    np.testing.assert_allclose(found, expected, atol=1e-5 * abs(expected).max())


def compute(model: td.Model, data: xr.Dataset | None = None, **options) -> xr.Dataset:
    data = samples() if data is None else data
    return td.featurize(data, model, projector=td.Identity(), **options).compute(scheduler="sync")


def test_featurize__torch_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with dask.config.set(scheduler="threads"):
            td.featurize(samples(), model()).feature.compute()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
