"""One block of features, computed to measure what all of them will take."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import dask
import dask.array as da
import numpy as np
import xarray as xr
from dask.base import tokenize

from trakdask.scheduling import are_lazy, gpu_options, n_slots

__all__ = ["Pilot", "run_pilot"]


@dataclass(frozen=True)
class Pilot:
    """One block of one checkpoint, measured.

    Parameters
    ----------
    n_samples
        Samples of the block.
    first_s
        Seconds it took, with what a process does once: load the model, check the gradients.
    block_s
        Seconds it took the second time, to be expected of all others.
    gram_s
        Seconds of its product φᵀφ alone.
    n_slots
        Tasks that the scheduler runs at once.
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
    """Run the first block of the first checkpoint twice, where tasks would run."""
    if not are_lazy(features[["feature"]]):
        raise ValueError(
            "pilot is True and the features are computed already; needed lazy ones of td.featurize."
            " Leave pilot out, or plan what td.featurize(samples, model) returns."
        )
    data = features.feature.variable.data
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
    start = time.perf_counter()
    phi = feature[:, :, 0]
    np.matmul(phi.T, phi)
    return np.array([time.perf_counter() - start])
