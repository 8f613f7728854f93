from __future__ import annotations

from typing import Any

import pytest
import torch

import trakdask as td
from trakdask.projection import RowMap, project
from trakdask.trak.projectors import BasicProjector, ChunkedCudaProjector, StreamProjector

GRADIENTS = torch.randn(3, 10, generator=torch.Generator().manual_seed(0))
AS_DICT = {"a": GRADIENTS[:, :6].reshape(3, 2, 3), "b": GRADIENTS[:, 6:]}


@pytest.mark.parametrize("grads", [GRADIENTS, AS_DICT])
@pytest.mark.parametrize(("sizes", "feat_bs"), [([10], 8), ([6, 4], 1), ([1, 8, 1], 2)])
def test_chunked_projector__is_the_sum_over_chunks(
    grads: Any, sizes: list[int], feat_bs: int
) -> None:
    parts = [BasicProjector(n, 5, 7 * i, "normal", "cpu") for i, n in enumerate(sizes)]
    projector = ChunkedCudaProjector(parts, max(sizes), sizes, feat_bs, "cpu", torch.float32)
    expected = sum(
        part.project(chunk, 1) for part, chunk in zip(parts, GRADIENTS.split(sizes, 1), strict=True)
    )
    torch.testing.assert_close(projector.project(grads, model_id=1), expected)


@pytest.mark.parametrize("grads", [GRADIENTS, AS_DICT])
@pytest.mark.parametrize("taken", [td.Rademacher(proj_dim=9, seed=2), td.SJLT(proj_dim=8, seed=1)])
def test_stream_projector__is_that_of_featurize(grads: Any, taken: Any) -> None:
    shapes = {"a": (2, 3), "b": (4,)}
    projector = StreamProjector(taken, shapes)
    rows = RowMap.from_shapes(shapes, alignment=taken.row_alignment)
    assert (projector.grad_dim, projector.proj_dim) == (10, taken.width(rows.n_rows))
    found = projector.project(grads, model_id=4)
    torch.testing.assert_close(found, project(taken, AS_DICT, rows, checkpoint=4))
