"""Checkpoints of random halves: what they are trained on, resuming, and mistakes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn

import trakdask as td
from trakdask.errors import BlockError, StoreMismatchError

N = 30
train_on_halves = td.evaluate.train_on_halves


class Remember:
    """Return a model whose weights say what it was trained on, and note each training."""

    def __init__(self, log: Path, returns: str = "module") -> None:
        self.log, self.returns = log, returns

    def __call__(self, positions: np.ndarray, seed: int) -> object:
        with self.log.open("a") as file:
            file.write(f"{seed}\n")
        if self.returns == "nothing":
            return None
        model = nn.Linear(N, 2)
        with torch.no_grad():
            model.weight.zero_()
            model.weight[0, positions] = 1.0
        return model if self.returns == "module" else model.state_dict()


@pytest.fixture
def samples() -> xr.Dataset:
    image = np.random.default_rng(0).normal(size=(N, N)).astype("f4")
    return td.from_arrays({"image": image}, coords={"label": np.arange(N) % 2})


@pytest.mark.parametrize("returns", ["module", "state_dict"])
def test_masks_say_what_models_were_trained_on(samples, tmp_path, returns: str) -> None:
    train = Remember(tmp_path / "log", returns)
    checkpoints, known = train_on_halves(train, samples, tmp_path / "m", n=4, progress=False)
    assert list(checkpoints) == ["half-0", "half-1", "half-2", "half-3"]
    for name, path in checkpoints.items():
        weight = torch.load(path)["weight"][0].numpy() == 1
        assert weight.sum() == N // 2
        np.testing.assert_array_equal(known.trained_on.sel(checkpoint=name), weight)
    features = td.featurize(known, td.Model(nn.Linear(N, 2), checkpoints), td.SJLT(proj_dim=8))
    np.testing.assert_array_equal(features.trained_on.values, known.trained_on.values.T)


def test_what_is_there_is_not_trained_again(samples, tmp_path) -> None:
    train = Remember(tmp_path / "log")
    few, first = train_on_halves(train, samples, tmp_path / "m", n=2, progress=False)
    more, known = train_on_halves(train, samples, tmp_path / "m", n=3, progress=False)
    seeds = (tmp_path / "log").read_text().split()
    assert len(seeds) == len(set(seeds)) == 3
    assert few.items() < more.items()
    xr.testing.assert_equal(first.trained_on, known.trained_on[:2])


def test_other_samples_or_another_recipe_are_refused(samples, tmp_path) -> None:
    train, folder = Remember(tmp_path / "log"), tmp_path / "m"
    train_on_halves(train, samples, folder, n=1, progress=False)
    for other in ({"seed": 1}, {"tag": "longer"}):
        with pytest.raises(StoreMismatchError, match=next(iter(other))):
            train_on_halves(train, samples, folder, n=1, progress=False, **other)
    with pytest.raises(StoreMismatchError, match="samples"):
        train_on_halves(train, samples.isel(sample=slice(9)), folder, n=1, progress=False)


def test_changed_labels_are_noticed__new_metadata_are_not(samples, tmp_path) -> None:
    train, folder = Remember(tmp_path / "log"), tmp_path / "m"
    _, known = train_on_halves(train, samples, folder, n=1, progress=False)
    described = known.assign_coords(origin=("sample", ["web"] * N))
    train_on_halves(train, described, folder, n=2, progress=False)
    corrected = known.assign_coords(label=1 - known.label)
    with pytest.warns(UserWarning, match="labels.*not trained again.*another folder"):
        train_on_halves(train, corrected, folder, n=2, progress=False)


def test_errors_name_the_half(samples, tmp_path) -> None:
    train = Remember(tmp_path / "log", "nothing")
    with pytest.raises(BlockError, match=r"half 0 \(15 samples\).*return model"):
        train_on_halves(train, samples, tmp_path / "m", n=1, progress=False)


def test_lazy_samples_may_be_read_while_training(samples, tmp_path, process_client) -> None:
    """On a cluster whose threads all train, nobody would be left to compute them."""

    def train(positions: np.ndarray, seed: int) -> nn.Module:
        model = nn.Linear(N, 2)
        model.weight.data[0] = torch.from_numpy(samples.image.values[positions].mean(axis=0))
        return model

    checkpoints, _ = train_on_halves(train, samples, tmp_path / "m", n=4, progress=False)
    assert all(Path(path).exists() for path in checkpoints.values())
