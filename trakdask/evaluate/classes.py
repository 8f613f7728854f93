"""Classes and marks of samples and targets, by the names of coords of scores."""

from __future__ import annotations

import numpy as np
import xarray as xr

from trakdask.arrays.detection import Bools, Codes, Floats
from trakdask.attribution.groups import group_codes
from trakdask.checks import shown
from trakdask.variables import SAMPLE, TARGET, TARGET_PREFIX, coords_along

__all__ = ["codes", "marks", "shares"]


def codes(scores: xr.DataArray, by: object, within: object) -> tuple[Codes, Codes]:
    """Return class and group of every sample, (sample, 2), and of every target, (target, 2).

    Parameters
    ----------
    scores
        Scores whose coords hold the labels.
    by, within
        Names of the coords of the samples that hold the class and the group; without ``within``
        there is one group. Those of the targets have the prefix ``target_``.

    Raises
    ------
    TypeError
        If a name is not a text.
    ValueError
        If there is no such coord, a label is missing, or samples and targets have labels of
        different kinds.
    """
    n, m = scores.sizes[SAMPLE], scores.sizes[TARGET]
    classes = _shared_codes(scores, by, "by")
    groups = np.zeros(n + m, np.int8) if within is None else _shared_codes(scores, within, "within")
    both = np.stack([classes, groups], axis=1)
    return both[:n], both[n:]


def shares(of_samples: Codes, of_targets: Codes, by: str) -> Floats:
    """Return which share of the samples of each target's group is of its class, (target,).

    Raises
    ------
    ValueError
        If for every target that is none of them, or all.
    """
    n_classes = int(max(of_samples[:, 0].max(), of_targets[:, 0].max())) + 1
    pairs, target_pairs = (
        each[:, 1].astype(np.int64) * n_classes + each[:, 0] for each in (of_samples, of_targets)
    )
    n_relevant = _counts(pairs, target_pairs)
    n_ranked = _counts(of_samples[:, 1], of_targets[:, 1])
    if not ((n_relevant > 0) & (n_relevant < n_ranked)).any():
        raise ValueError(
            f"expected samples with the {by!r} of the target and samples with another one, for at "
            f"least one of {len(of_targets)} targets, got between {n_relevant.min()} and "
            f"{n_relevant.max()} of {len(of_samples)} samples with that of a target; try a coord "
            "that has the same labels for samples and targets"
        )
    return np.asarray(n_relevant / np.maximum(n_ranked, 1))


def marks(scores: xr.DataArray, by: object) -> tuple[Bools, Bools]:
    """Return which samples and which targets carry a mark, (sample,) and (target,).

    Raises
    ------
    TypeError
        If the name is not a text.
    ValueError
        If there is no such coord, or it is not bool.
    """
    found = []
    for name, values in _labels(scores, by, "by").items():
        if values.dtype != bool:
            raise ValueError(
                f"expected the coord {name!r} to be bool, got {values.dtype}; try "
                f"scores.assign_coords({name}=scores.{name} == 1)"
            )
        found.append(values)
    return found[0], found[1]


def _labels(scores: xr.DataArray, name: object, option: str) -> dict[str, np.ndarray]:
    """Return the labels of the samples and of the targets, by the names of their coords."""
    if not isinstance(name, str):
        raise TypeError(
            f"expected the name of a coord for {option}, got {shown(name)}; try {option}='label', "
            "and scores.assign_coords(label=('sample', ...), target_label=('target', ...))"
        )
    found = {}
    for coord, dim in ((name, SAMPLE), (f"{TARGET_PREFIX}{name}", TARGET)):
        if coord not in scores.coords or scores.coords[coord].dims != (dim,):
            known = [str(each) for each in coords_along(scores, dim)]
            raise ValueError(
                f"expected the coord {coord!r} along {dim!r} in scores, got {known}; try "
                f"scores.assign_coords({coord}=({dim!r}, labels))"
            )
        found[coord] = np.asarray(scores.coords[coord].values)
    return found


def _shared_codes(scores: xr.DataArray, name: object, option: str) -> np.ndarray:
    """Return the number of each label: of the samples, then of the targets."""
    (coord, of_samples), (other, of_targets) = _labels(scores, name, option).items()
    if (of_samples.dtype.kind in "biuf") != (of_targets.dtype.kind in "biuf"):
        raise ValueError(
            f"expected labels of one kind in {coord!r} and {other!r}, got {of_samples.dtype} and "
            f"{of_targets.dtype}; try the same labels of both"
        )
    numbers, _ = group_codes(np.concatenate([of_samples, of_targets]))
    if (missing := np.flatnonzero(numbers < 0)).size:
        first, n = int(missing[0]), len(of_samples)
        raise ValueError(
            f"expected a label for every sample and target in {coord!r}, got {missing.size} "
            f"without one, the first at {f'sample {first}' if first < n else f'target {first - n}'}"
            "; try selecting those that have one"
        )
    return numbers


def _counts(values: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Return how often each query is among the values."""
    ordered = np.sort(values)
    return np.searchsorted(ordered, queries, "right") - np.searchsorted(ordered, queries)
