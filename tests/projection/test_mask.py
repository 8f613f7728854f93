from __future__ import annotations

import itertools
import json
import math
import pickle
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Self

import numpy as np
import pytest
import torch
from torch import Tensor

from trakdask.projection import Identity, Projector, Rademacher, RowMap, mask
from trakdask.projection.gaussian import Gaussian
from trakdask.projection.kronecker import Kronecker
from trakdask.projection.mask import Mask, select_rows
from trakdask.projection.philox import STREAM_MASK, philox4x32, split_seed
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


def normal(n_samples: int, n_rows: int) -> Tensor:
    return torch.randn(n_samples, n_rows, generator=torch.Generator().manual_seed(n_rows))


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


def test_select_rows__all_of_few_rows_where_too_few_are_expected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mask, "_margin", lambda keep: 1 - keep)
    assert in_key_order(5, 5) == kept_by_hand(5, 5)


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


def test_select_rows__every_row_is_as_likely() -> None:
    n_rows, keep, n_draws = 101, 25, 1000
    counts = np.zeros(n_rows)
    for checkpoint in range(n_draws):
        counts[select_rows(n_rows, keep, 0, checkpoint)[0]] += 1
    share = keep / n_rows
    z = (counts - n_draws * share) / (n_draws * share * (1 - share)) ** 0.5
    # A draw without replacement: the sum is fixed, so there are n_rows - 1 degrees of freedom.
    assert abs((z**2).sum() * (1 - 1 / n_rows) / (n_rows - 1) - 1) < 4 * (2 / n_rows) ** 0.5
    assert abs(z).max() < 5


def test_select_rows__seed_and_checkpoint_choose_others() -> None:
    draws = [(0, 0), (1, 0), (2**32, 0), (0, 1)]
    kept = [set(select_rows(10_000, 100, *draw)[0].tolist()) for draw in draws]
    assert all(len(a & b) < 20 for a, b in itertools.combinations(kept, 2))


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
def test_project__numba_and_numpy_agree(then: Projector, monkeypatch: pytest.MonkeyPatch) -> None:
    flat, results = normal(2, 30_000), []
    for numba in ("0", "1"):
        monkeypatch.setenv("TRAKDASK_NUMBA", numba)
        select_rows.cache_clear()
        results.append(project_flat(Mask(2000, then), flat))
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("then", [Identity(), Rademacher(12)])
@pytest.mark.parametrize("keep", [300, 17_000])  # less, and more, than one block of rows
def test_project__other_dtypes_are_float32_first(
    dtype: torch.dtype, then: Projector, keep: int
) -> None:
    flat = normal(2, 20_000).double().add(1e-9).to(dtype)
    projector = Mask(keep, then)
    assert torch.equal(project_flat(projector, flat), project_flat(projector, flat.float()))


@pytest.mark.parametrize("scale", [0.0, 2.0**-149, 2.0**100])
def test_project__zero_subnormal_and_huge_gradients(scale: float) -> None:
    flat = normal(2, 400).mul(100).round() * scale
    found = project_flat(Mask(100, seed=SEED), flat)
    assert torch.equal(found, flat[:, kept_by_hand(400, 100)] * 2)


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


def test_bind__aligned_rows_without_padding() -> None:
    flat = normal(2, 1024)
    shapes = {"a": (512,), "b": (16, 32)}
    aligned, plain = (RowMap.from_shapes(shapes, alignment=n) for n in (512, 1))
    gradients = {"a": flat[:, :512], "b": flat[:, 512:]}
    found, expected = (project(Mask(100), gradients, rows, 0) for rows in (aligned, plain))
    assert torch.equal(found, expected)


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


def test_selected_rows__cannot_be_changed() -> None:
    rows = Mask(5).bind(RowMap.from_shapes({"a": (9,)}, alignment=1)).selected_rows(0)
    with pytest.raises(ValueError, match="read-only"):
        rows[0] = 7


