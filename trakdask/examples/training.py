"""Train small classifiers in memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

__all__ = ["classifier_accuracy", "train_classifier"]

Images = NDArray[np.float32]
Labels = NDArray[np.int64]


def train_classifier(
    build: Callable[[], nn.Module],
    images: Images,
    labels: Labels,
    *,
    seed: int,
    epochs: int = 12,
    batch_size: int = 64,
    lr: float = 3e-3,
) -> dict[str, Tensor]:
    """Train a classifier with Adam, a one-cycle learning rate and cross-entropy.

    Parameters
    ----------
    build
        Function that returns the untrained model; called once, after seeding.
    images
        Model inputs (n, ...), float32, or int64 for tokens.
    labels
        Classes (n,), int64.
    seed
        Seed of the initial weights and of the order of the batches.
    epochs
        Passes over the samples.
    batch_size
        Samples per step; the last batch of an epoch may be smaller.
    lr
        Highest learning rate of the cycle.

    Returns
    -------
    The trained state dict, float32 on the CPU.

    Notes
    -----
    Runs on one thread, so equal settings give equal weights on one machine and torch version.
    The global random state and the number of threads are restored afterwards.
    """
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = build().train()
            data = torch.from_numpy(images), torch.from_numpy(labels)
            _fit(model, *data, epochs, batch_size, lr)
    finally:
        torch.set_num_threads(n_threads)
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def classifier_accuracy(
    build: Callable[[], nn.Module], state: dict[str, Tensor], images: Images, labels: Labels
) -> float:
    """Compute the share of images that a trained classifier labels correctly.

    Parameters
    ----------
    build
        Function that returns the model that ``state`` belongs to.
    state
        Its state dict.
    images
        Model inputs (n, ...), float32, or int64 for tokens.
    labels
        Classes (n,), int64.

    Returns
    -------
    A number in [0, 1].
    """
    model = build().eval()
    model.load_state_dict(state)
    with torch.no_grad():
        predicted = model(torch.from_numpy(images)).argmax(dim=1)
    return float((predicted == torch.from_numpy(labels)).float().mean())


def _fit(
    model: nn.Module, images: Tensor, labels: Tensor, epochs: int, batch_size: int, lr: float
) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    steps = -(-len(images) // batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=lr, epochs=epochs, steps_per_epoch=steps
    )
    for _ in range(epochs):
        order = torch.randperm(len(images))
        for start in range(0, len(images), batch_size):
            batch = order[start : start + batch_size]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            torch.autograd.backward(loss)
            optimizer.step()
            schedule.step()
