"""Oracle: a second training run, and the share of correct labels counted one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from trakdask.examples import digits_arrays, digits_cnn, digits_mlp
from trakdask.examples.training import classifier_accuracy, train_classifier


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


def test_train_classifier__one_sample_and_one_step() -> None:
    (images, labels), _ = digits_arrays()
    state = train_classifier(digits_mlp, images[:1], labels[:1], seed=0, epochs=1)
    assert all(tensor.isfinite().all() for tensor in state.values())


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


def test_train_classifier__checking_labels_does_not_change_the_weights() -> None:
    """The class count is asked for in evaluation mode: running statistics stay as they are."""

    def build() -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Flatten(),
            torch.nn.BatchNorm1d(64),
            torch.nn.Dropout(),
            torch.nn.Linear(64, 10),
        )

    (images, labels), _ = digits_arrays()
    state = train_classifier(build, images[:64], labels[:64], seed=0, epochs=2, batch_size=32)
    assert state["1.num_batches_tracked"] == 4


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
