"""Rankings against a stable argsort, with every kind of mask; of each target and of all."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest
import xarray as xr

import trakdask as td
from trakdask.testing import simulate_features

FEATURES = simulate_features(n_samples=50, proj_dim=6, chunks=16).assign_coords(
    label=("sample", np.arange(50) % 3),
    name=("sample", np.array([f"s{i}" for i in range(50)], dtype=object)),
    day=("sample", np.arange(50).astype("datetime64[D]").astype("datetime64[ns]")),
    size=("sample", np.linspace(0, 1, 50)),
)
TARGETS = simulate_features(n_samples=9, proj_dim=6, chunks=4, seed=1).assign_coords(
    label=("sample", np.arange(9) % 3)
)
SCORES = td.score(FEATURES, TARGETS)
DENSE = SCORES.compute(scheduler="synchronous").values  # workers import this module too


def argsorted(mask: np.ndarray, k: int, largest: bool = True) -> np.ndarray:
    """Positions (target, k): score descending, then position; -1 beyond the mask."""
    result = np.full((9, k), -1)
    for t in range(9):
        rows = np.flatnonzero(mask[:, t])
        order = rows[np.argsort(-DENSE[rows, t] if largest else DENSE[rows, t], kind="stable")][:k]
        result[t, : len(order)] = order
    return result


ALL = np.ones((50, 9), bool)


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("k", [1, 7, 50])
def test_top_k__equals_argsort(k: int, largest: bool) -> None:
    top = td.top_k(SCORES, k, largest=largest)
    expected = argsorted(ALL, k, largest)
    np.testing.assert_array_equal(top.position, expected)
    np.testing.assert_array_equal(top.score, np.take_along_axis(DENSE.T, expected, 1))
    np.testing.assert_array_equal(top.label, FEATURES.label.values[expected])
    np.testing.assert_array_equal(top.name, FEATURES.name.values[expected])
    assert top.label.dtype == np.int64
    np.testing.assert_array_equal(top.target_label, TARGETS.label)
    assert top["rank"].values.tolist() == list(range(k))


MASKS = [
    SCORES.label == 1,
    (SCORES.label == 1).values,
    "label == 1",
    lambda tile: tile.label == 1,
]


@pytest.mark.parametrize("where", MASKS)
def test_top_k__mask_over_samples(where) -> None:
    mask = ALL & (FEATURES.label == 1).values[:, None]
    np.testing.assert_array_equal(td.top_k(SCORES, 5, where=where).position, argsorted(mask, 5))


@pytest.mark.parametrize("k", [4, 20])
def test_top_k__mask_of_pairs(k: int) -> None:
    """20 is more than the 16 or 17 samples of one class: the rest is missing."""
    same = FEATURES.label.values[:, None] == TARGETS.label.values
    forms = [
        lambda tile: tile.label == tile.target_label,
        "label == target_label",
        SCORES.label == SCORES.target_label,
        same,
    ]
    for where in forms:
        top = td.top_k(SCORES, k, where=where).compute()
        expected = argsorted(same, k)
        np.testing.assert_array_equal(top.position, expected)
        missing = expected < 0
        assert np.isnan(top.score.values[missing]).all()
        assert (top.label.values[missing] == -1).all()
        assert np.isnat(top.day.values[missing]).all()
        assert np.isnan(top["size"].values[missing]).all()
        assert (top.name.values[missing] == "").all()
        found = np.broadcast_to(top.target_label.values[:, None], missing.shape)
        np.testing.assert_array_equal(top.label.values[~missing], found[~missing])


@pytest.mark.parametrize("large", [False, True])
def test_top_k__coords_keep_their_dtype_where_ranks_are_missing(large: bool) -> None:
    """Ids above 2⁵³ would be others as float64."""
    values = {
        "i8": np.arange(50) + 2**60 + 1,
        "i2": np.arange(50, dtype="i2"),
        "u1": np.arange(50, dtype="u1"),
        "bool": np.arange(50) % 2 == 0,
        "time": np.arange(50).astype("m8[s]"),
    }
    scores = SCORES.assign_coords({name: ("sample", data) for name, data in values.items()})
    top = td.top_k(scores, 20 if large else 2, where="label == target_label").compute()
    position, missing = top.position.values, top.position.values < 0
    assert missing.any() == large
    nothing = {"i8": -1, "i2": -1, "u1": 255, "bool": False, "time": np.timedelta64("NaT")}
    for name, data in values.items():
        assert top[name].dtype == data.dtype
        expected = np.where(missing, nothing[name], data[position])
        np.testing.assert_array_equal(top[name], expected.astype(data.dtype), err_msg=name)


def test_top_k__of_one_number_per_sample() -> None:
    features = td.testing.simulate_features(n_samples=40, proj_dim=8, n_checkpoints=3)
    influence = td.self_influence(features)
    top = td.top_k(influence, 5, where=influence.label != 0).compute()
    values = np.where(features.label != 0, influence.values, -np.inf)
    np.testing.assert_array_equal(top.position, np.argsort(-values)[:5])
    np.testing.assert_allclose(top.score, np.sort(values)[::-1][:5], rtol=1e-6)
    assert top.score.dims == ("rank",)
    assert (top.label != 0).all()


def test_top_k__coords_are_those_of_the_positions_however_they_are_computed() -> None:
    top = td.top_k(SCORES, 3)
    expected = top.compute()
    (together,) = dask.compute(top)
    xr.testing.assert_identical(together, expected)
    xr.testing.assert_identical(top.label.compute(), expected.label)
    some = {"rank": slice(1, None), "target": [4, 0]}
    xr.testing.assert_identical(top.isel(some).compute(), expected.isel(some))
    xr.testing.assert_identical(top.drop_vars("position").compute().label, expected.score.label)
    turned = top.assign(position=top.position[:, ::-1]).compute()
    np.testing.assert_array_equal(turned.label, expected.label)
    again = top.copy()
    assert again.load() is again
    xr.testing.assert_identical(again.load(), expected)


BARE = td.score(FEATURES.reset_coords(drop=True), TARGETS.reset_coords(drop=True))
NAMES = [f"s{i}" for i in range(50)]


@pytest.mark.parametrize("scores", [SCORES, BARE, SCORES.drop_vars("target_label")])
def test_top_k__function_where_coords_are_missing(scores: xr.DataArray) -> None:
    top = td.top_k(scores, 3, where=lambda tile: tile.sample >= 20)
    np.testing.assert_array_equal(top.position, argsorted(ALL & (np.arange(50) >= 20)[:, None], 3))
    top = td.top_k(scores, 3, where=lambda tile: tile.sample % 9 != tile.target)
    mask = np.arange(50)[:, None] % 9 != np.arange(9)
    np.testing.assert_array_equal(top.position, argsorted(mask, 3))


@pytest.mark.parametrize("dims", [("sample",), ("sample", "target"), ("target", "sample")])
def test_top_k__mask_in_another_order_is_aligned_by_label(dims: tuple[str, ...]) -> None:
    labels = {"sample": NAMES, "target": list("abcdefghi")}
    scores = SCORES.assign_coords(labels)
    rng = np.random.default_rng(0)
    mask = xr.DataArray(rng.random([len(labels[d]) for d in dims]) < 0.6, dims=dims)
    mask = mask.assign_coords({d: labels[d] for d in dims})
    orders = {d: rng.permutation(len(labels[d])) for d in dims}
    full = (mask & xr.ones_like(scores, bool).compute()).transpose("sample", "target").values
    expected = td.top_k(scores, 5, where=mask)
    np.testing.assert_array_equal(expected.position, argsorted(full, 5))
    found = td.top_k(scores, 5, where=mask.isel(orders))
    np.testing.assert_array_equal(found.position, expected.position)


def test_top_k__computed_together_computes_each_tile_once() -> None:
    tiles = []

    def counted(tile: np.ndarray) -> np.ndarray:
        if tile.size:
            tiles.append(1)
        return tile

    scores = td.score(simulate_features(20, 4, chunks=5), simulate_features(6, 4, chunks=3))
    counting = scores.copy(data=scores.data.map_blocks(counted, meta=np.empty((0, 0), "f4")))
    td.top_k(counting, 3).compute().to_dataframe()
    assert len(tiles) == 4 * 2


# --- of all targets together ----------------------------------------------------------------------

N, M = 50, 4


def tied(chunks: int = 7) -> xr.DataArray:
    """Scores with many ties, and some NaN."""
    random = np.random.default_rng(0)
    values = random.standard_normal((N, M)).round(1).astype("f4")
    values[[5, 30], 1] = np.nan
    coords = {"source": ("sample", random.choice(["web", "book", "code"], N))}
    data = da.from_array(values, chunks=(chunks, 2))
    return xr.DataArray(data, dims=("sample", "target"), coords=coords)


def taken(values: np.ndarray, group: np.ndarray, fraction: float) -> np.ndarray:
    """Sort every group by score, then by position; NaN last."""
    chosen = np.zeros(len(values), bool)
    for name in set(group.tolist()) - {None}:
        members = [i for i in range(len(values)) if group[i] == name]
        count = int(np.ceil(round(fraction * len(members), 9)))
        ranked = sorted((-values[i], i) for i in members if not np.isnan(values[i]))
        chosen[[i for _, i in ranked[:count]]] = True
    return chosen


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("over_targets", ["max", "mean"])
@pytest.mark.parametrize(
    ("by", "fraction", "chunks"), [(None, 1, 1), ("source", 0.001, 20), ("source", 0.3, 50)]
)
def test_top_k__over_targets_is_that_of_a_sort(by, fraction, chunks, over_targets, largest) -> None:
    scores = tied(chunks)
    top = td.top_k(scores, fraction=fraction, by=by, over_targets=over_targets, largest=largest)
    top = top.compute()
    best = getattr(scores.values.astype("f8"), over_targets)(1)
    group = scores.source.values if by else np.zeros(N)
    np.testing.assert_allclose(top.score, best, rtol=1e-6, atol=1e-12)
    expected = taken(top.score.values if largest else -top.score.values, group, fraction)
    np.testing.assert_array_equal(top.selected, expected)
    assert top.source.values.tolist() == scores.source.values.tolist()
    three = td.top_k(scores.compute(), 3, over_targets=over_targets, by="source").selected
    assert three.groupby(scores.source).sum().values.tolist() == [3, 3, 3]


def test_top_k__over_targets_leaves_out_samples_without_a_group_or_masked_out() -> None:
    group = np.array(["a", None] * (N // 2), object)
    scores = tied().assign_coords(group=("sample", group))
    top = td.top_k(scores, fraction=0.4, over_targets="max", by="group")
    np.testing.assert_array_equal(top.selected, taken(top.score.values, group, 0.4))
    assert not top.selected[1::2].any()
    masked = td.top_k(scores, fraction=0.4, over_targets="max", where=group == "a")
    np.testing.assert_array_equal(masked.selected, top.selected)
