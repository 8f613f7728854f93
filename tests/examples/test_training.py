"""Oracle: a second training run, and the share of correct labels counted one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from trakdask.examples import (
    classifier_accuracy,
    digits_arrays,
    digits_cnn,
    digits_mlp,
    train_classifier,
)


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
