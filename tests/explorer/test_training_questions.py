"""Questions of the explorer to training samples, against float64 numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import trakdask as td
from tests.explorer.simulated import FEATURES, LAMBDA, SOURCE, TARGETS, TRAK, N
from trakdask.explorer.conditions import condition_mask
from trakdask.explorer.html import _condition
from trakdask.explorer.marks import Marks
from trakdask.explorer.questions import Questions
from trakdask.explorer.tables import SampleTable, facets, searched
from trakdask.explorer.view import View


def test_ranking__is_by_self_influence(questions: Questions, truth: Any) -> None:
    view = View(order="self_influence")
    assert questions.ranking(view).index.tolist() == np.argsort(-truth.influence).tolist()
    of_web = questions.ranking(view.replace(where='source == "web"'))
    is_web = SOURCE == "web"
    order = [i for i in np.argsort(-truth.influence) if is_web[i]]
    assert of_web.index.tolist() == order


def test_alike__is_sorted_by_the_mean_cosine(questions: Questions, truth: Any) -> None:
    alike = questions.alike(View(sample=17, k=5))
    unit = truth.phi / np.linalg.norm(truth.phi, axis=1, keepdims=True)
    cosine = np.einsum("npc,pc->n", unit, unit[17]) / unit.shape[2]
    others = np.setdiff1d(np.argsort(-cosine, kind="stable"), [17], assume_unique=True)
    assert alike.index.tolist() == others[:5].tolist()
    np.testing.assert_allclose(alike["cosine"], cosine[others[:5]], rtol=1e-5)
    assert len(questions.alike(View(sample=0, k=N))) == N - 1  # all but itself


def test_sample__has_its_self_influence(questions: Questions, truth: Any) -> None:
    facts = questions.sample(View(sample=17))
    assert facts["self_influence"] == pytest.approx(truth.influence[17], rel=1e-5)
    assert facts["source"] == SOURCE[17]
    assert isinstance(facts["label"], int)
    assert facts["output"] == pytest.approx(FEATURES.output.values[17].mean())


def test_sample__has_the_weights_that_it_has_among_all_samples() -> None:
    """The power of Q in ``"soft"`` follows from the Q of all samples, which one alone lacks."""
    estimator = td.Soft(damping=td.Absolute(LAMBDA))
    soft, k = Questions(FEATURES, TARGETS, estimator), 17
    influence = td.self_influence(FEATURES, estimator).values[k]
    assert soft.sample(View(sample=k))["self_influence"] == pytest.approx(influence, rel=1e-5)
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
    assert searched(table, "WEB").index.tolist() == [0, 3, 4]
    assert searched(table, "<b>").index.tolist() == [2]
    assert len(searched(table, "")) == 5
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
