"""The damping for which the attributions of a target add up to the target's output.

In the linearised model the total of a target's attributions, Σ_z score(z, t) = φ(t)ᵀ (K + λI)⁻¹ r,
is the output that one regularised Newton step gives it. The right λ is the one whose totals follow
the outputs of the trained model. λ is relative here: ρ · tr(K_c)/n, one ρ for all checkpoints.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import dask.array as da
import numpy as np
import numpy.typing as npt
from dask.base import tokenize

from trakdask.arrays.blocks import Block
from trakdask.once import warn_once

__all__ = ["GRID", "Candidate", "choose", "curve", "is_followed"]

#: Candidates for ρ, a quarter of a decade apart.
GRID: npt.NDArray[np.float64] = 10.0 ** np.linspace(-2, 2, 17)
#: Totals that correlate less than this with the outputs say nothing of λ.
_LEAST_PEAK = 0.4
_STANDARD_ERRORS = 0.5


@dataclass(frozen=True)
class Candidate:
    """A set of outputs to choose λ by: totals (row, ρ, checkpoint) and outputs (row, checkpoint).

    ``name`` is what warnings call it.
    """

    name: str
    totals: da.Array
    outputs: da.Array


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
    (ρ + 1,) float64, lazy: Pearson's correlation over the finite rows (NaN where a side does not
    vary), and the number of these rows.
    """
    aligned = outputs.rechunk((totals.chunks[0], 1), method="tasks")
    result: da.Array = da.blockwise(
        _curve,
        "k",
        totals,
        "sgc",
        aligned,
        "sc",
        new_axes={"k": len(GRID) + 1},
        concatenate=True,
        align_arrays=False,
        name="completeness-curve-" + tokenize(totals.name, outputs.name),
        dtype=np.float64,
        meta=np.empty((0,), np.float64),
    )
    return result


def _curve(totals: Block, outputs: Block) -> Block:
    total, output = totals.mean(axis=2), outputs.astype(np.float64).mean(axis=1)
    finite = np.isfinite(output) & np.isfinite(total).all(axis=1)
    return np.append(_correlation(total[finite], output[finite]), finite.sum())


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
    return _peak(curve) >= _LEAST_PEAK


def _peak(curve: Block) -> float:
    values = curve[:-1]
    return float(np.nanmax(values)) if np.isfinite(values).any() else np.nan


def choose(candidates: Sequence[Candidate], curves: Sequence[da.Array]) -> da.Array:
    """Choose ρ by the first candidate whose totals follow the outputs.

    Parameters
    ----------
    candidates
        In order of preference.
    curves
        Of each, by :func:`curve`.

    Returns
    -------
    (ρ + 4,) float64, lazy: the chosen ρ; which candidate chose it, or their number if none did
    (ρ is then NaN); the peak of its curve; the least correlation that may be chosen; the curve,
    of the last candidate if none did.

    Warns
    -----
    UserWarning
        When computed, in the process that asked for it: if a candidate's peak is below 0.4 or
        undefined, or ρ is an end of the grid.

    Notes
    -----
    ρ is the largest whose curve is at most half a standard error, (1 - peak²)/√m of m rows, below
    the peak: the points of a curve are of the same rows, so that a whole one would be too lenient.
    """
    names = tuple(candidate.name for candidate in candidates)
    arrays = [item for i, each in enumerate(curves) for item in (each, f"{i}")]
    result: da.Array = da.blockwise(
        _choose,
        "k",
        *arrays,
        names=names,
        new_axes={"k": len(GRID) + 4},
        concatenate=True,
        align_arrays=False,
        name="completeness-choice-" + tokenize(names, *(each.name for each in curves)),
        dtype=np.float64,
        meta=np.empty((0,), np.float64),
    )
    return result


def _choose(*curves: Block, names: tuple[str, ...]) -> Block:
    for index, (each, name) in enumerate(zip(curves, names, strict=True)):
        peak = _peak(each)
        if is_followed(each):
            threshold = peak - _STANDARD_ERRORS * (1 - peak**2) / np.sqrt(each[-1])
            chosen = int(np.flatnonzero(each[:-1] >= threshold)[-1])
            if chosen in (0, len(GRID) - 1):
                warn_once(("end of the grid", name), _at_the_end(GRID[chosen], name), _warn)
            return np.array([GRID[chosen], index, peak, threshold, *each[:-1]])
        _warn(_too_weak(peak, name, names[index + 1 :]))
    return np.array([np.nan, len(names), peak, np.nan, *each[:-1]])


def _at_the_end(rho: float, name: str) -> str:
    return (
        f"the damping chosen by the {name} is {rho:g} tr(K)/n, an end of the grid "
        f"[{GRID[0]:g}, {GRID[-1]:g}]; the best may lie beyond. Look at "
        "td.plots.damping(td.damping(features, targets)), or type damping='closed_form'."
    )


def _too_weak(peak: float, name: str, rest: Sequence[str]) -> str:
    found = (
        f"correlate at most {peak:.2f} with their totals of attributions"
        if np.isfinite(peak)
        else "or their totals of attributions are all alike"
    )
    after = f"the {rest[0]}" if rest else "the closed form 0.03 tr(K²)/tr(K)"
    return (
        f"the outputs of the {name} {found}; choosing λ by them needs {_LEAST_PEAK}. λ comes from "
        f"{after} instead. Give other outputs with calibrate=td.featurize(held_out, model, ...)."
    )


def _warn(message: str) -> None:
    """Warn in this process and, inside a worker, in the process of the client."""
    if "distributed" in sys.modules:
        from distributed.worker import warn  # not imported for the threaded scheduler's sake

        warn(message, UserWarning)
    else:
        warnings.warn(message, UserWarning, stacklevel=2)
