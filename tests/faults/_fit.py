"""A driver to be killed: fits a projector, and leaves a file for each block that it begins."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import dask
import numpy as np
import torch

import trakdask as td
from trakdask.featurization import block
from trakdask.projection.fitted import Fitted

N_BLOCKS, N_CHECKPOINTS, N_PASSES = 4, 2, 5


def fit(store: str | Path, **options: Any) -> Fitted:
    rng = np.random.default_rng(0)
    images = rng.normal(size=(8 * N_BLOCKS, 6)).astype("f4")
    samples = td.from_arrays({"image": images, "label": np.arange(len(images)) % 3}, chunks=8)
    states = [
        {"weight": torch.tensor(rng.normal(size=(3, 6)).astype("f4")), "bias": torch.zeros(3)}
        for _ in range(N_CHECKPOINTS)
    ]
    model = td.Model(torch.nn.Linear(6, 3), states, task="image_classification")
    whole = {"curvature": True, "weights": True, "sketch": td.SJLT(24)}  # all passes
    return td.fit(samples, model, 6, store=store, progress=False, **whole, **options)


def main(store: str, begun: str) -> None:
    at_work = block.at_work

    @contextmanager
    def begin(what: str) -> Iterator[None]:
        with at_work(what):
            Path(begun, uuid4().hex).touch()
            time.sleep(0.02)
            yield

    block.at_work = begin
    with dask.config.set(scheduler="threads", num_workers=2):
        fit(store)


if __name__ == "__main__":
    main(*sys.argv[1:])
