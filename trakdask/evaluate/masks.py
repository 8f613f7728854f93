"""Masks of the samples that models are trained on: random subsets, or all samples but one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from trakdask import arrays
from trakdask.checks import shown
from trakdask.evaluate.labels import (
    SUBSET,
    as_array,
    require_fraction,
    require_positive,
    require_seed,
)
from trakdask.variables import SAMPLE, coords_along

__all__ = ["leave_one_out", "subsets"]


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
    TypeError
        If an argument has another type.
    ValueError
        If the subsets would contain no or all samples, there is no such coord, or labels are
        missing.

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
    n = _n_samples(samples)
    n_subsets = require_positive(n_subsets, name="n_subsets", example="n_subsets=100")
    fraction = require_fraction(fraction, name="fraction", example="fraction=0.5")
    seed = require_seed(seed, name="seed")
    groups = None if by is None else _groups(samples, by, n)
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
    return xr.DataArray(
        data, dims=(SUBSET, SAMPLE), coords=_coords(samples), name="mask", attrs=attrs
    )


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
    TypeError, ValueError
        If positions are not a list of integers, or a position is out of range.

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
    n = _n_samples(samples)
    remedy = f"try positions=np.arange({min(n, 100)})"
    chosen = (
        np.arange(n) if positions is None else as_array(positions, name="positions", remedy=remedy)
    )
    if chosen.ndim != 1 or chosen.dtype.kind not in "iu" or not len(chosen):
        raise ValueError(
            f"expected integers (subset,) for positions, got {chosen.dtype} of shape "
            f"{chosen.shape}; {remedy}"
        )
    if (bad := np.flatnonzero((chosen < 0) | (chosen >= n))).size:
        raise ValueError(
            f"expected positions in 0..{n - 1} ({n} samples), got {chosen[bad[0]]} at index "
            f"{bad[0]}; {remedy}"
        )
    data = arrays.subsets.leave_out_each(n, chosen.astype(np.int64))
    coords = {**_coords(samples), "left_out": (SUBSET, chosen)}
    attrs = {"description": "trained on: all but one"}
    return xr.DataArray(data, dims=(SUBSET, SAMPLE), coords=coords, name="mask", attrs=attrs)


def _n_samples(samples: int | xr.Dataset | xr.DataArray) -> int:
    if isinstance(samples, (xr.Dataset, xr.DataArray)):
        if SAMPLE not in samples.sizes:
            raise ValueError(
                f"expected samples with the dimension 'sample', got "
                f"{list(map(str, samples.sizes))}; try the training samples, their "
                "features, or their number"
            )
        samples = int(samples.sizes[SAMPLE])
    return require_positive(samples, name="samples", example="samples=len(labels)")


def _coords(samples: int | xr.Dataset | xr.DataArray) -> dict[Any, Any]:
    is_labelled = isinstance(samples, (xr.Dataset, xr.DataArray))
    return coords_along(samples, SAMPLE) if is_labelled else {}  # type: ignore[arg-type]


def _groups(
    samples: int | xr.Dataset | xr.DataArray, by: str | np.ndarray | xr.DataArray, n: int
) -> np.ndarray:
    coords = _coords(samples)
    if isinstance(by, str) and by not in coords:
        raise ValueError(
            f"expected by to be one of the samples' coords {list(map(str, coords))}, got {by!r}; "
            "try the labels themselves: by=labels"
        )
    remedy = "try the name of a coord of the samples"
    labels = as_array(coords[by] if isinstance(by, str) else by, name="by", remedy=remedy)
    if labels.shape != (n,):
        raise ValueError(
            f"expected one label per sample in by, ({n},), got shape {labels.shape}; {remedy}"
        )
    try:
        codes = np.asarray(pd.factorize(labels)[0], np.int64)
    except TypeError as err:
        raise TypeError(
            f"expected hashable labels in by, got {shown(by)} ({err}); {remedy}"
        ) from err
    if (codes < 0).any():
        raise ValueError(
            f"expected a label for each of the {n} samples in by, got {int((codes < 0).sum())} "
            f"without one, the first at sample {int(np.argmax(codes < 0))}; try "
            "labels.fillna('none')"
        )
    return codes
