from __future__ import annotations

import pytest
import torch

from trakdask.trak import utils


def test_vectorize__takes_the_widest_dtype() -> None:
    found = utils.vectorize(
        {"a": torch.ones(2, 1, dtype=torch.float16), "b": torch.full((2,), 1e5)}, device="cpu"
    )
    assert (found.dtype, found[0].tolist()) == (torch.float32, [1.0, 1e5])


def test_vectorize__fills_an_array() -> None:
    into = torch.zeros(2, 3, dtype=torch.float64)
    found = utils.vectorize({"a": torch.ones(2, 2), "b": torch.full((2, 1), 3.0)}, into)
    assert found is into
    assert into.tolist() == [[1, 1, 3], [1, 1, 3]]


def test_get_matrix_mult__float16_does_not_overflow_in_the_sums() -> None:
    a, b = torch.full((1, 64), 60.0).half(), torch.full((1, 64), 60.0).half()
    assert utils.get_matrix_mult(a, b, torch.float32).item() == 64 * 3600


@pytest.mark.parametrize("block", [1, 3, 100])
def test_get_matrix_mult_blockwise__is_the_product(block: int) -> None:
    a, b = torch.randn(7, 4), torch.randn(5, 4)
    found = utils.get_matrix_mult(a, b, batch_size=block, use_blockwise=True)
    torch.testing.assert_close(found, a @ b.T)


@pytest.mark.parametrize("sizes", [[100], [250], [30, 250, 30], [99, 100, 101]])
def test_chunk_sizes__cuts_what_is_too_large(sizes: list[int]) -> None:
    most, chunks = utils.chunk_sizes(sizes, (2**32 - 1) // 100)
    assert sum(chunks) == sum(sizes)
    assert 0 < min(chunks) <= max(chunks) <= most


@pytest.mark.parametrize("use_fast_jl", [False, True])
def test_test_install__says_what_was_tested(
    use_fast_jl: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    utils.test_install(use_fast_jl)
    printed = capsys.readouterr().out
    assert printed.startswith("TRAK is installed correctly!")
    assert ("fast_jl was not tested" in printed) == use_fast_jl
