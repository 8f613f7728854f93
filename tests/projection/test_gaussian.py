from __future__ import annotations

import hashlib
import json
import math
import pickle
from concurrent.futures import ThreadPoolExecutor
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trakdask.projection import Projector, dense_products, gaussian
from trakdask.projection.gaussian import TABLE, VARIANCE, Gaussian
from trakdask.projection.philox import STREAM_NORMAL, philox4x32, split_seed
from trakdask.projection.row_map import RowMap
from trakdask.projection.stream import project

SMALL = Gaussian(proj_dim=12, seed=3)
LARGEST = {"row": 2**47 - 16384, "seed": 2**64 - 1, "checkpoint": 2**32 - 1}


def matrix(n_rows: int, n_cols: int, row: int = 0, seed: int = 3, checkpoint: int = 9) -> Tensor:
    """Return the integers of the matrix by their definition, (rows, cols) float64."""
    rows = np.arange(row, row + n_rows, dtype=np.uint64)[:, None]
    index, column = rows >> np.uint64(4), np.arange(n_cols)
    high = (index >> np.uint64(32)) | np.uint64(STREAM_NORMAL << 16)
    counter = (index & np.uint64(2**32 - 1), column, checkpoint, high)
    words = philox4x32(counter, split_seed(seed)).astype("<u4")
    sixteen = np.moveaxis(words, 0, -1).copy().view(np.uint8)
    chosen = np.take_along_axis(sixteen, (rows & np.uint64(15)).astype(int)[:, :, None], axis=2)
    return torch.from_numpy(TABLE[chosen[:, :, 0]].astype(float))


def accumulated(
    block: Tensor, width: int, n_digits: int = 2, row: int = 0, seed: int = 3, checkpoint: int = 9
) -> Tensor:
    out = torch.zeros(len(block), width, dtype=torch.float64)
    projector = Gaussian(width, seed, arithmetic=f"int8x{n_digits}")
    projector.project_block(block, row, checkpoint, out)
    return out


def project_flat(projector: Projector, flat: Tensor) -> Tensor:
    rows = RowMap.from_shapes({"flat": flat.shape[1:]}, alignment=512)
    return project(projector, {"flat": flat}, rows, checkpoint=9)


