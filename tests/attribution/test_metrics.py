"""Metrics of outputs against torch's autograd, finite differences, and plugging in by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr

import trakdask as td
from tests.attribution.float64_features import float64_features

N, M, P, C = 60, 24, 6, 3
LABEL = np.arange(M) % 2
GROUP = np.array(["a", "b", "b", "c", None, "a"] * 4, object)
SOFT = td.Soft(power=0.5, damping=0.1)
TRAK = td.Trak(damping=0.1)


def targets(squared: bool = False, chunks: int = 7) -> xr.Dataset:
    made = float64_features(M, P, C, seed=1, chunks=chunks)
    outputs = np.random.default_rng(2).normal(1, 2, (M, C))
    made = made.assign(output=(("sample", "checkpoint"), outputs)).chunk(sample=chunks)
    made = made.assign_coords(label=("sample", LABEL), group=("sample", GROUP))
    return made.assign_attrs(attrs_of(squared))


def training(squared: bool = False, chunks: int = 16) -> xr.Dataset:
    made = float64_features(N, P, C, seed=0, chunks=chunks).assign_attrs(attrs_of(squared))
    return made.assign_coords(source=("sample", np.array(["x", "y", "z"])[np.arange(N) % 3]))


def attrs_of(squared: bool) -> dict[str, str]:
    return {"task": "regression", "loss_kind": "squared error"} if squared else {}


# --- metrics in torch -----------------------------------------------------------------------------


def group_means(f: torch.Tensor, coords: xr.Dataset) -> torch.Tensor:
    names = [name for name in ("a", "b", "c") if (coords.group == name).any()]
    masks = [torch.tensor((coords.group == name).values) for name in names]
    return torch.stack([torch.sigmoid(f)[mask].mean() for mask in masks])


def soft(means: torch.Tensor, sign: int) -> torch.Tensor:
    return sign * 0.1 * torch.logsumexp(sign * means / 0.1, 0)


def loss(f: torch.Tensor, coords: xr.Dataset) -> torch.Tensor:
    return torch.nn.functional.softplus(-f).mean()


def accuracy(f: torch.Tensor, coords: xr.Dataset) -> torch.Tensor:
    return torch.sigmoid(f).mean()


def worst_group(f: torch.Tensor, coords: xr.Dataset) -> torch.Tensor:
    return soft(group_means(f, coords), -1)


def gap(f: torch.Tensor, coords: xr.Dataset) -> torch.Tensor:
    means = group_means(f, coords)
    return soft(means, 1) - soft(means, -1)


def auroc(f: torch.Tensor, coords: xr.Dataset) -> torch.Tensor:
    label = torch.tensor(coords.label.values)
    z = f * (2 * label - 1)
    return torch.sigmoid(z[label == 1][:, None] - z[label == 0]).mean()


IN_TORCH = {f.__name__: f for f in (loss, accuracy, worst_group, gap, auroc)}


def coords_of(ds: xr.Dataset) -> xr.Dataset:
    return ds.drop_vars([*ds.data_vars, "checkpoint"])


def derivative(metric: Any, ds: xr.Dataset, at: float) -> np.ndarray:
    """Return the mean over checkpoints of the derivative by each output, by a loop."""
    whole = np.isfinite(ds.output.values).all(1)
    coords = coords_of(ds).isel(sample=whole)
    rows = []
    for f in ds.output.values[whole].T:
        leaf = torch.tensor(at * f, requires_grad=True)
        rows.append(torch.autograd.grad(metric(leaf, coords), leaf)[0].numpy())
    found = np.zeros(len(whole))
    found[whole] = np.mean(rows, 0)
    return found


@pytest.mark.parametrize("name", IN_TORCH)
@pytest.mark.parametrize("as_function", [False, True])
def test_combine__score_of_a_metric_is_the_weighted_sum_of_scores(name, as_function) -> None:
    T, X = targets(), training()
    metric = IN_TORCH[name]
    made = td.combine(T, metric=metric if as_function else name)
    assert made.combination.values.tolist() == [name]
    assert made.attrs["combined"] == f"metric {name}"
    apart = td.score(X, T, SOFT).values
    found = td.score(X, made, SOFT)
    assert found.target_combination.values.tolist() == [name]
    expected = apart @ derivative(metric, T.compute(), 0.75)
    np.testing.assert_allclose(found[:, 0], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["loss", "accuracy", "auroc"])
def test_metric__value_is_that_of_torch(name) -> None:
    T = targets().compute()
    expected = [float(IN_TORCH[name](torch.tensor(f), coords_of(T))) for f in T.output.values.T]
    for metric in (name, IN_TORCH[name]):
        found = td.evaluate.metric(T.output, T, metric)
        assert found.dims == ("checkpoint", "target")
        assert found.attrs == {"metric": name}
        np.testing.assert_allclose(found[:, 0], expected, rtol=1e-12)
        np.testing.assert_allclose(td.combine(T, metric=metric).output[0], expected, rtol=1e-12)


def test_metric__of_groups_is_the_hard_extreme() -> None:
    T = targets().compute()
    p = 1 / (1 + np.exp(-T.output))
    means = p.assign_coords(group=("sample", GROUP)).groupby("group").mean()
    worst, best = means.min("group"), means.max("group")
    np.testing.assert_allclose(td.evaluate.metric(T.output, T, "worst_group")[:, 0], worst)
    np.testing.assert_allclose(td.evaluate.metric(T.output, T, "gap")[:, 0], best - worst)


def test_squared_error__is_half_of_it_and_not_shrunk() -> None:
    T, X = targets(squared=True), training(squared=True)
    residual = T.out_to_loss.values.mean(1, keepdims=True)
    f = T.output.values
    y = (T.output + T.out_to_loss).values.mean(1, keepdims=True)
    np.testing.assert_allclose(
        td.evaluate.metric(T.output, T, "loss")[:, 0], ((f - y) ** 2).mean(0) / 2
    )
    found = td.score(X, td.combine(T, metric="loss"), TRAK)
    expected = td.score(X, T, TRAK).values @ (-residual / M)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


# --- groups of samples ----------------------------------------------------------------------------


def raised_by_hand(X: xr.Dataset, T: xr.Dataset, metric: Any, estimator: Any) -> np.ndarray:
    scores = td.score(X, T, estimator).values
    whole = np.isfinite(scores).all(0)
    f, coords = T.output.values[whole], coords_of(T).isel(sample=whole)
    scores = scores[:, whole]
    total, mean = scores.sum(0), f.mean(1)
    is_complete = np.corrcoef(mean, total)[0, 1] > 0.5
    scale = (mean @ total) / (total @ total) / 2 if is_complete else 1.0

    def value(outputs: np.ndarray) -> float:
        values = [float(metric(torch.tensor(column), coords)) for column in outputs.T]
        return float(np.mean(values))

    sums = [scores[X.source.values == name].sum(0) for name in ("x", "y", "z")]
    return np.array([value(f) - value(f - scale * s[:, None]) for s in sums])


def complete(T: xr.Dataset, X: xr.Dataset, estimator: Any) -> xr.Dataset:
    """Return targets whose outputs are about five times the sums of their scores."""
    total = td.score(X, T, estimator).sum("sample").values
    noise = 0.1 * total.std() * np.random.default_rng(0).standard_normal((M, C))
    return T.assign(output=(("sample", "checkpoint"), 5 * total[:, None] + noise)).chunk(sample=7)


@pytest.mark.parametrize(
    ("name", "is_complete", "as_function"),
    [
        *(("loss", False, False), ("loss", True, True)),
        *(("accuracy", True, False), ("accuracy", False, True), ("auroc", True, False)),
    ],
)
def test_group_score__plugs_predicted_outputs_in(name, is_complete, as_function) -> None:
    T, X = targets(), training()
    T = complete(T, X, SOFT) if is_complete else T
    metric = IN_TORCH[name]
    found = td.group_score(X, T, SOFT, by="source", metric=metric if as_function else name)
    assert found.dims == ("source", "target")
    assert found.source.values.tolist() == ["x", "y", "z"]
    assert found.target_combination.values.tolist() == [name]
    assert found.attrs["metric"] == name
    expected = raised_by_hand(X, T.compute(), metric, SOFT)
    np.testing.assert_allclose(found[:, 0], expected, rtol=1e-9, atol=1e-12)


def test_group_score__is_scaled_by_all_samples_also_those_without_a_group() -> None:
    T, X = targets(), training()
    T = complete(T, X, SOFT)
    whole = td.group_score(X, T, SOFT, by="source", metric="accuracy")
    parts = xr.DataArray(
        (X.source.values[:, None] == ["x", "y"]) * 1.0, {"part": ["x", "y"]}, ("sample", "part")
    )
    found = td.group_score(X, T, SOFT, by=parts, metric="accuracy")
    np.testing.assert_allclose(found, whole[:2], rtol=1e-6)
    source = X.source.values.astype(object)
    source[source == "z"] = None
    some = X.assign_coords(source=("sample", source))
    found = td.group_score(some, T, SOFT, by="source", metric="accuracy")
    np.testing.assert_allclose(found, whole[:2], rtol=1e-9)
    both = td.group_score(some, T, SOFT, by=["source", "label"], metric="accuracy")
    assert both.sizes == {"source": 2, "label": 2, "target": 1}


def test_group_score__a_metric_needs_no_derivative() -> None:
    def right(f: torch.Tensor, coords: xr.Dataset) -> float:
        return float((f > 0).float().mean())

    T, X = targets().compute(), training()
    found = td.group_score(X, T, SOFT, by="source", metric=right)
    np.testing.assert_allclose(found[:, 0], raised_by_hand(X, T, right, SOFT))
    with pytest.raises(ValueError, match="derivative"):
        td.combine(T, metric=right).feature.compute()


# --- what must not matter -------------------------------------------------------------------------


@pytest.mark.parametrize("name", IN_TORCH)
def test_metrics__leave_failed_targets_out(name) -> None:
    T, X = targets().compute(), training()
    for variable in ("feature", "output", "out_to_loss"):
        T[variable][5] = np.nan
        T[variable][8, ..., 1] = np.nan
    whole = T.isel(sample=np.delete(np.arange(M), [5, 8]))
    for metric in (name, IN_TORCH[name]):
        found, expected = (td.combine(ds, metric=metric).feature for ds in (T, whole))
        np.testing.assert_allclose(found, expected, rtol=1e-12)
        found, expected = (
            td.group_score(X, ds, SOFT, by="source", metric=metric) for ds in (T, whole)
        )
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_group_score__a_metric_of_many_groups_is_divided(monkeypatch) -> None:
    T, X = targets(), training()
    whole = td.group_score(X, T, SOFT, by="source", metric="gap")
    monkeypatch.setattr("trakdask.attribution.metrics._AT_ONCE", 1)
    divided = td.group_score(X, T, SOFT, by="source", metric="gap")
    assert divided.chunks[0] == (1, 1, 1)
    np.testing.assert_array_equal(divided, whole)


@pytest.mark.parametrize(
    ("name", "chunks"), [("worst_group", 1), (accuracy, 5), ("worst_group", M), (accuracy, M)]
)
def test_metrics__chunks_are_invisible(name, chunks) -> None:
    T, X = targets(chunks=7), training()
    other = targets(chunks=chunks)
    np.testing.assert_allclose(
        td.combine(T, metric=name).feature, td.combine(other, metric=name).feature, rtol=1e-12
    )
    np.testing.assert_allclose(
        td.group_score(X, T, SOFT, by="source", metric=name),
        td.group_score(training(chunks=N), other, SOFT, by="source", metric=name),
        rtol=1e-9,
    )


NEITHER = targets().drop_vars(["group", "label"])
THREE = targets().assign_coords(label=("sample", np.arange(M) % 3))
SEQUENCES = targets().assign_attrs(task=str(td.tasks.CausalLM()), loss_kind="other")


@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        (NEITHER, {"metric": "gap"}, "coord 'group'.*assign_coords"),
        (NEITHER, {"metric": "auroc"}, "coord 'label'.*assign_coords"),
        (NEITHER, {"metric": "f1"}, "'worst_group'.*a function"),
        (targets(), {"by": "label", "metric": "loss"}, "'by', 'metric'"),
        (THREE, {"metric": "auroc"}, r"0 and 1.*got \[0, 1, 2\]"),
        (targets(squared=True), {"metric": "accuracy"}, "metric='loss'"),
        (SEQUENCES, {"metric": "loss"}, "metric=lambda outputs"),
    ],
)
def test_errors__say_what_to_try(given: xr.Dataset, options: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        td.combine(given, **options)


def test_errors__of_other_samples() -> None:
    td.combine(targets().assign_attrs(task=str(td.tasks.CausalLM(position="at"))), metric="loss")
    with pytest.raises(ValueError, match=r"outputs with the sizes {'sample': 24}"):
        td.evaluate.metric(targets().output[:5], targets(), "loss")
    X = training()
    X = X.assign(gram=td.gram(X)).isel(sample=slice(30))
    with pytest.raises(ValueError, match="all 60 training samples"):
        td.group_score(X, targets(), TRAK, by="source", metric="accuracy")


# --- nothing to measure ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, "all") for name in [*IN_TORCH, "squared loss"]),
        *((name, "one label") for name in ("loss", "worst_group", "gap", "auroc")),
    ],
)
def test_metrics__of_nothing_are_nan(name: str, how: str) -> None:
    squared = name == "squared loss"
    T, X = targets(squared).compute(), training(squared)
    failed = np.ones(M, bool) if how == "all" else LABEL == 1
    for variable in ("feature", "output", "out_to_loss"):
        T[variable][failed] = np.nan
    has_nothing = how == "all" or name == "auroc"
    metrics = ["loss"] if squared else [name, *[IN_TORCH[name]] * (how == "all")]
    for metric in metrics:
        score = td.score(X, td.combine(T, metric=metric), TRAK)
        summed = td.group_score(X, T, TRAK, by="source", metric=metric)
        value = td.evaluate.metric(T.output, T, metric)
        for found in (score, summed, value):
            assert (np.isnan(found) if has_nothing else np.isfinite(found)).all()


def test_metrics__have_no_cosine() -> None:
    T, X = targets(), training()
    with pytest.raises(ValueError, match="linear in the targets"):
        td.score(X, td.combine(T, metric="loss"), "grad_cos")
    found = td.group_score(X, T, "grad_cos", by="source", metric="accuracy")
    np.testing.assert_allclose(
        found[:, 0], raised_by_hand(X, T, IN_TORCH["accuracy"], "grad_cos"), rtol=1e-6
    )