def test_mask__not_bound() -> None:
    message = r"Mask\(keep=5, .*\); try projector\.bind\(row_map\)"
    with pytest.raises(ValueError, match=message):
        Mask(5).selected_rows(0)
    with pytest.raises(ValueError, match=message):
        Mask(5).project_block(torch.zeros(1, 5), 0, 0, torch.zeros(1, 5, dtype=torch.float64))


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"keep": 0}, ValueError, r"keep .*in \[1, 2\*\*47\), got 0; try keep=65536"),
        ({"keep": 2**47}, ValueError, r"keep .*got 140737488355328"),
        ({"keep": 0.1}, TypeError, r"integer for keep, got 0\.1; try keep=65536"),
        ({"seed": -1}, ValueError, r"seed .*in \[0, 2\*\*64\), got -1; try seed=0"),
        ({"then": 512}, TypeError, r"then .*got 512; try then=td.SJLT"),
        ({"then": Rademacher}, TypeError, r"then .*got <class"),
        ({"then": Mask(4)}, TypeError, r"then .*got Mask\(keep=4, .*all rows"),
        ({"then": Kronecker()}, TypeError, r"then .*got Kronecker\(.*shapes of parameters"),
    ],
)
def test_mask__refused(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Mask(**{"keep": 5} | fields)


def test_mask__is_a_value() -> None:
    projector = Mask(40, Rademacher(16, 2**64 - 1), 2**64 - 1)
    assert isinstance(projector, Projector)
    again = pickle.loads(pickle.dumps(projector))
    assert again == projector
    assert hash(again) == hash(projector)
    assert json.loads(json.dumps(projector.spec())) == projector.spec()
    assert projector.width(10**9) == 16
    bound = projector.bind(RowMap.from_shapes({"a": (90,)}, alignment=1))
    again = pickle.loads(pickle.dumps(bound))
    assert again.selected_rows(3).tolist() == bound.selected_rows(3).tolist()
    assert bound.spec() == projector.spec()
    assert bound.width(90) == projector.width(90)


def test_spec__tells_every_field_apart() -> None:
    projectors = [Mask(5), Mask(6), Mask(5, Rademacher()), Mask(5, Rademacher(8)), Mask(5, seed=1)]
    assert len({json.dumps(projector.spec()) for projector in projectors}) == 5
    assert Mask(5).spec()["then"] == Identity().spec()


def product_errors(projector: Projector, gradients: Tensor, n_draws: int) -> Tensor:
    """Return φ·φ' - g·g' of the two gradients, for many draws."""
    features = torch.stack([project_flat(projector, gradients, c) for c in range(n_draws)])
    return (features[:, 0] * features[:, 1]).sum(1) - gradients[0] @ gradients[1]


@pytest.mark.parametrize("then", [Identity(), Gaussian(64)])
def test_cost__product_error_of_spread_gradients(then: Projector) -> None:
    gradients = torch.nn.functional.normalize(normal(2, 2000))
    projector = Mask(200, then)
    errors = product_errors(projector, gradients, 400)
    typical, _ = projector.cost(2000).product_error
    assert errors.mean().abs() < 4 * typical / 400**0.5
    assert errors.std() == pytest.approx(typical, rel=0.15)


@pytest.mark.parametrize("then", [Identity(), Gaussian(16)])
def test_cost__product_error_of_one_row(then: Projector) -> None:
    gradients = torch.zeros(2, 40)
    gradients[:, 11] = 1
    projector = Mask(10, then)
    errors = product_errors(projector, gradients, 800)
    _, worst = projector.cost(40).product_error
    assert errors.mean().abs() < 4 * worst / 800**0.5
    assert errors.std() == pytest.approx(worst, rel=0.1)


def test_project__variance_is_the_one_documented() -> None:
    n_rows, keep = 30, 12
    gradients = normal(2, n_rows)
    x = (gradients[0] * gradients[1]).double()
    expected = n_rows * (n_rows - keep) / (keep * (n_rows - 1)) * (x**2 - x.mean() ** 2).sum()
    errors = product_errors(Mask(keep), gradients, 1000)
    assert errors.var().item() == pytest.approx(expected.item(), rel=0.15)


def test_cost__of_all_rows_is_that_of_the_next() -> None:
    cost, inner = Mask(500, Rademacher(64)).cost(500), Rademacher(64).cost(500)
    assert cost.product_error == pytest.approx(inner.product_error)
    assert cost.rounding_error == inner.rounding_error
    assert cost.operations == inner.operations
    assert cost.random_bits == inner.random_bits + 64 * 500
    assert cost.buffer_bytes > inner.buffer_bytes
