"""A driver to be killed: saves features whose blocks take a while and count themselves."""

from __future__ import annotations

import functools
import sys
import time
import uuid
from pathlib import Path

import dask
import dask.array as da
import numpy as np
import xarray as xr
from distributed import Client

import trakdask as td
from tests.waiting import PATIENCE_S
from trakdask.testing import simulate_features

N_BLOCKS = 24
N_CHECKPOINTS = 2
ROWS = 16


def features(counts: Path, seconds: float) -> xr.Dataset:
    """Return features that leave one file in ``counts`` for each time that a block is computed."""
    plain = simulate_features(
        n_samples=ROWS * N_BLOCKS, proj_dim=8, chunks=ROWS, n_checkpoints=N_CHECKPOINTS
    )
    data = da.map_blocks(
        functools.partial(_slow, counts, seconds), plain.feature.data,
        dtype="f4", meta=np.empty((0, 0, 0), "f4"),
    )  # fmt: skip
    return plain.assign(feature=(plain.feature.dims, data))


def _slow(
    counts: Path, seconds: float, values: np.ndarray, block_id: tuple[int, ...]
) -> np.ndarray:
    time.sleep(seconds)
    while len(list(counts.iterdir())) >= limit(counts):
        time.sleep(0.01)
    (counts / f"{block_id[2]}-{block_id[0]}-{uuid.uuid4().hex}").touch()
    return values


def limit(counts: Path) -> int:
    """Return how many blocks may be computed for now: whoever is to be killed waits for it."""
    try:
        return int(limit_file(counts).read_text())
    except FileNotFoundError:
        return sys.maxsize


def limit_file(counts: Path) -> Path:
    """Return where the limit is written, beside the counts."""
    return counts.with_name("limit")


def main(store: str, counts: str, seconds: str, address: str) -> None:
    """Save on a cluster, or on this process's threads where there is no address."""
    threads = dask.config.set(scheduler="threads", num_workers=2)
    with Client(address, timeout=PATIENCE_S) if address else threads:
        td.save(features(Path(counts), float(seconds)), store, progress=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
