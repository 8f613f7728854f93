from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from trakdask.projection.quantize import (
    FRACTION_BITS,
    QuantizedBlock,
    Scratch,
    quantize_block,
    quantize_integers,
)


def quantize_by_hand(values: list[float], n_digits: int) -> tuple[list[int], float]:
    """Quantise one sample with Python numbers: (integers, step)."""
    exponent = math.frexp(max(map(abs, values)))[1]
    step = 2.0 ** (exponent - FRACTION_BITS[n_digits])
    integers = [round(value / step) for value in values]  # Python rounds half to even
    if n_digits == 1:
        integers = [max(-127, min(127, integer)) for integer in integers]
    return integers, step


def integers(quantized: QuantizedBlock, n_samples: int) -> Tensor:
    """Return (B, padded rows) int64: what the digits stand for."""
    digits = torch.cat(quantized.slabs, dim=1).long().view(quantized.n_digits, n_samples, -1)
    return sum((digits[i] * 256**i for i in range(quantized.n_digits)), torch.tensor(0))


@pytest.mark.parametrize("n_digits", [1, 2, 3])
@pytest.mark.parametrize("n_rows", [1, 127, 2048, 2049, 16384])
@pytest.mark.parametrize("magnitude", [1.0, 1e-44, 1e-30, 1e38])
def test_quantize_block__as_by_hand(n_digits: int, n_rows: int, magnitude: float) -> None:
    generator = torch.Generator().manual_seed(n_rows)
    block = torch.randn(3, n_rows, generator=generator).clamp(-3, 3) * magnitude
    block[2] = block[2].sign() * magnitude  # at a power of two, and half-way cases below it
    quantized = quantize_block(block, n_digits, Scratch())
    found = integers(quantized, 3)
    for sample in range(3):
        expected, step = quantize_by_hand(block[sample].tolist(), n_digits)
        assert found[sample, :n_rows].tolist() == expected
        assert quantized.step[sample].item() == step
    assert not found[:, n_rows:].any()


@pytest.mark.parametrize("n_digits", [1, 2, 3])
def test_quantize_block__half_to_even(n_digits: int) -> None:
    unit = 2.0 ** (1 - FRACTION_BITS[n_digits])
    halves = [0.5, 1.5, 2.5, -0.5, -1.5, -2.5]
    block = torch.tensor([[1.0, *(half * unit for half in halves)]])
    found = integers(quantize_block(block, n_digits, Scratch()), 1)[0, 1:7]
    assert found.tolist() == [0, 2, 2, 0, -2, -2]


@pytest.mark.parametrize("n_digits", [1, 2, 3])
def test_quantize_block__largest_integers_fit(n_digits: int) -> None:
    below = 1 - 2.0**-24
    block = torch.tensor([[below, -below, 127 / 128, 0.5 + 2.0**-24]])
    found = integers(quantize_block(block, n_digits, Scratch()), 1)[0, :4]
    assert found.tolist() == quantize_by_hand(block[0].tolist(), n_digits)[0]


@pytest.mark.parametrize("numba", "01")
@pytest.mark.parametrize("outlier", [1.0, 30.0, 1000.0, 1e30])
@pytest.mark.parametrize(("n_digits", "bound"), [(1, 2.0**-6), (2, 2.0**-14), (3, 2.0**-22)])
def test_quantize_block__error_is_bounded_by_the_largest(
    n_digits: int, bound: float, outlier: float, numba: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAKDASK_NUMBA", numba)
    block = torch.randn(3, 5000, generator=torch.Generator().manual_seed(8))
    block[:, 77] = outlier * torch.tensor([1.0, -1.3, 1.99])
    quantized = quantize_block(block, n_digits, Scratch())
    found = integers(quantized, 3)[:, :5000] * quantized.step[:, None]
    error = (found - block.double()).abs().amax(1)
    largest = block.double().abs().amax(1)
    assert (error <= bound * largest).all()
    assert (error > bound * largest / 64).any()  # the bound is not far off


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_quantize_block__flags_only_the_sample_that_is_not_finite(bad: float) -> None:
    block = torch.ones(3, 5)
    block[1, 4] = bad
    step = quantize_block(block, 2, Scratch()).step
    assert step.isnan().tolist() == [False, True, False]


def test_quantize_block__zero_block() -> None:
    quantized = quantize_block(torch.zeros(2, 10), 2, Scratch())
    assert not integers(quantized, 2).any()
    assert quantized.step.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_quantize_block__other_dtypes_are_float32_first(dtype: torch.dtype) -> None:
    block = torch.randn(4, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    block = block.to(dtype)
    found, expected = (quantize_block(x, 3, Scratch()) for x in (block, block.float()))
    assert torch.equal(integers(found, 4), integers(expected, 4))
    assert torch.equal(found.step, expected.step)


def test_quantize_block__groups_of_samples_and_strides_are_invisible() -> None:
    block = torch.randn(40, 16384 + 9, generator=torch.Generator().manual_seed(1))[:, :16384]
    whole = integers(quantize_block(block, 2, Scratch()), 40)
    scratch = Scratch()
    for sample in (0, 15, 16, 39):
        alone = integers(quantize_block(block[sample : sample + 1].clone(), 2, scratch), 1)
        assert torch.equal(whole[sample], alone[0])


@pytest.mark.parametrize("fraction_bits", [14, 16, 22])
@pytest.mark.parametrize("magnitude", [1.0, 1e-44, 1e38])
def test_quantize_integers__as_by_hand(fraction_bits: int, magnitude: float) -> None:
    block = torch.randn(3, 2049, generator=torch.Generator().manual_seed(2)) * magnitude
    block = block.clamp(-2e38, 2e38)
    found, step = quantize_integers(block, fraction_bits, Scratch())
    for sample in range(3):
        exponent = math.frexp(block[sample].abs().max().item())[1]
        assert step[sample].item() == 2.0 ** (exponent - fraction_bits)
        expected = [round(value / step[sample].item()) for value in block[sample].tolist()]
        assert found[sample].tolist() == expected


def test_quantize_integers__flags_only_the_sample_that_is_not_finite() -> None:
    block = torch.ones(3, 5)
    block[1, 4] = torch.inf
    assert quantize_integers(block, 14, Scratch())[1].isnan().tolist() == [False, True, False]


def test_take__usable_after_inference_mode() -> None:
    scratch = Scratch()
    with torch.inference_mode():
        scratch.take("x", (3,), torch.float32)
    assert scratch.take("x", (2,), torch.float32).zero_().tolist() == [0, 0]
