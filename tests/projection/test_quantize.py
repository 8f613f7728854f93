from __future__ import annotations

import math

import pytest
import torch

from trakdask.projection.memory import Scratch
from trakdask.projection.quantize import quantize


def quantize_by_hand(values: list[float], fraction_bits: int) -> tuple[list[int], float]:
    """Quantise one sample with Python numbers: (integers, step)."""
    step = 2.0 ** (math.frexp(max(map(abs, values)))[1] - fraction_bits)
    return [round(value / step) for value in values], step  # Python rounds half to even


@pytest.fixture(params=["0", "1"], ids=["numpy", "numba"], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAKDASK_NUMBA", request.param)


@pytest.mark.parametrize("fraction_bits", [7, 14, 22])
@pytest.mark.parametrize("n_rows", [1, 127, 2049, 16384])
@pytest.mark.parametrize("magnitude", [1.0, 1e-44, 1e-30, 1e38])
def test_quantize__as_by_hand(fraction_bits: int, n_rows: int, magnitude: float) -> None:
    generator = torch.Generator().manual_seed(n_rows)
    block = torch.randn(3, n_rows, generator=generator).clamp(-3, 3) * magnitude
    block[2] = block[2].sign() * magnitude  # at a power of two, and half-way cases below it
    found, step = quantize(block, fraction_bits, Scratch())
    for sample in range(3):
        expected, unit = quantize_by_hand(block[sample].tolist(), fraction_bits)
        assert found[sample].tolist() == expected
        assert step[sample].item() == unit


@pytest.mark.parametrize("fraction_bits", [7, 14, 22])
def test_quantize__half_to_even_and_the_largest(fraction_bits: int) -> None:
    unit, below = 2.0 ** (1 - fraction_bits), 1 - 2.0**-24
    halves = torch.tensor([[1.0, *(half * unit for half in (0.5, 1.5, 2.5, -0.5, -1.5, -2.5))]])
    assert quantize(halves, fraction_bits, Scratch())[0][0, 1:].tolist() == [0, 2, 2, 0, -2, -2]
    block = torch.tensor([[below, -below, 127 / 128, 0.5 + 2.0**-24]])
    expected, _ = quantize_by_hand(block[0].tolist(), fraction_bits)
    assert quantize(block, fraction_bits, Scratch())[0][0].tolist() == expected


@pytest.mark.parametrize("outlier", [1.0, 30.0, 1000.0, 1e30])
@pytest.mark.parametrize("fraction_bits", [7, 14, 22])
def test_quantize__error_is_bounded_by_the_largest(fraction_bits: int, outlier: float) -> None:
    block = torch.randn(3, 5000, generator=torch.Generator().manual_seed(8))
    block[:, 77] = outlier * torch.tensor([1.0, -1.3, 1.99])
    found, step = quantize(block, fraction_bits, Scratch())
    error = (found * step[:, None] - block.double()).abs().amax(1)
    bound = 2.0**-fraction_bits * block.double().abs().amax(1)
    assert (error <= bound).all()
    assert (error > bound / 64).any()  # the bound is not far off


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_quantize__flags_only_the_sample_that_is_not_finite(bad: float) -> None:
    block = torch.ones(3, 5)
    block[1, 4], block[2] = bad, 0
    found, step = quantize(block, 14, Scratch())
    assert step.isnan().tolist() == [False, True, False]
    assert not found[2].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_quantize__other_dtypes_and_strides_are_float32_first(dtype: torch.dtype) -> None:
    wide = torch.randn(4, 900, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    block = wide.to(dtype)[:, 7:-13:3]
    found, expected = (quantize(x, 22, Scratch()) for x in (block, block.float().contiguous()))
    assert all(map(torch.equal, found, expected))
