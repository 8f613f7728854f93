"""Compute one block of features to estimate how long all of them will take."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import dask
import dask.array as da
import numpy as np
import xarray as xr
from dask.base import tokenize

from trakdask.execution.scheduling import are_lazy, gpu_options, n_slots
from trakdask.projection.acceleration import stop_waiting

__all__ = ["Pilot", "run_pilot"]


@dataclass(frozen=True)
class Pilot:
    """Measurements of one block of samples at one checkpoint.

    Parameters
    ----------
    n_samples
        Samples of the block.
    first_s
        Seconds of the first run, which includes what a process does once: loading the model and
        checking the gradients.
    block_s
        Seconds of the second run, which estimates those of every other block.
    gram_s
        Seconds of the product φᵀφ alone.
    n_slots
        Number of tasks that the scheduler runs at once.
    """

    n_samples: int
    first_s: float
    block_s: float
    gram_s: float
    n_slots: int

    def estimate(self, n_blocks: int, n_checkpoints: int) -> float:
        """Return the seconds that all blocks will take, checkpoint after checkpoint."""
        once = max(self.first_s - self.block_s, 0)
        waves = n_checkpoints * math.ceil(n_blocks / self.n_slots)
        return once + waves * (self.block_s + self.gram_s)


def run_pilot(features: xr.Dataset) -> Pilot:
    """Run the first block of the first checkpoint twice, on the active scheduler.

    Raises
    ------
    ValueError
        If the features are already computed, or there are none.
    """
    if not are_lazy(features[["feature"]]):
        raise ValueError(
            "expected lazy features for pilot=True, got features that are already computed; try "
            "td.plan(features), or td.plan(td.featurize(samples, model), pilot=True)"
        )
    data = features.feature.variable.data
    if 0 in data.shape:
        raise ValueError(
            f"expected features to measure for pilot=True, got an array of shape {data.shape}; try "
            "td.plan(features)"
        )
    n = data.chunks[0][0]
    first = [features[name].data[:n, ..., :1] for name in ("feature", "output", "out_to_loss")]
    options = gpu_options(features)
    seconds, gram_s = [], 0.0
    for attempt in range(2):
        task = da.blockwise(
            _gram_seconds, "s", first[0], "spc", first[1], "sc", first[2], "sc",
            name=f"pilot-{attempt}-{tokenize(data.name)}", concatenate=True, align_arrays=False,
            adjust_chunks={"s": 1}, dtype=np.float64, meta=np.empty(0),
        )  # fmt: skip
        start = time.perf_counter()
        ((gram_s,),) = dask.compute(task, **options)
        seconds.append(time.perf_counter() - start - gram_s)
    first_s, block_s = map(float, seconds)
    return Pilot(n, first_s, block_s, float(gram_s), n_slots(options.get("resources")))


def _gram_seconds(feature: np.ndarray, *others: np.ndarray) -> np.ndarray:
    stop_waiting()  # the second run is as fast as the others will be
    start = time.perf_counter()
    phi = feature[:, :, 0]
    np.matmul(phi.T, phi)
    return np.array([time.perf_counter() - start])
