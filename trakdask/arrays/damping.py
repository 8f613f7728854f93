"""Choose the damping λ by the outputs of the model, of rows that the gram matrix leaves out.

Completeness: in the linearised model the total of a target's attributions, Σ_z score(z, t) =
φ(t)ᵀ (K + λI)⁻¹ r, is the output that one regularised Newton step gives it. The right λ is the one
whose totals follow the outputs of the trained model. λ is relative there: ρ · tr(K_c)/n, one ρ for
all checkpoints.
"""

from __future__ import annotations

import math
import sys
import warnings
from typing import Any

import dask.array as da
import numpy as np
import numpy.typing as npt

from trakdask.arrays.blocks import Block, Blocks, align_weights, block_starts, blockwise, flat
from trakdask.arrays.evaluation import correlation
from trakdask.arrays.spectra import Inverse, Spectrum
from trakdask.arrays.weights import pooled
from trakdask.errors import warn_once

#: Candidates for ρ, a quarter of a decade apart, which scores hardly notice.
GRID: npt.NDArray[np.float64] = 10.0 ** np.linspace(-2, 3, 21)
#: Totals follow the outputs if their correlation is this many standard errors, 1/√m, above 0.
FOLLOWED = 3.0
#: A few rows of a block take as long to read as all of it. Rows of eight blocks are not of one
#: class or source alone where samples are sorted.
_LEFT_OUT_BLOCKS = 8
#: How much larger than at the prior a correlation must be to choose its ρ, by one checkpoint; by C,
#: this divided by √C, as the noise of their trainings. In Fisher's z, because near 1 a correlation
#: grows by ever less: from 0.9 to 0.94 is as far as from 0 to 0.25. Where K has the wrong classes,
#: ρ may be smaller by a decade, for which a correlation has to be larger by twice as much, since
#: that noise asks for too small a ρ. 2026-11-30-outputs.txt has the tasks it was chosen by.
LARGER = 0.2
_DECADE = 4
#: The same without the wrong classes, for any number of checkpoints, where totals at the prior
#: explain a third of the outputs and samples are not few: random columns of checkpoints of halves
#: gain up to 0.5 at a ρ that makes scores worse. Else it is LARGER: that gain comes from a short
#: training. These were chosen by 2026-11-24-halves.txt.
CLEARLY_LARGER = 0.6
HARDLY_FOLLOWED = 0.57
FEW_SAMPLES = 500

#: The name of held-out samples that choose λ, of the rule by outputs, and by left-out checkpoints.
CALIBRATION = "calibration set"
COMPLETENESS = "completeness"
CROSS_VALIDATION = "cross-validation"

#: How λ was chosen: by which rule, in the end; by the outputs of which samples, if any were asked;
#: ρ, NaN if outputs did not choose; the largest correlation; the one that the prior needs to be
#: chosen; all correlations, the curve; and what left-out checkpoints say of each ρ.
CHOICE = np.dtype(
    [
        ("rule", "U64"),
        ("samples", "U32"),
        ("relative", np.float64),
        ("peak", np.float64),
        ("threshold", np.float64),
        ("curve", np.float64, GRID.shape),
        ("grade", np.float64, GRID.shape),
    ]
)


def made_choice(rule: str, samples: str = "", **numbers: object) -> Block:
    """Return how λ was chosen, (1,) of dtype :data:`CHOICE`; other numbers are NaN.

    Examples
    --------
    >>> choice = made_choice("tr(K)/n", peak=0.2)
    >>> choice["peak"].tolist(), choice["relative"].tolist()
    ([0.2], [nan])
    """
    names = ("relative", "peak", "threshold", "curve", "grade")
    return np.array([(rule, samples, *(numbers.get(name, np.nan) for name in names))], CHOICE)


def _inverse(spectrum: Spectrum) -> Inverse:
    """Return (K + λI)⁻¹ for every λ = ρ tr(K)/n of the grid; NaN where K is all 0."""
    return spectrum.inverse(GRID * (spectrum.mean if spectrum.mean > 0 else np.nan))


def held_out(spectrum: da.Array, feature: da.Array) -> da.Array:
    """Return Σ_z score(z, t) of rows that are not in the gram matrix, for every ρ of the grid.

    Parameters
    ----------
    spectrum
        Result of :func:`trakdask.arrays.spectra.spectrum`, with r.
    feature
        (row, proj_dim, checkpoint), float, chunks (rows, p, 1).

    Returns
    -------
    φ_c(t)ᵀ (K_c + λ_c I)⁻¹ r_c, (row, ρ, checkpoint) float64, lazy.

    Notes
    -----
    Cost: 34 p flops per row, after 34 p² once per checkpoint.
    """
    directions = blockwise(
        _directions, "pgc", spectrum, "c",
        new_axes={"p": feature.shape[1], "g": len(GRID)},
        name="newton-directions", dtype=np.float64,
    )  # fmt: skip
    return blockwise(
        _totals, "sgc", feature, "spc", directions, "pgc",
        concatenate=False, name="held-out-totals", dtype=np.float64,
    )  # fmt: skip


