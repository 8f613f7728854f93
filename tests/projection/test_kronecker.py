from __future__ import annotations

import json
import math
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trakdask.projection import ROW_BLOCK, Projector, Rademacher, RowMap, dense_products, kronecker
from trakdask.projection.kronecker import Kronecker
from trakdask.projection.philox import philox4x32, split_seed
from trakdask.projection.quantize import Scratch, quantize_integers
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
        integers, step = quantize_integers(flat[:, rows], 14, Scratch())
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


def test_project__smaller_left_is_a_prefix() -> None:
    gradients = draw(LAYERS["several in one block"])
    large, small = (project_shapes(Kronecker(left, 4), gradients) for left in (16, 4))
    assert torch.equal(small * 4, large[:, :16] * 8)


def test_project__float32_fallback_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients, results = draw(LAYERS["across blocks"]), []
    for usable in (True, False):
        monkeypatch.setattr(dense_products, "int8_matmul_is_usable", lambda usable=usable: usable)
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


def test_project__rounding_error() -> None:
    gradients = draw(LAYERS["across blocks"])
    row_map = RowMap.from_shapes(LAYERS["across blocks"], alignment=512)
    exact = flatten(gradients, row_map).double() @ matrix(Kronecker(8, 8), row_map, 0) / 8
    error = (project(Kronecker(8, 8), gradients, row_map, 0) - exact).norm() / exact.norm()
    assert 1e-6 < error < 2e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_project__other_dtypes_are_float32_first(dtype: torch.dtype) -> None:
    gradients = {
        name: gradient.double().add(1e-9).to(dtype)
        for name, gradient in draw(LAYERS["across blocks"]).items()
    }
    rounded = {name: gradient.float() for name, gradient in gradients.items()}
    found, expected = (project_shapes(Kronecker(4, 4), g) for g in (gradients, rounded))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["first", "linear", "last"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_project__sample_that_is_not_finite_is_nan(name: str, bad: float) -> None:
    gradients = draw(LAYERS["across blocks"], n_samples=4)
    clean = project_shapes(Kronecker(4, 4), gradients)
    gradients[name][2].view(-1)[-1] = bad
    found = project_shapes(Kronecker(4, 4), gradients)
    assert found[2].isnan().all()
    assert torch.equal(found[[0, 1, 3]], clean[[0, 1, 3]])


@pytest.mark.parametrize("scale", [0.0, 2.0**-149, 2.0**-126, 2.0**110])
def test_project_block__zero_subnormal_and_huge_gradients(scale: float) -> None:
    shapes: Shapes = {"linear": (5, 6), "bias": (5,)}
    row_map = RowMap.from_shapes(shapes, alignment=512)
    gradients = {name: g.mul(30).round() * scale for name, g in draw(shapes).items()}
    flat, out = flatten(gradients, row_map), torch.zeros(3, 6, dtype=torch.float64)
    Kronecker(2, 3).bind(row_map).project_block(flat, 0, 0, out)
    assert torch.equal(out, flat.double() @ matrix(Kronecker(2, 3), row_map, 0))


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
    integers, step = quantize_integers(block, 14, Scratch())
    expected = integers[:, :1500].double() @ torch.kron(left, right)
    bias = signs(0, offset + 1536, 9, 6, SEED, CHECKPOINT)
    expected += integers[:, 1536 : 1536 + 9].double() @ bias
    assert torch.equal(out, expected * step[:, None])


def test_project_block__accumulates() -> None:
    bound = Kronecker(2, 3).bind(RowMap.from_shapes({"a": (5, 4)}, alignment=512))
    out = torch.ones(2, 6, dtype=torch.float64)
    bound.project_block(torch.zeros(2, 20), 0, 0, out)
    assert (out == 1).all()


def test_project_block__not_bound() -> None:
    with pytest.raises(ValueError, match=r"shapes.*Kronecker\(left=2, .*projector\.bind"):
        Kronecker(2, 2).project_block(torch.zeros(1, 5), 0, 0, torch.zeros(1, 4).double())


@pytest.mark.parametrize("other", [{"seed": 2**32}, {"seed": 1}, {"checkpoint": 1}])
def test_project__seed_and_checkpoint_choose_the_matrix(other: dict[str, int]) -> None:
    gradients = draw({"linear": (40, 30), "bias": (40,)}, n_samples=1)
    addresses = [{"seed": 0, "checkpoint": 0}, {"seed": 0, "checkpoint": 0} | other]
    features = [
        project_shapes(Kronecker(16, 16, a["seed"]), gradients, a["checkpoint"]) for a in addresses
    ]
    assert abs(torch.corrcoef(torch.cat(features))[0, 1]) < 0.3


# ---------------------------------------------------------------- how far φ·φ' is from g·g'

N = 16
LEFT, RIGHT = 6, 4


def hadamard() -> Tensor:
    """Return an orthogonal matrix with entries of one size."""
    matrix = torch.ones(1, 1)
    while len(matrix) < N:
        matrix = torch.kron(matrix, torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
    return matrix / N**0.5


def product_errors(first: dict[str, Tensor], second: dict[str, Tensor], n_draws: int) -> Tensor:
    """Return φ·φ' - g·g' for pairs of gradients, (draws, pairs)."""
    n_pairs, exact = len(next(iter(first.values()))), torch.zeros(())
    for name, gradient in first.items():
        exact = exact + (gradient * second[name]).flatten(1).sum(1)
    both = {name: torch.cat([first[name], second[name]]) for name in first}
    errors = []
    for checkpoint in range(n_draws):
        features = project_shapes(Kronecker(LEFT, RIGHT), both, checkpoint)
        errors.append((features[:n_pairs] * features[n_pairs:]).sum(1) - exact)
    return torch.stack(errors)


def rank_one(left: Tensor, right: Tensor) -> dict[str, Tensor]:
    """Return outer products of 8 columns with 8 columns, (64, N, N)."""
    return {"w": torch.einsum("ui,vj->ijuv", left[:, :8], right[:, :8]).flatten(0, 1)}


def rank_one_variance(same_left: bool, same_right: bool) -> float:
    """Evaluate the docstring's formula for columns of a Hadamard matrix."""
    rho_l, rho_r = float(same_left), float(same_right)
    v_l, v_r = (1 + rho**2 - 2 / N for rho in (rho_l, rho_r))
    return (rho_l**2 + v_l / LEFT) * (rho_r**2 + v_r / RIGHT) - (rho_l * rho_r) ** 2


@pytest.mark.parametrize("same_left", [True, False])
@pytest.mark.parametrize("same_right", [True, False])
def test_product_error__rank_one_gradients(same_left: bool, same_right: bool) -> None:
    h = hadamard()
    first = rank_one(h, h)
    second = rank_one(h if same_left else h.roll(1, 1), h if same_right else h.roll(1, 1))
    errors = product_errors(first, second, n_draws=200)
    expected = rank_one_variance(same_left, same_right)
    assert errors.var().item() == pytest.approx(expected, rel=0.15)
    assert errors.mean().abs() < 4 * (expected / 200) ** 0.5
    assert expected < Kronecker(LEFT, RIGHT).cost(N * N).product_error[1] ** 2


def test_product_error__worst_case_is_approached_by_rank_one() -> None:
    worst = Kronecker(LEFT, RIGHT).cost(N * N).product_error[1] ** 2
    assert worst == pytest.approx((1 + 2 / LEFT) * (1 + 2 / RIGHT) - 1)
    assert rank_one_variance(True, True) > 0.85 * worst
    assert worst > 10 * Kronecker(LEFT, RIGHT).cost(N * N).product_error[0] ** 2


def test_product_error__high_rank_gradients_are_about_as_with_a_dense_matrix() -> None:
    flips = torch.randn(4, 32, N, generator=torch.Generator().manual_seed(0)).sign()
    first, second = (
        {"w": rows[:, :, None] * hadamard() * columns[:, None] / N**0.5}
        for rows, columns in (flips[:2], flips[2:])
    )
    errors = product_errors(first, first, n_draws=200)
    fourth_moment = 3 - 6 / N + 4 / N**2  # of lᵀ G r: |Gᵀ l| = 1 for all l
    assert errors.var().item() == pytest.approx((fourth_moment - 1) / (LEFT * RIGHT), rel=0.15)
    assert errors.var() < 2 / (LEFT * RIGHT)
    errors = product_errors(first, second, n_draws=200)
    # Features of one column of L, or of R, have the covariance |G G'ᵀ|² = 1 / rank.
    of_rank = (1 + (LEFT + RIGHT - 2) / N) / (LEFT * RIGHT)
    assert errors.var().item() == pytest.approx(of_rank, rel=0.15)


def test_product_error__many_layers_are_better_than_one() -> None:
    h, n_layers = hadamard(), 8
    one = rank_one(h, h)["w"][:32]
    g = {str(i): one.roll(i, 0) / n_layers**0.5 for i in range(n_layers)}
    g["bias"] = torch.zeros(32, 3)
    variance = product_errors(g, g, n_draws=200).var().item()
    kappa = 1 / n_layers  # of equal norms
    bound = (2 + kappa * (2 * LEFT + 2 * RIGHT + 2)) / (LEFT * RIGHT)
    assert 0.7 * bound < variance < bound


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"left": 0}, ValueError, r"left .*in \[1, 65536\), got 0; try left=64"),
        ({"right": 2**16}, ValueError, r"right .*in \[1, 65536\), got 65536; try right=64"),
        ({"right": 8.0}, TypeError, r"integer for right, got 8\.0; try right=64"),
        ({"seed": 2**64}, ValueError, r"seed .*got 18446744073709551616; try seed=0"),
    ],
)
def test_kronecker__refused(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Kronecker(**fields)


def test_kronecker__is_a_value() -> None:
    projector = Kronecker(3, 5, 2**64 - 1)
    bound = projector.bind(RowMap.from_shapes({"a": (5, 4)}, alignment=512))
    for value in (projector, bound):
        assert isinstance(value, Projector)
        again = pickle.loads(pickle.dumps(value))
        assert again == value
        assert hash(again) == hash(value)
        assert json.loads(json.dumps(value.spec())) == projector.spec()
        assert value.width(20) == 15
        assert value.scale(20) == 15**-0.5


def test_spec__tells_every_field_apart() -> None:
    projectors = [Kronecker(), Kronecker(3), Kronecker(right=3), Kronecker(seed=1)]
    assert len({json.dumps(projector.spec()) for projector in projectors}) == 4


def test_cost__counts_the_shapes_it_is_bound_to() -> None:
    row_map = RowMap.from_shapes({"a": (100, 400), "b": (100,), "c": (0, 3)}, alignment=512)
    cost = Kronecker(8, 16).bind(row_map).cost(row_map.n_rows)
    # L first: 400 columns remain. R first: 100 rows, but 16 columns for each element.
    l_first, r_first = 4 * 40_000 * 8 + 2 * 400 * 128, 4 * 40_000 * 16 + 2 * 100 * 128
    assert l_first < r_first
    assert cost.operations == l_first + 4 * 100 * 128
    assert cost.random_bits == 8 * 100 + 16 * 400 * 3 + 100 * 128


def test_cost__not_bound_is_that_of_one_square_matrix() -> None:
    row_map = RowMap.from_shapes({"a": (128, 128)}, alignment=512)
    assert Kronecker().cost(128 * 128) == Kronecker().bind(row_map).cost(128 * 128)
    assert Kronecker().cost(10**6).operations < Rademacher(4096).cost(10**6).operations / 10
