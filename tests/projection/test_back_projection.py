"""back_project multiplies with the matrix that gradients are projected with."""

from __future__ import annotations

import math

import pytest
import torch

import trakdask as td
from trakdask.projection import Projector, RowMap, project
from trakdask.projection import back_projection as module
from trakdask.projection.back_projection import back_project, require_back_projection

SHAPES = {"matrix": (9, 70), "bias": (33,), "kernel": (5, 3, 7), "scalar": ()}
PROJECTORS = [
    td.Identity(),
    td.SJLT(64),
    td.SJLT(64, sparsity=5, seed=2**40 + 3),
    td.SJLT(64, sparsity=1),
    td.Rademacher(300),
    td.Mask(keep=50),
    td.Mask(keep=300, then=td.Rademacher(64)),
    td.Mask(keep=300, then=td.SJLT(64)),
    td.Kronecker(left=8, right=5),
]


def explicit(projector: Projector, rows: RowMap, checkpoint: int) -> torch.Tensor:
    """The matrix, (n_rows, width): the features of unit vectors, which rounding leaves exact."""
    unit = {name: torch.zeros(rows.n_parameters, rows.size(name)) for name in rows.names}
    places, number = [], 0
    for name in rows.names:
        for i in range(rows.size(name)):
            unit[name][number, i] = 1
            places.append(rows.offset(name) + i)
            number += 1
    matrix = torch.zeros(rows.n_rows, projector.width(rows.n_rows))
    matrix[places] = project(projector, unit, rows, checkpoint)
    return matrix.double()


def used(rows: RowMap) -> torch.Tensor:
    spans = [range(rows.offset(n), rows.offset(n) + rows.size(n)) for n in rows.names]
    return torch.tensor([row for span in spans for row in span])


@pytest.mark.parametrize("tiles", [(2048, 256, 1 << 14), (128, 3, 128)], ids=["one", "many"])
@pytest.mark.parametrize("checkpoint", [0, 2**32 - 1])
@pytest.mark.parametrize("projector", PROJECTORS, ids=str)
def test_back_project__is_the_product_with_the_explicit_matrix(
    projector: Projector, checkpoint: int, tiles: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in zip(("_ROW_TILE", "_COLUMN_TILE", "_SPARSE_ROWS"), tiles, strict=True):
        monkeypatch.setattr(module, name, size)
    rows = RowMap.from_shapes(SHAPES, alignment=projector.row_alignment)
    bound = projector.bind(rows)
    w = torch.randn(3, bound.width(rows.n_rows), generator=torch.Generator().manual_seed(0))
    found = back_project(bound, rows, checkpoint, w)
    assert found.shape == (3, rows.n_rows)
    assert found.dtype == torch.float32
    expected = w.double() @ explicit(projector, rows, checkpoint).T
    chosen = used(rows)
    scale = float(expected.abs().max())
    torch.testing.assert_close(
        found[:, chosen].double(), expected[:, chosen], rtol=1e-5, atol=1e-6 * scale
    )
    assert math.isfinite(scale)
    assert scale > 0


def test_back_project__other_vectors_and_nan_stay_apart() -> None:
    rows = RowMap.from_shapes(SHAPES, alignment=1)
    w = torch.randn(2, 64)
    alone = back_project(td.SJLT(64), rows, 1, w[1:])
    w[0] = torch.nan
    both = back_project(td.SJLT(64), rows, 1, w)
    assert both[0].isnan().all()
    torch.testing.assert_close(both[1:], alone)


@pytest.mark.parametrize(
    "projector", [td.FastJL(512, num_sms=1), td.Mask(keep=9, then=td.Identity())], ids=str
)
def test_require_back_projection__names_the_kind(projector: Projector) -> None:
    if isinstance(projector, td.Mask):
        require_back_projection(projector)
        return
    with pytest.raises(ValueError, match="FastJL"):
        require_back_projection(projector)
