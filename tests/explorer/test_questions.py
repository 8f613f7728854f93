"""Every question of the explorer against float64 numpy."""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
import xarray as xr
from scipy.spatial.distance import pdist

import trakdask as td
from trakdask.explorer.questions import Questions
from trakdask.explorer.tables import few_values, metadata, searched
from trakdask.explorer.view import View

N, M, P, C = 90, 40, 12, 3
LAMBDA = 2.5


def data(n: int, seed: int) -> xr.Dataset:
    features = td.testing.simulate_features(n, P, C, chunks=17, seed=seed)
    rng = np.random.default_rng(seed)
    return features.assign_coords(
        source=("sample", rng.choice(["web", "book", "wiki"], n)),
        length=("sample", rng.integers(0, 100, n)),
    )


@pytest.fixture(scope="module")
def features() -> xr.Dataset:
    return data(N, 0)


@pytest.fixture(scope="module")
def targets() -> xr.Dataset:
    return data(M, 1)


@pytest.fixture
def questions(features: xr.Dataset, targets: xr.Dataset) -> Questions:
    return Questions(features, targets, estimator=td.Trak(damping=td.Absolute(LAMBDA)))


def phi(ds: xr.Dataset) -> np.ndarray:
    return ds.feature.values.astype(np.float64)


def inverse(ds: xr.Dataset, c: int) -> np.ndarray:
    x = phi(ds)[:, :, c]
    return np.linalg.inv(x.T @ x + LAMBDA * np.eye(P))


def apart(features: xr.Dataset, targets: xr.Dataset) -> np.ndarray:
    """TRAK's scores of each checkpoint, (n, m, C)."""
    q = features.out_to_loss.values.astype(np.float64).mean(axis=1)
    x, t = phi(features), phi(targets)
    pairs = [x[..., c] @ inverse(features, c) @ t[..., c].T * q[:, None] for c in range(C)]
    return np.stack(pairs, axis=-1)


def expected(features: xr.Dataset, targets: xr.Dataset) -> np.ndarray:
    return apart(features, targets).mean(axis=-1)


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("where", ["", 'source == "web" and length < 70', '"w" in source'])
def test_top__is_the_sorted_row_of_the_scores(
    questions: Questions, features: xr.Dataset, targets: xr.Dataset, where: str, largest: bool
) -> None:
    top = questions.top(View(target=7, where=where, k=6), largest=largest)
    source, length = features.source.values, features.length.values
    is_web = (source == "web") & (length < 70)
    mask = {"": np.ones(N, bool), '"w" in source': source != "book"}.get(where, is_web)
    scores = expected(features, targets)[:, 7]
    order = np.argsort(-scores if largest else scores)
    order = order[mask[order]][:6]
    assert top["sample"].tolist() == order.tolist()
    np.testing.assert_allclose(top["score"], scores[order], rtol=1e-4)
    spread = apart(features, targets)[order, 7].std(axis=-1, ddof=1) / C**0.5
    np.testing.assert_allclose(top["spread"], spread, rtol=1e-3)
    assert top["source"].tolist() == source[order].tolist()


def test_top__of_a_condition_that_selects_fewer_than_k(questions: Questions) -> None:
    few = questions.top(View(where="sample in [3, 5]"))
    assert sorted(few["sample"]) == [3, 5]
    assert questions.top(View(where="length > 1000")).empty


def test_top__of_some_checkpoints(
    questions: Questions, features: xr.Dataset, targets: xr.Dataset
) -> None:
    one = questions.top(View(checkpoints=("c1",), k=1))
    x, t = phi(features)[:, :, 1], phi(targets)[0, :, 1]
    q = features.out_to_loss.values[:, 1].astype(np.float64)
    scores = x @ inverse(features, 1) @ t * q
    assert one["sample"].tolist() == [int(scores.argmax())]
    assert one["spread"].isna().all()


OTHERS = [td.GradDot(), td.GradCos(), td.TracIn({"c0": 0.1, "c1": 0.01, "c2": 1.0})]


@pytest.mark.parametrize(
    "estimator",
    [*(kind(damping=td.Absolute(LAMBDA)) for kind in (td.Trak, td.Soft, td.RelatIF)), *OTHERS],
    ids=lambda estimator: estimator.name,
)
def test_top_and_targets_of__are_a_column_and_a_row_of_the_scores(
    questions: Questions, features: xr.Dataset, targets: xr.Dataset, estimator: Any
) -> None:
    chosen = Questions(features, targets, estimator)
    scores = td.score(features, targets, estimator).values
    top = chosen.top(View(target=7, k=5))
    assert top["sample"].tolist() == np.argsort(-scores[:, 7])[:5].tolist()
    np.testing.assert_allclose(top["score"], scores[top["sample"], 7], rtol=1e-5)
    view = View(sample=11, k=4)
    if estimator.name == "tracin":  # whose learning rates no view has
        questions = chosen
    else:
        view = view.replace(estimator=estimator.name, damping="absolute 2.5")
    table = questions.targets_of(view)
    order = np.argsort(-scores[11])
    assert table.index.tolist() == [*order[:4], *order[-4:]]
    np.testing.assert_allclose(table["score"], scores[11][table.index], rtol=1e-4)


