"""Every estimator against a few lines of float64 numpy, to 1e-10; labels, weights and groups."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

import trakdask as td
from tests.attribution.float64_features import float64_features, with_values
from trakdask.attribution.estimators import GradCos, GradDot
from trakdask.models.tasks.protocol import task_facts

N, M, P, C = 60, 11, 5, 3
RATES = {"c0": 0.1, "c1": 0.3, "c2": 0.02}


TRAIN, TARGETS = float64_features(N, P, C, 0, 16), float64_features(M, P, C, 1, 4)
SIDES = TRAIN, TARGETS
SIGNED = TRAIN.assign(out_to_loss=TRAIN.out_to_loss - 0.5)


def parts(train: xr.Dataset) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return train.feature.values, TARGETS.feature.values, train.out_to_loss.values


def kernels(train: xr.Dataset, h: np.ndarray, lam: float = 2.0) -> tuple[np.ndarray, np.ndarray]:
    """φ(z)ᵀ (K + λI)⁻¹ φ(t), (n, m, C), and φ(z)ᵀ (K + λI)⁻¹ φ(z), (n, C)."""
    x, t, _ = parts(train)
    across, own = [], []
    for c in range(C):
        inverse = np.linalg.inv((x[..., c] * h[:, [c]]).T @ x[..., c] + lam * np.eye(P))
        across.append(x[..., c] @ inverse @ t[..., c].T)
        own.append(np.diag(x[..., c] @ inverse @ x[..., c].T))
    return np.stack(across, -1), np.stack(own, -1)


def of_task(ds: xr.Dataset, task: str) -> xr.Dataset:
    """Return features with the attrs that the features of a task have."""
    return ds.assign_attrs(task=f"{task}()", **task_facts(getattr(td.tasks, task)()))


def oracle(train: xr.Dataset, estimator: str, power: float | None = None) -> np.ndarray:
    """Per-checkpoint scores (n, m, C) whose mean is the score."""
    x, t, q = parts(train)
    pooled = q.mean(1)[:, None, None]
    sign = np.where(pooled < 0, -1, 1)
    dot = np.einsum("spc,tpc->stc", x, t)
    if estimator == "trak":
        return kernels(train, np.ones_like(q))[0] * pooled
    if estimator == "soft":
        across, _ = kernels(train, q ** (0.5 if power is None else power) * (1 - q))
        if power is None:
            spread = np.sqrt(np.mean(np.log((1 - q) / q).std(0) ** 2))
            power = np.interp(spread, (0.8, 1.4), (1, 0.5))
        return across * (q**power).mean(1)[:, None, None]
    if estimator == "relatif":
        across, own = kernels(train, np.ones_like(q))
        return across * pooled / np.sqrt(own.mean(1)[:, None, None] * pooled**2)
    if estimator == "grad_dot":
        return dot * pooled
    if estimator == "grad_cos":
        norms = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(t, axis=1)
        return dot / norms * sign
    return C * dot * q[:, None] * np.array(list(RATES.values()))


LAMBDA = td.Absolute(2.0)
ESTIMATORS = {
    "trak": td.Trak(LAMBDA),
    "soft": td.Soft(damping=LAMBDA),
    "relatif": td.RelatIF(LAMBDA),
    "grad_dot": GradDot(),
    "grad_cos": GradCos(),
    "tracin": td.TracIn(RATES),
    "tracin, labelled": td.TracIn(xr.DataArray([*RATES.values()], {"checkpoint": [*RATES]})[::-1]),
}


@pytest.mark.parametrize(
    ("estimator", "train"),
    [(each, TRAIN) for each in ESTIMATORS]
    + [(each, SIGNED) for each in ESTIMATORS if each != "soft"],
)
def test_score__float64_equals_dense_numpy(estimator: str, train: xr.Dataset) -> None:
    expected = oracle(train, estimator)
    found = td.score(train, TARGETS, ESTIMATORS[estimator])
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected.mean(-1), rtol=1e-10, atol=1e-12)
    apart = td.score(train, TARGETS, ESTIMATORS[estimator], average=False)
    np.testing.assert_allclose(apart, expected, rtol=1e-10, atol=1e-12)
    assert apart.dims == ("sample", "target", "checkpoint")


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_group_score__float64_equals_sums_of_dense_numpy(estimator: str) -> None:
    source = np.array(["web", "wiki", None, "book"] * N, object)[:N]
    source[TRAIN.label.values == 0] = "web"
    sides = TRAIN.assign_coords(source=("sample", source)), TARGETS, ESTIMATORS[estimator]
    found = td.group_score(*sides, by=["source", "label"])
    assert found.dims == ("source", "label", "target")
    assert found.source.values.tolist() == ["book", "web", "wiki"]
    dense = oracle(TRAIN, estimator).mean(-1)
    for i, j in np.ndindex(3, 2):
        chosen = (source == found.source.values[i]) & (TRAIN.label.values == j)
        np.testing.assert_allclose(found[i, j], dense[chosen].sum(0), rtol=1e-10, atol=1e-12)
    one, same = (td.group_score(*sides, by=by) for by in (["label"], "label"))
    xr.testing.assert_identical(one, same)
    np.testing.assert_allclose(one[0], dense[TRAIN.label == 0].sum(0), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("narrow", [0.1, 0.5, 0.6, 0.7, 1.0])
def test_score__power_follows_how_sure_the_model_is(narrow: float) -> None:
    q = TRAIN.out_to_loss
    logit = narrow * np.log((1 - q) / q) + 1
    train = TRAIN.assign(out_to_loss=1 / (1 + np.exp(logit)))
    found = td.score(train, TARGETS, td.Soft(damping=td.Absolute(2)))
    expected = oracle(train, "soft")
    np.testing.assert_allclose(found, expected.mean(-1), rtol=1e-10)
    h = (train.out_to_loss**0.5 * (1 - train.out_to_loss)).values
    across, leverage = kernels(train, h)
    g = (expected / across)[:, 0]
    own = td.self_influence(train, td.Soft(damping=td.Absolute(2)))
    np.testing.assert_allclose(own, leverage.mean(1) * g.mean(1) ** 2, rtol=1e-10)


def test_score__grad_cos_of_a_zero_feature_is_nan_without_warning() -> None:
    x = TRAIN.feature.values.copy()
    x[3, :, 1] = 0
    found = td.score(with_values(TRAIN, feature=x), TARGETS, estimator="grad_cos").values
    assert np.isnan(found[3]).all()
    assert np.isfinite(np.delete(found, 3, 0)).all()


@pytest.mark.parametrize("estimator", ["trak", "soft", "grad_dot"])
def test_self_influence__equals_dense_numpy(estimator: str) -> None:
    x, _, q = parts(TRAIN)
    g = (np.sqrt(q) if estimator == "soft" else q).mean(1)[:, None]
    own = np.square(x).sum(1)
    if estimator != "grad_dot":
        own = kernels(TRAIN, np.sqrt(q) * (1 - q) if estimator == "soft" else np.ones_like(q))[1]
    found = td.self_influence(TRAIN, ESTIMATORS[estimator])
    np.testing.assert_allclose(found, (own * g**2).mean(1), rtol=1e-10)
    apart = td.self_influence(TRAIN, ESTIMATORS[estimator], average=False)
    np.testing.assert_allclose(apart, own * g**2, rtol=1e-10)
    assert (found >= 0).all()
    assert found.dims == ("sample",)
    assert set(found.coords) == {"label"}


@pytest.mark.parametrize(
    ("task", "asked", "estimator", "damping"),
    [
        ("ImageClassification", "auto", "soft", "completeness"),
        ("TextClassification", "auto", "soft", "completeness"),
        ("Classification", "trak", "trak", "completeness"),
        ("MultiLabel", "auto", "soft", "completeness"),
        ("CausalLM", "auto", "trak", "tr(K)/n"),
        ("CausalLM", "soft", "soft", "completeness"),
        ("Regression", "auto", "trak", "tr(K)/n"),
        ("BinaryClassification", "auto", "trak", "0.03 tr(K^2)/tr(K)"),
        ("Clip", "relatif", "relatif", "0.03 tr(K^2)/tr(K)"),
    ],
)
def test_score__automatic_estimator_and_damping(task, asked, estimator, damping) -> None:
    train, targets = (of_task(ds, task) for ds in (TRAIN, TARGETS))
    attrs = td.score(train, targets, estimator=asked).attrs
    assert (attrs["estimator"], attrs["damping"]) == (estimator, damping)
    assert attrs["gram_weights"] == ("q^0.5 (1 - q)" if estimator == "soft" else "1")


@pytest.mark.parametrize("chunks", [1, 3])
def test_score__damping_that_was_chosen_before(chunks: int) -> None:
    chosen = td.damping(TRAIN, td.Soft(damping=0.2)).compute()
    expected = td.score(TRAIN, TARGETS, td.Soft(damping=0.2))
    turned = chosen.isel(checkpoint=[2, 0, 1])
    for given in (turned, turned.damping, turned.damping.chunk(checkpoint=chunks)):
        found = td.score(TRAIN, TARGETS, td.Soft(damping=given))
        np.testing.assert_array_equal(found, expected)
        assert found.attrs["damping"] == "given"


@pytest.mark.parametrize("chunks", [{}, {"sample": 7}])
@pytest.mark.parametrize("dims", [("sample",), ("sample", "checkpoint")])
def test_score__weights_of_the_gram_matrix_are_aligned_by_label(dims, chunks) -> None:
    rng, names = np.random.default_rng(0), [f"s{i}" for i in range(N)]
    h = rng.random((N, C)[: len(dims)])
    across, _ = kernels(TRAIN, h if h.ndim == 2 else np.stack([h] * C, axis=1))
    expected = across.mean(-1) * TRAIN.out_to_loss.values.mean(1)[:, None]
    labels = {"sample": names, "checkpoint": TRAIN.checkpoint.values}
    weights = xr.DataArray(h, {dim: labels[dim] for dim in dims})
    turned = weights.isel({dim: rng.permutation(weights.sizes[dim]) for dim in dims}).chunk(chunks)
    named = TRAIN.assign_coords(sample=names)
    for train, given in ((named, turned), (TRAIN, xr.DataArray(h, dims=dims))):
        train = train.assign(gram=td.gram(train, weights=given))
        found = td.score(train, TARGETS, td.Trak(damping=td.Absolute(2.0)))
        np.testing.assert_allclose(found, expected, rtol=1e-10)
        assert found.attrs["gram_weights"] == "given"
        some = td.score(train.isel(sample=[4, 50]), TARGETS, td.Trak(damping=td.Absolute(2.0)))
        np.testing.assert_allclose(some, expected[[4, 50]], rtol=1e-10)
        with pytest.raises(ValueError, match="2 columns"):
            td.score(*(ds.isel(proj_dim=slice(2)) for ds in (train, TARGETS)), td.Trak())


def test_score__labels_of_both_sides() -> None:
    scores = td.score(TRAIN, TARGETS)
    assert scores.dims == ("sample", "target")
    assert set(scores.coords) == {"label", "target_label"}
    assert scores.chunks == ((16, 16, 16, 12), (4, 4, 3))
    assert scores.name == "score"
    assert scores.attrs["source"] == TRAIN.attrs["source"]
    assert scores.attrs["target_source"] == TARGETS.attrs["source"] != scores.attrs["source"]
    assert scores.attrs["projector"] == TRAIN.attrs["projector"]
    apart = td.score(TRAIN, TARGETS, average=False)
    assert apart.checkpoint.values.tolist() == ["c0", "c1", "c2"]


@pytest.mark.parametrize("field", ["dtype", "autocast", "float32_matmul_precision"])
def test_score__precisions_that_differ_are_warned_of_once(field: str) -> None:
    sides = [ds.assign_attrs({field: v}) for ds, v in ((TRAIN, "bfloat16"), (TARGETS, "off"))]
    with pytest.warns(UserWarning, match=f"{field} 'bfloat16' and 'off'"):
        found = td.score(*sides, estimator=td.Trak(damping=0.1))
    np.testing.assert_array_equal(found, td.score(*sides, estimator=td.Trak(damping=0.1)))
    td.score(TRAIN, TARGETS.assign_attrs({field: "off"}))


def test_score__columns_in_another_order_are_refused() -> None:
    features, targets = (ds.assign_coords(proj_column=("proj_dim", np.arange(P))) for ds in SIDES)
    turned = {"proj_dim": slice(None, None, -1)}
    for sides in ((features, targets.isel(turned)), (features.isel(turned), targets)):
        with pytest.raises(td.errors.StoreMismatchError, match="differ in proj_column"):
            td.score(*sides, "grad_dot")
    found = td.score(features.isel(turned), targets.isel(turned), "grad_dot")
    np.testing.assert_allclose(found, td.score(features, targets, "grad_dot"), rtol=1e-10)
