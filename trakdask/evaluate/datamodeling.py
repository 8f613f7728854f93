"""Rank correlations of sums of scores with retrained models."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from trakdask import arrays
from trakdask.checks import nearest, require_integer, shown
from trakdask.evaluate.results import (
    as_array,
    checked_masks,
    lazy_data,
    lazy_results,
    require_bootstrap,
    require_fraction,
    require_known,
)
from trakdask.variables import SAMPLE, TARGET, coords_along, data_in_order, require_alike


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
    seed = require_integer("seed", seed, 0, remedy="try seed=0")
    labelled = samples if isinstance(samples, xr.Dataset | xr.DataArray) else xr.Dataset()
    if isinstance(by, str) and by not in coords:
        near = nearest(by, coords)
        raise KeyError(
            f"expected by as a coord of the samples, one of {list(coords)}, got {by!r}; try "
            f"{repr(near) if near else 'one label per sample'}"
        )
    by = coords[by].values if isinstance(by, str) else by
    groups, n_drawn = None, n
    if by is not None:  # the number of each sample's label
        labels = np.asarray(data_in_order(by, labelled, SAMPLE, what="by"))
        groups = np.asarray(pd.factorize(labels)[0], np.int64)
        if groups.shape != (n,) or (groups < 0).any():
            raise ValueError(
                f"expected a label for each of the {n} samples in by, got {len(groups)}, and "
                f"{(groups < 0).sum()} are missing; try labels.fillna('none')"
            )
        n_drawn = int(groups.max()) + 1
    # Of samples, or of labels: then a label is drawn with all of its samples.
    size = round(fraction * n_drawn)
    if not 0 < size < n_drawn:
        raise ValueError(
            f"expected subsets of 1 to {n_drawn - 1} of the {n_drawn} "
            f"{'samples' if by is None else 'labels'}, got {size} by fraction={fraction}; try "
            "fraction=0.5"
        )
    data = arrays.subsets.random_subsets(n, n_subsets, size, seed, groups=groups)
    attrs = {"description": "trained on", "fraction": fraction, "seed": seed}
    return xr.DataArray(data, dims=("subset", SAMPLE), coords=coords, name="mask", attrs=attrs)


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
    coords |= {"left_out": ("subset", chosen)}
    return xr.DataArray(data, dims=("subset", SAMPLE), coords=coords, name="mask", attrs=attrs)


def lds(
    scores: xr.DataArray | Mapping[str, xr.DataArray],
    masks: xr.DataArray,
    outputs: xr.DataArray,
    *,
    resamples: int = 1000,
    seed: int = 0,
    confidence: float = 0.95,
) -> xr.Dataset:
    """Correlate the predictions of scores for subsets with outputs of models trained on them.

    For each target the Spearman correlation, over subsets S, of Σ_{z in S} τ(z, t) with the mean
    output of the models of S.

    Parameters
    ----------
    scores
        Scores (sample, target) of :func:`trakdask.score`, with any further dimensions, such as a
        checkpoint. Every entry along these is evaluated, on the same resamples. A mapping from
        names to such scores, as of :func:`baselines`, has the further dimension ``estimator``, and
        the coords of the first.
    masks
        Samples that the models were trained on, bool (subset, sample), as from :func:`subsets`. At
        least two subsets.
    outputs
        Outputs of these models, (subset[, seed], target), as from :func:`retrain`.
    resamples
        Number of bootstrap samples.
    seed
        Seed of the bootstrap.
    confidence
        Level of the intervals.

    Returns
    -------
    Lazy Dataset of float64 variables. Further dimensions of ``scores`` follow those named here:

    - ``lds`` (target), and ``lds_mean``, its mean over targets with ``interval`` (bound);
    - ``ceiling`` (target): the correlation that a perfect prediction of the expected output would
      have, by the Spearman-Brown formula from the seeds, NaN with a single seed; ``ceiling_mean``
      and ``ceiling_interval`` (bound);
    - ``draws`` (draw): ``lds_mean`` of each resample, minus the bias. Draws of one call are paired,
      so the difference of draws gives the interval of a difference::

          (result.draws.sel(estimator="soft") - result.draws.sel(estimator="embedding")).quantile(
              [0.025, 0.975], "draw"
          )

    Raises
    ------
    ValueError
        If samples, subsets or targets do not agree, masks are not bool, or an option is out of
        range; when computed, if the correlation is undefined for every target.

    Notes
    -----
    Equal values share their mean rank. A target with a NaN among its scores or outputs, or with
    constant predictions or outputs, has the correlation NaN and is left out of the means.

    Cost: one pass over the scores, tile by tile; then predictions (subset, target) in memory on one
    worker. Exactness: float64 sums; a different chunking can change their last bits.

    The intervals account for the choice of subsets and of targets: they are percentiles of a
    bootstrap over subsets, corrected for its bias, with a Student draw for how targets differ
    beyond their noise. ``tests/evaluate/test_datamodeling.py`` measures their coverage: with about
    20 targets they are too narrow, the interval of the ceiling most of all. They do not account for
    the choice of checkpoints or projections. ``lds`` and ``ceiling`` are plain estimates, which are
    biased towards 0 if there are few subsets; ``ceiling_mean`` is corrected for the bias that the
    bootstrap shows.

    References
    ----------
    Ilyas et al. 2022, "Datamodels"; Park et al. 2023, section 4; Owen 2007, "The pigeonhole
    bootstrap".

    Examples
    --------
    >>> import trakdask as td
    >>> features = td.testing.simulate_features(n_samples=40, proj_dim=8)
    >>> scores = td.score(features, features.isel(sample=slice(5)))
    >>> masks = td.evaluate.subsets(features, 30)
    >>> outputs = xr.dot(masks, scores, dim="sample")  # as if models were linear
    >>> result = td.evaluate.lds(scores, masks, outputs, resamples=20)
    >>> float(result.lds_mean)
    1.0
    """
    scores, masks = as_array(scores, SAMPLE, TARGET), checked_masks(masks)
    if "seed" not in as_array(outputs, "subset", TARGET).dims:
        outputs = outputs.expand_dims("seed")
    outputs = outputs.transpose("subset", "seed", TARGET)
    more = scores.dims[2:]
    # Raises if labels differ; sizes of dimensions without labels are compared, too.
    xr.align(scores, masks, outputs, join="exact", copy=False, exclude={"seed", *more})
    require_alike(masks, scores, what="masks")
    require_alike(outputs, scores, what="outputs")
    options = require_bootstrap(resamples, seed, confidence)
    prediction = arrays.subsets.subset_sums(lazy_data(masks), lazy_data(scores))
    result = lazy_results(
        rank_correlations, prediction, lazy_data(outputs), options, of=scores,
        variables=described_lds(more), sizes={"draw": resamples},
    )  # fmt: skip
    return result.assign_attrs(options)


def described_lds(more: tuple[Hashable, ...]) -> dict[str, tuple[tuple[Hashable, ...], str]]:
    """Describe the arrays of :func:`rank_correlations`, which has further dimensions."""
    return {
        "lds": ((TARGET, *more), "Spearman of predicted and retrained outputs"),
        "lds_mean": (more, "mean of lds over targets"),
        "interval": (("bound", *more), "of lds_mean"),
        "ceiling": ((TARGET,), "Spearman of a perfect prediction, given the noise of seeds"),
        "ceiling_mean": ((), "mean of ceiling over targets, minus the bias"),
        "ceiling_interval": (("bound",), "of ceiling_mean"),
        "draws": (("draw", *more), "lds_mean of each bootstrap sample, minus the bias"),
    }


def rank_correlations(
    prediction: np.ndarray, outputs: np.ndarray, options: dict[str, Any]
) -> dict[str, np.ndarray]:
    """Compare predictions (subset, target, ...) with outputs (subset, seed, target)."""
    more = prediction.shape[2:]
    # (subset, target, entry of all further dimensions)
    flat = prediction.reshape(*prediction.shape[:2], -1)
    predicted = [arrays.evaluation.Ranking.of(flat[:, :, i]) for i in range(flat.shape[2])]
    seeds = [arrays.evaluation.Ranking.of(outputs[:, k]) for k in range(outputs.shape[1])]
    # Scores predict the mean over seeds; seeds apart say how much of it is noise.
    truth = arrays.evaluation.Ranking.of(outputs.mean(axis=1))
    rows, means, draws = arrays.evaluation.bootstrap(
        truth, predicted, seeds, repeats=options["resamples"], seed=options["seed"]
    )
    require_known(rows[:-1])
    intervals = arrays.evaluation.percentiles(draws, options["confidence"])
    return {
        "lds": rows[:-1].T.reshape(-1, *more),
        "lds_mean": means[:-1].reshape(more),
        "interval": intervals[:, :-1].reshape(2, *more),
        "ceiling": rows[-1],
        "ceiling_mean": means[-1],
        "ceiling_interval": intervals[:, -1],
        "draws": draws[:-1].T.reshape(-1, *more),
    }


def _size_and_coords(samples: int | xr.Dataset | xr.DataArray) -> tuple[int, dict[Any, Any]]:
    if isinstance(samples, (xr.Dataset, xr.DataArray)):
        return samples.sizes[SAMPLE], dict(coords_along(samples, SAMPLE))
    return require_integer("samples", samples, 1, remedy="try the samples or their number"), {}