@pytest.mark.parametrize("where", ["", "length >= 50"])
def test_groups__are_sums_of_scores(
    questions: Questions, features: xr.Dataset, targets: xr.Dataset, where: str
) -> None:
    groups = questions.groups(View(target=3, group_by="source", where=where))
    mask = features.length.values >= (50 if where else 0)
    scores = pd.Series(expected(features, targets)[mask, 3])
    by = scores.groupby(features.source.values[mask])
    np.testing.assert_allclose(groups["score"], by.sum()[groups["source"]], rtol=1e-4)
    assert groups["samples"].tolist() == by.size()[groups["source"]].tolist()
    assert groups["score"].is_monotonic_decreasing


def test_conditions__may_compare_samples_with_the_target(
    questions: Questions, features: xr.Dataset, targets: xr.Dataset
) -> None:
    view = View(target=3, group_by="source", where="label == target_label and sample >= 9", k=N)
    mask = (features.label.values == targets.label.values[3]) & (np.arange(N) >= 9)
    assert 0 < mask.sum() < N
    scores = expected(features, targets)[:, 3]
    order = np.argsort(-scores)
    assert questions.top(view)["sample"].tolist() == order[mask[order]].tolist()
    sums = pd.Series(scores[mask]).groupby(features.source.values[mask]).sum()
    groups = questions.groups(view)
    np.testing.assert_allclose(groups["score"], sums[groups["source"]], rtol=1e-4)


def test_page_of_a_target__computes_its_scores_once(
    features: xr.Dataset, targets: xr.Dataset
) -> None:
    read: list[int] = []

    def counted(block: np.ndarray) -> np.ndarray:
        read.append(1)
        return block

    data = features.feature.data
    lazy = da.map_blocks(counted, data, dtype=data.dtype, meta=data._meta)
    features = features.assign(feature=(features.feature.dims, lazy))
    questions = Questions(features, targets, estimator=td.Trak(damping=td.Absolute(LAMBDA)))
    questions.prepared(View())
    read.clear()
    for view in (View(target=3, group_by="source"), View(target=3, where="length > 50", k=3)):
        questions.top(view)
        questions.top(view, largest=False)
        questions.groups(view.replace(group_by="source"))
        questions.histogram(view, "score")
    assert len(read) == data.npartitions


def test_questions__with_other_targets_keep_what_is_known_of_training_samples(
    questions: Questions, features: xr.Dataset, targets: xr.Dataset
) -> None:
    view = View(target=2, k=4)
    questions.top(view)
    other = questions.with_targets(targets.isel(sample=slice(None, None, -1)))
    assert other.prepared(view) is questions.prepared(view)
    of_others = other.top(view)
    order = np.argsort(-expected(features, targets)[:, M - 3])[:4]
    assert of_others["sample"].tolist() == order.tolist()
    assert questions.top(view)["sample"].tolist() != order.tolist()


def test_score_histogram__counts_every_sample(
    questions: Questions, features: xr.Dataset, targets: xr.Dataset
) -> None:
    bins = questions.histogram(View(target=2), "score")
    scores = expected(features, targets)[:, 2]
    assert bins["samples"].sum() == N
    ends = [bins["low"].iloc[0], bins["high"].iloc[-1]]
    np.testing.assert_allclose(ends, [scores.min(), scores.max()], rtol=1e-4)


def own_influence(features: xr.Dataset) -> np.ndarray:
    x, q = phi(features), features.out_to_loss.values.astype(np.float64).mean(axis=1)
    own = [np.einsum("np,pq,nq->n", x[..., c], inverse(features, c), x[..., c]) for c in range(C)]
    return np.mean(own, axis=0) * q**2


def test_ranking__is_by_self_influence(questions: Questions, features: xr.Dataset) -> None:
    influence = own_influence(features)
    assert questions.ranking(View()).index.tolist() == np.argsort(-influence).tolist()
    of_web = questions.ranking(View(where='source == "web"'))
    is_web = features.source.values == "web"
    order = [i for i in np.argsort(-influence) if is_web[i]]
    assert of_web.index.tolist() == order
    assert questions.histogram(View(), "self_influence")["samples"].sum() == N


