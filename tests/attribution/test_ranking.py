"""Rankings against a stable argsort, with every kind of mask."""

from __future__ import annotations

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


@pytest.mark.parametrize("form", ["DataArray", "array"])
def test_top_k__mask_over_samples(form: str) -> None:
    where = SCORES.label == 1
    top = td.top_k(SCORES, 5, where=where if form == "DataArray" else where.values)
    np.testing.assert_array_equal(top.position, argsorted(ALL & where.values[:, None], 5))


@pytest.mark.parametrize("k", [4, 20])
def test_top_k__mask_of_pairs(k: int) -> None:
    """20 is more than the 16 or 17 samples of one class: the rest is missing."""
    same = FEATURES.label.values[:, None] == TARGETS.label.values
    forms = [
        lambda tile: tile.label == tile.target_label,
        SCORES.label == SCORES.target_label,
        same,
    ]
    for where in forms:
        top = td.top_k(SCORES, k, where=where).compute()
        expected = argsorted(same, k)
        np.testing.assert_array_equal(top.position, expected)
        missing = expected < 0
        assert np.isnan(top.score.values[missing]).all()
        assert np.isnan(top.label.values[missing]).all()
        assert np.isnat(top.day.values[missing]).all()
        assert np.isnan(top["size"].values[missing]).all()
        assert (top.name.values[missing] == "").all()
        found = np.broadcast_to(top.target_label.values[:, None], missing.shape)
        np.testing.assert_array_equal(top.label.values[~missing], found[~missing])


def test_top_k__mask_over_targets() -> None:
    top = td.top_k(SCORES, 3, where=SCORES.target_label == 0)
    mask = ALL & (TARGETS.label.values == 0)
    np.testing.assert_array_equal(top.position, argsorted(mask, 3))


def test_top_k__of_computed_scores() -> None:
    np.testing.assert_array_equal(td.top_k(SCORES.compute(), 3).position, argsorted(ALL, 3))


def test_top_k__then_selected() -> None:
    top = td.top_k(SCORES, 3).isel(target=[2, 5])
    np.testing.assert_array_equal(top.position, argsorted(ALL, 3)[[2, 5]])


def test_top_k__nan_scores_never_rank() -> None:
    scores = SCORES.where(SCORES["size"] > 0.5)
    top = td.top_k(scores, 3)
    mask = ALL & (FEATURES["size"].values > 0.5)[:, None]
    np.testing.assert_array_equal(top.position, argsorted(mask, 3))
    with pytest.raises(ValueError, match=r"integer coords"):
        td.top_k(SCORES.where(SCORES["size"] > 2), 3).compute(scheduler="sync")


@pytest.mark.parametrize("form", ["variable", "coord", "lazy coord"])
def test_top_k__target_that_failed_has_no_samples(form: str) -> None:
    """featurize records errors in a variable, open in a coord."""
    failed = np.full((9, 2), "", object)
    failed[4, 1] = "too long"
    error = xr.DataArray(failed, dims=("sample", "checkpoint"))
    lazy = error.chunk(sample=4) if form == "lazy coord" else error
    feature = TARGETS.feature.where(error == "")
    targets = TARGETS.assign(feature=feature).assign({"error": lazy})
    if form != "variable":
        targets = targets.set_coords("error")
    top = td.top_k(td.score(FEATURES, targets, damping=0.1), 3)
    assert (top.position[4] == -1).all()
    assert np.isnan(top.label[4]).all()
    others = np.arange(9) != 4
    expected = td.top_k(td.score(FEATURES, TARGETS, damping=0.1), 3)
    np.testing.assert_array_equal(top.position[others], expected.position[others])


@pytest.mark.parametrize("k", [0, -1, 51, 2.0, True, "3"])
def test_top_k__bad_k(k: object) -> None:
    with pytest.raises(ValueError, match=r"\bk\b.* 1 to .*50 samples.*got"):
        td.top_k(SCORES, k)


