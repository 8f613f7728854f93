from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.projection.reference import normal, rademacher_bits, small_integers
from trakdask.projection import Rademacher, integer_products
from trakdask.projection.integer_products import (
    int8_matmul_is_usable,
    integer_matmul,
    sign_bits,
    signed_sums,
    signs_of,
    split_digits,
)

ADDRESS = {"seed": 5, "checkpoint": 9}


def signs(row: int, n_rows: int, column: int, n_columns: int) -> Tensor:
    """Return the matrix itself, (columns, rows) float64."""
    bits = rademacher_bits(row, n_rows, column, n_columns, **ADDRESS)
    return torch.from_numpy(1.0 - 2.0 * bits)


def accumulated(block: Tensor, width: int, n_digits: int = 2, row: int = 0) -> Tensor:
    out = torch.zeros(len(block), width, dtype=torch.float64)
    Rademacher(width, 5, f"int8x{n_digits}").project_block(block, row, 9, out)
    return out


# Rows that start in the middle of a counter, and that end in one; slabs of 2048 rows.
@pytest.mark.parametrize(("row", "n_rows"), [(0, 1), (5, 200), (128, 4096), (16384 + 77, 5000)])
@pytest.mark.parametrize("n_digits", [2, 3])
def test_signed_sums__are_the_matrix_product(row: int, n_rows: int, n_digits: int) -> None:
    largest = {2: 2**14, 3: 2**22}[n_digits]
    integers = torch.from_numpy(
        np.random.default_rng(0).integers(-largest, largest + 1, (3, 2, n_rows), dtype=np.int32)
    )
    integers[0] = largest  # sums as large as they get
    packed = sign_bits(row, n_rows, 7, 40, **ADDRESS, stream=0)
    found = signed_sums(packed, split_digits(integers, n_digits, row), n_digits)
    expected = signs(row, n_rows, 7, 40) @ integers.flatten(0, 1).double().T
    assert torch.equal(found, expected)
    assert torch.equal(signs_of(packed, row, n_rows), signs(row, n_rows, 7, 40))


@pytest.mark.parametrize("n_digits", [1, 2, 3])
@pytest.mark.parametrize(
    ("n_samples", "n_rows", "width"), [(1, 1, 1), (3, 127, 77), (2, 2049, 257), (5, 16384, 2100)]
)
def test_rademacher__exact_on_small_integers(
    n_digits: int, n_samples: int, n_rows: int, width: int
) -> None:
    block, row = small_integers(n_samples, n_rows), 3 * 16384
    expected = block.double() @ signs(row, n_rows, 0, width).T
    assert torch.equal(accumulated(block, width, n_digits, row), expected)


@pytest.mark.parametrize(("n_digits", "bound"), [(1, 2e-2), (2, 2e-4), (3, 1e-6)])
def test_rademacher__error_on_gaussian_data(n_digits: int, bound: float) -> None:
    block = normal(8, 16384)
    expected = block.double() @ signs(0, 16384, 0, 64).T
    error = (accumulated(block, 64, n_digits) - expected).norm() / expected.norm()
    assert bound / 100 < error < bound


@pytest.mark.parametrize("n_digits", [1, 2, 3])
def test_rademacher__every_way_has_the_same_bits(
    n_digits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = normal(7, 16384 - 300)
    expected = accumulated(block, 270, n_digits)
    for numba, usable in itertools.product("01", {int8_matmul_is_usable(), False}):
        monkeypatch.setenv("TRAKDASK_NUMBA", numba)
        monkeypatch.setattr(integer_products, "int8_matmul_is_usable", lambda usable=usable: usable)
        assert torch.equal(accumulated(block, 270, n_digits), expected)


def test_rademacher__threads_are_invisible_and_do_not_share_buffers() -> None:
    blocks, before = (
        [normal(4, n_rows) for n_rows in (300, 5000, 129, 2048) * 3],
        (torch.get_num_threads()),
    )
    expected = [accumulated(block, 130) for block in blocks]
    try:
        torch.set_num_threads(2)
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda block: accumulated(block, 130), blocks))
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("shape", [(1, 1, 128), (3, 5, 16384), (17, 33, 256)])
@pytest.mark.parametrize("usable", [True, False])
def test_integer_matmul__exact_at_the_extremes(
    shape: tuple[int, int, int], usable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if usable and not int8_matmul_is_usable():
        pytest.skip("torch multiplies int8 matrices wrongly or slowly here")
    monkeypatch.setattr(integer_products, "int8_matmul_is_usable", lambda: usable)
    n, m, k = shape
    rng = np.random.default_rng(k)
    bits = torch.from_numpy(rng.integers(0, 2, (n, k), dtype=np.int8))
    digits = torch.from_numpy(rng.integers(-128, 128, (m, k), dtype=np.int8))
    bits[0], digits[0] = 1, -128
    out = torch.empty(n, m, dtype=torch.int32)
    integer_matmul(bits, digits, out)
    assert torch.equal(out.long(), bits.long() @ digits.long().T)


def saturating(bits: Tensor, digits: Tensor, out: Tensor) -> None:
    """Multiply as processors do that have AVX-512 but not VNNI: in 16 bits, two by two."""
    pairs = [bits[:, i::2].int()[:, None] * digits[:, i::2].int()[None] for i in range(2)]
    out.copy_((pairs[0] + pairs[1]).clamp(-(2**15), 2**15 - 1).sum(2))


def missing(*_: Tensor) -> None:
    raise AttributeError("module 'torch' has no attribute '_int_mm'")


@pytest.mark.parametrize("product", [missing, lambda a, b, out: out.zero_(), saturating])
def test_int8_matmul_is_usable__only_where_it_is_there_and_exact(
    product: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integer_products, "int8_matmul", product)
    assert int8_matmul_is_usable.__wrapped__() is False
