"""Two blocks of features that are computed to see what all will take."""

from __future__ import annotations

import ctypes
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import dask
import dask.array as da
import numpy as np
import psutil
import torch
import xarray as xr
from dask.utils import format_bytes, format_time

from trakdask.execution import active_client, gpu_options, n_slots
from trakdask.projection.acceleration import NUMPY_ELEMENTS, count_elements
from trakdask.variables import CHECKPOINT, SAMPLE

_SAMPLING_S = 0.001


@dataclass(frozen=True)
class Pilot:
    """Measurements of two blocks of samples, one after the other.

    Parameters
    ----------
    n_samples
        Samples of each block.
    first_s
        Seconds of the first, which includes what a process does once: loading the model and
        checking the gradients.
    block_s
        Seconds of the second, which estimates the time of every other block. It is the first block
        again if there is no other.
    gram_s
        Seconds of the product φᵀφ alone.
    n_slots
        Number of tasks that the scheduler runs at once.
    process_bytes
        Memory of the process between the blocks: what it has imported, the weights of the model,
        and whatever else it holds.
    task_bytes
        The most memory that the process held while it computed the blocks, less ``process_bytes``.
    gpu_bytes
        The most memory that torch held on the GPU; 0 without one.
    """

    n_samples: int
    first_s: float
    block_s: float
    gram_s: float
    n_slots: int
    process_bytes: int
    task_bytes: int
    gpu_bytes: int

    def __str__(self) -> str:
        on_gpu = f", {format_bytes(self.gpu_bytes)} on the GPU" if self.gpu_bytes else ""
        return (
            f"Pilot: {counted(self.n_samples, 'sample')} at 1 checkpoint took "
            f"{format_time(self.block_s)} ({format_time(self.first_s)} the first time){on_gpu}, "
            f"their gram matrix {format_time(self.gram_s)}; all on "
            f"{counted(self.n_slots, 'thread')}"
        )


def run_pilot(features: xr.Dataset) -> Pilot:
    """Compute the first two blocks on the active scheduler, one after the other."""
    if not isinstance(features.feature.data, da.Array):
        raise ValueError(
            "expected lazy features for pilot=True, got features that are already computed; try "
            "td.plan(features), or td.plan(td.featurize(samples, model), pilot=True)"
        )
    arrays = [features.feature.data] + [
        variable.data
        for name, variable in features.data_vars.items()
        if {SAMPLE, CHECKPOINT} <= {*variable.dims} and name != "feature"
    ]
    # A block that nothing was loaded for yet, and one like all others. Of a single block, another
    # checkpoint is the second, if there is one.
    n_blocks, _, n_checkpoints = arrays[0].numblocks
    second = (1, 0) if n_blocks > 1 else (0, n_checkpoints - 1)
    blocks = [[array.blocks[i, ..., j] for array in arrays] for i, j in ((0, 0), second)]
    options, client = gpu_options(features), active_client()
    if client is None:
        measured = _measured(blocks, None)
    else:
        # Inside of a task "sync" computes there, in the process whose memory is measured; the
        # default would be the cluster. Not pure: a second pilot measures anew.
        measured = client.submit(_measured, blocks, "sync", pure=False, **options).result()
    n_samples, slots = arrays[0].chunks[0][0], n_slots(options.get("resources"))
    return Pilot(n_samples, n_slots=slots, **measured)


def _measured(blocks: list[list[da.Array]], scheduler: str | None) -> dict[str, Any]:
    """Compute blocks in this process, and return the measured fields of :class:`Pilot`."""
    # A thread reads the memory all the time: the most that the system has counted for the process
    # may be of an earlier computation.
    memory, seconds, held = psutil.Process().memory_info, [], []
    most, is_done = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not is_done.wait(_SAMPLING_S):
            most = max(most, memory().rss)

    _give_back()  # what was freed before would seem to be of the first block
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    count_elements(NUMPY_ELEMENTS)  # numba from the first block on: the second is like the others
    try:
        for block in blocks:
            start = time.perf_counter()
            # All arrays of a block at once, since they share its gradients. With one worker,
            # because the numbers are those of one thread.
            feature, *_ = dask.compute(*block, scheduler=scheduler, num_workers=1)
            seconds.append(time.perf_counter() - start)
            _give_back()
            held.append(memory().rss)
    finally:
        is_done.set()
        watcher.join()
    # (sample, proj_dim), of the second block; it has one checkpoint.
    phi = feature[:, :, 0]
    start = time.perf_counter()
    np.matmul(phi.T, phi)
    return {
        "first_s": seconds[0],
        "block_s": seconds[1],
        "gram_s": time.perf_counter() - start,
        "process_bytes": held[0],
        "task_bytes": max(most - held[0], 0),
        "gpu_bytes": torch.cuda.max_memory_allocated(),
    }


def _give_back() -> None:
    """Give freed memory, which glibc keeps for the next task, back to the system."""
    with suppress(AttributeError, OSError):
        # Where there is no glibc, the measured memory includes what was freed.
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> counted(2, "block")
    '2 blocks'
    """
    return f"{number:,} {noun}{'s' * (number != 1)}"