@pytest.mark.parametrize(
    "where",
    [
        np.ones(49, bool),
        np.ones(50, int),
        np.ones((9, 50), bool),
        xr.DataArray(np.ones(50, bool), dims="label"),
        xr.DataArray(np.array(True)),
    ],
)
def test_top_k__bad_mask(where: object) -> None:
    with pytest.raises(ValueError, match=r"where as bool.*\{'sample': 50\}"):
        td.top_k(SCORES, 3, where=where)


def test_top_k__mask_selects_too_few() -> None:
    with pytest.raises(ValueError, match=r"select k=3 samples or more, got 2 of 50; try k=2"):
        td.top_k(SCORES, 3, where=np.arange(50) < 2)


def test_top_k__function_that_returns_no_mask() -> None:
    with pytest.raises(ValueError, match=r"boolean DataArray.*got int64"):
        td.top_k(SCORES, 3, where=lambda tile: tile.label).compute(scheduler="sync")


def test_top_k__function_of_a_coord_that_is_not_there() -> None:
    for where in (lambda tile: tile.source == "web", lambda tile: tile["source"] == "web"):
        with pytest.raises(ValueError, match=r"mask of the coords \['label'.*source"):
            td.top_k(SCORES, 3, where=where).compute(scheduler="sync")


def test_top_k__of_something_else() -> None:
    with pytest.raises(ValueError, match=r"scores.mean\('checkpoint'\)"):
        td.top_k(td.score(FEATURES, TARGETS, average=False), 3)
    with pytest.raises(TypeError, match="got a ndarray"):
        td.top_k(DENSE, 3)


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


def test_top_k__mask_that_cannot_be_aligned_is_refused() -> None:
    where = SCORES.label == 1
    with pytest.raises(ValueError, match="coord 'label' at sample 1"):
        td.top_k(SCORES.sortby("label"), 3, where=where)
    labelled = xr.DataArray(np.ones(50, bool), coords={"sample": NAMES})
    with pytest.raises(ValueError, match="labels"):
        td.top_k(SCORES, 3, where=labelled)
    with pytest.raises(ValueError, match="without 's49'"):
        td.top_k(SCORES.assign_coords(sample=NAMES), 3, where=labelled[:49])


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (lambda tile: 1 / 0, "ZeroDivisionError"),
        (lambda tile: SCORES.label == 1, "got .*'sample': 50"),
        (lambda tile: xr.DataArray(np.array([True, False]), dims="x"), r"bool over \('x',\)"),
        (lambda tile: tile, "got Dataset"),
        (lambda tile: True, "got bool"),
    ],
)
def test_top_k__function_that_raises_or_returns_another_shape(where, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        td.top_k(SCORES, 3, where=where).compute(scheduler="sync")


@pytest.mark.parametrize(
    ("scores", "remedy"),
    [
        (SCORES.T, r"got \('target', 'sample'\); try scores.transpose\('sample', 'target'\)"),
        (SCORES.isel(target=0), r"got \('sample',\); try scores.isel\(target=\[0\]\)"),
        (SCORES.isel(sample=0), r"got \('target',\); try scores.isel\(sample=\[0\]\)"),
        (SCORES.expand_dims(checkpoint=2), r"try scores.mean\('checkpoint'\)"),
    ],
)
def test_top_k__other_dimensions_say_what_to_type(scores: xr.DataArray, remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        td.top_k(scores, 3)


def test_top_k__nothing_selected_does_not_ask_for_one() -> None:
    with pytest.raises(ValueError, match=r"got 0 of 50; try"):
        td.top_k(SCORES, 1, where=np.zeros(50, bool))


def test_top_k__masked_mask_is_refused() -> None:
    """Its hidden entries would count as what lies below."""
    hidden = np.ma.masked_array(np.ones(50, bool), mask=np.arange(50) < 20)
    with pytest.raises(TypeError, match="hides 20 of 50"):
        td.top_k(SCORES, 3, where=hidden)


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
