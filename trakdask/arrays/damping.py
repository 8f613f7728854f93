"""Choose the damping λ by the outputs of the model, of rows that the gram matrix leaves out.

Completeness: in the linearised model the total of a target's attributions, Σ_z score(z, t) =
φ(t)ᵀ (K + λI)⁻¹ r, is the output that one regularised Newton step gives it. The right λ is the one
whose totals follow the outputs of the trained model. λ is relative there: ρ · tr(K_c)/n, one ρ for
all checkpoints.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence

import dask.array as da
import numpy as np
import numpy.typing as npt

from trakdask.arrays.blocks import Block, Blocks, align_weights, block_starts, blockwise, flat
from trakdask.arrays.solve import Inverse, Spectrum
from trakdask.arrays.weights import pooled
from trakdask.errors import warn_once

#: The default factor of the closed form of λ, which was fitted by tests/benchmarks/quality.py:
#: tr(K²)/tr(K) is of the size of the largest eigenvalues, and λ has to be well below these.
CLOSED_FORM = 0.03
#: Candidates for ρ, a quarter of a decade apart, which scores hardly notice.
GRID: npt.NDArray[np.float64] = 10.0 ** np.linspace(-2, 2, 17)
#: Totals that correlate less than this with the outputs do not determine λ. Peaks were 0.66 to 0.99
#: where the linearised model follows the real one, and 0.34 where the projection was too small.
LEAST_PEAK = 0.4
#: A few rows of a block take as long to read as all of it. Rows of eight blocks are not of one
#: class or source alone where samples are sorted.
_LEFT_OUT_BLOCKS = 8
#: By how many standard errors the correlation at the chosen ρ may be below the largest one. All
#: points of a curve are of the same rows, so they differ by less than one, which is too lenient.
STANDARD_ERRORS = 0.5
#: How much larger than that at ρ = 1 a correlation must be, in Fisher's z, to choose a larger ρ. On
#: a flat curve the largest ρ would win for no reason. Chosen by tests/benchmarks/quality_wider.py;
#: in Fisher's z because near 1 a correlation grows by ever less: from 0.9 to 0.94 is as far as
#: from 0 to 0.25.
CLEARLY_LARGER = 0.25

_ONE = int(np.flatnonzero(GRID == 1)[0])

#: The correlation for every ρ of the grid, and the number of rows that it is computed from.
CURVE = np.dtype([("correlation", np.float64, GRID.shape), ("n_rows", np.int64)])
#: How λ was chosen: ρ; the index of the candidate that chose it; the largest correlation; the least
#: one that may be chosen; and all correlations.
CHOICE = np.dtype(
    [
        ("relative", np.float64),
        ("candidate", np.int64),
        ("peak", np.float64),
        ("threshold", np.float64),
        ("correlation", np.float64, GRID.shape),
    ]
)


def _inverse(spectrum: Spectrum) -> Inverse:
    """Return (K + λI)⁻¹ for every λ = ρ tr(K)/n of the grid; NaN where K is all 0."""
    return spectrum.inverse(GRID * (spectrum.mean if spectrum.mean > 0 else np.nan))


def held_out(spectrum: da.Array, feature: da.Array) -> da.Array:
    """Return Σ_z score(z, t) of rows that are not in the gram matrix, for every ρ of the grid.

    Parameters
    ----------
    spectrum
        Of :func:`trakdask.arrays.solve.spectrum`, with r.
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
    weights: da.Array | None,
    sum_weights: da.Array,
    unless: Sequence[da.Array] = (),
) -> da.Array:
    """Return the totals of :func:`held_out` with each row in turn left out of K and r.

    Parameters
    ----------
    spectrum, feature
        As in :func:`held_out`; the rows are among those that K and r are sums over.
    weights, sum_weights
        h (None for 1) and g of those rows, (row, checkpoint), as K and r were made with.
    unless
        Curves of the candidates before this one: if one of them reaches the least peak, nothing is
        computed and the totals are NaN.

    Returns
    -------
    (row, ρ, checkpoint) float64, lazy.

    Notes
    -----
    Exact (Sherman-Morrison): with the leverage l = φᵀ (K + λI)⁻¹ φ it is
    (φᵀ (K + λI)⁻¹ r - g l) / (1 - h l). Cost: 2 p² flops per row and checkpoint.
    """
    h = (None, None) if weights is None else (align_weights(weights, feature), "sc")
    g = pooled(align_weights(sum_weights, feature))
    curves = [item for curve in unless for item in (curve, "k")]
    return blockwise(
        _left_out, "sgc", feature, "spc", g, "s", spectrum, "c", *h, *curves,
        new_axes={"g": len(GRID)}, concatenate=True, name="left-out-totals", dtype=np.float64,
    )  # fmt: skip


