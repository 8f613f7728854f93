"""Rounding, exact products of integers, sorted nonzeros, and when numba computes them."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.projection.reference import normal, project_blocks, project_flat, rounded, signs
from trakdask.projection import SJLT, Identity, Rademacher, acceleration, fixed_point, sjlt
from trakdask.projection.fixed_point import int8_matmul_is_usable, integer_matmul, quantize
from trakdask.projection.protocol import ARITHMETIC, ROUNDING_ERROR

ADDRESS = {"seed": 5, "checkpoint": 9}

# ----------------------------------------------------------------------------------------- rounding


@pytest.mark.parametrize("fraction_bits", [14, 22])
@pytest.mark.parametrize(
    ("n_rows", "magnitude"),
    [(1, 1e-30), (1, 1.0), (127, 1e-44), (127, 1e38), (2049, 1.0), (2049, 1e-44), (16384, 1e-30)],
)
def test_quantize__as_by_hand(
    fraction_bits: int, n_rows: int, magnitude: float, backend: str
) -> None:
    block = normal(3, n_rows).clamp(-3, 3) * magnitude
    block[2] = block[2].sign() * magnitude  # at a power of two, and half-way cases below it
    found, step = quantize(block, fraction_bits)
    assert torch.equal(found * step[:, None], rounded(block, fraction_bits))
    largest = found.abs().amax(1)[block.any(1)]
    assert ((largest >= 2 ** (fraction_bits - 1)) & (largest <= 2**fraction_bits)).all()


@pytest.mark.parametrize("fraction_bits", [7, 14, 22])
def test_quantize__half_to_even_and_the_largest(fraction_bits: int, backend: str) -> None:
    unit, below = 2.0 ** (1 - fraction_bits), 1 - 2.0**-24
    halves = torch.tensor([[1.0, *(half * unit for half in (0.5, 1.5, 2.5, -0.5, -1.5, -2.5))]])
    assert quantize(halves, fraction_bits)[0][0, 1:].tolist() == [0, 2, 2, 0, -2, -2]
    block = torch.tensor([[below, -below, 127 / 128, 0.5 + 2.0**-24]])
    expected = (block.double() * 2**fraction_bits).round()
    assert torch.equal(quantize(block, fraction_bits)[0].double(), expected)


@pytest.mark.parametrize("arithmetic", ARITHMETIC)
def test_rademacher__error_on_gaussian_data_is_the_one_we_tell(arithmetic: str) -> None:
    block = normal(8, 16384)
    expected = block.double() @ torch.from_numpy(signs(0, 16384, 0, 64, **ADDRESS))
    found = project_blocks(Rademacher(64, 5, arithmetic), block, 0, 9)
    error = (found - expected).norm() / expected.norm()
    assert float(error) == pytest.approx(ROUNDING_ERROR[arithmetic], rel=0.3)


# ---------------------------------------------------------------------------------- exact products


@pytest.mark.parametrize("shape", [(1, 1, 128), (3, 5, 16384), (17, 33, 256)])
@pytest.mark.parametrize("usable", [True, False])
def test_integer_matmul__exact_at_the_extremes(
    shape: tuple[int, int, int], usable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if usable and not int8_matmul_is_usable():
        pytest.skip("torch multiplies int8 matrices wrongly or slowly here")
    monkeypatch.setattr(fixed_point, "int8_matmul_is_usable", lambda: usable)
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
    monkeypatch.setattr(fixed_point, "int8_matmul", product)
    assert int8_matmul_is_usable.__wrapped__() is False


# ------------------------------------------------------------ nonzeros, which are sorted and kept

PROJECTOR = SJLT(proj_dim=12, sparsity=5, seed=2**40 + 3)


@pytest.mark.parametrize("projector", [PROJECTOR, SJLT(2**13)], ids=str)
def test_kept__blocks_are_drawn_once_and_older_matrices_make_way(
    projector: SJLT, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sjlt, "_kept", sjlt._Kept(3 * projector.nonzeros(7, 0, 100).nbytes + 1))
    blocks = [projector.nonzeros(7, row, 100) for row in range(0, 1000, 100)]
    again = [projector.nonzeros(7, row, 100) for row in range(0, 1000, 100)]
    kept = [one is other for one, other in zip(blocks, again, strict=True)]
    assert kept == [True] * 3 + [False] * 7
    other = projector.nonzeros(8, 300, 100)
    assert projector.nonzeros(7, 0, 100) is not blocks[0]
    assert projector.nonzeros(8, 300, 100) is other


def test_kept__nonzeros_by_row_and_by_column_are_no_aliases(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process takes numba after its first gradients, and other nonzeros with it."""
    flat = normal(5, 3000)
    found = []
    for setting in "0101":
        monkeypatch.setenv("TRAKDASK_NUMBA", setting)
        found.append(project_flat(SJLT(2**13), flat))
    assert all(torch.equal(found[0], other) for other in found)


# ------------------------------------------------------------------------------------------- numba


def test_numba_kernels__after_a_number_of_elements_and_where_it_imports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRAKDASK_NUMBA")
    monkeypatch.setattr(acceleration, "_n_projected", acceleration.NUMPY_ELEMENTS - 6)
    monkeypatch.setattr(acceleration, "_load", lambda: "kernels")
    assert acceleration.numba_kernels() is None
    project_flat(Identity(), torch.ones(2, 3))
    assert acceleration.numba_kernels() == "kernels"
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "numba", None)
    acceleration._load.cache_clear()
    try:
        assert acceleration.numba_kernels() is None
    finally:
        acceleration._load.cache_clear()
