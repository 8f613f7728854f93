"""Scores, damping and groups against dense float64 numpy, and refusals."""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np
import pytest
import xarray as xr

import trakdask as td
from trakdask.testing import simulate_features

FEATURES = simulate_features(n_samples=50, proj_dim=6, n_checkpoints=3, chunks=16)
TARGETS = simulate_features(n_samples=9, proj_dim=6, n_checkpoints=3, chunks=4, seed=1)


def dense_scores(features: xr.Dataset, targets: xr.Dataset, damping, h=None) -> np.ndarray:
    """One checkpoint after the other, with an explicit inverse."""
    per_checkpoint = []
    for c in range(features.sizes["checkpoint"]):
        x = features.feature[..., c].values.astype("f8")
        t = targets.feature[..., c].values.astype("f8")
        k = (x if h is None else x * np.asarray(h)[:, None]).T @ x
        per_checkpoint.append(x @ np.linalg.inv(k + damping(k) * np.eye(len(k))) @ t.T)
    q = features.out_to_loss.values.astype("f8").mean(1)
    return np.stack(per_checkpoint, -1) * q[:, None, None]


def closed_form(k: np.ndarray, factor: float = 0.03) -> float:
    return factor * np.trace(k @ k) / np.trace(k)


@pytest.mark.parametrize(
    ("damping", "rule"),
    [
        ("auto", closed_form),
        (0.5, lambda k: closed_form(k, 0.5)),
        (0, lambda k: 0.0),
        (td.Absolute(2.5), lambda k: 2.5),
    ],
)
def test_score__equals_dense_inverse(damping, rule) -> None:
    expected = dense_scores(FEATURES, TARGETS, rule)
    found = td.score(FEATURES, TARGETS, damping=damping)
    np.testing.assert_allclose(found, expected.mean(-1), rtol=1e-3, atol=1e-5)
    apart = td.score(FEATURES, TARGETS, damping=damping, average=False)
    np.testing.assert_allclose(apart, expected, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(apart.mean("checkpoint"), found, rtol=1e-4, atol=1e-6)


def test_score__labels_of_both_sides() -> None:
    scores = td.score(FEATURES, TARGETS)
    assert scores.dims == ("sample", "target")
    assert scores.dtype == np.float32
    assert set(scores.coords) == {"label", "target_label"}
    assert scores.chunks == ((16, 16, 16, 2), (4, 4, 1))
    assert scores.attrs["damping"] == "0.03 tr(K^2)/tr(K)"
    assert "> 0" in scores.attrs["description"]
    assert scores.name == "score"
    assert scores.attrs["source"] == FEATURES.attrs["source"]
    assert scores.attrs["target_source"] == TARGETS.attrs["source"] != scores.attrs["source"]
    assert td.score(FEATURES, TARGETS, average=False).checkpoint.values.tolist() == [
        "c0",
        "c1",
        "c2",
    ]


@pytest.mark.parametrize("with_checkpoint", [False, True])
def test_score__weights(with_checkpoint: bool) -> None:
    h = np.random.default_rng(0).random(50)
    weights = xr.DataArray(h, dims="sample")
    if with_checkpoint:
        weights = weights.expand_dims(checkpoint=3)
    found = td.score(FEATURES, TARGETS, weights=weights)
    expected = dense_scores(FEATURES, TARGETS, closed_form, h).mean(-1)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)


def test_score__in_memory_and_lazy_are_equal() -> None:
    lazy = td.score(FEATURES, TARGETS)
    np.testing.assert_allclose(
        td.score(FEATURES.compute(), TARGETS.compute()), lazy, rtol=1e-4, atol=1e-6
    )


def test_score__chunked_coords_do_no_harm() -> None:
    scores = td.score(FEATURES.chunk(sample=10), TARGETS.chunk(sample=3))
    top = td.top_k(scores, 2, where=scores.label == 0)
    np.testing.assert_array_equal(top.label, np.zeros((9, 2)))


