from __future__ import annotations

import numpy as np
import pytest
import torch

from trakdask.trak import utils
from trakdask.trak.projectors import chunk_sizes
from trakdask.trak.score_computers import BasicScoreComputer, BasicSingleBlockScoreComputer

G = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
T = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))


def oracle_features(lambda_reg: float, centred: bool) -> np.ndarray:
    g = G.double().numpy()
    inverse = np.linalg.inv(g.T @ g + lambda_reg * np.eye(4))
    return g @ (inverse / np.abs(inverse).mean() if centred else inverse)


@pytest.mark.parametrize("lambda_reg", [0.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", [BasicScoreComputer, BasicSingleBlockScoreComputer])
def test_features_and_scores__are_the_formula(
    kind: type, dtype: torch.dtype, lambda_reg: float
) -> None:
    computer = kind(dtype=dtype, device="cpu", logging_level=100, lambda_reg=lambda_reg)
    g, t = G.to(dtype), T.to(dtype)
    features = computer.get_x_xtx_inv(g, computer.get_xtx(g))
    expected = oracle_features(lambda_reg, centred=kind is BasicScoreComputer)
    tolerance = 5e-3 if dtype == torch.float16 else 1e-5
    assert features.dtype == dtype
    np.testing.assert_allclose(features, expected, rtol=0, atol=tolerance * abs(expected).max())
    total = torch.zeros(30, 5)
    computer.get_scores(features, t, total)
    scores = expected @ T.double().numpy().T
    np.testing.assert_allclose(total, scores, rtol=0, atol=tolerance * abs(scores).max())


def test_get_xtx__float16_does_not_overflow() -> None:
    g = torch.full((1000, 2), 10.0).half()
    found = BasicScoreComputer(torch.float16, "cpu").get_xtx(g)
    assert found.tolist() == [[1e5, 1e5], [1e5, 1e5]]


def test_get_x_xtx_inv__float16_keeps_a_small_lambda() -> None:
    g = torch.eye(2).half() * 2**-10
    found = BasicScoreComputer(torch.float16, "cpu", lambda_reg=1e-8)
    inverse = np.linalg.inv((2.0**-20 + 1e-8) * np.eye(2))
    expected = g.double().numpy() @ (inverse / np.abs(inverse).mean())
    np.testing.assert_allclose(found.get_x_xtx_inv(g, found.get_xtx(g)), expected, rtol=2e-3)


@pytest.mark.parametrize(
    ("g", "lambda_reg", "is_singular"),
    [(G[:3], 0.0, True), (G @ T.T, 0.0, True), (G, 0.0, False), (G[:3], 1e-3, False)],
)
def test_get_x_xtx_inv__logs_a_singular_matrix(
    g: torch.Tensor, lambda_reg: float, is_singular: bool, caplog: pytest.LogCaptureFixture
) -> None:
    computer = BasicScoreComputer(torch.float32, "cpu", lambda_reg=lambda_reg)
    computer.get_x_xtx_inv(g, computer.get_xtx(g))
    logged = f"{len(g)} samples and {g.shape[1]} columns is singular"
    assert (logged in caplog.text) == is_singular


def test_vectorize__takes_the_widest_dtype_or_fills_an_array() -> None:
    gradients = {"a": torch.ones(2, 1, dtype=torch.float16), "b": torch.full((2,), 1e5)}
    found = utils.vectorize(gradients, device="cpu")
    assert (found.dtype, found[0].tolist()) == (torch.float32, [1.0, 1e5])
    into = torch.zeros(2, 2, dtype=torch.float64)
    assert utils.vectorize(gradients, into) is into
    assert into.tolist() == [[1, 1e5], [1, 1e5]]


def test_get_matrix_mult__float16_does_not_overflow_in_the_sums() -> None:
    a = torch.full((1, 64), 60.0).half()
    assert utils.get_matrix_mult(a, a, torch.float32).item() == 64 * 3600


@pytest.mark.parametrize("block", [1, 3, 100])
def test_get_matrix_mult_blockwise__is_the_product(block: int) -> None:
    a, b = torch.randn(7, 4), torch.randn(5, 4)
    found = utils.get_matrix_mult(a, b, batch_size=block, use_blockwise=True)
    torch.testing.assert_close(found, a @ b.T)


@pytest.mark.parametrize("sizes", [[100], [250], [30, 250, 30], [99, 100, 101]])
def test_chunk_sizes__cuts_what_is_too_large(sizes: list[int]) -> None:
    most, chunks = chunk_sizes(sizes, (2**32 - 1) // 100)
    assert sum(chunks) == sum(sizes)
    assert 0 < min(chunks) <= max(chunks) <= most