def _left_out(phi: Block, g: Block, spectrum: Spectrum, h: Block | None, *curves: Block) -> Block:
    if any(is_followed(curve) for curve in curves):
        return np.full((len(phi), len(GRID), 1), np.nan)
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


def curve(totals: da.Array, outputs: da.Array) -> da.Array:
    """Correlate totals with outputs for every ρ, both as means over checkpoints.

    Parameters
    ----------
    totals
        (row, ρ, checkpoint).
    outputs
        f, (row, checkpoint).

    Returns
    -------
    (1,) of dtype :data:`CURVE`, lazy: Pearson's correlation over the finite rows (NaN where a side
    does not vary), and the number of these rows.
    """
    aligned = outputs.rechunk((totals.chunks[0], 1), method="tasks")
    return blockwise(
        _curve, "k", totals, "sgc", aligned, "sc",
        new_axes={"k": 1}, concatenate=True, name="completeness-curve", dtype=CURVE,
    )  # fmt: skip


def _curve(totals: Block, outputs: Block) -> Block:
    total, output = totals.mean(axis=2), outputs.astype(np.float64).mean(axis=1)
    finite = np.isfinite(output) & np.isfinite(total).all(axis=1)
    return np.array([(_correlation(total[finite], output[finite]), finite.sum())], CURVE)


def _correlation(x: Block, y: Block) -> Block:
    """Return Pearson's correlation of every column of x with y, NaN where a side is constant."""
    if len(y) < 2:
        return np.full(x.shape[1], np.nan)
    varies = (np.ptp(x, axis=0) > 0) & (np.ptp(y) > 0)
    x, y = x - x.mean(axis=0), y - y.mean()
    scale = np.sqrt(np.square(x).sum(axis=0) * np.square(y).sum())
    correlation = (y @ x) / np.where(varies, scale, 1)
    # Rounding may put it beyond 1, where no point of a curve reaches the threshold.
    return np.where(varies, np.clip(correlation, -1, 1), np.nan)


def is_followed(curve: Block) -> bool:
    """Return whether a computed curve's peak is high enough to choose λ by."""
    return peak(curve) >= LEAST_PEAK


def peak(curve: Block) -> float:
    """Return the largest correlation of a computed curve, NaN if none is defined."""
    values = curve["correlation"][0]
    return float(np.nanmax(values)) if np.isfinite(values).any() else np.nan