def test_score__selected_rows_under_the_gram_of_all() -> None:
    whole = FEATURES.assign(gram=td.gram(FEATURES))
    rows = [3, 17, 44]
    found = td.score(whole.isel(sample=rows), TARGETS)
    np.testing.assert_allclose(found, td.score(FEATURES, TARGETS)[rows], rtol=1e-4, atol=1e-6)


def test_score__one_checkpoint_of_many() -> None:
    found = td.score(FEATURES.isel(checkpoint=[1]), TARGETS.isel(checkpoint=[1]))
    x = FEATURES.isel(checkpoint=[1])
    expected = dense_scores(x, TARGETS.isel(checkpoint=[1]), closed_form).mean(-1)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)


def test_damping__is_free_of_gradient_scale() -> None:
    scaled = FEATURES.assign(feature=FEATURES.feature * 1000)
    ratio = td.damping(scaled).damping / td.damping(FEATURES).damping
    np.testing.assert_allclose(ratio, 1e6, rtol=1e-4)
    np.testing.assert_allclose(td.damping(FEATURES, damping=td.Absolute(3)).damping, [3, 3, 3])


def test_gram__equals_einsum() -> None:
    x = FEATURES.feature.values.astype("f8")
    found = td.gram(FEATURES)
    np.testing.assert_allclose(found, np.einsum("npc,nqc->pqc", x, x), rtol=1e-5)
    assert found.name == "gram"
    h = np.random.default_rng(0).random(50)
    weighted = td.gram(FEATURES, weights=xr.DataArray(h, dims="sample"))
    np.testing.assert_allclose(weighted, np.einsum("n,npc,nqc->pqc", h, x, x), rtol=1e-5)


def test_group_score__equals_groupby_of_the_scores() -> None:
    found = td.group_score(FEATURES, TARGETS, by="label")
    expected = td.score(FEATURES, TARGETS).compute().groupby("label").sum()
    np.testing.assert_allclose(found, expected.transpose("label", "target"), rtol=1e-3, atol=1e-5)
    assert found.dims == ("label", "target")
    np.testing.assert_array_equal(found.label, [0, 1])


@pytest.mark.parametrize(
    ("options", "other"),
    [
        ({"estimator": "soft", "damping": 0.1, "power": 0.3}, 0.9),
        ({"damping": 0.5}, 0.05),
        ({"weights": xr.DataArray(np.linspace(0, 1, 50), dims="sample")}, None),
        (
            {"estimator": "tracin", "learning_rates": {"c0": 1, "c1": 2, "c2": 3}},
            {"c0": 3, "c1": 2, "c2": 1},
        ),
        ({"estimator": "relatif"}, "trak"),
    ],
)
def test_group_score__every_option_is_that_of_score(options: dict[str, Any], other: Any) -> None:
    found = td.group_score(FEATURES, TARGETS, by="label", **options)
    expected = td.score(FEATURES, TARGETS, **options).compute().groupby("label").sum()
    np.testing.assert_allclose(found, expected.transpose("label", "target"), rtol=1e-3, atol=1e-5)
    changed = options | {list(options)[-1]: other}
    assert not np.allclose(
        found, td.group_score(FEATURES, TARGETS, by="label", **changed), rtol=0.02
    )


def test_group_score__strings_and_missing_coord() -> None:
    names = np.where(np.arange(50) < 20, "web", "book").astype(object)
    found = td.group_score(FEATURES.assign_coords(source=("sample", names)), TARGETS, by="source")
    scores = td.score(FEATURES, TARGETS)
    np.testing.assert_allclose(
        found.sel(source="web"), scores[:20].sum("sample"), rtol=1e-3, atol=1e-5
    )
    with pytest.raises(ValueError, match=r"which are \['label'\].*got 'source'"):
        td.group_score(FEATURES, TARGETS, by="source")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("projector", {"kind": "simulated", "proj_dim": 6, "seed": 9}),
        ("checkpoints", {"c0": "c0", "c1": "c1", "c2": "other"}),
        ("checkpoint_ids", {"c0": 5, "c1": 1, "c2": 2}),
        ("parameters", {"weight": [2, 3]}),
        ("task", "other"),
    ],
)
def test_score__features_made_differently_refuse_to_meet(field: str, value: object) -> None:
    with pytest.raises(
        td.errors.StoreMismatchError, match=rf"differ in {field}.*expected .*, got .*; try"
    ):
        td.score(FEATURES, TARGETS.assign_attrs({field: value}))


