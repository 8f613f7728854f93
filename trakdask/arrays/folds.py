"""Leave one checkpoint out: the others predict its outputs, and are compared with them.

A checkpoint that was trained on a known part of the samples is a retrained model. The scores of the
other checkpoints, added up over its samples, predict its outputs.
"""

from __future__ import annotations

import dask.array as da
import numpy as np
import numpy.typing as npt

from trakdask.arrays.blocks import Block, Floats, blockwise
from trakdask.arrays.damping import CHOICE, CROSS_VALIDATION, GRID
from trakdask.arrays.evaluation import Ranking, correlation, mean_without_nan
from trakdask.arrays.spectra import Spectrum

#: Candidates for ρ are this many decades around the start, with the ends.
_NEAR = 1.01


def means_of_others(values: da.Array) -> da.Array:
    """Return the mean over all checkpoints but j, of each sample.

    Parameters
    ----------
    values
        (sample, checkpoint), float; NaN where a sample failed.

    Returns
    -------
    (sample, fold) float64, lazy, one chunk of folds; NaN where a sample failed elsewhere than at j.

    Examples
    --------
    >>> means_of_others(da.from_array(np.array([[1.0, 2.0, 6.0]]))).compute()
    array([[4. , 3.5, 1.5]])
    """
    return blockwise(
        mean_of_others, "sf", values, "sc",
        new_axes={"f": values.shape[1]}, concatenate=True, name="fold-means", dtype=np.float64,
    )  # fmt: skip


def mean_of_others(values: Block) -> Block:
    """Return the mean without each column in turn; see :func:`means_of_others`."""
    x, failed = np.nan_to_num(values.astype(np.float64)), np.isnan(values)
    mean = (x.sum(axis=1, keepdims=True) - x) / (x.shape[1] - 1)
    # A sample that failed at j alone has a mean of the others.
    has_failed = failed.sum(axis=1, keepdims=True) > failed
    return np.where(has_failed, np.nan, mean)


def predicted(sums: da.Array, solved: da.Array) -> da.Array:
    """Return the mean over the other checkpoints of the products of sums and solved features.

    Parameters
    ----------
    sums
        Result of :func:`trakdask.arrays.groups.weighted_sums`, with a fold for each checkpoint, in
        their order.
    solved
        Result of :func:`trakdask.arrays.solve.solve`, (target, proj_dim, checkpoint).

    Returns
    -------
    (target, checkpoint) float64, lazy: the prediction of the others for each checkpoint, but for a
    constant of each target.
    """
    products = blockwise(
        _products, "tfc", solved, "tpc", sums, "fpc",
        concatenate=True, name="fold-products", dtype=np.float64,
    )  # fmt: skip
    return _without_own(products)


def _without_own(parts: da.Array) -> da.Array:
    """Return the mean of (..., fold, checkpoint) over the checkpoints that are not the fold's."""
    rest = "sg"[: parts.ndim - 2]
    return blockwise(
        _mean_of_others, f"{rest}f", parts, f"{rest}fc",
        concatenate=True, name="fold-means-of-parts", dtype=np.float64,
    )  # fmt: skip


def _mean_of_others(parts: Block) -> Block:
    n = parts.shape[-1]
    return np.asarray(np.where(np.eye(n, dtype=bool), 0, parts).sum(axis=-1) / (n - 1))


def _products(solved: Block, sums: Block) -> Block:
    product = solved[:, :, 0].astype(np.float64) @ sums[:, :, 0].T
    return np.asarray(product)[:, :, None]


def totals(spectrum: da.Array, sums: da.Array, feature: da.Array) -> da.Array:
    """Return :func:`predicted` of some rows for every ρ of the grid of λ.

    Parameters
    ----------
    spectrum
        Result of :func:`trakdask.arrays.spectra.spectrum`.
    sums
        Result of :func:`trakdask.arrays.groups.weighted_sums`.
    feature
        φ of the rows, (row, proj_dim, checkpoint), chunks (rows, p, 1).

    Returns
    -------
    (row, ρ, checkpoint) float64, lazy, λ = ρ tr(K_c)/n.

    Notes
    -----
    Cost: 2 p k flops per row and fold, with k eigenvectors, and 2 k per ρ.
    """
    parts = blockwise(
        _totals, "sgfc", feature, "spc", sums, "fpc", spectrum, "c",
        new_axes={"g": len(GRID)}, concatenate=True, name="fold-totals", dtype=np.float64,
    )  # fmt: skip
    return _without_own(parts)


def _totals(phi: Block, sums: Block, spectrum: Spectrum) -> Block:
    inverse, rows = spectrum.inverse(GRID * spectrum.mean), phi[:, :, 0].astype(np.float64)
    v = sums[:, :, 0]
    # (row, ρ, fold): all λ share the products with the eigenvectors, which are most of the work.
    along = np.einsum(
        "rk,kg,fk->rgf", rows @ inverse.vectors, inverse.along, v @ inverse.vectors, optimize=True
    )
    rest = inverse.rest[:, None] * (rows @ v.T)[:, None]
    return np.asarray(along + rest)[..., None]