def _directions(spectrum: Spectrum) -> Block:
    """Return (K + λI)⁻¹ r, (p, ρ, 1)."""
    inverse, r = _inverse(spectrum), spectrum.loss_gradient[:, None]
    along = inverse.vectors @ (inverse.along * (inverse.vectors.T @ r))
    return np.asarray(along + r * inverse.rest)[:, :, None]


def _totals(feature: Blocks, directions: Blocks) -> Block:
    (phi,), (along,) = flat(feature), flat(directions)
    with np.errstate(invalid="ignore"):  # a NaN target is left out of the correlation
        return (phi[:, :, 0] @ along[:, :, 0])[:, :, None]


def left_out(
    spectrum: da.Array,
    feature: da.Array,
    gram_weights: da.Array | None,
    loss_weights: da.Array,
) -> da.Array:
    """Return the totals of :func:`held_out` with each row in turn left out of K and r.

    Parameters
    ----------
    spectrum, feature
        As in :func:`held_out`; K and r are sums over these rows, too.
    gram_weights, loss_weights
        h (None for 1) and g of those rows, (row, checkpoint), as K and r were made with.

    Returns
    -------
    (row, ρ, checkpoint) float64, lazy.

    Notes
    -----
    Exact (Sherman-Morrison): with the leverage l = φᵀ (K + λI)⁻¹ φ it is
    (φᵀ (K + λI)⁻¹ r - g l) / (1 - h l). Cost: 2 p² flops per row and checkpoint.
    """
    h = (None, None) if gram_weights is None else (align_weights(gram_weights, feature), "sc")
    g = pooled(align_weights(loss_weights, feature))
    return blockwise(
        _left_out, "sgc", feature, "spc", g, "s", spectrum, "c", *h,
        new_axes={"g": len(GRID)}, concatenate=True, name="left-out-totals", dtype=np.float64,
    )  # fmt: skip


def _left_out(phi: Block, g: Block, spectrum: Spectrum, h: Block | None) -> Block:
    rows = phi[:, :, 0].astype(np.float64, copy=False)
    total, leverage = rows @ _directions(spectrum)[:, :, 0], _inverse(spectrum).forms(rows)
    weight = 1.0 if h is None else h
    result = (total - g[:, None] * leverage) / (1 - weight * leverage)
    return np.asarray(result)[:, :, None]


def spread_rows(sizes: tuple[int, ...], most: int) -> list[slice]:
    """Return at most ``most`` rows in all, from up to 8 chunks spread over all of them.

    Examples
    --------
    >>> [(rows.start, rows.stop) for rows in spread_rows((4, 4, 4), 6)]
    [(0, 2), (4, 6), (8, 10)]
    """
    n_blocks = min(len(sizes), _LEFT_OUT_BLOCKS, most)
    chosen = np.unique(np.linspace(0, len(sizes) - 1, n_blocks).round().astype(int))
    starts = block_starts(sizes)
    rows = most // len(chosen)
    return [slice(int(starts[i]), int(starts[i]) + min(rows, sizes[i])) for i in chosen]


def choose(
    totals: da.Array,
    outputs: da.Array,
    *,
    samples: str,
    otherwise: str,
    prior: float,
    is_whole: bool,
    n_samples: int,
    quiet: bool = False,
) -> da.Array:
    """Choose ρ by samples whose totals follow their outputs, both as means over checkpoints.

    Parameters
    ----------
    totals
        (row, ρ, checkpoint), NaN for samples to leave out.
    outputs
        f, (row, checkpoint).
    samples
        The name of these samples.
    otherwise
        The rule that chooses if the totals do not follow the outputs.
    prior
        The ρ of models that were trained to the end.
    is_whole
        Whether K is the whole curvature, and checkpoints were trained on all samples.
    n_samples
        How many samples K is a sum over.
    quiet
        Does not warn; the caller does, by :func:`warn_of_choice`.

    Returns
    -------
    (1,) of dtype :data:`CHOICE`, lazy, with Pearson's correlations over the finite rows (NaN where
    a side does not vary). ``relative`` is NaN if the totals do not follow the outputs.

    Warns
    -----
    UserWarning
        When computed, in the process that asked for it: if the peak of the curve is less than three
        standard errors above 0, or undefined, or ρ is the end of the grid.

    Notes
    -----
    ρ is where the correlation is largest, if its artanh exceeds artanh of the correlation at the
    prior; else it is the prior. Where K is whole, it has to by 0.2/√C above the prior, with C
    checkpoints, and by 0.4/√C below, down to a tenth of it. Elsewhere ρ is never below, and has to
    by 0.6, or by 0.2 where the correlation at the prior is below 0.57 or K is of fewer than 500
    samples.
    """
    aligned = outputs.rechunk((totals.chunks[0], 1), method="tasks")
    return blockwise(
        _choose, "k", totals, "sgc", aligned, "sc",
        new_axes={"k": 1}, concatenate=True, name="completeness-choice", dtype=CHOICE,
        samples=samples, otherwise=otherwise, prior=prior, is_whole=is_whole, n_samples=n_samples,
        quiet=quiet,
    )  # fmt: skip