def choose(curves: Mapping[str, da.Array], *, least: float = 0.0, quiet: bool = False) -> da.Array:
    """Choose ρ by the first set of samples whose totals follow their outputs.

    Parameters
    ----------
    curves
        Of each candidate, by :func:`curve`, in order of preference; with what warnings call them.
    least
        The smallest ρ that may be chosen.
    quiet
        Does not warn; the caller does, by :func:`warn_of_choice`.

    Returns
    -------
    (1,) of dtype :data:`CHOICE`, lazy. If no candidate's totals follow the outputs, ``relative`` is
    NaN, ``candidate`` the number of candidates, and the curve that of the last one.

    Warns
    -----
    UserWarning
        When computed, in the process that asked for it: if a candidate's peak is below 0.4 or
        undefined, or ρ is an end of the grid.

    Notes
    -----
    ρ is the largest whose curve is at most half a standard error, (1 - peak²)/√m of m rows, below
    the peak: the points of a curve are of the same rows, so that a whole one would be too lenient.
    If that is above 1, it has to be clearly better, artanh(peak) - artanh(curve at 1) > 0.25;
    otherwise ρ is 1. Below ``least``, it is that.
    """
    inputs = [item for curve in curves.values() for item in (curve, "k")]
    return blockwise(
        _choose, "k", *inputs, concatenate=True, name="completeness-choice", dtype=CHOICE,
        names=tuple(curves), least=least, quiet=quiet,
    )  # fmt: skip


def _choose(*curves: Block, names: tuple[str, ...], least: float, quiet: bool) -> Block:
    for index, (curve, name) in enumerate(zip(curves, names, strict=True)):
        values, n_rows = curve[0]
        largest, followed, rho, threshold = peak(curve), is_followed(curve), np.nan, np.nan
        if followed:
            chosen, threshold = _chosen(values, largest, n_rows)
            rho = GRID[max(chosen, int(np.searchsorted(GRID, least)))]
        if not quiet:
            warn_of_choice(rho, largest, name, *names[index + 1 :])
        if followed:
            break
    candidate = index if followed else len(names)
    return np.array([(rho, candidate, largest, threshold, values)], CHOICE)


def _chosen(correlation: Block, largest: float, n_rows: int) -> tuple[int, float]:
    """Return the position of ρ in the grid, and the least correlation that might be chosen."""
    threshold = largest - STANDARD_ERRORS * (1 - largest**2) / np.sqrt(n_rows)
    chosen = int(np.flatnonzero(correlation >= threshold)[-1])
    with np.errstate(divide="ignore"):  # of a correlation of exactly 1
        least = float(np.tanh(np.arctanh(largest) - CLEARLY_LARGER))
    is_one = chosen > _ONE and correlation[_ONE] >= least
    return (_ONE, least) if is_one else (chosen, threshold)


def warn_of_choice(rho: float, peak: float, name: str, *others: str) -> None:
    """Warn if outputs did not follow the totals, or ρ is an end of the grid; once for each case.

    Parameters
    ----------
    rho
        What was chosen; NaN if the outputs did not follow the totals.
    peak
        The largest correlation.
    name
        What warnings call the samples whose outputs chose, or failed to.
    others
        The samples that are asked next.
    """
    if np.isnan(rho):
        defect = (
            f"outputs of the {name} correlate at most {peak:.2f} with their attribution totals"
            if np.isfinite(peak)
            else f"outputs of the {name} or their attribution totals are constant, so their "
            "correlation is undefined"
        )
        instead = f"the {others[0]}" if others else f"the closed form {CLOSED_FORM} tr(K²)/tr(K)"
        message = (
            f"{defect} ({LEAST_PEAK} or more is needed to choose λ by them). λ comes from "
            f"{instead} instead. Try held-out samples: td.damping(features, calibrate=held_out)."
        )
    elif rho in (GRID[0], GRID[-1]):
        message = (
            f"the damping chosen by the {name} is {rho:g} tr(K)/n, an end of the grid "
            f"[{GRID[0]:g}, {GRID[-1]:g}]; the best one may lie beyond it. Look at "
            "td.plots.damping(td.damping(features)), or td.Soft(damping='closed_form')."
        )
    else:
        return
    warn_once(message, message, _warn)


def _warn(message: str) -> None:
    """Warn in this process and, inside a worker, in the process of the client."""
    if "distributed" in sys.modules:
        from distributed.worker import warn  # not imported for the threaded scheduler's sake

        warn(message, UserWarning)
    else:
        warnings.warn(message, UserWarning, stacklevel=2)