def choose(
    totals: da.Array, outputs: da.Array, choice: da.Array, start: da.Array, differ: da.Array
) -> da.Array:
    """Choose ρ by the predictions for checkpoints that were left out.

    Parameters
    ----------
    totals
        Result of :func:`totals`.
    outputs
        f of the rows, (row, checkpoint).
    choice
        How λ was chosen without them, (1,) of dtype :data:`trakdask.arrays.damping.CHOICE`.
    start
        The ρ of that, (), lazy.
    differ
        Whether the checkpoints were trained on different samples, () bool, lazy.

    Returns
    -------
    ``choice`` with the ``grade`` of every ρ. If another ρ is clearly better, it is ``relative``,
    and its ``rule`` is cross-validation. Checkpoints that do not differ leave ``choice`` as it is.

    Notes
    -----
    ρ is the one within a decade of the start with the largest mean of Spearman's correlations over
    rows, if that exceeds the mean at the start by more than one standard error of the difference.
    Ten checkpoints are ten points for each row, which are noisy among neighbours. Both means have
    the same rows and checkpoints, so the jackknife over checkpoints gives the error of the
    difference.
    """
    return blockwise(
        _choose, "k", totals, "sgf", outputs.rechunk((totals.chunks[0], -1)), "sf",
        choice, "k", start, "", differ, "", concatenate=True, name="fold-choice", dtype=CHOICE,
    )  # fmt: skip


def _choose(totals: Block, outputs: Block, choice: Block, start: Block, differ: Block) -> Block:
    if not differ:
        return choice
    of_rows, without = agreement(totals, outputs.astype(np.float64))
    grade, chosen = _mean(of_rows), choice.copy()
    chosen["grade"] = grade
    if np.isnan(grade).any():  # no row has predictions and outputs that differ
        return chosen
    distance = np.abs(np.log10(GRID / float(start)))
    at, near = int(distance.argmin()), np.flatnonzero(distance < _NEAR)
    best = int(near[np.argmax(grade[near])])
    if grade[best] - grade[at] > jackknife_error(without[:, best] - without[:, at]):
        chosen["relative"], chosen["rule"] = GRID[best], CROSS_VALIDATION
    return chosen


def agreement(
    prediction: Floats, output: Floats, *, unbiased: bool = False
) -> tuple[Floats, Floats]:
    """Correlate predictions with outputs over checkpoints, of all of them and without each.

    Parameters
    ----------
    prediction, output
        (target, ..., checkpoint) and (target, checkpoint).
    unbiased
        Estimate Spearman's correlation over infinitely many checkpoints. The correlation r over n
        has the expectation (3 τ + (n - 2) ρ)/(n + 1), with Kendall's τ, which is below ρ by 0.05
        for ten checkpoints and by 0.1 for five, if ρ is 0.7.

    Returns
    -------
    Spearman's correlation of each target, (target, ...), NaN where a side is constant or NaN; and
    its mean over targets without each checkpoint in turn, (checkpoint, ...), for a jackknife.

    References
    ----------
    Hoeffding 1948, section 5 (expectation of Spearman's correlation).

    Examples
    --------
    >>> f = np.array([[1.0, 2.0, 3.0, 4.0]])
    >>> [x.round(3).tolist() for x in agreement(f + [0, 0, 3, 0], f)]
    [[0.8], [0.5, 0.5, 1.0, 1.0]]
    """
    n, shape = output.shape[-1], prediction.shape
    predicted, truth = Ranking.of(prediction.reshape(-1, n).T), Ranking.of(output.T)
    # Whether both sides order a pair of checkpoints alike: 1, -1, or 0 where one is equal.
    sides = [np.sign(x[..., :, None] - x[..., None, :]) for x in (prediction, output)]
    concordance = sides[0] * sides[1].reshape(len(output), *(1,) * (len(shape) - 2), n, n)

    def spearman(counts: Floats) -> Floats:
        a, b = predicted.centred(counts).reshape(shape), truth.centred(counts)
        r = correlation(a, b.reshape(len(b), *(1,) * (len(shape) - 2), n), counts)
        if not unbiased:
            return r
        m = counts.sum()
        # Over ordered pairs of checkpoints, of which there are m (m - 1); that of one with itself
        # is 0. `counts` is 0 for the one that is left out.
        tau = (concordance @ counts @ counts) / (m * (m - 1))
        return np.asarray(((m + 1) * r - 3 * tau) / (m - 2))

    without = [_mean(spearman(counts)) for counts in 1.0 - np.eye(n)]
    return spearman(np.ones(n)), np.array(without)


def _mean(correlation: Floats) -> Floats:
    return mean_without_nan(np.moveaxis(correlation, 0, -1))


def jackknife_error(values: npt.ArrayLike) -> Floats:
    """Return the standard error of a statistic from its values without each of n parts, (n, ...).

    References
    ----------
    Efron & Stein 1981.

    Examples
    --------
    >>> mean_without = (10 - np.array([1.0, 2.0, 3.0, 4.0])) / 3
    >>> float(jackknife_error(mean_without).round(4))  # √(s²/n) of 1, 2, 3, 4
    0.6455
    """
    x = np.asarray(values, np.float64)
    return np.asarray(np.sqrt((len(x) - 1) * x.var(axis=0)))