def _choose(totals: Block, outputs: Block, **options: Any) -> Block:
    total, output = totals.mean(axis=2), outputs.astype(np.float64).mean(axis=1)
    finite = np.isfinite(output) & np.isfinite(total).all(axis=1)
    x, y, curve = total[finite], output[finite], np.full(len(GRID), np.nan)
    if len(y) > 1:
        columns, values = (x - x.mean(axis=0)).T, y - y.mean()
        # Rounding may put it beyond 1, where no point of a curve reaches the threshold.
        clipped = np.clip(correlation(columns, values, np.ones(len(y))), -1, 1)
        curve = np.where((np.ptp(x, axis=0) > 0) & (np.ptp(y) > 0), clipped, np.nan)
    return chosen(curve, len(y), totals.shape[2], **options)


def chosen(
    correlation: Block,
    n_rows: int,
    n_checkpoints: int,
    *,
    samples: str,
    otherwise: str,
    prior: float,
    is_whole: bool,
    n_samples: int,
    quiet: bool = False,
) -> Block:
    """Return what :func:`choose` returns, from the correlation for every ρ, of so many rows."""
    peak = float(np.nanmax(correlation)) if np.isfinite(correlation).any() else np.nan
    numbers: dict[str, Any] = {"peak": peak, "curve": correlation}
    # 1. Totals that do not follow the outputs say nothing: λ is then as by the trace.
    rho, rule = np.nan, otherwise
    if peak * math.sqrt(n_rows) >= FOLLOWED:
        # 2. Correlations, less how much larger than at the prior they have to be.
        at = int(np.abs(np.log(GRID / prior)).argmin())
        least = LARGER / math.sqrt(n_checkpoints)
        if not is_whole:
            is_easy = correlation[at] < HARDLY_FOLLOWED or n_samples < FEW_SAMPLES
            least = LARGER if is_easy else CLEARLY_LARGER
        needed = np.full(len(GRID), least)
        needed[:at] *= 2
        needed[: max(at - is_whole * _DECADE, 0)] = needed[at] = np.inf
        with np.errstate(divide="ignore", invalid="ignore"):  # of a correlation of exactly 1
            others = np.arctanh(correlation) - needed
        # 3. The best of the others, if the prior is below it.
        best = int(np.nanargmax(others))
        threshold, rule = float(np.tanh(others[best])), f"{COMPLETENESS}, {samples}"
        rho = float(GRID[best]) if correlation[at] < threshold else prior
        numbers |= {"relative": rho, "threshold": threshold}
    if not quiet:
        warn_of_choice(rho, peak, samples)
    return made_choice(rule, samples, **numbers)


def warn_of_choice(rho: float, peak: float, samples: str) -> None:
    """Warn if outputs did not follow the totals, or ρ is the end of the grid; once for each case.

    Parameters
    ----------
    rho
        The chosen ρ; NaN if the outputs did not follow the totals.
    peak
        The largest correlation.
    samples
        The name, in warnings, of the samples whose outputs chose, or failed to.
    """
    if np.isnan(rho):
        defect = (
            f"do not follow the sums of their scores (they correlate by {peak:.2f} at most, which "
            "may be chance)"
            if np.isfinite(peak)
            else "or the sums of their scores are all the same"
        )
        remedy = "Featurize more of them, or set damping='trace' to silence this."
        if samples != CALIBRATION:
            remedy = (
                "Let 50 or more held-out samples choose it, with held_out = td.featurize(samples, "
                "model, like=features): type td.calibrate('train.zarr', held_out) if the features "
                "are in a store, as td.attribute keeps them, and ask again; else pass "
                "td.Soft(damping=td.damping(features, calibrate=held_out)) as the estimator."
            )
        message = (
            f"outputs of the {samples} {defect}, so they cannot say how large the damping λ "
            "should be. λ comes from the gram matrix alone, as by damping='trace', which suits "
            f"most models that were trained to the end. {remedy}"
        )
    elif rho == GRID[-1]:
        message = (
            f"the damping chosen by the {samples} is {rho:g} tr(K)/n, the end of the grid: the "
            "model was hardly trained, and estimator='grad_dot' gives nearly the same scores. Look "
            "at td.plots.damping(td.damping(features))."
        )
    else:
        return
    warn_once(message, message, warn_client)


def warn_client(message: str) -> None:
    """Warn in this process and, inside a worker, in the process of the client."""
    if "distributed" in sys.modules:
        from distributed.worker import warn  # not imported for the threaded scheduler's sake

        warn(message, UserWarning)
    else:
        warnings.warn(message, UserWarning, stacklevel=2)
