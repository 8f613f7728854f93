"""Masks of the samples that models are trained on: random subsets, or all samples but one."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from trakdask import arrays
from trakdask.checks import require_integer, shown
from trakdask.evaluate.labels import SUBSET, require_fraction
from trakdask.variables import SAMPLE, coords_along


def subsets(
    samples: int | xr.Dataset | xr.DataArray,
    n_subsets: int,
    *,
    fraction: float = 0.5,
    seed: int = 0,
    by: str | np.ndarray | xr.DataArray | None = None,
) -> xr.DataArray:
    """Draw random subsets of the training samples, all of the same size.

    Parameters
    ----------
    samples
        Number of training samples, or the samples, features or scores, whose coords are copied to
        the masks.
    n_subsets
        Number of subsets.
    fraction
        Share of the samples in each subset, rounded to whole samples.
    seed
        A subset is a function of (seed, its index, number of samples, fraction): asking for more
        subsets gives the same ones and further ones.
    by
        Name of a coord, or one label per sample. Samples with the same label are in a subset
        together or not at all, and ``fraction`` is a share of the labels.

    Returns
    -------
    Lazy DataArray ``mask`` (subset, sample), bool; True where the sample is trained on.

    Raises
    ------
    ValueError
        If the subsets would contain no or all samples, or there is not one label per sample.
    KeyError
        If the samples have no such coord.

    Notes
    -----
    The linear datamodeling score is usually measured with halves of the samples. Scores that rank
    halves well do not always rank the removal of single samples well; see :func:`leave_one_out`.

    Examples
    --------
    >>> import trakdask as td
    >>> masks = td.evaluate.subsets(10, 4, fraction=0.3)
    >>> masks.sum("sample").values.tolist()
    [3, 3, 3, 3]
    >>> bool((masks == td.evaluate.subsets(10, 9, fraction=0.3)[:4]).all())
    True
    """
    n, coords = _size_and_coords(samples)
    n_subsets = require_integer("n_subsets", n_subsets, 1, remedy="try n_subsets=100")
    fraction = require_fraction("fraction", fraction)
    groups = None if by is None else _groups(coords[by] if isinstance(by, str) else by, n)
    n_drawn = n if groups is None else int(groups.max()) + 1
    size = round(fraction * n_drawn)
    if not 0 < size < n_drawn:
        raise ValueError(
            f"expected subsets of 1 to {n_drawn - 1} of the {n_drawn} "
            f"{'samples' if by is None else 'labels'}, got {size} by fraction={fraction}; try "
            "fraction=0.5"
        )
    data = arrays.subsets.random_subsets(n, n_subsets, size, seed, groups=groups)
    attrs = {"description": "trained on", "fraction": fraction, "seed": seed}
    return xr.DataArray(data, dims=(SUBSET, SAMPLE), coords=coords, name="mask", attrs=attrs)


def leave_one_out(
    samples: int | xr.Dataset | xr.DataArray, positions: np.ndarray | None = None
) -> xr.DataArray:
    """Make subsets that leave out one training sample each.

    Models retrained on them give the effect of single samples on every target, and
    ``lds(scores, masks, outputs)`` the Spearman correlation of scores with these effects: the sum
    of the scores of all samples but one ranks as minus the score of that one.

    Parameters
    ----------
    samples
        As in :func:`subsets`.
    positions
        Positions of the samples to leave out, integers (subset,); every sample once by default.

    Returns
    -------
    Lazy DataArray ``mask`` (subset, sample), bool, with the coord ``left_out`` (subset).

    Raises
    ------
    ValueError
        If positions are not integers, or out of range.

    Notes
    -----
    In neural networks the effect of one sample is usually far below the noise of training, so look
    at ``ceiling`` before you interpret a low correlation, and increase ``seeds``.

    Examples
    --------
    >>> import trakdask as td
    >>> td.evaluate.leave_one_out(3, [1]).values.tolist()
    [[True, False, True]]
    """
    n, coords = _size_and_coords(samples)
    chosen = np.arange(n) if positions is None else np.asarray(positions)
    # A mask would be read as the positions 0 and 1, and -1 as the last sample.
    if chosen.dtype.kind not in "iu" or ((chosen < 0) | (chosen >= n)).any():
        raise ValueError(
            f"expected positions in 0..{n - 1} ({n} samples), got {shown(positions)}; try "
            "np.flatnonzero of a mask"
        )
    data = arrays.subsets.leave_out_each(n, chosen.astype(np.int64))
    attrs = {"description": "trained on: all but one"}
    coords |= {"left_out": (SUBSET, chosen)}
    return xr.DataArray(data, dims=(SUBSET, SAMPLE), coords=coords, name="mask", attrs=attrs)


def _size_and_coords(samples: int | xr.Dataset | xr.DataArray) -> tuple[int, dict[Any, Any]]:
    if isinstance(samples, (xr.Dataset, xr.DataArray)):
        return samples.sizes[SAMPLE], dict(coords_along(samples, SAMPLE))
    return operator.index(samples), {}


def _groups(by: object, n: int) -> np.ndarray:
    """Return the number of each sample's label."""
    codes = np.asarray(pd.factorize(np.asarray(by))[0], np.int64)
    if codes.shape != (n,) or (codes < 0).any():
        raise ValueError(
            f"expected a label for each of the {n} samples in by, got {len(codes)}, of which "
            f"{(codes < 0).sum()} are missing; try labels.fillna('none')"
        )
    return codes
