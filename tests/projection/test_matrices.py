"""Features are products of rounded gradients with matrices that are built by their definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.projection.reference import (
    explicit,
    mask_order,
    matrix,
    normal,
    project_blocks,
    project_by_hand,
    project_flat,
)
from trakdask.projection import (
    SJLT,
    Identity,
    Mask,
    Projector,
    Rademacher,
    RowMap,
    fixed_point,
    project,
    sjlt,
)
from trakdask.projection.mask import select_rows

SEED, CHECKPOINT = 2**64 - 3, 2**32 - 1

LAYERS: dict[str, dict[str, tuple[int, ...]]] = {
    "several in one block": {
        "conv": (6, 3, 3, 3), "bias": (6,), "linear": (10, 54), "scalar": (), "norm": (700,)
    },
    "across blocks": {"first": (300,), "linear": (300, 130), "last": (5, 1, 7)},
    "nothing": {"a": (0, 4), "b": (3, 0), "c": (0,), "linear": (5, 60), "d": (0, 0)},
}  # fmt: skip

PROJECTORS = [
    Rademacher(77, SEED),
    Rademacher(1, SEED, "int8x1"),
    Rademacher(5, SEED, "int8x3"),
    SJLT(12, 3, SEED),
    SJLT(1, 7, SEED),
    SJLT(100, 1, SEED),
    Mask(90, seed=SEED),
    Mask(290, Rademacher(12, 3), SEED),
    Mask(290, SJLT(12, 4), SEED),
]


def draw(layers: str, n_samples: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(len(layers))
    return {
        name: torch.randn(n_samples, *shape, generator=generator)
        for name, shape in LAYERS[layers].items()
    }


def rows_of(layers: str, projector: Projector) -> RowMap:
    return RowMap.from_shapes(LAYERS[layers], alignment=projector.row_alignment)


@pytest.fixture(autouse=True)
def _nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each backend has to draw rows and nonzeros itself."""
    select_rows.cache_clear()
    monkeypatch.setattr(sjlt, "_kept", sjlt._Kept(0))


@pytest.mark.parametrize("layers", ["across blocks", "nothing"])
@pytest.mark.parametrize("projector", PROJECTORS, ids=str)
def test_project__is_the_matrix_product(layers: str, projector: Projector, backend: str) -> None:
    gradients, row_map = draw(layers), rows_of(layers, projector)
    found = project(projector, gradients, row_map, CHECKPOINT)
    assert found.dtype == torch.float32
    assert torch.equal(found, project_by_hand(projector, gradients, row_map, CHECKPOINT))


@pytest.mark.parametrize(
    ("projector", "n_samples", "n_rows"),
    [
        *((SJLT(70_000, s), 37, 60) for s in (1, 4, 9)),
        *((SJLT(2**18 + 1, s), 2, 60) for s in (1, 9)),
        *((SJLT(width, 3), 17, 16385) for width in (2**13, 2**15, 2**15 + 1)),
        (SJLT(512, 5), 9, 16383),
        (Rademacher(2100), 5, 2049),
        (Rademacher(77), 17, 16385),
        (Mask(20_000, Rademacher(12)), 3, 40_000),
    ],
    ids=str,
)  # fmt: skip
def test_project__many_columns_rows_and_samples(
    projector: Projector, n_samples: int, n_rows: int, backend: str
) -> None:
    flat = normal(n_samples, n_rows)
    row_map = RowMap.from_shapes({"flat": (n_rows,)}, alignment=projector.row_alignment)
    expected = project_by_hand(projector, {"flat": flat}, row_map, 4)
    assert torch.equal(project_flat(projector, flat), expected)


# ------------------------------------------------------------------------------- the largest sums


@pytest.mark.parametrize(
    "projector",
    [
        *(Rademacher(3, SEED, f"int8x{n}") for n in (1, 2, 3)),
        *(SJLT(width, s) for width, s in ((1, 1), (1, 5), (1, 7), (1, 8), (1, 64), (2, 1))),
    ],
    ids=str,
)
@pytest.mark.parametrize("n_samples", [2, 6])
def test_project__exact_where_nothing_cancels(
    projector: Projector, n_samples: int, backend: str
) -> None:
    # Gradients with the signs of a column, and the largest numbers that rounding makes.
    row_map = RowMap.from_shapes({"w": (4, 4096)}, alignment=512)
    column = matrix(projector, row_map, 4)[:, 0]
    block = (torch.where(column < 0, -1, 1) * (1 - 2.0**-24)).float().expand(n_samples, -1)
    expected = project_by_hand(projector, {"w": block}, row_map, 4)
    assert torch.equal(project(projector, {"w": block}, row_map, 4), expected)
    assert expected.abs().max() > 5_000


@pytest.mark.parametrize(("width", "sparsity"), [(2, 7), (2, 8), (2, 64), (2**13, 4)])
@pytest.mark.parametrize("n_samples", [2, 6])
def test_sjlt__exact_at_the_largest_sums(
    width: int, sparsity: int, n_samples: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Words of 0 are nonzeros of +1 in column 0; the largest integer is 2**14.
    words = np.zeros((-(-sparsity // 4), 16384, 4), np.uint32)
    monkeypatch.setattr(SJLT, "_words", lambda *_: words)
    found = project_blocks(SJLT(width, sparsity), torch.full((n_samples, 16384), 1 - 2.0**-24))
    expected = torch.tensor([16384.0 * sparsity, *[0.0] * (width - 1)]).double()
    assert torch.equal(found, expected.expand(n_samples, width))


# ------------------------------------------------------------- what a definition says about others


# ------------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize("n_rows", [1, 2, 37, 140_001])  # the last one: two pieces of keys
def test_select_rows__have_the_smallest_keys(n_rows: int, backend: str) -> None:
    expected = mask_order(n_rows, SEED, CHECKPOINT)
    for keep in sorted({1, min(2, n_rows), n_rows // 300 + 1, n_rows // 2 + 1, n_rows}):
        rows, ranks = select_rows(n_rows, keep, SEED, CHECKPOINT)
        assert (np.diff(rows) > 0).all()
        assert rows[np.argsort(ranks)].tolist() == expected[:keep]


# ----------------------------------------------------------------------------- from the other side


@pytest.mark.parametrize("tiles", [(2048, 256), (128, 3)], ids=["one", "many"])
@pytest.mark.parametrize("projector", [*PROJECTORS, Identity()], ids=str)
def test_back_project__is_the_product_with_the_explicit_matrix(
    projector: Projector, tiles: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in zip(("_ROW_TILE", "_COLUMN_TILE"), tiles, strict=True):
        monkeypatch.setattr(fixed_point, name, size)
    row_map = rows_of("several in one block", projector)
    vectors = torch.randn(3, projector.width(row_map.n_rows), generator=torch.Generator())
    vectors[0] = torch.nan  # other vectors are none of its business
    found = projector.bind(row_map).back_project(row_map, CHECKPOINT, vectors)
    assert found.dtype == torch.float32
    assert found[0].isnan().any()
    expected = vectors[1:].double() @ explicit(projector, row_map, CHECKPOINT).T
    size = float(expected.abs().max())
    for name in row_map.names:
        rows = slice(row_map.offset(name), row_map.offset(name) + row_map.size(name))
        torch.testing.assert_close(
            found[1:, rows].double(), expected[:, rows], rtol=1e-5, atol=1e-6 * size
        )
    assert 0 < size < math.inf