def small_integers(n_samples: int, n_rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(n_rows)
    return torch.randint(-63, 64, (n_samples, n_rows), generator=generator).float()


def normal(n_samples: int, n_rows: int) -> Tensor:
    return torch.randn(n_samples, n_rows, generator=torch.Generator().manual_seed(n_rows))


def test_table__is_the_quantised_normal() -> None:
    quantiles = [NormalDist().inv_cdf((i + 0.5) / 256) for i in range(256)]
    wanted = [127 / quantiles[255] * quantile for quantile in quantiles]
    # A quantile of another platform, wrong in its last bits, must round to the same integer.
    assert min(abs(value % 1 - 0.5) for value in wanted) > 5e-4
    assert TABLE.tolist() == [round(value) for value in wanted]


def test_table__sha256_of_the_definition() -> None:
    assert TABLE.dtype == np.int8
    digest = "bfe90f74a8d0e1b70a4569961440af04ef546850b7894a42813aab81206190d9"
    assert hashlib.sha256(TABLE.tobytes()).hexdigest() == digest


def test_table__moments() -> None:
    entries = TABLE.astype(float)
    assert entries.sum() == 0
    assert (entries**2).mean() == VARIANCE == 1930.90625
    assert (entries**4).mean() / VARIANCE**2 == pytest.approx(2.918, abs=5e-4)


@pytest.mark.parametrize("numba", ["0", "1"])
@pytest.mark.parametrize("n_digits", [1, 2, 3])
@pytest.mark.parametrize(
    ("n_samples", "n_rows", "width"), [(1, 1, 1), (3, 127, 77), (2, 2049, 130), (2, 16384, 30)]
)
@pytest.mark.parametrize("address", [{}, {"row": 2**36 + 3 * 16384}, LARGEST])
def test_project_block__exact_on_small_integers(
    n_samples: int,
    n_rows: int,
    width: int,
    n_digits: int,
    address: dict[str, int],
    numba: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRAKDASK_NUMBA", numba)
    block = small_integers(n_samples, n_rows)
    expected = block.double() @ matrix(n_rows, width, **address)
    assert torch.equal(accumulated(block, width, n_digits, **address), expected)


def test_project_block__more_than_one_tile_of_columns() -> None:
    block = small_integers(2, 40)
    expected = block.double() @ matrix(40, 2100)
    assert torch.equal(accumulated(block, 2100), expected)


@pytest.mark.parametrize(("n_digits", "bound"), [(1, 2e-2), (2, 2e-4), (3, 1e-6)])
def test_project_block__error_on_gaussian_data(n_digits: int, bound: float) -> None:
    block = normal(4, 16384)
    expected = block.double() @ matrix(16384, 16)
    error = (accumulated(block, 16, n_digits) - expected).norm() / expected.norm()
    assert bound / 100 < error < bound


@pytest.mark.parametrize("n_digits", [1, 2, 3])
def test_project_block__float32_fallback_has_the_same_bits(
    n_digits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = normal(5, 16384 - 300)
    expected = accumulated(block, 130, n_digits)
    monkeypatch.setattr(dense_products, "int8_matmul_is_usable", lambda: False)
    assert torch.equal(accumulated(block, 130, n_digits), expected)


@pytest.mark.parametrize("way", ["as chosen", "float32"])
@pytest.mark.parametrize("digit", [127, -127, -128])
def test_project_block__exact_at_the_extremes(
    digit: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Odd products, since a float32 holds large multiples of 128 without an error.
    if way == "float32":
        monkeypatch.setattr(dense_products, "int8_matmul_is_usable", lambda: False)
    monkeypatch.setattr(gaussian, "_PAIRS", np.full(2**16, 0x7F7F, np.uint16))
    block = torch.full((2, 16384), float(digit))
    block[:, 0] = 2**13
    expected = 127 * (2**13 + 16383 * digit)
    assert (accumulated(block, 3) == expected).all()


def test_project_block__batch_is_invisible() -> None:
    block = normal(7, 5000)
    parts = [accumulated(part, 100) for part in block.split([1, 4, 2])]
    assert torch.equal(torch.cat(parts), accumulated(block, 100))


def test_project_block__thread_count_is_invisible() -> None:
    block, before = normal(6, 5000), torch.get_num_threads()
    results = []
    try:
        for n_threads in (1, 2):
            torch.set_num_threads(n_threads)
            results.append(accumulated(block, 100))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


def test_project_block__concurrent_threads_do_not_share_buffers() -> None:
    blocks = [normal(4, n_rows) for n_rows in (300, 5000, 129, 2048) * 3]
    expected = [accumulated(block, 130) for block in blocks]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda block: accumulated(block, 130), blocks))
    assert all(map(torch.equal, found, expected))


def test_project_block__accumulates() -> None:
    out = torch.ones(2, 12, dtype=torch.float64)
    SMALL.project_block(torch.zeros(2, 5), 0, 0, out)
    assert (out == 1).all()


@pytest.mark.parametrize("n_rows", [1, 16385, 40000])
def test_project__is_the_matrix_product(n_rows: int) -> None:
    flat = small_integers(3, n_rows)
    expected = flat.double() @ matrix(n_rows, 12) * (12 * VARIANCE) ** -0.5
    assert torch.equal(project_flat(SMALL, flat), expected.float())


def test_project__smaller_proj_dim_is_a_prefix() -> None:
    flat = normal(3, 17000)
    small, large = (project_flat(Gaussian(n, 3), flat) * n**0.5 for n in (64, 256))
    assert torch.equal(small, large[:, :64])  # powers of 4: the scale is exact


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("row", [0, 20000])
def test_project__sample_that_is_not_finite_is_nan(row: int, bad: float) -> None:
    flat = normal(4, 20001)
    clean = project_flat(SMALL, flat)
    flat[2, row] = bad
    found = project_flat(SMALL, flat)
    assert found[2].isnan().all()
    assert torch.equal(found[[0, 1, 3]], clean[[0, 1, 3]])


def test_gaussian__is_a_value() -> None:
    projector = Gaussian(16, 2**64 - 1, "int8x3")
    assert isinstance(projector, Projector)
    again = pickle.loads(pickle.dumps(projector))
    assert again == projector
    assert hash(again) == hash(projector)
    assert json.loads(json.dumps(projector.spec())) == projector.spec()


def test_gaussian_spec__tells_every_field_apart() -> None:
    projectors = [Gaussian(), Gaussian(3), Gaussian(seed=1), Gaussian(arithmetic="int8x1")]
    assert len({json.dumps(projector.spec()) for projector in projectors}) == 4


def test_gaussian_cost__counts() -> None:
    cost = Gaussian(proj_dim=100, arithmetic="int8x3").cost(1000)
    assert (cost.operations, cost.random_bits) == (600_000, 800_000)
    assert cost.product_error == (0.1, pytest.approx(0.1 * 2**0.5))
    # Digits of 512 samples, then sums in int32 (twice) and float64 for a tile of columns.
    assert cost.buffer_bytes == 2**23 + 512 * (3 * 16384 + 1024 * (2 * 3 * 4 + 8))


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"proj_dim": 0}, ValueError, r"proj_dim .*in \[1, 2\*\*32\), got 0; try proj_dim=2048"),
        ({"proj_dim": 64.0}, TypeError, r"integer for proj_dim, got 64\.0; try proj_dim=2048"),
        ({"seed": 2**64}, ValueError, r"seed .*got 18446744073709551616; try seed=0"),
        (
            {"arithmetic": "fp32"},
            ValueError,
            r"arithmetic.*'int8x1'.*got 'fp32'.*arithmetic='int8x2'",
        ),
    ],
)
def test_gaussian__refused(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Gaussian(**fields)
