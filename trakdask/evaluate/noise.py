"""How much of scores is noise of the training, and what more checkpoints would gain."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr

from trakdask.arrays.evaluation import mean_agreement
from trakdask.attribution.estimators import EstimatorLike
from trakdask.attribution.scores import score
from trakdask.checks import require_integer
from trakdask.variables import CHECKPOINT, SAMPLE

_ROWS, _COLUMNS = 500, 100


def reliability(
    features: xr.Dataset,
    estimator: EstimatorLike = "auto",
    n_checkpoints: Sequence[int] = (1, 2, 3, 5, 10, 20, 50),
) -> xr.Dataset:
    """Say what more checkpoints would gain, before anybody trains them.

    Scores of one checkpoint are partly noise of its training, which the mean over checkpoints
    reduces. How much of them is noise shows in how far checkpoints agree: by the theory of tests,
    the LDS of C checkpoints is the one of infinitely many times √R, where R is their reliability.

    Parameters
    ----------
    features
        Features of the training samples, at two or more checkpoints of independent trainings. With
        checkpoints of one training, the noise that they share is not seen.
    estimator
        As in :func:`trakdask.score`.
    n_checkpoints
        Numbers of checkpoints to compare.

    Returns
    -------
    Dataset of float64, in memory:

    - ``agreement`` (): r, the mean correlation between two checkpoints of the scores of training
      samples for others, without the mean of each target;
    - ``reliability`` (n_checkpoints): R = C r / (1 + (C - 1) r), for the mean of C checkpoints;
    - ``relative_lds`` (n_checkpoints): √R, over the √R of the checkpoints that there are. Times the
      LDS that they have, this is the LDS to expect.

    Raises
    ------
    ValueError
        If there is one checkpoint, or a number of checkpoints is less than 1.

    Notes
    -----
    Cost: the scores of all samples for 100 of them, of which those of up to 500 are compared.
    On 36 tasks (``tests/benchmarks/results/2026-11-30-reliability.txt``), three checkpoints
    foretold the LDS of ten to within 0.024, and the LDS of one to within 0.054.

    References
    ----------
    Spearman 1910 and Brown 1910, "Correlation calculated from faulty data" and "Some experimental
    results in the correlation of mental abilities", for R.

    Examples
    --------
    >>> import trakdask as td
    >>> features = td.testing.simulate_features(n_samples=40, n_checkpoints=3)
    >>> found = td.evaluate.reliability(features, n_checkpoints=[3, 10])
    >>> found.relative_lds.round(2).values.tolist()
    [1.0, 1.6]
    """
    n_here = features.sizes[CHECKPOINT]
    if n_here < 2:
        raise ValueError(
            f"expected features at two or more checkpoints, which can agree, got {n_here}; try "
            "checkpoints of other seeds"
        )
    numbers = [
        require_integer("n_checkpoints", n, 1, remedy="try n_checkpoints=[3, 10]")
        for n in n_checkpoints
    ]
    rows = np.random.default_rng(0).permutation(features.sizes[SAMPLE])[:_ROWS]
    targets = features.isel({SAMPLE: rows[:_COLUMNS]})
    scores = score(features, targets, estimator, average=False)[rows].values
    # (sample, target, group, checkpoint) with one group. Where checkpoints do not agree at all,
    # more of them gain nothing.
    r = max(float(mean_agreement(scores[:, :, None])[0]), 0.0)
    c = np.array(numbers)
    # The formula of Spearman and Brown, of as many checkpoints as asked for and as there are.
    found = c * r / (1 + (c - 1) * r)
    here = n_here * r / (1 + (n_here - 1) * r)
    return xr.Dataset(
        {
            "agreement": r,
            "reliability": ("n_checkpoints", found),
            "relative_lds": ("n_checkpoints", np.sqrt(found / here) if r else np.ones(len(c))),
        },
        coords={"n_checkpoints": c},
    )
