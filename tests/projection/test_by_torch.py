"""Projections by operations of torch: the bits of ``project_block``, whose oracle is elsewhere.

They run on tensors of the CPU here, which is a device of torch like others.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.projection.reference import normal, project_blocks
from trakdask.projection import ROW_BLOCK, SJLT, Rademacher, by_torch
from trakdask.projection.cuda import products

PROJECTORS = [
    *(SJLT(width, sparsity, seed=2**63 + 5) for width in (1, 77) for sparsity in (1, 4, 7, 13)),
    *(Rademacher(33, seed=2, arithmetic=f"int8x{n}") for n in (1, 2, 3)),
    Rademacher(by_torch._COLUMN_TILE + 3, seed=2**40),
]


def by_operations(projector: SJLT | Rademacher, rows: Tensor, row: int) -> Tensor:
    out = torch.full((len(rows), projector.proj_dim), 0.1, dtype=torch.float64)
    projector.project_by_torch(rows, row, 9, out)
    return out


@pytest.mark.parametrize("projector", PROJECTORS, ids=str)
@settings(max_examples=5)
@given(
    n_rows=st.sampled_from([1, 127, ROW_BLOCK, 2 * ROW_BLOCK + 301]),
    row=st.sampled_from([0, 3 * ROW_BLOCK, (2**33 - 4) * ROW_BLOCK]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    step=st.sampled_from([1, 2]),
)
def test_project__bits_of_the_cpu(
    projector: SJLT | Rademacher, n_rows: int, row: int, dtype: torch.dtype, step: int
) -> None:
    rows = normal(5, step * n_rows)[:, ::step].to(dtype)
    rows *= torch.tensor([1, 1e-42, 0, 1e37, 1.0], dtype=dtype)[:, None]  # subnormal, zero, large
    rows[4, n_rows // 3] = math.nan
    sums = torch.full((5, projector.proj_dim), 0.1, dtype=torch.float64)
    expected = project_blocks(projector, rows, row, 9, sums)
    np.testing.assert_array_equal(by_operations(projector, rows, row), expected)
    assert expected.isnan().any(1).tolist() == [False] * 4 + [True]


@pytest.mark.parametrize("projector", [SJLT(20), Rademacher(20)], ids=str)
def test_project__runs_of_blocks_are_invisible(
    projector: SJLT | Rademacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = normal(3, 5 * ROW_BLOCK + 7)
    expected = by_operations(projector, rows, 0)
    monkeypatch.setattr(products, "_RUN_BYTES", 2 * (by_torch._WORDS_BYTES + 12 * (ROW_BLOCK + 20)))
    assert torch.equal(by_operations(projector, rows, 0), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dense_sums__are_exact_where_products_are_cast(dtype: torch.dtype) -> None:
    rows = normal(3, ROW_BLOCK)
    expected = by_operations(Rademacher(20), rows, 0)
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(by_operations(Rademacher(20), rows, 0), expected)
