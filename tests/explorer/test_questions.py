"""Questions of the explorer to targets and training samples, against float64 numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
import xarray as xr

import trakdask as td
from tests.explorer.sessions import through
from tests.explorer.simulated import (
    FEATURES,
    LABEL,
    LAMBDA,
    LENGTH,
    SOURCE,
    TARGETS,
    TRAK,
    C,
    M,
    N,
    halves,
)
from trakdask.attribution.estimators import GradCos, GradDot
from trakdask.explorer.html import _condition
from trakdask.explorer.marks import Marks
from trakdask.explorer.questions import Questions
from trakdask.explorer.tables import SampleTable, facets, searched
from trakdask.explorer.view import View, condition_mask

# A page says the same beside the number.
pytestmark = pytest.mark.filterwarnings("ignore:all samples of .* are in one group")


MASKS = {
    "": np.ones(N, bool),
    'source == "web" and length < 70': (SOURCE == "web") & (LENGTH < 70),
    '"w" in source': SOURCE != "book",
    "label == target_label and sample > 8": (TARGETS.label[7].item() == LABEL) & (np.arange(N) > 8),
}
"""Which training samples meet a condition, which may name the label of target 7."""


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize(("where", "mask"), MASKS.items())
def test_top__is_a_sorted_row(
    questions: Questions, truth: Any, where: str, mask: np.ndarray, largest: bool
) -> None:
    top = questions.top(View(target=7, where=where, k=6), largest=largest)
    scores = truth.scores[:, 7]
    order = np.argsort(-scores if largest else scores)
    order = order[mask[order]][:6]
    assert top["sample"].tolist() == order.tolist()
    np.testing.assert_allclose(top["score"], scores[order], rtol=1e-4)
    others = 1 - np.eye(C)  # without each checkpoint in turn
    without = (truth.products[order, 7] @ others) * (truth.q[order] @ others) / (C - 1) ** 2
    spread = np.sqrt((C - 1) * without.var(axis=-1))
    np.testing.assert_allclose(top["spread"], spread, rtol=1e-3)
    assert top["source"].tolist() == SOURCE[order].tolist()


def test_top__of_few_samples_or_checkpoints(questions: Questions, truth: Any) -> None:
    assert sorted(questions.top(View(where="sample in [3, 5]"))["sample"]) == [3, 5]
    assert questions.top(View(where="length > 1000")).empty
    features, targets = (ds.isel(checkpoint=[1]) for ds in (FEATURES, TARGETS))
    one = Questions(features, targets, TRAK).top(View(k=1))
    assert one["sample"].tolist() == [int((truth.products[:, 0, 1] * truth.q[:, 1]).argmax())]
    assert one["spread"].isna().all()
    assert not questions.has_credit
    assert not questions.has_grade


WRONG = FEATURES.assign(wrong_classes=td.gram(FEATURES).compute(scheduler="sync") / N)
WEIGHTED = td.gram(FEATURES, weights=xr.DataArray(np.linspace(0, 1, N), dims="sample"))


@pytest.mark.parametrize(
    ("features", "estimator"),
    [
        *((FEATURES, kind(damping=td.Absolute(LAMBDA))) for kind in (td.Soft, td.RelatIF)),
        *((FEATURES, kind()) for kind in (GradDot, GradCos)),
        (FEATURES, td.TracIn({"c0": 0.1, "c1": 0.01, "c2": 1.0})),
        (FEATURES.assign(gram=WEIGHTED), td.Trak(damping=0.5)),
        (WRONG, td.Soft(0.5, damping=td.Absolute(LAMBDA))),
    ],
    ids=["soft", "relatif", "grad_dot", "grad_cos", "tracin", "a given gram", "wrong classes"],
)
def test_top_and_targets_of__are_a_column_and_a_row(features: xr.Dataset, estimator: Any) -> None:
    chosen = Questions(features, TARGETS, estimator)
    scores = td.score(features, TARGETS, estimator).values
    top = chosen.top(View(target=7, k=5))
    assert top["sample"].tolist() == np.argsort(-scores[:, 7])[:5].tolist()
    np.testing.assert_allclose(top["score"], scores[top["sample"], 7], rtol=1e-4)
    table = chosen.targets_of(View(sample=11, k=4))
    order = np.argsort(-scores[11])
    assert table.index.tolist() == [*order[:4], *order[-4:]]
    np.testing.assert_allclose(table["score"], scores[11][table.index], rtol=1e-4)


@pytest.mark.parametrize(("where", "mask"), MASKS.items())
def test_groups__are_sums_of_scores(
    questions: Questions, truth: Any, where: str, mask: np.ndarray
) -> None:
    groups = questions.groups(View(target=7, group_by="source", where=where))
    scores = pd.Series(truth.scores[mask, 7])
    by = scores.groupby(SOURCE[mask])
    np.testing.assert_allclose(groups["score"], by.sum()[groups["source"]], rtol=1e-4)
    assert groups["samples"].tolist() == by.size()[groups["source"]].tolist()
    assert groups["score"].is_monotonic_decreasing


def test_page_of_a_target__computes_its_scores_once() -> None:
    read: list[int] = []

    def counted(block: np.ndarray) -> np.ndarray:
        read.append(1)
        return block

    questions = Questions(through(counted, FEATURES), TARGETS, TRAK)
    assert questions.setting
    read.clear()
    for view in (View(target=3, group_by="source"), View(target=3, where="length > 50", k=3)):
        questions.top(view)
        questions.top(view, largest=False)
        questions.groups(view.replace(group_by="source"))
    assert len(read) == FEATURES.feature.data.npartitions


def test_targets__searches_filters_and_sorts(questions: Questions) -> None:
    output = TARGETS.output.values.astype(np.float64)
    view = View(
        search="W",
        targets_where="output < 0.7 and length > 10",
        sort="disagreement",
        ascending=True,
    )
    selected = questions.targets.selected(view)
    is_found = (TARGETS.source.values != "book") & (output.mean(1) < 0.7)
    is_found &= TARGETS.length.values > 10
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
    features = td.featurize(samples, model, projector=td.Identity()).compute()
    losses = [loss(net(x).detach().double(), torch.from_numpy(label)) for net in nets]
    expected = np.mean(losses, axis=0)
    questions = Questions(features, features, td.Trak(damping=0.1))
    table = questions.targets.selected(View())
    assert table.index.tolist() == np.argsort(-expected).tolist()
    np.testing.assert_allclose(table[name], np.sort(expected)[::-1], rtol=1e-4)
    assert {"loss", "Q"} & {*table} == {name}
    assert questions.sample(View(sample=5))[name] == pytest.approx(expected[5], rel=1e-4)


def test_targets__without_a_loss_are_sorted_by_the_size_of_q() -> None:
    signed = TARGETS.assign(out_to_loss=TARGETS.out_to_loss - 0.5).assign_attrs(loss_kind="other")
    q = signed.out_to_loss.values.astype(np.float64).mean(axis=1)
    table = Questions(FEATURES, signed).targets.selected(View())
    assert table.index.tolist() == np.argsort(-np.abs(q)).tolist()
    np.testing.assert_allclose(table["Q"], q[table.index])


def test_questions__of_combined_targets_have_no_class_and_no_loss(tmp_path) -> None:
    task = str(td.tasks.ImageClassification())
    features, targets = (ds.assign_attrs(task=task, label="label") for ds in (FEATURES, TARGETS))
    assert "probability" in Questions(features, targets).targets.whole
    combined = td.combine(targets, by="label")
    stored = td.save(combined, tmp_path / "t.zarr", estimator=None, progress=False)
    questions = Questions(features, stored)
    table = questions.targets.whole
    assert set(table) == {"label", "output", "disagreement", "Q"}
    np.testing.assert_allclose(table.Q, combined.out_to_loss.mean("checkpoint"), rtol=1e-6)
    expected = td.score(features, combined, TRAK).values[:, 1]
    top = Questions(features, stored, TRAK).top(View(target=1, k=2))
    np.testing.assert_allclose(top.score, np.sort(expected)[::-1][:2], rtol=1e-5)


@pytest.fixture(scope="module")
def graded() -> Questions:
    """Return questions to six checkpoints, each trained on half of the samples."""
    return Questions(*halves(), TRAK)


def halved(found: xr.Dataset, name: str, **of: Any) -> tuple[pd.Series, pd.Series]:
    """Return values of groups and half of their intervals."""
    found = found.compute().isel(**of)
    return found[name].to_series(), ((found.upper - found.lower) / 2).to_series()


def test_scores__have_intervals_from_five_checkpoints_on(graded: Questions) -> None:
    expected = td.score(graded.features, graded.targets.features, TRAK, level=0.9).compute()
    half = (expected.upper - expected.score).values
    top = graded.top(View(target=3, k=100))
    np.testing.assert_allclose(top["spread"], half[top["sample"], 3], rtol=1e-4)
    of_sample = graded.targets_of(View(sample=7, k=4))
    np.testing.assert_allclose(of_sample["spread"], half[7, of_sample.index], rtol=1e-3)
    assert graded.has_intervals


def test_groups__have_effects_by_one_pass_for_a_block_of_targets(
    graded: Questions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trakdask.explorer.questions._TARGETS_TOGETHER", 25)
    calls: list[int] = []
    group_score = td.group_score

    def counted(features: xr.Dataset, targets: xr.Dataset, *args: Any, **kwargs: Any) -> xr.Dataset:
        calls.append(targets.sizes["sample"])
        return group_score(features, targets, *args, **kwargs)

    monkeypatch.setattr(td, "group_score", counted)
    features, targets = graded.features, graded.targets.features
    questions = Questions(features, targets, TRAK)
    blocks = [slice(25), slice(25, None)]  # the rest of ten would be too few
    how = {"by": "source", "effect": True, "level": 0.9}
    found = [group_score(features, targets.isel(sample=block), TRAK, **how) for block in blocks]
    sums = group_score(features, targets, TRAK, by="source")
    for target in (27, 48, 3, 54, 26):  # the last is of class 2, which is in the source d alone
        groups = questions.groups(View(target=target, group_by="source")).set_index("source")
        block = target >= 25
        effect, half = halved(found[block], "effect", target=target - 25 * block)
        known = effect[["a", "b", "c"] if target % 3 == 2 else ["a", "b", "c", "d"]]
        order = [*known.sort_values(ascending=False).index]
        assert groups.index[: len(order)].tolist() == order
        np.testing.assert_allclose(groups["score"][order], effect[order], rtol=1e-3)
        np.testing.assert_allclose(groups["spread"][order], half[order], rtol=1e-3)
        assert groups["score"].isna().sum() == 4 - len(order)
        of_target = sums.isel(target=target).to_series()
        np.testing.assert_allclose(groups["sum"], of_target[groups.index], rtol=1e-3)
        assert groups["samples"].tolist() == [23 if name in "ab" else 22 for name in groups.index]
    assert calls == [35, 25]


def few(n: int) -> tuple[xr.Dataset, xr.Dataset]:
    return tuple(ds.isel(checkpoint=slice(n)) for ds in halves())  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("fewer", "n", "where"),
    [
        (lambda train, targets: (train.drop_vars("trained_on"), targets), 6, ""),
        (lambda train, targets: (train, targets.isel(sample=slice(19))), 6, ""),
        (lambda train, targets: (train, targets), 6, "sample < 50"),
        (lambda train, targets: (train.drop_vars("trained_on"), targets), 4, ""),
    ],
    ids=["halves", "targets", "samples", "checkpoints"],
)
def test_groups__have_sums_where_effects_are_unknown(fewer: Any, n: int, where: str) -> None:
    train, targets = fewer(*few(n))
    view = View(target=3, group_by="source", where=where)
    groups = Questions(train, targets, TRAK).groups(view).set_index("source")
    assert "sum" not in groups
    chosen = train.isel(sample=slice(50 if where else N)).assign(gram=td.gram(train))
    sums = td.group_score(chosen, targets, TRAK, by="source").isel(target=3).to_series()
    np.testing.assert_allclose(groups["score"], sums[groups.index], rtol=1e-3)
    assert groups["spread"].isna().tolist() == [n < 5] * len(groups)
    if n >= 5:
        found = td.group_score(chosen, targets, TRAK, by="source", level=0.9)
        _, half = halved(found, "score", target=3)
        np.testing.assert_allclose(groups["spread"], half[groups.index], rtol=1e-3)


def test_grouped__is_by_the_classes_only_if_somebody_says_so(graded: Questions) -> None:
    assert graded.training.groupings[0] == graded.targets.label == "label"
    assert graded.grouped(View()).group_by == "source"
    assert graded.grouped(View(group_by="label")).group_by == "label"
    alone = Questions(graded.features.drop_vars("source"), graded.targets.features, TRAK)
    assert alone.grouped(View()).group_by == "label"


def test_credit__is_the_effect_on_the_loss_or_a_share(graded: Questions) -> None:
    view = View(group_by="source", targets_where="sample >= 20")
    credit = graded.credit(view).set_index("source")
    chosen = graded.targets.features.isel(sample=slice(20, None))
    how = {"by": "source", "metric": "loss", "effect": True, "level": 0.9}
    effect, half = halved(td.group_score(graded.features, chosen, TRAK, **how), "effect", target=0)
    assert credit.index.tolist() == [*effect[["a", "b", "c"]].sort_values().index, "d"]
    np.testing.assert_allclose(credit["score"][:3], effect[credit.index[:3]], rtol=1e-3)
    np.testing.assert_allclose(credit["spread"][:3], half[credit.index[:3]], rtol=1e-3)
    assert credit.loc["d", ["score", "spread"]].isna().all()  # without d, no model knows class 2
    share = td.group_score(graded.features, chosen, TRAK, by="source", share=True).to_series()
    np.testing.assert_allclose(credit["sum"], share[credit.index], rtol=1e-3)
    # Shares alone, if all groups are whole classes, or halves are not known.
    without = Questions(graded.features.drop_vars("trained_on"), graded.targets.features, TRAK)
    for questions, by in ((graded, "label"), (without, "source")):
        credit = questions.credit(view.replace(group_by=by)).set_index(by)
        found = td.group_score(graded.features, chosen, TRAK, by=by, share=True).to_series()
        np.testing.assert_allclose(credit["score"], found[credit.index], rtol=1e-3)
        assert "sum" not in credit
        assert credit["spread"].isna().all()
        counts = graded.features[by].to_series().value_counts()
        assert credit["samples"].tolist() == counts[credit.index].tolist()
    assert without.has_credit
    assert not Questions(without.features, without.targets.features, "grad_cos").has_credit


def test_credit__of_a_regression_is_an_effect_or_an_error() -> None:
    train, targets = (
        ds.assign_attrs(task="Regression()", label="", loss_kind="squared error") for ds in halves()
    )
    questions, view = Questions(train, targets, TRAK), View(group_by="source")
    how = {"by": "source", "metric": "loss", "effect": True}
    effect = td.group_score(train, targets, TRAK, **how).isel(target=0).to_series()
    credit = questions.credit(view).set_index("source")["score"]
    np.testing.assert_allclose(credit, effect.sort_values(), rtol=1e-3)
    with pytest.raises(ValueError, match="20 or more targets"):
        questions.credit(view.replace(targets_where="sample < 10"))
    assert not Questions(train.drop_vars("trained_on"), targets, TRAK).has_credit


def test_alike__is_sorted_by_the_mean_cosine(questions: Questions, truth: Any) -> None:
    alike = questions.alike(View(sample=17, k=5))
    unit = truth.phi / np.linalg.norm(truth.phi, axis=1, keepdims=True)
    cosine = np.einsum("npc,pc->n", unit, unit[17]) / unit.shape[2]
    others = np.setdiff1d(np.argsort(-cosine, kind="stable"), [17], assume_unique=True)
    assert alike.index.tolist() == others[:5].tolist()
    np.testing.assert_allclose(alike["cosine"], cosine[others[:5]], rtol=1e-5)
    assert len(questions.alike(View(sample=0, k=N))) == N - 1  # all but itself


def test_sample__has_the_weights_that_it_has_among_all_samples() -> None:
    """The power of Q in ``"soft"`` follows from the Q of all samples, which one alone lacks."""
    estimator = td.Soft(damping=td.Absolute(LAMBDA))
    soft, k = Questions(FEATURES, TARGETS, estimator), 17
    facts = soft.sample(View(sample=k))
    influence = td.self_influence(FEATURES, estimator).values[k]
    assert facts["self_influence"] == pytest.approx(influence, rel=1e-5)
    assert (facts["source"], facts["label"]) == (SOURCE[k], LABEL[k])
    assert facts["output"] == pytest.approx(FEATURES.output.values[k].mean())
    for target, row in soft.targets_of(View(sample=k, k=2)).iterrows():
        of_target = soft.top(View(target=target, k=N)).loc[k]
        assert row["score"] == pytest.approx(of_target["score"], rel=1e-4)
        assert row["spread"] == pytest.approx(of_target["spread"], rel=1e-3)


def test_tables__of_metadata() -> None:
    ds = td.testing.simulate_features(5, 4, 2)
    more = ds.assign_coords(one=("sample", [1] * 5), each=("sample", range(5)))
    assert SampleTable(more, ds, "target").groupings == ["label"]
    table = SampleTable(ds, ds, "target").metadata
    assert {name: table[name].tolist() for name in table} == {"label": [0, 1, 0, 1, 0]}
    table = table.assign(source=["web", "book", "<b>", "Web", "web"], size=[0.5, 1, 2, 3, np.nan])
    assert searched(table, "<b>").index.tolist() == [2]
    assert searched(table, "3").empty


def test_facets__lead_to_every_kind_of_value_also_to_missing_ones() -> None:
    """Names that no condition can have, such as words of Python, have none."""
    n = 12
    table = pd.DataFrame(
        {
            "day": pd.Timestamp("2024-06-01") + pd.to_timedelta(np.arange(n) % 3, "D"),
            "hour": pd.Timestamp("2024-06-01 10:30") + pd.to_timedelta(np.arange(n) % 2, "h"),
            "age": np.where(np.arange(n) % 4, 30.5, np.nan),
            "größe": np.array(["S", "it's", "<b>"], object)[np.arange(n) % 3],
            "class": "p",
            "my column": "q",
        }
    )
    table.loc[:3, "day"] = pd.NaT
    found = facets(table, [*table], "")
    assert list(found) == ["day", "hour", "age", "größe"]
    for name, (counts, left_out) in found.items():
        assert left_out == 0
        assert counts.sum() == n
        for value, count in counts.items():
            assert condition_mask(table, _condition(value, name)).sum() == count


def test_tables__of_all_training_samples_are_made_for_the_first_page_alone(monkeypatch) -> None:
    questions = Questions(FEATURES, TARGETS, TRAK)
    assert {"label", "loss", "self_influence", "mark"} <= {*questions.first_row}
    made, assign = [], pd.DataFrame.assign
    counted = lambda table, **new: made.append(len(table)) or assign(table, **new)  # noqa: E731
    monkeypatch.setattr(pd.DataFrame, "assign", counted)
    for target in range(3):
        view = View(page="target", target=target, group_by="source")
        assert len(questions.first_row) == 1
        assert len(questions.ranking(view)) == N
        assert len(questions.groups(view)) == len(questions.facets(view)["source"][0]) == 3
    assert N not in made
    questions.ranking(View(order="self_influence"))  # which needs one more column
    assert N in made


def test_duplicates__are_found_by_their_features() -> None:
    rows = np.arange(N)
    rows[[40, 60, 61]] = 5
    rows[20] = 77
    table = Questions(FEATURES.isel(sample=rows).load(), TARGETS).duplicates()
    groups = table.groupby("group")["sample"].apply(list).tolist()
    assert groups == [[5, 40, 60, 61], [20, 77]]
    assert Questions(FEATURES, TARGETS).duplicates().empty


def test_conditions__may_name_numbers_and_marks(tmp_path: Path) -> None:
    marks = Marks(tmp_path / "m.parquet")
    marked = Questions(FEATURES.assign_coords(sample=range(N)), TARGETS, TRAK, marks=marks)
    assert "mark" not in marked.facets(View())
    marks.mark([4, 9], "remove")
    Marks(tmp_path / "m.parquet").mark([9], "duplicate")

    def selected(where: str) -> list[int]:
        return marked.ranking(View(page="corpus", where=where, order="")).index.tolist()

    assert selected("'remove' in mark") == [4, 9]
    assert selected("mark == 'duplicate, remove'") == [9]
    assert len(selected("mark == ''")) == N - 2
    assert sorted(marked.top(View(where="mark != ''"))["sample"]) == [4, 9]
    counts = marked.facets(View())["mark"][0]
    assert counts.to_dict() == {"": N - 2, "remove": 1, "duplicate, remove": 1}
    marks.undo()
    assert selected("mark != ''") == [9]  # at once: marks are never kept
    output = FEATURES.output.values.mean(axis=1)
    assert selected("output > 0.5") == np.flatnonzero(output > 0.5).tolist()
