"""Scores, gram matrices and sums of groups against dense float64 numpy; labels and attrs."""

from __future__ import annotations

import json
from typing import Any

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
    assert scores.name == "score"
    assert scores.attrs["source"] == FEATURES.attrs["source"]
    assert scores.attrs["target_source"] == TARGETS.attrs["source"] != scores.attrs["source"]
    assert json.loads(scores.attrs["projector"]) == FEATURES.attrs["projector"]
    apart = td.score(FEATURES, TARGETS, average=False)
    assert apart.checkpoint.values.tolist() == ["c0", "c1", "c2"]


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


def test_gram__equals_einsum() -> None:
    x = FEATURES.feature.values.astype("f8")
    found = td.gram(FEATURES)
    np.testing.assert_allclose(found, np.einsum("npc,nqc->pqc", x, x), rtol=1e-5)
    assert found.name == "gram"
    h = np.random.default_rng(0).random(50)
    weighted = td.gram(FEATURES, weights=xr.DataArray(h, dims="sample"))
    np.testing.assert_allclose(weighted, np.einsum("n,npc,nqc->pqc", h, x, x), rtol=1e-5)


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
    assert found.dims == ("label", "target")
    np.testing.assert_array_equal(found.label, [0, 1])
    changed = options | {list(options)[-1]: other}
    assert not np.allclose(
        found, td.group_score(FEATURES, TARGETS, by="label", **changed), rtol=0.02
    )


def test_group_score__strings() -> None:
    names = np.where(np.arange(50) < 20, "web", "book").astype(object)
    found = td.group_score(FEATURES.assign_coords(source=("sample", names)), TARGETS, by="source")
    scores = td.score(FEATURES, TARGETS)
    np.testing.assert_allclose(
        found.sel(source="web"), scores[:20].sum("sample"), rtol=1e-3, atol=1e-5
    )


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


@pytest.mark.parametrize("field", ["dtype", "autocast", "float32_matmul_precision"])
def test_score__precisions_that_differ_are_warned_of_once(field: str) -> None:
    sides = [ds.assign_attrs({field: v}) for ds, v in ((FEATURES, "bfloat16"), (TARGETS, "off"))]
    with pytest.warns(UserWarning, match=f"{field} 'bfloat16' and 'off'"):
        found = td.score(*sides, damping=0.1)
    np.testing.assert_array_equal(found, td.score(*sides, damping=0.1))
    td.score(FEATURES, TARGETS.assign_attrs({field: "off"}))
