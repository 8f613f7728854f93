from __future__ import annotations

import hashlib

import numpy as np
import pytest

from tests.projection.reference import philox4x32, rademacher_bits
from trakdask.projection.philox import fill_words, split_seed

SEEDS = [(0, 0), (0x123456789ABCDEF0, 7)]


@pytest.fixture(params=["0", "1"], ids=["numpy", "numba"], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAKDASK_NUMBA", request.param)


@pytest.mark.parametrize(
    ("seed", "checkpoint", "digest", "n_ones"),
    [
        (*SEEDS[0], "194ec9b24bff7ded6efb45cdc1afed7f4533e93ec50b428f89ac84bf8d2d8ac7", 1048308),
        (*SEEDS[1], "c9bf4bf7a13bf510588112934cbb98eef000b2a65499fd2567b62e42a23f70c3", 1046626),
    ],
)
def test_fill_words__sha256_of_the_definition(
    seed: int, checkpoint: int, digest: str, n_ones: int
) -> None:
    words = np.empty((512, 32, 2), np.uint64)
    fill_words(words, 0, 0, seed=seed, checkpoint=checkpoint, stream=0)
    assert hashlib.sha256(words.tobytes()).hexdigest() == digest
    bits = rademacher_bits(0, 4096, 0, 512, seed=seed, checkpoint=checkpoint)
    assert np.packbits(bits, axis=1, bitorder="little").tobytes() == words.tobytes()
    assert bits.sum() == n_ones


@pytest.mark.parametrize("index", [0, 2**32 - 3, 2**40 - 9])  # where an index needs a second word
@pytest.mark.parametrize("shape", [(3, 7), (2, 40_000), (700, 90)])  # small, long and wide grids
def test_fill_words__is_the_reference(shape: tuple[int, int], index: int) -> None:
    out = np.empty((*shape, 2), np.uint64)
    seed, checkpoint, stream, column = 2**64 - 2, 2**32 - 1, 5, 2**32 - 1000
    fill_words(out, index, column, seed=seed, checkpoint=checkpoint, stream=stream)
    at = np.arange(index, index + shape[1], dtype=np.uint64)
    columns = np.arange(column, column + shape[0], dtype=np.uint64)[:, None]
    low, high = at & np.uint64(2**32 - 1), (at >> np.uint64(32)) | np.uint64(stream << 16)
    expected = philox4x32((low, columns, checkpoint, high), split_seed(seed))
    assert (out.view(np.uint32) == np.moveaxis(expected, 0, -1)).all()
