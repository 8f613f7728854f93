from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from trakdask.projection import acceleration, dense_products
from trakdask.projection.dense_products import accumulate_by_matmul
from trakdask.projection.lookup_products import accumulate_by_lookup, lookup_is_available
from trakdask.projection.philox import rademacher_bits

needs_lookup = pytest.mark.skipif(
    not lookup_is_available(), reason="table lookup needs numba and a processor with AVX-512"
)


def signs(n_rows: int, n_cols: int, row: int) -> Tensor:
    """Return the matrix itself, (rows, cols) float64."""
    bits = rademacher_bits(row, n_rows, 0, n_cols, seed=2**63 + 5, checkpoint=9)
    return torch.from_numpy(1.0 - 2.0 * bits.T)


def accumulated(way: str, block: Tensor, width: int, n_digits: int, row: int = 0) -> Tensor:
    out = torch.zeros(len(block), width, dtype=torch.float64)
    accumulate = {"lookup": accumulate_by_lookup, "matmul": accumulate_by_matmul}[way]
    address = {"seed": 2**63 + 5, "checkpoint": 9}
    accumulate(block, row, n_digits=n_digits, out=out, **address)
    return out


def gaussian(n_samples: int, n_rows: int) -> Tensor:
    return torch.randn(n_samples, n_rows, generator=torch.Generator().manual_seed(n_rows))


@needs_lookup
@pytest.mark.parametrize("n_digits", [1, 2, 3])
@pytest.mark.parametrize("row", [0, 2**39 + 5 * 16384])
@pytest.mark.parametrize(
    ("n_samples", "n_rows", "width"),
    [(1, 1, 1), (3, 15, 77), (2, 127, 256), (5, 273, 257), (65, 2049, 300), (2, 16384, 4097)],
)
def test_accumulate_by_lookup__exact_on_small_integers(
    n_digits: int, n_samples: int, n_rows: int, width: int, row: int
) -> None:
    generator = torch.Generator().manual_seed(3)
    block = torch.randint(-63, 64, (n_samples, n_rows), generator=generator).float()
    expected = block.double() @ signs(n_rows, width, row)
    assert torch.equal(accumulated("lookup", block, width, n_digits, row), expected)


@needs_lookup
@pytest.mark.parametrize("n_digits", [1, 2, 3])
@pytest.mark.parametrize("magnitude", [1.0, 1e-44, 1e38])
def test_accumulate_by_lookup__same_bits_as_matmul(n_digits: int, magnitude: float) -> None:
    block = gaussian(70, 5000).clamp(-3, 3) * magnitude
    block[3], block[5, 4999], block[6, 0] = 0, math.nan, -math.inf
    found, expected = (accumulated(way, block, 300, n_digits) for way in ("lookup", "matmul"))
    assert expected[[5, 6]].isnan().all()
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


@needs_lookup
@pytest.mark.parametrize("n_digits", [1, 2, 3])
def test_accumulate_by_lookup__sums_at_the_limits_of_16_bits(n_digits: int) -> None:
    # All digits of a chunk -128 (lowest) or at their largest, under columns of ones.
    lowest = {1: -127.0, 2: -128.0 - 2**13, 3: -128.0 - 2**15 - 2**21}[n_digits]
    block = torch.full((2, 16384), lowest)
    block[1] *= -1
    expected = block.double() @ signs(16384, 260, 0)
    assert torch.equal(accumulated("lookup", block, 260, n_digits), expected)


@needs_lookup
@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_accumulate_by_lookup__threads_and_tiles_are_invisible(n_threads: int) -> None:
    block, before = gaussian(131, 700), torch.get_num_threads()
    expected = accumulated("matmul", block, 40, 2)
    try:
        torch.set_num_threads(n_threads)
        assert torch.equal(accumulated("lookup", block, 40, 2), expected)
    finally:
        torch.set_num_threads(before)


@needs_lookup
def test_accumulate_by_lookup__strided_rows_and_other_dtypes() -> None:
    wide = gaussian(6, 900)
    expected = accumulated("matmul", wide[:, 100:800].clone(), 30, 2)
    assert torch.equal(accumulated("lookup", wide[:, 100:800], 30, 2), expected)
    every_other = wide[::2, 100:800]
    assert torch.equal(accumulated("lookup", every_other, 30, 2), expected[::2])
    columns = wide[:, 100:800].T.contiguous().T
    assert torch.equal(accumulated("lookup", columns, 30, 2), expected)
    half = wide.half()
    assert torch.equal(*(accumulated("lookup", x, 30, 3) for x in (half, half.float())))


@needs_lookup
def test_accumulate_by_lookup__adds_to_what_is_there() -> None:
    block = gaussian(3, 20)
    out = torch.ones(3, 5, dtype=torch.float64)
    accumulate_by_lookup(block * 0, 0, seed=0, checkpoint=0, n_digits=2, out=out)
    assert (out == 1).all()


def test_lookup_is_available__not_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAKDASK_NUMBA", "0")
    assert not lookup_is_available()
    assert not dense_products.lookup_is_faster()


def test_lookup_is_available__not_for_a_chosen_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    # Code for another processor would end the process where LLVM lacks the instruction.
    numba = pytest.importorskip("numba")
    monkeypatch.setattr(numba.config, "CPU_NAME", "generic")
    assert not lookup_is_available()


def test_compiled__when_it_is_worth_its_import(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    monkeypatch.delenv("TRAKDASK_NUMBA")
    monkeypatch.setattr(acceleration, "_spent_s", 0.0)
    assert acceleration.compiled("random_words") is None
    monkeypatch.setattr(acceleration, "PATIENCE_S", 1e-9)
    with acceleration.timed():
        assert acceleration.compiled("random_words") is None
    assert acceleration.compiled("random_words") is not None
    monkeypatch.setattr(acceleration, "PATIENCE_S", 1e9)
    assert acceleration.compiled("random_words") is None
    acceleration.stop_waiting()
    assert acceleration.compiled("random_words") is not None


def test_compiled__none_where_numba_does_not_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "numba", None)
    acceleration._load.cache_clear()
    try:
        assert acceleration.compiled("random_words") is None
    finally:
        acceleration._load.cache_clear()


@pytest.mark.parametrize("numba", ["0", "1"])
@pytest.mark.parametrize("index", [0, 2**32 - 3, 2**40 - 9])
def test_fill_words__is_the_reference(
    numba: str, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trakdask.projection.philox import philox4x32, split_seed
    from trakdask.projection.random_words import fill_words

    monkeypatch.setenv("TRAKDASK_NUMBA", numba)
    out = np.empty((3, 7, 2), np.uint64)
    seed, checkpoint, stream, column = 2**64 - 2, 2**32 - 1, 5, 2**32 - 3
    fill_words(out, index, column, seed=seed, checkpoint=checkpoint, stream=stream)
    for j in range(3):
        for i in range(7):
            at = index + i
            counter = (at & 0xFFFFFFFF, column + j, checkpoint, (at >> 32) | stream << 16)
            expected = philox4x32(counter, split_seed(seed)).ravel()
            assert out[j, i].view(np.uint32).tolist() == expected.tolist()
