"""Train small classifiers in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trakdask.checks import require_integer, require_number, shown

__all__ = ["build_model", "classifier_accuracy", "require_training", "train_classifier"]

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

    Raises
    ------
    TypeError, ValueError
        If ``build`` does not return a model for these images, images and labels do not fit each
        other or the model, or an option is out of range.

    Notes
    -----
    Runs on one thread, so equal settings give equal weights on one machine and torch version.
    The global random state and the number of threads are restored afterwards.
    """
    _require_data(images, labels)
    require_training(seed, epochs, batch_size, lr)
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = build_model(build)
            _require_classes(model, images, labels)
            _fit(
                model.train(),
                torch.from_numpy(images),
                torch.from_numpy(labels),
                epochs,
                batch_size,
                lr,
            )
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

    Raises
    ------
    TypeError, ValueError
        If ``build`` does not return a model for these images, or ``state``, images and labels do
        not fit it.
    """
    _require_data(images, labels)
    model = build_model(build).eval()
    _load_state(model, state)
    _require_classes(model, images, labels)
    with torch.no_grad():
        predicted = model(torch.from_numpy(images)).argmax(dim=1)
    return float((predicted == torch.from_numpy(labels)).float().mean())


def require_training(seed: int, epochs: int, batch_size: int, lr: float) -> None:
    """Reject options of :func:`train_classifier` that are out of range."""
    require_integer("seed", seed, 0, 2**63, remedy="try seed=0")
    require_integer("epochs", epochs, 1, remedy="try epochs=12")
    require_integer("batch_size", batch_size, 1, remedy="try batch_size=64")
    require_number("lr", lr, low=0, remedy="try lr=3e-3")


def _require_data(images: object, labels: object) -> None:
    """Reject anything but finite float32 images, or int64 tokens, and as many int64 labels."""
    tokens = isinstance(images, np.ndarray) and images.dtype == np.int64
    inputs = np.int64 if tokens else np.float32
    for name, array, dtype in (("images", images, inputs), ("labels", labels, np.int64)):
        if not isinstance(array, np.ndarray):
            raise TypeError(
                f"expected {name} to be a NumPy array, got a {type(array).__name__}; try "
                f"np.asarray({name})"
            )
        if array.dtype != dtype:
            raise TypeError(
                f"expected {name} of dtype {np.dtype(dtype)}, got {array.dtype}; try "
                f"{name}.astype('{np.dtype(dtype)}')"
            )
    assert isinstance(images, np.ndarray)
    assert isinstance(labels, np.ndarray)
    if labels.ndim != 1 or not len(labels) or images.shape[:1] != labels.shape:
        raise ValueError(
            "expected images (n, ...) and labels (n,) of at least one sample, got shapes "
            f"{images.shape} and {labels.shape}; try images[:n] and labels[:n]"
        )
    finite = np.isfinite(images.reshape(len(images), -1)).all(axis=1)
    if not finite.all():
        raise ValueError(
            f"expected finite images, got NaN or infinity in {int((~finite).sum())}, the first at "
            f"sample {int(np.argmin(finite))}; try np.nan_to_num(images)"
        )


def build_model(build: object) -> nn.Module:
    """Return the model that ``build()`` returns.

    Raises
    ------
    TypeError
        If ``build`` is not a function without arguments that returns a model.
    """
    remedy = "try build=td.examples.digits_mlp, without calling it"
    if isinstance(build, nn.Module) or not callable(build):
        raise TypeError(
            f"expected build to be a function that returns a model, got {shown(build)}; {remedy}"
        )
    try:
        model = build()
    except TypeError as err:
        raise TypeError(
            f"expected build to take no arguments, got {shown(build)} ({err}); {remedy}"
        ) from err
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected build to return an nn.Module, got {shown(model)}; {remedy}")
    return model


def _require_classes(model: nn.Module, images: Images, labels: Labels) -> None:
    """Reject images that the model cannot process, and labels that it has no logit for."""
    model.eval()
    try:
        with torch.no_grad():
            logits = model(torch.from_numpy(images[:1]))
    except (RuntimeError, ValueError, TypeError) as err:
        raise ValueError(
            f"expected images that the model can process, got shape {images.shape} ({err}); try "
            "images of the shape that the model was written for"
        ) from err
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        returned = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(
            f"expected the model to return logits (n, classes), got {returned} for one image; try "
            "td.examples.digits_mlp"
        )
    n_classes = logits.shape[1]
    if (bad := np.flatnonzero((labels < 0) | (labels >= n_classes))).size:
        raise ValueError(
            f"expected label in 0..{n_classes - 1} ({n_classes} classes), got {labels[bad[0]]} at "
            f"sample {bad[0]}; try images[labels < {n_classes}]"
        )


def _load_state(model: nn.Module, state: object) -> None:
    remedy = "try what td.examples.train_classifier returned for the same build"
    if not isinstance(state, Mapping):
        raise TypeError(f"expected state to be a state dict, got {shown(state)}; {remedy}")
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as err:
        reason = " ".join(str(err).split())
        raise ValueError(
            f"expected the state dict of this model, got other tensors ({reason}); {remedy}"
        ) from err


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
