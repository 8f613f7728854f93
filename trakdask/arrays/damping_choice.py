"""The choice of λ by the first outputs that the totals of attributions follow."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import dask.array as da
import numpy as np
from dask.base import tokenize

from trakdask.arrays.blocks import Block
from trakdask.arrays.completeness import GRID, LEAST_PEAK, is_followed, peak
from trakdask.arrays.solve import CLOSED_FORM
from trakdask.errors import warn_once

__all__ = ["CHOICE", "Candidate", "choose", "warn_of_choice"]

#: By how many standard errors the correlation at the chosen ρ may be below the largest one.
STANDARD_ERRORS = 0.5

#: How much larger than that at ρ = 1 a correlation must be, in Fisher's z, to choose a larger ρ.
CLEARLY_LARGER = 0.25

_ONE = int(np.flatnonzero(GRID == 1)[0])

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


@dataclass(frozen=True)
class Candidate:
    """A set of outputs to choose λ by: totals (row, ρ, checkpoint) and outputs (row, checkpoint).

    ``name`` is what warnings call it.
    """

    name: str
    totals: da.Array
    outputs: da.Array


def choose(
    candidates: Sequence[Candidate], curves: Sequence[da.Array], *, quiet: bool = False
) -> da.Array:
    """Choose ρ by the first candidate whose totals follow the outputs.

    Parameters
    ----------
    candidates
        In order of preference.
    curves
        Of each, by :func:`trakdask.arrays.completeness.curve`.
    quiet
        Leave warnings to whoever uses the choice, who calls :func:`warn_of_choice`.

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
    otherwise ρ is 1.
    """
    names = tuple(candidate.name for candidate in candidates)
    arrays = [item for each in curves for item in (each, "k")]
    result: da.Array = da.blockwise(
        _choose,
        "k",
        *arrays,
        names=names,
        quiet=quiet,
        concatenate=True,
        align_arrays=False,
        name="completeness-choice-" + tokenize(names, quiet, *(each.name for each in curves)),
        dtype=CHOICE,
        meta=np.empty((0,), CHOICE),
    )
    return result


def _choose(*curves: Block, names: tuple[str, ...], quiet: bool) -> Block:
    for index, (each, name) in enumerate(zip(curves, names, strict=True)):
        largest, values = peak(each), each["correlation"][0]
        if is_followed(each):
            chosen, threshold = _chosen(values, largest, each["n_rows"][0])
            if not quiet:
                _warn_at_the_end(GRID[chosen], name)
            return np.array([(GRID[chosen], index, largest, threshold, values)], CHOICE)
        if not quiet:
            _warn(_too_weak(largest, name, names[index + 1 :]))
    return np.array([(np.nan, len(names), largest, np.nan, values)], CHOICE)


def _chosen(correlation: Block, largest: float, n_rows: int) -> tuple[int, float]:
    """Return the position of ρ in the grid, and the least correlation that might be chosen."""
    threshold = largest - STANDARD_ERRORS * (1 - largest**2) / np.sqrt(n_rows)
    chosen = int(np.flatnonzero(correlation >= threshold)[-1])
    with np.errstate(divide="ignore"):  # of a correlation of exactly 1
        least = float(np.tanh(np.arctanh(largest) - CLEARLY_LARGER))
    is_one = chosen > _ONE and correlation[_ONE] >= least
    return (_ONE, least) if is_one else (chosen, threshold)


def warn_of_choice(rho: float, peak: float, name: str) -> None:
    """Warn of what :func:`choose` warns of, given what it chose and the name of the last samples.

    Parameters
    ----------
    rho
        What was chosen; NaN if the outputs did not follow the totals.
    peak
        The largest correlation.
    name
        What warnings call the samples whose outputs chose, or failed to.
    """
    if np.isnan(rho):
        warn_once(("too weak", name), _too_weak(peak, name, ()), _warn)
    else:
        _warn_at_the_end(rho, name)


def _warn_at_the_end(rho: float, name: str) -> None:
    if rho in (GRID[0], GRID[-1]):
        warn_once(("end of the grid", name), _at_the_end(rho, name), _warn)


def _at_the_end(rho: float, name: str) -> str:
    return (
        f"the damping chosen by the {name} is {rho:g} tr(K)/n, an end of the grid "
        f"[{GRID[0]:g}, {GRID[-1]:g}]; the best one may lie beyond it. Look at "
        "td.plots.damping(td.damping(features)), or type damping='closed_form'."
    )


def _too_weak(largest: float, name: str, rest: Sequence[str]) -> str:
    defect = (
        f"outputs of the {name} correlate at most {largest:.2f} with their attribution totals"
        if np.isfinite(largest)
        else f"outputs of the {name} or their attribution totals are constant, so their "
        "correlation is undefined"
    )
    instead = f"the {rest[0]}" if rest else f"the closed form {CLOSED_FORM} tr(K²)/tr(K)"
    return (
        f"{defect} ({LEAST_PEAK} or more is needed to choose λ by them). λ comes from {instead} "
        "instead. Try other outputs: calibrate=td.featurize(held_out, model, ...)."
    )


def _warn(message: str) -> None:
    """Warn in this process and, inside a worker, in the process of the client."""
    if "distributed" in sys.modules:
        from distributed.worker import warn  # not imported for the threaded scheduler's sake

        warn(message, UserWarning)
    else:
        warnings.warn(message, UserWarning, stacklevel=2)
