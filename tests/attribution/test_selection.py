"""top_fraction: against a sort of all scores, in numpy."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
import xarray as xr

import trakdask as td
from trakdask.testing import raise_if_dask_computes

N, M = 50, 4


def scores(chunks: int = 7, seed: int = 0, decimals: int = 1) -> xr.DataArray:
    random = np.random.default_rng(seed)
    values = random.standard_normal((N, M)).round(decimals).astype("f4")  # with many ties
    values[[5, 30], 1] = np.nan
    coords = {"source": ("sample", random.choice(["web", "book", "code"], N))}
    return xr.DataArray(
        da.from_array(values, chunks=(chunks, 2)), dims=("sample", "target"), coords=coords
    )


def oracle(values: np.ndarray, group: np.ndarray, fraction: float) -> np.ndarray:
    """Sort every group by score, then by position; NaN last."""
    chosen = np.zeros(len(values), bool)
    for name in set(group.tolist()) - {None}:
        members = [i for i in range(len(values)) if group[i] == name]
        count = int(np.ceil(round(fraction * len(members), 9)))
        ranked = sorted((-values[i], i) for i in members if not np.isnan(values[i]))
        chosen[[i for _, i in ranked[:count]]] = True
    return chosen


@pytest.mark.parametrize("how", ["max", "mean"])
@pytest.mark.parametrize("fraction", [0.05, 0.3, 1, 0.001])
@pytest.mark.parametrize("by", [None, "source"])
def test_top_fraction__is_that_of_a_sort(by: str | None, fraction: float, how: str) -> None:
    given = scores()
    found = td.top_fraction(given, fraction, by=by, how=how).compute()
    best = getattr(given.values.astype("f8"), how)(1)
    group = given.source.values if by else np.zeros(N)
    np.testing.assert_allclose(found.score, best, rtol=1e-6, atol=1e-12)
    np.testing.assert_array_equal(found.selected, oracle(found.score.values, group, fraction))
    assert found.source.values.tolist() == given.source.values.tolist()


@pytest.mark.parametrize("chunks", [1, 50])
def test_top_fraction__does_not_depend_on_chunks(chunks: int) -> None:
    expected = td.top_fraction(scores(), 0.2, by="source").selected
    again = td.top_fraction(scores(chunks), 0.2, by="source")
    np.testing.assert_array_equal(again.selected, expected)
    in_memory = td.top_fraction(scores().compute(), 0.2, by="source")
    np.testing.assert_array_equal(in_memory.selected, expected)


def test_top_fraction__equal_scores_are_taken_in_their_order() -> None:
    same = xr.DataArray(np.zeros((6, 1), "f4"), dims=("sample", "target"))
    same[0] = -0.0
    assert td.top_fraction(same, 0.5).selected.values.tolist() == [True] * 3 + [False] * 3


def test_top_fraction__samples_without_a_group_are_not_taken() -> None:
    group = np.array(["a", None] * (N // 2), object)
    given = scores().assign_coords(group=("sample", group))
    found = td.top_fraction(given, 0.4, by="group")
    np.testing.assert_array_equal(found.selected, oracle(found.score.values, group, 0.4))
    assert not found.selected[1::2].any()


@pytest.mark.parametrize("n", [127, 128, 129, 255, 256, 257])
def test_top_fraction__of_many_groups(n: int) -> None:
    group = np.tile(np.arange(n), 2)
    values = np.random.default_rng(0).standard_normal((2 * n, 1)).astype("f4")
    given = xr.DataArray(values, dims=("sample", "target"), coords={"group": ("sample", group)})
    found = td.top_fraction(given, 0.5, by="group").selected.values
    expected = values[:n, 0] > values[n:, 0]
    np.testing.assert_array_equal(found, np.concatenate([expected, ~expected]))


def test_top_fraction__agrees_with_top_k() -> None:
    given = scores().isel(target=[0])
    chosen = np.flatnonzero(td.top_fraction(given, 0.1).selected)
    assert sorted(td.top_k(given, 5).position.values[0].tolist()) == chosen.tolist()


def test_top_fraction__is_lazy() -> None:
    with raise_if_dask_computes():
        lazy = td.top_fraction(scores(), 0.1, by="source")
    assert lazy.selected.chunks == lazy.score.chunks == ((7,) * 7 + (1,),)
