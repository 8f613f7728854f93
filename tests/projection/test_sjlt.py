from __future__ import annotations

import itertools
import json
import math
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trakdask.projection import Projector, sjlt
from trakdask.projection import nonzeros as kept_nonzeros
from trakdask.projection.nonzeros import SparseMatrix, sort_nonzeros
from trakdask.projection.philox import STREAM_SJLT, philox4x32
from trakdask.projection.row_map import RowMap
from trakdask.projection.sjlt import SJLT
from trakdask.projection.stream import project

SMALL = SJLT(proj_dim=12, sparsity=3, seed=3)
NUMBA = {"numba": "1", "numpy": "0"}


def nonzero(projector: SJLT, row: int, j: int, checkpoint: int) -> tuple[int, int]:
    """Return (bucket, sign) of one nonzero, in Python integers."""
    counter = (row & 0xFFFFFFFF, j >> 2, checkpoint, (row >> 32) | STREAM_SJLT << 16)
    words = philox4x32(counter, (projector.seed & 0xFFFFFFFF, projector.seed >> 32))
    word = int(words[j & 3])
    return (word * projector.proj_dim) >> 32, 1 - 2 * (word & 1)


def nonzeros(
    projector: SJLT, row_offset: int, n_rows: int, checkpoint: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return the buckets and signs of a window of rows, both (sparsity, n_rows)."""
    rows = np.arange(row_offset, row_offset + n_rows, dtype=np.uint64)
    low, high = rows & np.uint64(0xFFFFFFFF), rows >> np.uint64(32) | np.uint64(1 << 16)
    key = (projector.seed & 0xFFFFFFFF, projector.seed >> 32)
    words = np.stack(
        [philox4x32((low, j >> 2, checkpoint, high), key)[j & 3] for j in range(projector.sparsity)]
    ).astype(np.uint64)
    buckets = words * np.uint64(projector.proj_dim) >> np.uint64(32)
    return buckets.astype(np.int64), 1.0 - 2.0 * (words & np.uint64(1))


def project_by_hand(projector: SJLT, block: Tensor, row_offset: int, checkpoint: int) -> Tensor:
    """Add up the nonzeros in float64, all samples at a time."""
    out = np.zeros((projector.proj_dim, len(block)))
    for buckets, signs in zip(
        *nonzeros(projector, row_offset, block.shape[1], checkpoint), strict=True
    ):
        np.add.at(out, buckets, (block.double().numpy() * signs).T)
    return torch.from_numpy(out.T)


def project_one(projector: SJLT, block: Tensor, row_offset: int = 0, checkpoint: int = 4) -> Tensor:
    out = torch.zeros(projector.proj_dim, len(block), dtype=torch.float64).T
    projector.project_block(block, row_offset, checkpoint, out)
    return out


def project_flat(projector: SJLT, flat: Tensor, checkpoint: int = 4) -> Tensor:
    rows = RowMap.from_shapes({"flat": flat.shape[1:]}, alignment=1)
    return project(projector, {"flat": flat}, rows, checkpoint)


def small_integers(n_samples: int, n_rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(n_rows)
    return torch.randint(-63, 64, (n_samples, n_rows), generator=generator).float()


def gaussian(n_samples: int, n_rows: int) -> Tensor:
    return torch.randn(n_samples, n_rows, generator=torch.Generator().manual_seed(n_rows))


def matrix(projector: SJLT, n_rows: int, checkpoint: int = 0) -> npt.NDArray[np.float64]:
    """Return the rows of the matrix, (n_rows, proj_dim): the projections of unit gradients."""
    rows = project_one(projector, torch.eye(n_rows), checkpoint=checkpoint)
    return (rows * projector.scale(n_rows)).numpy()


@pytest.fixture(autouse=True)
def nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each backend has to draw and sort the nonzeros itself."""
    monkeypatch.setattr(kept_nonzeros, "_kept", kept_nonzeros._Kept(0))


@pytest.fixture(params=NUMBA)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TRAKDASK_NUMBA", NUMBA[request.param])
    return str(request.param)


@pytest.mark.parametrize("row", [0, 16384 * 5, 2**32 - 16384, 2**32 + 16384, 2**47 - 16384])
@pytest.mark.parametrize("seed", [0, 2**64 - 1])
@pytest.mark.usefixtures("backend")
def test_project_block__entries_are_those_of_the_definition(row: int, seed: int) -> None:
    projector, checkpoint = SJLT(proj_dim=1000, sparsity=6, seed=seed), 2**32 - 1
    expected = torch.zeros(3, 1000, dtype=torch.float64)
    for i, j in itertools.product(range(3), range(6)):
        bucket, sign = nonzero(projector, row + i, j, checkpoint)
        expected[i, bucket] += sign
    assert torch.equal(project_one(projector, torch.eye(3), row, checkpoint), expected)


@pytest.mark.parametrize("sparsity", [1, 3, 4, 5, 9])
@pytest.mark.parametrize(
    ("n_samples", "n_rows", "proj_dim"),
    [
        (1, 1, 1),
        (3, 127, 77),
        (4, 16384, 3),
        (5, 130, 512),
        (9, 16383, 4096),
        (37, 300, 70000),
        (2, 400, 2**18 + 1),
    ],
)
@pytest.mark.usefixtures("backend")
def test_project_block__exact_on_small_integers(
    n_samples: int, n_rows: int, proj_dim: int, sparsity: int
) -> None:
    projector = SJLT(proj_dim, sparsity, seed=2**63 + 5)
    block, row = small_integers(n_samples, n_rows), 2**32 + 16384 * 3
    expected = project_by_hand(projector, block, row, 9)
    assert torch.equal(project_one(projector, block, row, 9), expected)


@pytest.mark.parametrize(("proj_dim", "sparsity"), [(1, 1), (1, 5), (1, 7), (2, 1)])
@pytest.mark.parametrize("n_samples", [2, 6])
@pytest.mark.usefixtures("backend")
def test_project_block__exact_where_nothing_cancels(
    proj_dim: int, sparsity: int, n_samples: int
) -> None:
    # Gradients with the signs of their rows and of 14 bits: too large for sums in float32.
    projector = SJLT(proj_dim, sparsity)
    _, signs = nonzeros(projector, 0, 4999, 4)
    values = 16383 * np.where(signs.sum(0) < 0, -1, 1)
    block = torch.from_numpy(values).float().expand(n_samples, 4999)
    expected = project_by_hand(projector, block, 0, 4)
    assert not torch.equal(expected.float().double(), expected)
    assert torch.equal(project_one(projector, block), expected)


@pytest.mark.parametrize("sparsity", [7, 8, 64])
@pytest.mark.parametrize("n_samples", [2, 6])
@pytest.mark.usefixtures("backend")
def test_add_product__exact_at_the_largest_sums(sparsity: int, n_samples: int) -> None:
    # Words of 0 are nonzeros of +1 in column 0; the largest integer is 2**14.
    words = np.zeros((-(-sparsity // 4), 16384, 4), np.uint32)
    block = torch.full((n_samples, 16384), 1 - 2.0**-24)
    out = torch.zeros(n_samples, 2, dtype=torch.float64)
    sjlt.add_product(block, sort_nonzeros(words, SparseMatrix(2, sparsity, 0, 0)), out)
    assert torch.equal(out, torch.tensor([16384.0 * sparsity, 0.0]).double().expand(n_samples, 2))


@pytest.mark.parametrize("sparsity", [1, 4, 6, 8])
@pytest.mark.parametrize("proj_dim", [2, 500, 70001])
@pytest.mark.parametrize("n_samples", [1, 4, 5, 8, 33])
def test_project_block__numba_and_numpy_have_the_same_bits(
    sparsity: int, proj_dim: int, n_samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    projector, block = SJLT(proj_dim, sparsity), gaussian(n_samples, 9999)
    block *= torch.logspace(-20, 20, n_samples)[:, None]
    results = []
    for switch in NUMBA.values():
        monkeypatch.setenv("TRAKDASK_NUMBA", switch)
        results.append(project_one(projector, block))
    assert torch.equal(*results)


@settings(max_examples=8)
@given(cuts=st.lists(st.integers(1, 69), unique=True, max_size=4))
def test_project__split_into_batches_is_invisible(cuts: list[int]) -> None:
    flat = gaussian(70, 17000)
    edges = [0, *sorted(cuts), 70]
    with pytest.MonkeyPatch.context() as patch:
        for switch in NUMBA.values():
            patch.setenv("TRAKDASK_NUMBA", switch)
            parts = [project_flat(SMALL, flat[a:b]) for a, b in itertools.pairwise(edges)]
            assert torch.equal(torch.cat(parts), project_flat(SMALL, flat))


@settings(max_examples=12)
@given(cuts=st.lists(st.integers(1, 39999), unique=True, max_size=5))
def test_project__split_into_tensors_is_invisible(cuts: list[int]) -> None:
    flat = gaussian(2, 40000)
    edges = [0, *sorted(cuts), 40000]
    gradients = {str(a): flat[:, a:b] for a, b in itertools.pairwise(edges)}
    rows = RowMap.from_shapes({k: v.shape[1:] for k, v in gradients.items()}, alignment=1)
    assert torch.equal(project(SMALL, gradients, rows, 4), project_flat(SMALL, flat))


def strided_columns(block: Tensor) -> Tensor:
    return block.repeat_interleave(3, dim=1)[:, ::3]


def rows_of_a_larger_one(block: Tensor) -> Tensor:
    return torch.cat([block, block, block], dim=1)[:, block.shape[1] : 2 * block.shape[1]]


@pytest.mark.parametrize("n_samples", [1, 3, 9])
@pytest.mark.parametrize(
    "layout", [strided_columns, rows_of_a_larger_one, lambda block: block.T.contiguous().T]
)
@pytest.mark.usefixtures("backend")
def test_project_block__layout_is_invisible(n_samples: int, layout: Any) -> None:
    block = gaussian(n_samples, 5000)
    assert torch.equal(project_one(SMALL, layout(block)), project_one(SMALL, block))


@pytest.mark.usefixtures("backend")
def test_project_block__one_gradient_for_all_samples() -> None:
    block = gaussian(1, 5000)
    expected = project_one(SMALL, block).expand(9, 12)
    assert torch.equal(project_one(SMALL, block.expand(9, 5000)), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.usefixtures("backend")
def test_project_block__other_dtypes_are_rounded_to_float32(dtype: torch.dtype) -> None:
    block = gaussian(6, 3000).to(dtype)
    assert torch.equal(project_one(SMALL, block), project_one(SMALL, block.float()))


@pytest.mark.usefixtures("backend")
def test_project_block__layout_of_out_is_invisible() -> None:
    block = gaussian(6, 3000)
    expected = project_one(SMALL, block)
    larger = torch.zeros(13, 30, dtype=torch.float64)
    for out in (torch.zeros(6, 12, dtype=torch.float64), larger[2:8, 4:28:2]):
        SMALL.project_block(block, 0, 4, out)
        assert torch.equal(out, expected)
    assert larger.count_nonzero() == expected.count_nonzero()


@pytest.mark.usefixtures("backend")
def test_project_block__accumulates() -> None:
    block, out = small_integers(6, 300), torch.full((6, 12), 0.5, dtype=torch.float64)
    SMALL.project_block(block, 0, 4, out)
    assert torch.equal(out, project_by_hand(SMALL, block, 0, 4) + 0.5)


@pytest.mark.parametrize("n_samples", [4, 40])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.usefixtures("backend")
def test_project__sample_that_is_not_finite_is_nan(n_samples: int, bad: float) -> None:
    projector = SJLT(proj_dim=4096, sparsity=1)  # most columns are hit by no row
    flat = gaussian(n_samples, 50)
    clean = project_flat(projector, flat)
    flat[2, 49] = bad
    found = project_flat(projector, flat)
    others = torch.arange(n_samples) != 2
    assert found[2].isnan().all()
    assert torch.equal(found[others], clean[others])


@pytest.mark.parametrize("scale", [0.0, 2.0**-149, 2.0**-126, 2.0**121])
@pytest.mark.parametrize("n_samples", [3, 9])
@pytest.mark.usefixtures("backend")
def test_project_block__zero_subnormal_and_huge_gradients(scale: float, n_samples: int) -> None:
    block = small_integers(n_samples, 40) * scale
    assert scale < 1 or block.abs().max() > 1e38
    expected = project_by_hand(SMALL, block, 0, 4)
    assert torch.equal(project_one(SMALL, block), expected)


@pytest.mark.usefixtures("backend")
def test_project_block__rounding_error_on_gaussian_data() -> None:
    projector, block = SJLT(proj_dim=256), gaussian(8, 16384)
    expected = project_by_hand(projector, block, 0, 4)
    error = (project_one(projector, block) - expected).norm() / expected.norm()
    assert error == pytest.approx(projector.cost(16384).rounding_error, rel=0.5)


@pytest.mark.usefixtures("backend")
def test_project_block__an_outlier_costs_as_much_as_stated() -> None:
    block = gaussian(8, 16384)
    block[:, 7] = 1000
    entries = SJLT(proj_dim=4096, sparsity=1)
    few = block[:, :100]  # hardly any two in one column: columns are elements
    error = project_one(entries, few) - project_by_hand(entries, few, 0, 4)
    assert 2.0**-18 * 1000 < error.abs().max() <= 2 * 2.0**-14 * 1000
    error = (project_one(entries, block) - project_by_hand(entries, block, 0, 4)).norm(dim=1)
    bound = 2.0**-14 * 1000 * 16384**0.5
    assert bound / 10 < error.max() < bound


@pytest.mark.usefixtures("backend")
def test_project_block__concurrent_threads_do_not_share_buffers() -> None:
    blocks = [gaussian(6, n_rows) for n_rows in (300, 5000, 129, 2048) * 3]
    expected = [project_one(SMALL, block) for block in blocks]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda block: project_one(SMALL, block), blocks))
    assert all(map(torch.equal, found, expected))


@pytest.mark.usefixtures("backend")
def test_project_block__thread_count_is_invisible() -> None:
    block, before = gaussian(40, 5000), torch.get_num_threads()
    results = []
    try:
        for n_threads in (1, 2):
            torch.set_num_threads(n_threads)
            results.append(project_one(SJLT(proj_dim=300), block))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


@pytest.mark.usefixtures("backend")
def test_project__inference_mode() -> None:
    flat = gaussian(6, 600)
    expected = project_flat(SMALL, flat)
    with torch.inference_mode():
        assert torch.equal(project_flat(SMALL, flat.clone()), expected)
    assert torch.equal(project_flat(SMALL, flat), expected)


@pytest.mark.parametrize(("proj_dim", "factor"), [(96, 4), (15, 3), (1, 64)])
@pytest.mark.parametrize("sparsity", [1, 4, 5])
def test_project_block__adjacent_columns_add_up_to_a_smaller_proj_dim(
    proj_dim: int, factor: int, sparsity: int
) -> None:
    block = small_integers(3, 5000)
    small = project_one(SJLT(proj_dim, sparsity), block)
    large = project_one(SJLT(proj_dim * factor, sparsity), block)
    assert torch.equal(large.unflatten(1, (proj_dim, factor)).sum(2), small)


@pytest.mark.parametrize("sparsity", [1, 2, 4, 16])
def test_sjlt__squared_norm_of_a_row(sparsity: int) -> None:
    projector = SJLT(proj_dim=16, sparsity=sparsity)
    rows = np.concatenate([matrix(projector, 512, checkpoint) for checkpoint in range(16)])
    squares = (rows**2).sum(1)
    variance = 2 * (sparsity - 1) / (sparsity * 16)
    assert squares.mean() == pytest.approx(1, abs=5 * (variance / len(rows)) ** 0.5 + 1e-12)
    assert squares.var() == pytest.approx(variance, rel=0.1, abs=1e-12)


@pytest.mark.parametrize("sparsity", [1, 2, 4, 16])
def test_sjlt__products_of_two_rows(sparsity: int) -> None:
    rows = matrix(SJLT(proj_dim=256, sparsity=sparsity), 1024)
    products = (rows @ rows.T)[np.triu_indices(1024, 1)]
    assert products.std() == pytest.approx(256**-0.5, rel=0.02)
    assert abs(products.mean()) < 5 * 256**-0.5 / len(products) ** 0.5
    kurtosis = (products**4).mean() / products.var() ** 2
    assert kurtosis == pytest.approx(3 + (256 - 3) / sparsity**2, rel=0.15)


@pytest.mark.parametrize("sparsity", [1, 4])
def test_sjlt__variance_of_products_of_gradients(sparsity: int) -> None:
    flat = gaussian(300, 2000)
    flat = flat / flat.norm(dim=1, keepdim=True)
    projector = SJLT(proj_dim=64, sparsity=sparsity)
    features = torch.cat([project_flat(projector, flat, checkpoint) for checkpoint in range(3)])
    typical, worst = projector.cost(2000).product_error
    for part in features.chunk(3):
        errors = part @ part.T - flat @ flat.T
        assert errors[torch.triu(torch.ones(300, 300), 1) == 1].std() == pytest.approx(
            typical, rel=0.1
        )
        assert errors.diagonal().std() == pytest.approx(worst, rel=0.15)


def test_cost__counts() -> None:
    cost = SJLT(proj_dim=4096, sparsity=5).cost(10**6)
    assert cost.operations == 10 * 10**6
    assert cost.random_bits == 256 * 10**6
    assert cost.product_error == (4096**-0.5, 2048**-0.5)
    assert 16384 * 32 * 4 < cost.buffer_bytes < 64 * 2**20


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"proj_dim": 0}, ValueError, r"proj_dim .*in \[1, 2\*\*31\), got 0; try proj_dim=4096"),
        ({"proj_dim": 2**31}, ValueError, r"proj_dim .*got 2147483648"),
        ({"proj_dim": 64.0}, TypeError, r"integer for proj_dim, got 64\.0"),
        ({"sparsity": 0}, ValueError, r"sparsity .*in \[1, 65\), got 0; try sparsity=4"),
        ({"sparsity": True}, TypeError, r"integer for sparsity, got True"),
        ({"seed": -1}, ValueError, r"seed .*got -1; try seed=0"),
    ],
)
def test_sjlt__refused(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SJLT(**fields)


def test_sjlt__is_a_value() -> None:
    projector = SJLT(2**31 - 1, 64, 2**64 - 1)
    assert isinstance(projector, Projector)
    again = pickle.loads(pickle.dumps(projector))
    assert again == projector
    assert hash(again) == hash(projector)
    spec = json.loads(json.dumps(projector.spec()))
    assert spec == projector.spec()


def test_spec__tells_every_field_apart() -> None:
    projectors = [SJLT(), SJLT(proj_dim=4095), SJLT(sparsity=3), SJLT(seed=1)]
    assert len({json.dumps(projector.spec()) for projector in projectors}) == 4
