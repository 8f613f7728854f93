"""Which training samples a model is trained on: random subsets, and all but one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from trakdask import arrays
from trakdask.evaluate.labels import SUBSET, coords_along, require_fraction, require_positive
from trakdask.variables import SAMPLE

__all__ = ["leave_one_out", "subsets"]


def subsets(
    samples: int | xr.Dataset | xr.DataArray,
    n_subsets: int,
    *,
    fraction: float = 0.5,
    seed: int = 0,
    by: str | np.ndarray | xr.DataArray | None = None,
) -> xr.DataArray:
    """Draw random subsets of the training samples, all of one size.

    Parameters
    ----------
    samples
        How many training samples there are, or the samples, features or scores, whose coords the
        masks are to carry.
    n_subsets
        How many subsets.
    fraction
        Share of the samples in each subset, rounded to whole samples.
    seed
        A subset is a function of (seed, its index, number of samples, fraction): asking for more
        subsets gives the same ones and further ones.
    by
        Name of a coord, or one label per sample: samples of one label are in or out together, and
        ``fraction`` is of the labels.

    Returns
    -------
    Lazy DataArray ``mask`` (subset, sample), bool; True where the sample is trained on.

    Raises
    ------
    ValueError
        If the subsets would be empty or whole, there is no such coord, or labels are missing.

    Notes
    -----
    Half of the samples is what the linear datamodeling score is usually measured with. Scores that
    rank halves well need not rank the removal of single samples as well: see :func:`leave_one_out`.

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
    require_positive(n_subsets, name="n_subsets", example="n_subsets=100")
    require_fraction(fraction, name="fraction", example="fraction=0.5")
    groups = None if by is None else _groups(samples, by, n)
    n_drawn = n if groups is None else int(groups.max()) + 1
    size = round(fraction * n_drawn)
    if not 0 < size < n_drawn:
        raise ValueError(
            f"fraction {fraction} of {n_drawn} {'samples' if by is None else 'labels'} is {size}; "
            f"needed from 1 to {n_drawn - 1}. Type fraction=0.5."
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
        Which samples to leave out; each once, unless given.

    Returns
    -------
    Lazy DataArray ``mask`` (subset, sample), bool, with the coord ``left_out`` (subset).

    Raises
    ------
    ValueError
        If a position is not one of a sample.

    Notes
    -----
    In nets the effect of one sample is mostly far below the noise of training: see how high
    ``ceiling`` is before believing a low correlation, and raise ``seeds``.

    Examples
    --------
    >>> import trakdask as td
    >>> td.evaluate.leave_one_out(3, [1]).values.tolist()
    [[True, False, True]]
    """
    n = _n_samples(samples)
    chosen = np.arange(n) if positions is None else np.asarray(positions)
    if chosen.ndim != 1 or chosen.dtype.kind not in "iu" or not len(chosen):
        raise ValueError(
            f"positions are {chosen.dtype} of shape {chosen.shape}; needed integers (subset,). "
            "Type positions=np.arange(100)."
        )
    if chosen.min() < 0 or chosen.max() >= n:
        raise ValueError(
            f"positions go from {chosen.min()} to {chosen.max()}; needed 0 to {n - 1}, the "
            f"positions of the {n} samples. Leave out the others."
        )
    data = arrays.subsets.leave_out_each(n, chosen.astype(np.int64))
    coords = {**_coords(samples), "left_out": (SUBSET, chosen)}
    attrs = {"description": "trained on: all but one"}
    return xr.DataArray(data, dims=(SUBSET, SAMPLE), coords=coords, name="mask", attrs=attrs)


def _n_samples(samples: int | xr.Dataset | xr.DataArray) -> int:
    if isinstance(samples, (xr.Dataset, xr.DataArray)):
        if SAMPLE not in samples.sizes:
            raise ValueError(
                f"samples has the dimensions {list(samples.sizes)}; needed 'sample'. Pass the "
                "training samples, their features, or their number."
            )
        return int(samples.sizes[SAMPLE])
    return require_positive(samples, name="samples", example="subsets(len(labels), 100)")


def _coords(samples: int | xr.Dataset | xr.DataArray) -> dict[Any, Any]:
    is_labelled = isinstance(samples, (xr.Dataset, xr.DataArray))
    return coords_along(samples, SAMPLE) if is_labelled else {}  # type: ignore[arg-type]


def _groups(
    samples: int | xr.Dataset | xr.DataArray, by: str | np.ndarray | xr.DataArray, n: int
) -> np.ndarray:
    coords = _coords(samples)
    if isinstance(by, str) and by not in coords:
        raise ValueError(
            f"the samples have the coords {list(map(str, coords))}; needed {by!r}. Pass samples "
            "that have it, or the labels themselves: by=labels."
        )
    labels = np.asarray(coords[by] if isinstance(by, str) else by)
    if labels.shape != (n,):
        raise ValueError(
            f"by has shape {labels.shape}; needed one label per sample, ({n},). Type the name of "
            "a coord of the samples."
        )
    codes = np.asarray(pd.factorize(labels)[0], np.int64)
    if (codes < 0).any():
        raise ValueError(
            f"{int((codes < 0).sum())} of {n} samples have no label in by; needed one for each. "
            "Fill the missing ones."
        )
    return codes
