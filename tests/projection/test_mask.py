from __future__ import annotations

import math
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Self

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.projection.reference import normal, philox4x32
from trakdask.projection import Identity, Projector, Rademacher, RowMap, mask
from trakdask.projection.kronecker import Kronecker
from trakdask.projection.mask import Mask, select_rows
from trakdask.projection.philox import STREAM_MASK, split_seed
from trakdask.projection.stream import project

SEED, CHECKPOINT = 2**64 - 3, 2**32 - 1


@cache
def keys_by_hand(n_rows: int, seed: int = SEED, checkpoint: int = CHECKPOINT) -> list[int]:
    """Return the keys of all rows, by the definition, as Python integers."""
    index = np.arange(-(-n_rows // 2), dtype=np.uint64)
    high = (index >> np.uint64(32)) | np.uint64(STREAM_MASK << 16)
    words = philox4x32((index & np.uint64(2**32 - 1), 0, checkpoint, high), split_seed(seed))
    w = words.T.tolist()
    keys = [row[j] | row[j + 1] << 32 for row in w for j in (0, 2)]
    return keys[:n_rows]


def kept_by_hand(n_rows: int, keep: int, **address: int) -> list[int]:
    """Return the kept rows in the order of their keys."""
    keys = keys_by_hand(n_rows, **address)
    return sorted(range(n_rows), key=lambda row: (keys[row], row))[:keep]


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    select_rows.cache_clear()
    yield
    select_rows.cache_clear()


def in_key_order(n_rows: int, keep: int) -> list[int]:
    rows, ranks = select_rows(n_rows, keep, SEED, CHECKPOINT)
    assert (np.diff(rows) > 0).all()
    assert rows.dtype == np.int64
    by_key = np.empty_like(rows)
    by_key[ranks] = rows
    return by_key.tolist()


def project_flat(projector: Projector, flat: Tensor, checkpoint: int = CHECKPOINT) -> Tensor:
    row_map = RowMap.from_shapes({"flat": flat.shape[1:]}, alignment=projector.row_alignment)
    return project(projector, {"flat": flat}, row_map, checkpoint)


@pytest.mark.parametrize("numba", ["0", "1"])
@pytest.mark.parametrize("n_rows", [1, 2, 37, 140_001])  # the last one: two pieces of keys
def test_select_rows__have_the_smallest_keys(
    n_rows: int, numba: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAKDASK_NUMBA", numba)
    expected = kept_by_hand(n_rows, n_rows)
    for keep in sorted({1, min(2, n_rows), n_rows // 300 + 1, n_rows // 2 + 1, n_rows}):
        assert in_key_order(n_rows, keep) == expected[:keep]


def test_select_rows__too_few_candidates_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    limits, rows_up_to = [], mask._rows_up_to
    monkeypatch.setattr(mask, "_margin", lambda keep: 20 - keep)
    monkeypatch.setattr(
        mask, "_rows_up_to", lambda limit, *rest: limits.append(limit) or rows_up_to(limit, *rest)
    )
    assert in_key_order(5001, 2000) == kept_by_hand(5001, 2000)
    assert len(limits) > 5
    assert limits == sorted(limits)


def test_select_rows__lower_row_first_where_keys_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    fill_words = mask.fill_words

    def few_keys(out: Any, *args: Any, **address: Any) -> None:
        fill_words(out, *args, **address)
        out %= 5

    monkeypatch.setattr(mask, "fill_words", few_keys)
    keys = [key % 5 for key in keys_by_hand(3000)]
    expected = sorted(range(3000), key=lambda row: (keys[row], row))[:800]
    assert in_key_order(3000, 800) == expected


def test_select_rows__memory_does_not_grow_with_the_rows() -> None:
    n_rows, keep = 3_000_000, 50_000
    in_key_order(1000, 10)  # imports and compiles
    tracemalloc.start()
    select_rows(n_rows, keep, SEED, CHECKPOINT)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    bound = mask._BATCH_BYTES + mask._BYTES_PER_SELECTED_ROW * keep
    assert peak < bound < 8 * n_rows / 4


@pytest.mark.parametrize("keep", [1, 500, 20_000])
def test_project__alone_is_the_kept_entries(keep: int) -> None:
    flat = normal(3, 40_000)
    expected = flat[:, kept_by_hand(40_000, keep)].double() * (40_000 / keep) ** 0.5
    assert torch.equal(project_flat(Mask(keep, seed=SEED), flat), expected.float())


def test_project__smaller_keep_is_a_prefix() -> None:
    flat = normal(3, 20_000)
    features = {keep: project_flat(Mask(keep), flat) for keep in (1000, 16_000)}
    assert torch.equal(features[1000], features[16_000][:, :1000] * 4)


def test_project__before_another_projector_it_sees_the_kept_entries_in_row_order() -> None:
    flat = normal(3, 40_000)
    inner = Rademacher(12, seed=3)
    found = project_flat(Mask(10_000, inner, SEED), flat)
    kept = flat[:, sorted(kept_by_hand(40_000, 10_000))]
    assert torch.equal(found, project_flat(inner, kept) * 2)


@pytest.mark.parametrize("then", [Identity(), Rademacher(12)])
@pytest.mark.parametrize("keep", [30, 12_345, 39_000])
def test_project__split_into_tensors_and_batches_is_invisible(then: Projector, keep: int) -> None:
    projector, flat = Mask(keep, then, seed=7), normal(5, 40_000)
    shapes = {"a": (3,), "b": (10, 100, 25), "c": (0, 4), "d": (), "e": (14_996,)}
    row_map = RowMap.from_shapes(shapes, alignment=1)
    assert row_map.n_rows == 40_000
    gradients = {
        name: flat[:, row_map.offset(name) :][:, : row_map.size(name)].reshape(5, *shape)
        for name, shape in shapes.items()
    }
    parts = []
    for samples in (slice(0, 2), slice(2, 5)):
        batch = {name: gradient[samples] for name, gradient in gradients.items()}
        parts.append(project(projector, batch, row_map, CHECKPOINT))
    assert torch.equal(torch.cat(parts), project_flat(projector, flat))


@pytest.mark.parametrize("then", [Identity(), Rademacher(12)])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_project__sample_is_nan_where_a_kept_entry_is_not_finite(
    then: Projector, bad: float
) -> None:
    projector, flat = Mask(20_000, then, SEED), normal(4, 40_000)
    clean = project_flat(projector, flat)
    kept = kept_by_hand(40_000, 20_001)
    flat[2, kept[-2]] = flat[0, kept[-1]] = bad
    found = project_flat(projector, flat)
    assert found[2].isnan().all()
    assert torch.equal(found[[0, 1, 3]], clean[[0, 1, 3]])


def test_project__too_large_for_float32_is_not_finite() -> None:
    flat = torch.ones(2, 20_000, dtype=torch.float64)
    flat[1] = 1e300
    assert project_flat(Mask(20_000), flat).isnan().all(1).tolist() == [False, True]


@dataclass(frozen=True)
class NeedsLayout(Identity):
    """Tells what it was bound to."""

    row_alignment: ClassVar[int] = 512
    row_map: RowMap | None = None

    def bind(self, row_map: RowMap) -> Self:
        return type(self)(row_map)


def test_bind__binds_what_follows_to_the_select_rows() -> None:
    bound = Mask(30, NeedsLayout()).bind(RowMap.from_shapes({"a": (40,)}, alignment=1))
    assert isinstance(bound.then, NeedsLayout)
    assert bound.then.row_map == RowMap.from_shapes({"kept": (30,)}, alignment=512)


def test_bind__padding_is_refused() -> None:
    row_map = RowMap.from_shapes({"a": (5,), "b": (6,)}, alignment=512)
    with pytest.raises(ValueError, match=r"507 rows of padding; .*alignment=1"):
        Mask(3).bind(row_map)


def test_bind__too_few_rows() -> None:
    row_map = RowMap.from_shapes({"a": (5,)}, alignment=1)
    assert Mask(5).bind(row_map).selected_rows(0).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match=r"keep .*at most the 5 .*got 6; try keep=5"):
        Mask(6).bind(row_map)
    with pytest.raises(ValueError, match=r"keep .*got 6"):
        Mask(6).cost(5)


@pytest.mark.parametrize("then", [512, Rademacher, Mask(4), Kronecker()], ids=str)
def test_mask__what_cannot_follow_it(then: Any) -> None:
    with pytest.raises(TypeError, match=r"then"):
        Mask(5, then)


def test_cost__of_all_rows_is_that_of_the_next() -> None:
    cost, inner = Mask(500, Rademacher(64)).cost(500), Rademacher(64).cost(500)
    assert cost.product_error == pytest.approx(inner.product_error)
    assert cost.rounding_error == inner.rounding_error
    assert cost.operations == inner.operations
    assert cost.random_bits == inner.random_bits + 64 * 500
    assert cost.buffer_bytes > inner.buffer_bytes