def test_score__seed_of_the_projector_is_named() -> None:
    a, b = ({"kind": "rademacher", "proj_dim": 6, "seed": seed} for seed in (0, 1))
    with pytest.raises(
        td.errors.StoreMismatchError, match=r"projector\['seed'\]: expected 0, got 1"
    ):
        td.score(FEATURES.assign_attrs(projector=a), TARGETS.assign_attrs(projector=b))


def test_score__checkpoints_in_another_order_or_number() -> None:
    with pytest.raises(
        td.errors.StoreMismatchError, match=r"checkpoints .*: expected .*, got \['c1', 'c0'\]"
    ):
        td.score(FEATURES.isel(checkpoint=[0, 1]), TARGETS.isel(checkpoint=[1, 0]))
    with pytest.raises(td.errors.StoreMismatchError, match="differ in proj_dim: expected 6, got 3"):
        td.score(FEATURES, TARGETS.isel(proj_dim=slice(3)))


def test_score__proj_dim_split() -> None:
    with pytest.raises(ValueError, match=r"along 'proj_dim', got 2 \(3, 3\); try ds"):
        td.score(FEATURES.chunk(proj_dim=3), TARGETS)


def test_score__missing_variable_or_other_type() -> None:
    with pytest.raises(ValueError, match=r"expected 'feature'"):
        td.score(FEATURES.drop_vars("feature"), TARGETS)
    with pytest.raises(TypeError, match=r"features.*xarray\.Dataset.*DataArray"):
        td.score(FEATURES.feature, TARGETS)
    with pytest.raises(ValueError, match="in floating point, got int64"):
        td.score(FEATURES.assign(feature=FEATURES.feature.astype(int)), TARGETS)
    with pytest.raises(ValueError, match=r"try ds.transpose\('sample', 'proj_dim', 'checkpoint'\)"):
        td.score(FEATURES.transpose("checkpoint", ...), TARGETS)


@pytest.mark.parametrize("damping", ["automatic", -1, True, np.nan, np.inf, None])
def test_score__bad_damping(damping: object) -> None:
    with pytest.raises(ValueError, match=r"expected damping as 'auto', .* a number >= 0"):
        td.score(FEATURES, TARGETS, damping=damping)


def test_score__bad_weights() -> None:
    with pytest.raises(ValueError, match=r"weights.*DataArray.*'sample': 3"):
        td.score(FEATURES, TARGETS, weights=xr.DataArray(np.ones(3), dims="sample"))
    with pytest.raises(ValueError, match=r"finite weights >= 0.*got -1.0 at sample 0"):
        td.score(FEATURES, TARGETS, weights=xr.DataArray(-np.ones(50), dims="sample"))
    with pytest.raises(ValueError, match="got list"):
        td.score(FEATURES, TARGETS, weights=[1.0] * 50)


def test_score__singular_gram_names_the_checkpoint() -> None:
    few = FEATURES.isel(sample=slice(3))
    with pytest.raises(np.linalg.LinAlgError, match=r"checkpoint 'c\d' .*larger damping"):
        td.score(few, TARGETS, damping=0).compute(scheduler="sync")


NAMES = [f"s{i}" for i in range(50)]
ORDER = np.random.default_rng(0).permutation(50)
NAMED = FEATURES.assign_coords(sample=NAMES)