def test_sample__has_its_self_influence(questions: Questions, features: xr.Dataset) -> None:
    facts = questions.sample(View(sample=17))
    assert facts["self_influence"] == pytest.approx(own_influence(features)[17], rel=1e-5)
    assert facts["source"] == features.source.values[17]
    assert isinstance(facts["label"], int)
    assert facts["output"] == pytest.approx(features.output.values[17].mean())


def test_heatmap__is_a_mean_over_targets_of_sums_over_samples(
    questions: Questions, features: xr.Dataset, targets: xr.Dataset
) -> None:
    heat = questions.heatmap(View(group_by="source"), across="label")
    scores = pd.DataFrame(expected(features, targets)).groupby(features.source.values).sum()
    means = scores.T.groupby(targets.label.values).mean().T
    np.testing.assert_allclose(heat.values, means.values, rtol=1e-3, atol=1e-6)
    failed = targets.where(xr.DataArray(np.arange(M) != 3, dims="sample"))
    without = questions.with_targets(failed)
    means = scores.drop(columns=3).T.groupby(np.delete(targets.label.values, 3)).mean().T
    heat = without.heatmap(View(group_by="source"), across="label")
    np.testing.assert_allclose(heat.values, means.values, rtol=1e-3, atol=1e-6)
    cosines = questions.heatmap(View(group_by="source", estimator="grad_cos"), across="label")
    of_first = td.group_score(features, targets, by="source", estimator="grad_cos").values
    np.testing.assert_allclose(cosines.values, of_first[:, : cosines.shape[1]], rtol=1e-3)
    first = questions.heatmap(View(group_by="source"))
    np.testing.assert_allclose(first.values, scores.values[:, : first.shape[1]], rtol=1e-3)


def test_targets__searches_filters_and_sorts(questions: Questions, targets: xr.Dataset) -> None:
    output = targets.output.values.astype(np.float64)
    view = View(
        search="W",
        targets_where="output < 0.7 and length > 10",
        sort="disagreement",
        ascending=True,
    )
    selected = questions.targets.selected(view)
    is_found = (targets.source.values != "book") & (output.mean(1) < 0.7)
    is_found &= targets.length.values > 10
    spread = output.std(axis=1, ddof=1)
    order = [i for i in np.argsort(spread) if is_found[i]]
    assert selected.index.tolist() == order
    assert questions.targets.selected(View(sort="")).index.tolist() == [*range(M)]


NUMBER = np.arange(12) % 2 * 1.0
LOSSES = [
    ("loss", td.tasks.Classification(temperature=3.0), np.arange(12) % 3,
     lambda z, y: F.cross_entropy(z, y, reduction="none")),
    ("loss", td.tasks.BinaryClassification(), NUMBER,
     lambda z, y: F.binary_cross_entropy_with_logits(z[:, 0], y, reduction="none")),
    ("loss", td.tasks.Regression(target="label"), NUMBER, lambda z, y: (y - z[:, 0]) ** 2 / 2),
    ("Q", td.tasks.MultiLabel(), np.stack([NUMBER, 1 - NUMBER], axis=1),
     lambda z, y: (z * (1 - 2 * y)).sigmoid().mean(dim=1)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "task", "label", "loss"), LOSSES)
def test_targets__have_the_loss_of_their_task_or_else_q(name, task, label, loss) -> None:
    torch.manual_seed(0)
    x = 3 * torch.randn(12, 3)
    nets = [torch.nn.Linear(3, 3 if label.dtype == int else label[0].size) for _ in range(2)]
    states = {name: net.state_dict() for name, net in zip("ab", nets, strict=True)}
    model = td.Model(nets[0], states, task=task)
    samples = td.from_arrays({"x": x.numpy(), "label": label})
    features = td.featurize(samples, model, projector=td.SJLT(4)).compute()
    each = [loss(net(x).detach().double(), torch.from_numpy(label)) for net in nets]
    expected = np.mean(each, axis=0)
    questions = Questions(features, features, estimator=td.Trak(damping=0.1))
    table = questions.targets.selected(View())
    assert table.index.tolist() == np.argsort(-expected).tolist()
    np.testing.assert_allclose(table[name], np.sort(expected)[::-1], rtol=1e-4)
    assert {"loss", "Q"} & {*table} == {name}
    assert questions.sample(View(sample=5))[name] == pytest.approx(expected[5], rel=1e-4)


