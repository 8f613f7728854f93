from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.projection.reference import philox4x32
from trakdask.projection import (
    ROW_BLOCK,
    Projector,
    Rademacher,
    RowMap,
    integer_products,
    kronecker,
)
from trakdask.projection.kronecker import Kronecker
from trakdask.projection.memory import Scratch
from trakdask.projection.philox import split_seed
from trakdask.projection.quantize import quantize
from trakdask.projection.stream import project

SEED, CHECKPOINT = 2**64 - 3, 2**32 - 1
Shapes = dict[str, tuple[int, ...]]

LAYERS: dict[str, Shapes] = {
    "several in one block": {
        "conv": (6, 3, 3, 3), "bias": (6,), "linear": (10, 54), "scalar": (), "norm": (700,)
    },
    "across blocks": {"first": (300,), "linear": (300, 130), "last": (5, 1, 7)},
    "one row and more is a block": {"wide": (3, 20_000), "bias": (3,)},
    "one column": {"tall": (17_000, 1), "bias": (20_000,)},
    "one row": {"embedding": (1, 17_000), "conv": (40, 1, 3, 3)},
    "nothing": {"a": (0, 4), "b": (3, 0), "c": (0,), "linear": (5, 6), "d": (0, 0)},
}  # fmt: skip


def signs(stream: int, row: int, n_rows: int, n_cols: int, seed: int, checkpoint: int) -> Tensor:
    """Return a window of signs by the definition, (rows, columns) float64."""
    rows = np.arange(row, row + n_rows, dtype=np.uint64)[:, None]
    low = (rows >> np.uint64(7)) & np.uint64(2**32 - 1)
    high = (rows >> np.uint64(39)) | np.uint64(stream << 16)
    words = philox4x32((low, np.arange(n_cols), checkpoint, high), split_seed(seed))
    which, shift = (rows >> np.uint64(5)) & np.uint64(3), rows.astype(np.uint32) & np.uint32(31)
    word = np.take_along_axis(words, which.astype(int)[None], axis=0)[0]
    return torch.from_numpy(1.0 - 2.0 * ((word >> shift) & np.uint32(1)))


