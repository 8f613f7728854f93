"""How far the scores of several checkpoints agree."""

from __future__ import annotations

import numpy as np


def mean_agreement(scores: np.ndarray) -> np.ndarray:
    """Return the mean correlation between two checkpoints, (group,) float64; 0 of one.

    Parameters
    ----------
    scores
        (sample, target, group, checkpoint), where target i is sample i: this score is left out,
        because training draws it near to its sample. So is the mean of each target.

    Examples
    --------
    >>> one = np.random.default_rng(0).standard_normal((9, 4, 1, 1))
    >>> mean_agreement(np.concatenate([one, 2 * one], -1)).round(6).tolist()
    [1.0]
    """
    n_samples, n_targets, n_groups, n = scores.shape
    others = np.arange(n_samples)[:, None] != np.arange(n_targets)
    wide = scores.astype(np.float64) * others[..., None, None]
    wide = (wide - wide.sum(0) / (n_samples - 1)) * others[..., None, None]
    flat = np.moveaxis(wide, 2, 0).reshape(n_groups, -1, n)
    length = np.linalg.norm(flat, axis=1, keepdims=True)
    flat /= np.where(length > 0, length, 1)
    products = flat.mT @ flat
    total = products.sum((1, 2)) - np.trace(products, axis1=1, axis2=2)
    return total / max(n * (n - 1), 1)