def test_targets__without_a_loss_are_sorted_by_the_size_of_q(
    features: xr.Dataset, targets: xr.Dataset
) -> None:
    signed = targets.assign(out_to_loss=targets.out_to_loss - 0.5)
    q = signed.out_to_loss.values.astype(np.float64).mean(axis=1)
    table = Questions(features, signed).targets.selected(View())
    assert table.index.tolist() == np.argsort(-np.abs(q)).tolist()
    np.testing.assert_allclose(table["Q"], q[table.index])


def test_tables__of_metadata() -> None:
    table = metadata(td.testing.simulate_features(5, 4, 2))
    assert {name: table[name].tolist() for name in table} == {"label": [0, 1, 0, 1, 0]}
    table = table.assign(source=["web", "book", "<b>", "Web", "web"], size=[0.5, 1, 2, 3, np.nan])
    assert searched(table, "WEB").index.tolist() == [0, 3, 4]
    assert searched(table, "<b>").index.tolist() == [2]
    assert len(searched(table, "")) == 5
    assert searched(table, "3").empty
    assert few_values(table, 3) == ["label"]


def test_duplicates__are_found_by_their_features(features: xr.Dataset, targets: xr.Dataset) -> None:
    rows = np.arange(N)
    rows[[40, 60, 61]] = 5
    rows[20] = 77
    table = Questions(features.isel(sample=rows).load(), targets).duplicates(View())
    found = table.groupby("group")["sample"].apply(list).tolist()
    assert found == [[5, 40, 60, 61], [20, 77]]
    assert Questions(features, targets).duplicates(View()).empty


def test_map__has_the_distances_of_the_leading_principal_components(
    questions: Questions, features: xr.Dataset, targets: xr.Dataset
) -> None:
    unit = phi(features)[:, :, 1]
    unit = unit / np.linalg.norm(unit, axis=1, keepdims=True)
    left, sizes, _ = np.linalg.svd(unit - unit.mean(axis=0))
    view = View(page="map", checkpoints=("c1", "c2"))
    place = questions.map(view)
    distances = pdist(left[:, :2] * sizes[:2])
    np.testing.assert_allclose(
        pdist(place) / pdist(place).max(), distances / distances.max(), atol=1e-3
    )
    assert place.min().tolist() == [0, 0]
    assert place.max().max() == 100
    mask = (place["map_x"] > 40) & (place["map_y"] <= 50) & (features.label.values == 1)
    where = "map_x > 40 and map_y <= 50 and label == 1"
    assert questions.selected(view.replace(where=where)).tolist() == np.flatnonzero(mask).tolist()
    failed = features.where(xr.DataArray(np.arange(N) != 3, dims="sample"))
    missing = Questions(failed, targets).map(View()).isna().any(axis=1)
    assert np.flatnonzero(missing).tolist() == [3]


def test_damping__is_that_of_the_setting(questions: Questions, features: xr.Dataset) -> None:
    chosen = questions.prepared(View(damping="0.5")).damping
    assert chosen is not None
    expected_damping = td.damping(features, td.Trak(damping=0.5)).damping.values
    np.testing.assert_allclose(chosen.damping.values, expected_damping, rtol=1e-5)
    assert questions.prepared(View(estimator="grad_dot")).damping is None
    of_trace = questions.prepared(View(damping="0.5 tr(K)/n")).damping
    assert of_trace is not None
    np.testing.assert_allclose(of_trace.damping, 0.5 * (phi(features) ** 2).sum((0, 1)) / N)


def test_scores__under_a_gram_matrix_that_was_given(
    features: xr.Dataset, targets: xr.Dataset
) -> None:
    h = xr.DataArray(np.linspace(0, 1, N), dims="sample")
    given = features.assign(gram=td.gram(features, weights=h))
    for estimator in (td.Trak(damping=0.5), td.Soft(damping=td.Absolute(LAMBDA))):
        expected = td.score(given, targets, estimator).values[:, 3]
        found = Questions(given, targets, estimator).scores(View(target=3))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_words__are_asked_for_with_the_options_of_the_view(
    features: xr.Dataset, targets: xr.Dataset
) -> None:
    def words_of(known, target, at, estimator):
        scores = td.score(known, target, estimator).isel(sample=at)
        return (scores * xr.DataArray([0.75, 0.25], dims="token")).transpose(
            "sample", ..., "target"
        )

    questions = Questions(
        features, targets, estimator=td.Trak(damping=td.Absolute(LAMBDA)), words=words_of
    )
    words = questions.words(View(target=7), np.array([5, 2]))
    scores = expected(features, targets)[[5, 2], 7]
    np.testing.assert_allclose(words.values, scores[:, None] * [0.75, 0.25], rtol=1e-3)
    assert questions.has_words(View())
    assert not questions.has_words(View(estimator="grad_cos"))