@pytest.mark.parametrize("with_checkpoint", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
def test_score__weights_in_another_order_are_aligned_by_label(with_checkpoint, chunked) -> None:
    h = np.random.default_rng(0).random((50, 3))
    weights = xr.DataArray(h, coords={"sample": NAMES, "checkpoint": FEATURES.checkpoint.values})
    turned = weights.isel(sample=ORDER, checkpoint=[2, 0, 1])
    if not with_checkpoint:
        weights, turned = (
            weights[:, 1].drop_vars("checkpoint"),
            turned.sel(checkpoint="c1", drop=True),
        )
    if chunked:
        turned = turned.chunk(sample=7)
    expected = td.score(NAMED, TARGETS, weights=weights)
    np.testing.assert_array_equal(td.score(NAMED, TARGETS, weights=turned), expected)
    np.testing.assert_array_equal(td.gram(NAMED, weights=turned), td.gram(NAMED, weights=weights))
    plain = td.score(FEATURES, TARGETS, weights=xr.DataArray(weights.values, dims=weights.dims))
    np.testing.assert_array_equal(plain, expected)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (xr.DataArray(np.ones(50), coords={"sample": NAMES}), "labels"),
        (
            xr.DataArray(np.ones((50, 3)), dims=("sample", "checkpoint")).assign_coords(
                checkpoint=["c0", "c1", "x"]
            ),
            "without 'c2'",
        ),
        (
            xr.DataArray(np.ones(50), dims="sample").assign_coords(label=FEATURES.label[::-1]),
            "coord 'label' at sample 0",
        ),
    ],
)
def test_score__weights_that_cannot_be_aligned_are_refused(weights, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        td.score(FEATURES, TARGETS, weights=weights)


@pytest.mark.parametrize("field", ["dtype", "autocast", "float32_matmul_precision"])
def test_score__precisions_that_differ_are_warned_of_once(field: str) -> None:
    sides = [ds.assign_attrs({field: v}) for ds, v in ((FEATURES, "bfloat16"), (TARGETS, "off"))]
    with pytest.warns(UserWarning, match=f"{field} 'bfloat16' and 'off'"):
        found = td.score(*sides, damping=0.1)
    np.testing.assert_array_equal(found, td.score(*sides, damping=0.1))
    td.score(FEATURES, TARGETS.assign_attrs({field: "off"}))


@pytest.mark.parametrize("by", ["target", "target_label", ["label"], None, 3])
def test_group_score__by_what_is_no_coord_of_its_own(by: object) -> None:
    features = FEATURES.assign_coords(target_label=("sample", np.arange(50)))
    features = features.assign_coords(target=("sample", np.arange(50)))
    with pytest.raises(ValueError, match=r"\bby\b.*coord.*got"):
        td.group_score(features, TARGETS, by=by)


def test_score__coord_of_the_targets_name_is_refused() -> None:
    features = FEATURES.assign_coords(target_label=("sample", np.arange(50)))
    with pytest.raises(ValueError, match="got 'target_label' for both"):
        td.score(features, TARGETS)


@pytest.mark.parametrize("estimator", ["trak", "soft"])
@pytest.mark.parametrize("sides", [1, 2])
def test_damping__all_features_zero_at_one_checkpoint_names_it(sides: int, estimator: str) -> None:
    x = FEATURES.feature.values.copy()
    x[..., 1] = 0
    flat = FEATURES.assign(feature=FEATURES.feature.copy(data=da.from_array(x, chunks=(16, 6, 1))))
    options = {"damping": "closed_form", "estimator": estimator}
    lazy = td.damping(flat, **options) if sides == 1 else td.score(flat, TARGETS, **options)
    with pytest.raises(ValueError, match=r"gram .* got 0 at checkpoint 'c1'"):
        lazy.compute(scheduler="sync")


def test_self_influence__attrs_say_what_it_is() -> None:
    found = td.self_influence(FEATURES)
    assert "lowered its own loss" in found.attrs["description"]
    assert (found >= 0).all()


def test_score__hidden_entries_of_masked_arrays_are_never_used() -> None:
    """XArray makes NaN of them: not a number among weights, and features that are not finite."""
    h = np.ma.masked_array(np.ones(50), mask=np.arange(50) == 7)
    with pytest.raises(ValueError, match="got nan at sample 7"):
        td.score(FEATURES, TARGETS, weights=xr.DataArray(h, dims="sample"))
    hidden = np.ma.masked_array(FEATURES.feature.values, mask=FEATURES.feature.values > 2)
    masked = FEATURES.assign(feature=FEATURES.feature.copy(data=hidden))
    with pytest.raises(ValueError, match=r"not finite for checkpoint 'c.'"):
        td.score(masked, TARGETS).compute(scheduler="sync")
