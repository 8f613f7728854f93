"""The bits of features never change: digests of known gradients, by every projector.

Stores of different versions can only be combined if they agree in every bit, whatever processor
made them. ``python tests/projection/test_digests.py`` writes ``digests.json``; it should not be
needed again unless the definition of a matrix changes, which ``DEFINITION_VERSION`` then counts.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from trakdask.projection import SJLT, Identity, Mask, Projector, Rademacher, RowMap, project

PATH = Path(__file__).with_name("digests.json")

# Parameters across the borders of blocks of 16384 rows, in the middle of counters, of one element
# and of none; the last block is short.
SHAPES = {
    "embedding": (30, 700), "bias": (7,), "kernel": (16, 3, 3, 3), "scalar": (), "none": (0, 4),
    "wide": (3, 9001), "tall": (5000, 2), "vector": (900,),
}  # fmt: skip
N_SAMPLES = 37

PROJECTORS: list[Projector] = [
    SJLT(512), SJLT(77, sparsity=1, seed=2**64 - 1), SJLT(3000, sparsity=9, seed=5),
    SJLT(3, sparsity=64),
    Rademacher(300), Rademacher(33, seed=2**64 - 1, arithmetic="int8x1"),
    Rademacher(20, seed=5, arithmetic="int8x3"),
    Mask(500, seed=3), Mask(20000, SJLT(64), seed=2**64 - 1), Mask(17000, Rademacher(31)),
    Identity(),
]  # fmt: skip

# Gradients of float32, float16 and bfloat16 at usual sizes, as subnormals and near overflow.
SCALES = {
    torch.float32: (1.0, 1e-43, 1e36),
    torch.float16: (1.0, 5e-8, 3000.0),
    torch.bfloat16: (1.0, 1e-39, 1e36),
}


@functools.cache
def gradient(name: str) -> Tensor:
    """Return gradients (sample, *shape): dense ones, zeros, outliers, and one with infinity."""
    size = math.prod(SHAPES[name])
    # From integers, because the streams of random generators may change between versions.
    step = np.arange(N_SAMPLES * size, dtype=np.int64).reshape(N_SAMPLES, size) + len(name)
    values = ((step * 7919 + step * step % 613) % 20011 - 10005) / 1024
    values[2] = 0
    if size:
        values[3, size // 2] *= 100  # an outlier takes accuracy from its block
        values[4, -1] = math.inf if name == "wide" else 0
        values[5:] *= 2.0 ** -np.arange(N_SAMPLES - 5)[:, None]
    return torch.from_numpy(values).view(N_SAMPLES, *SHAPES[name])


@functools.cache
def scaled(dtype: torch.dtype, scale: float) -> dict[str, Tensor]:
    return {name: (gradient(name) * scale).to(dtype) for name in SHAPES}


def digest(projector: Projector, dtype: torch.dtype, scale: float) -> str:
    rows = RowMap.from_shapes(SHAPES, alignment=projector.row_alignment)
    features = project(projector, scaled(dtype, scale), rows, checkpoint=2**32 - 1).numpy()
    features[np.isnan(features)] = np.nan  # one NaN for all: its sign and payload say nothing
    return hashlib.sha256(features.astype("<f4").tobytes()).hexdigest()[:16]


def digests(projector: Projector) -> dict[str, str]:
    return {
        f"{str(dtype).removeprefix('torch.')} {scale:g}": digest(projector, dtype, scale)
        for dtype, scales in SCALES.items()
        for scale in scales
    }


@pytest.mark.parametrize("projector", PROJECTORS, ids=str)
def test_features__have_the_known_bits(projector: Projector, backend: str) -> None:
    assert digests(projector) == json.loads(PATH.read_text())[str(projector)]


if __name__ == "__main__":
    PATH.write_text(json.dumps({str(each): digests(each) for each in PROJECTORS}, indent=1) + "\n")