def matrix(projector: Kronecker, row_map: RowMap, checkpoint: int) -> Tensor:
    """Return the whole map, (rows, left * right) float64, from Kronecker products."""
    left, right, address = projector.left, projector.right, (projector.seed, checkpoint)
    whole = torch.zeros(row_map.n_rows, left * right, dtype=torch.float64)
    for shape, offset in zip(row_map.shapes, row_map.offsets, strict=True):
        size = math.prod(shape)
        if len(shape) < 2 or not size:
            part = signs(0, offset, size, left * right, *address)
        else:
            part = torch.kron(
                signs(3, offset, shape[0], left, *address),
                signs(4, offset, size // shape[0], right, *address),
            )
        whole[offset : offset + size] = part
    return whole


def flatten(gradients: dict[str, Tensor], row_map: RowMap) -> Tensor:
    flat = torch.zeros(len(next(iter(gradients.values()))), row_map.n_rows)
    for name, gradient in gradients.items():
        flat[:, row_map.offset(name) :][:, : row_map.size(name)] = gradient.reshape(
            len(flat), row_map.size(name)
        )
    return flat


def project_by_hand(
    projector: Kronecker, gradients: dict[str, Tensor], row_map: RowMap, checkpoint: int
) -> Tensor:
    """Multiply the quantised blocks with the whole matrix, in float64."""
    flat, whole = flatten(gradients, row_map), matrix(projector, row_map, checkpoint)
    out = torch.zeros(len(flat), whole.shape[1], dtype=torch.float64)
    for start in range(0, row_map.n_rows, ROW_BLOCK):
        rows = slice(start, start + ROW_BLOCK)
        integers, step = quantize(flat[:, rows], 14, Scratch())
        out += step[:, None] * (integers.double() @ whole[rows])
    return (out * (projector.left * projector.right) ** -0.5).float()


def draw(shapes: Shapes, n_samples: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(len(shapes))
    return {
        name: torch.randn(n_samples, *shape, generator=generator) for name, shape in shapes.items()
    }


def project_shapes(
    projector: Projector, gradients: dict[str, Tensor], checkpoint: int = CHECKPOINT
) -> Tensor:
    shapes = {name: gradient.shape[1:] for name, gradient in gradients.items()}
    return project(projector, gradients, RowMap.from_shapes(shapes, alignment=512), checkpoint)


@pytest.mark.parametrize("numba", ["0", "1"])
@pytest.mark.parametrize(("left", "right"), [(1, 1), (3, 5), (8, 2)])
@pytest.mark.parametrize("layers", LAYERS)
def test_project__is_the_matrix_product(
    layers: str, left: int, right: int, numba: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAKDASK_NUMBA", numba)
    projector, gradients = Kronecker(left, right, SEED), draw(LAYERS[layers])
    row_map = RowMap.from_shapes(LAYERS[layers], alignment=512)
    found = project(projector, gradients, row_map, CHECKPOINT)
    assert torch.equal(found, project_by_hand(projector, gradients, row_map, CHECKPOINT))


@pytest.mark.parametrize(("left", "right"), [(40, 33), (1, 600), (600, 1)])
def test_project__many_columns(left: int, right: int) -> None:
    shapes: Shapes = {"linear": (30, 35), "bias": (30,), "conv": (4, 2, 3, 3)}
    projector, gradients = Kronecker(left, right, SEED), draw(shapes)
    row_map = RowMap.from_shapes(shapes, alignment=512)
    found = project(projector, gradients, row_map, CHECKPOINT)
    assert torch.equal(found, project_by_hand(projector, gradients, row_map, CHECKPOINT))


@pytest.mark.parametrize("layers", LAYERS)
def test_project__tiles_are_invisible(layers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    projector, gradients = Kronecker(7, 6), draw(LAYERS[layers], n_samples=5)
    expected = project_shapes(projector, gradients)
    monkeypatch.setattr(kronecker, "_SAMPLE_TILE", 2)
    monkeypatch.setattr(kronecker, "_COLUMN_TILE", 13)
    monkeypatch.setattr(kronecker, "_SIGNS_TILE", 2**16)
    assert torch.equal(project_shapes(projector, gradients), expected)


def test_project__split_into_batches_is_invisible() -> None:
    projector, gradients = Kronecker(7, 6), draw(LAYERS["across blocks"], n_samples=70)
    parts = []
    for start, stop in [(0, 1), (1, 34), (34, 70)]:
        batch = {name: gradient[start:stop] for name, gradient in gradients.items()}
        parts.append(project_shapes(projector, batch))
    assert torch.equal(torch.cat(parts), project_shapes(projector, gradients))


def test_project__vectors_are_projected_as_by_rademacher() -> None:
    gradients = draw({"a": (300,), "b": (40_000,), "c": ()})
    found, expected = (
        project_shapes(projector, gradients)
        for projector in (Kronecker(4, 8, SEED), Rademacher(32, SEED))
    )
    assert torch.equal(found, expected)


def test_project__smaller_factors_are_a_sub_grid_for_matrices() -> None:
    gradients = draw({"linear": (300, 130), "conv": (6, 3, 3, 3)})
    large = project_shapes(Kronecker(16, 16), gradients).view(-1, 16, 16)[:, :4, :4]
    small = project_shapes(Kronecker(4, 4), gradients)  # powers of 4: the scale is exact
    assert torch.equal(small * 4, large.flatten(1) * 16)


def test_project__float32_fallback_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    if not integer_products.int8_matmul_is_usable():
        pytest.skip("torch multiplies int8 matrices wrongly or slowly here")
    gradients, results = draw(LAYERS["across blocks"]), []
    for usable in (True, False):
        monkeypatch.setattr(integer_products, "int8_matmul_is_usable", lambda usable=usable: usable)
        results.append(project_shapes(Kronecker(9, 70), gradients))
    assert torch.equal(*results)


def test_project__concurrent_threads_do_not_share_buffers() -> None:
    jobs = [draw(layers) for layers in LAYERS.values()] * 2
    expected = [project_shapes(Kronecker(9, 8), gradients) for gradients in jobs]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda gradients: project_shapes(Kronecker(9, 8), gradients), jobs))
    assert all(map(torch.equal, found, expected))


def test_project__largest_integers_are_exact() -> None:
    # A block of equal elements makes every partial sum as large as it can be.
    shapes: Shapes = {"linear": (4, 4096)}
    gradients = {"linear": torch.full((2, 4, 4096), 1 - 2.0**-24)}
    row_map = RowMap.from_shapes(shapes, alignment=512)
    found = project(Kronecker(3, 3, SEED), gradients, row_map, CHECKPOINT)
    whole = matrix(Kronecker(3, 3, SEED), row_map, CHECKPOINT)
    assert torch.equal(found, (torch.ones(2, 16384).double() @ whole / 3).float())


@pytest.mark.parametrize("name", ["first", "linear", "last"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_project__sample_that_is_not_finite_is_nan(name: str, bad: float) -> None:
    gradients = draw(LAYERS["across blocks"], n_samples=4)
    clean = project_shapes(Kronecker(4, 4), gradients)
    gradients[name][2].view(-1)[-1] = bad
    found = project_shapes(Kronecker(4, 4), gradients)
    assert found[2].isnan().all()
    assert torch.equal(found[[0, 1, 3]], clean[[0, 1, 3]])


def test_project_block__rows_beyond_32_bits() -> None:
    offset = 2**40
    row_map = RowMap.from_shapes({"huge": (offset,), "w": (50, 30), "b": (9,)}, alignment=512)
    block = torch.zeros(2, 2048 + 9)
    gradients = draw({"w": (50, 30), "b": (9,)}, n_samples=2)
    block[:, :1500], block[:, 1536 : 1536 + 9] = gradients["w"].flatten(1), gradients["b"]
    out = torch.zeros(2, 6, dtype=torch.float64)
    Kronecker(2, 3, SEED).bind(row_map).project_block(block, offset, CHECKPOINT, out)
    left = signs(3, offset, 50, 2, SEED, CHECKPOINT)
    right = signs(4, offset, 30, 3, SEED, CHECKPOINT)
    integers, step = quantize(block, 14, Scratch())
    expected = integers[:, :1500].double() @ torch.kron(left, right)
    bias = signs(0, offset + 1536, 9, 6, SEED, CHECKPOINT)
    expected += integers[:, 1536 : 1536 + 9].double() @ bias
    assert torch.equal(out, expected * step[:, None])


# ---------------------------------------------------------------- how far φ·φ' is from g·g'

LEFT, RIGHT = 6, 4


def test_cost__counts_the_shapes_it_is_bound_to() -> None:
    row_map = RowMap.from_shapes({"a": (100, 400), "b": (100,), "c": (0, 3)}, alignment=512)
    cost = Kronecker(8, 16).bind(row_map).cost(row_map.n_rows)
    # L first: 400 columns remain. R first: 100 rows, but 16 columns for each element.
    l_first, r_first = 4 * 40_000 * 8 + 2 * 400 * 128, 4 * 40_000 * 16 + 2 * 100 * 128
    assert l_first < r_first
    assert cost.operations == l_first + 4 * 100 * 128
    assert cost.random_bits == 8 * 100 + 16 * 400 * 3 + 100 * 128
