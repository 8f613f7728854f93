from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

from trakdask.projection import dense_products
from trakdask.projection.dense_products import (
    accumulate_by_matmul,
    accumulate_rademacher,
    integer_matmul,
)
from trakdask.projection.philox import rademacher_bits


def signs(n_rows: int, n_cols: int, seed: int, checkpoint: int, row: int = 0) -> Tensor:
    """Return the matrix itself, (rows, cols) float64."""
    bits = rademacher_bits(row, n_rows, 0, n_cols, seed=seed, checkpoint=checkpoint)
    return torch.from_numpy(1.0 - 2.0 * bits.T)


def accumulated(block: Tensor, width: int, n_digits: int = 2, row: int = 0) -> Tensor:
    out = torch.zeros(len(block), width, dtype=torch.float64)
    accumulate_rademacher(block, row, seed=5, checkpoint=9, n_digits=n_digits, out=out)
    return out


def gaussian(n_samples: int, n_rows: int) -> Tensor:
    return torch.randn(n_samples, n_rows, generator=torch.Generator().manual_seed(n_rows))


@pytest.mark.parametrize("n_digits", [1, 2, 3])
@pytest.mark.parametrize(
    ("n_samples", "n_rows", "width"), [(1, 1, 1), (3, 127, 77), (2, 2049, 257), (5, 16384, 300)]
)
def test_accumulate_rademacher__exact_on_small_integers(
    n_digits: int, n_samples: int, n_rows: int, width: int
) -> None:
    generator = torch.Generator().manual_seed(3)
    block = torch.randint(-63, 64, (n_samples, n_rows), generator=generator).float()
    row = 3 * 16384
    expected = block.double() @ signs(n_rows, width, 5, 9, row)
    assert torch.equal(accumulated(block, width, n_digits, row), expected)


@pytest.mark.parametrize(("n_digits", "bound"), [(1, 2e-2), (2, 2e-4), (3, 1e-6)])
def test_accumulate_rademacher__error_on_gaussian_data(n_digits: int, bound: float) -> None:
    block = gaussian(8, 16384)
    expected = block.double() @ signs(16384, 64, 5, 9)
    error = (accumulated(block, 64, n_digits) - expected).norm() / expected.norm()
    assert bound / 100 < error < bound


@pytest.mark.parametrize("n_digits", [1, 2, 3])
def test_accumulate_by_matmul__every_way_has_the_same_bits(
    n_digits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = gaussian(7, 16384 - 300)
    expected = accumulated(block, 270, n_digits)
    for numba, usable in itertools.product("01", {dense_products.int8_matmul_is_usable(), False}):
        monkeypatch.setenv("TRAKDASK_NUMBA", numba)
        monkeypatch.setattr(dense_products, "int8_matmul_is_usable", lambda usable=usable: usable)
        out = torch.zeros(7, 270, dtype=torch.float64)
        accumulate_by_matmul(block, 0, seed=5, checkpoint=9, n_digits=n_digits, out=out)
        assert torch.equal(out, expected)


def test_accumulate_rademacher__thread_count_is_invisible() -> None:
    block, before = gaussian(6, 5000), torch.get_num_threads()
    results = []
    try:
        for n_threads in (1, 2):
            torch.set_num_threads(n_threads)
            results.append(accumulated(block, 100))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


def test_accumulate_rademacher__concurrent_threads_do_not_share_buffers() -> None:
    blocks = [gaussian(4, n_rows) for n_rows in (300, 5000, 129, 2048) * 3]
    expected = [accumulated(block, 130) for block in blocks]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda block: accumulated(block, 130), blocks))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("shape", [(1, 1, 128), (3, 5, 16384), (17, 33, 256)])
@pytest.mark.parametrize("usable", [True, False])
def test_integer_matmul__exact_at_the_extremes(
    shape: tuple[int, int, int], usable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if usable and not dense_products.int8_matmul_is_usable():
        pytest.skip("torch multiplies int8 matrices wrongly or slowly here")
    monkeypatch.setattr(dense_products, "int8_matmul_is_usable", lambda: usable)
    n, m, k = shape
    rng = np.random.default_rng(k)
    bits = torch.from_numpy(rng.integers(0, 2, (n, k), dtype=np.int8))
    digits = torch.from_numpy(rng.integers(-128, 128, (m, k), dtype=np.int8))
    bits[0], digits[0] = 1, -128
    out = torch.empty(n, m, dtype=torch.int32)
    integer_matmul(bits, digits, out)
    assert torch.equal(out.long(), bits.long() @ digits.long().T)


def test_int8_matmul_is_usable__false_without_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_int_mm")
    assert dense_products.int8_matmul_is_usable.__wrapped__() is False


def test_int8_matmul_is_usable__false_when_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_int_mm", lambda a, b, out: out.zero_())
    assert dense_products.int8_matmul_is_usable.__wrapped__() is False


def test_int8_matmul_is_usable__false_where_pairs_saturate(monkeypatch: pytest.MonkeyPatch) -> None:
    def saturating(a: Tensor, b: Tensor, out: Tensor) -> None:
        """Multiply as processors do that have AVX-512 but not VNNI: in 16 bits, two by two."""
        pairs = [a[:, i::2].int()[:, :, None] * b[i::2].int()[None] for i in range(2)]
        out.copy_((pairs[0] + pairs[1]).clamp(-(2**15), 2**15 - 1).sum(1))

    monkeypatch.setattr(torch, "_int_mm", saturating)
    assert dense_products.int8_matmul_is_usable.__wrapped__() is False
