"""Review: predictions, filters by a click, marks of many samples."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import numpy as np
import pytest

import trakdask as td
from tests.explorer import test_new_targets as new_targets
from tests.explorer.sessions import M, N, data, go, links, opened, show
from tests.explorer.simulated import TRAK, halves
from trakdask.explorer import Explorer, Marks
from trakdask.explorer.app import Session
from trakdask.explorer.html import signed
from trakdask.explorer.pages import sections
from trakdask.explorer.view import View, condition_mask, joined, toggled, without

# A page says the same beside the number.
pytestmark = pytest.mark.filterwarnings("ignore:all samples of .* are in one group")


@pytest.fixture
def explorer(tmp_path: Path) -> Explorer:
    train = td.save(data(N, 0), tmp_path / "train.zarr", progress=False)
    images = td.from_arrays({"image": np.random.default_rng(0).random((N, 8, 8))})
    marks = Marks.beside(tmp_path / "train.zarr")
    return td.explore(train, data(M, 1), samples=images, marks=marks, estimator=TRAK)


@pytest.mark.parametrize("is_there", [True, False])
def test_predictions__are_those_of_the_model(is_there: bool) -> None:
    explorer = new_targets.explorer_of_images()
    if not is_there:
        explorer = td.explore(
            explorer.features, explorer.targets.features, estimator=td.Trak(damping=0.1)
        )
    samples = new_targets.samples(new_targets.M, 1)
    p, label = new_targets.probabilities(samples.image.values), samples.label.values
    assert (p.argmax(1) != label).any()
    is_known = is_there | (p[np.arange(len(p)), label] >= 0.5)
    expected = np.where(is_known, p.argmax(1), np.nan)
    table = explorer.targets.whole
    np.testing.assert_array_equal(table["predicted"], expected)
    np.testing.assert_allclose(table["probability"], np.where(is_known, p.max(1), np.nan), 1e-5)
    training = new_targets.samples(new_targets.N, 0)
    p = new_targets.probabilities(training.image.values)
    cards = explorer.training.cards(explorer.training.metadata)
    is_sure = p[np.arange(len(p)), training.label] >= 0.5
    read = [card["reading"]["predicted"] for card in cards]
    np.testing.assert_array_equal(read, np.where(is_there | is_sure, p.argmax(1), np.nan))
    wrong = explorer.targets.selected(View(targets_where="predicted != label"))
    assert sorted(wrong.index) == np.flatnonzero(expected != label).tolist()
    clicks = {text: view for view, text in links(sections(explorer, View())["targets"]())}
    name = "wrong or unknown" if np.isnan(expected).any() else "wrong"
    assert clicks[f"{name} {len(wrong)}"].targets_where == "predicted != label"
    for i, predicted in enumerate(expected):  # in words beside each target
        html = sections(explorer, View(page="target", target=i))["target"]()
        words = "perhaps misread" if np.isnan(predicted) else f"read as {predicted:g}"
        text = re.sub("<[^>]*>", "", html.partition('class="reading">')[2])
        assert text.startswith(f"label {label[i]}, {words} (")
    for label in (None, 1, 77):  # counts of the confusion lead to what they count
        where, of_label = (f"label == {label}", table["label"] == label) if label else ("", True)
        cells = links(sections(explorer, View(targets_where=where))["confusion"]())
        assert sum(int(text) for _, text in cells) == (table["predicted"].notna() & of_label).sum()
        for view, text in cells:
            assert len(explorer.targets.selected(view)) == int(text)


@pytest.mark.parametrize(
    "where", ["", "label == 1", 'source == "web & co" and (label == 0 or sample > 9)']
)
def test_facets__count_what_a_click_shows(explorer: Explorer, where: str) -> None:
    view, table = View(page="corpus", where=where), explorer.training.metadata
    clicks = [(text, click.where) for click, text in links(sections(explorer, view)["corpus"]())]
    facets = {name: x for name, (x, _) in explorer.facets(view).items()}
    assert len(facets["label"]) >= 2
    assert len(facets["source"]) == 3
    for name, counts in facets.items():
        for value, count in counts.items():
            condition = f"{name} == {value!r}"
            assert condition_mask(table, joined(without(where, name), condition)).sum() == count
            assert (f"{value} {count}", toggled(where, condition)) in clicks


def test_marks__of_many_samples(explorer: Explorer) -> None:
    explorer.marks.mark([5, 6], "remove")
    view = View(page="target", target=2, k=4)
    session = opened(explorer, view)
    session._handle_msg({"mark": "wrong label", "of": "harmful", "wanted": True})
    worst = explorer.top(view, largest=False)["sample"].tolist()
    assert explorer.marks.samples("wrong label").tolist() == worst
    assert session.said["text"] == "4 samples are marked as wrong label."
    show(session, View(page="marks"))
    assert session.html.count("Take back</button>") == 6
    go(session, {"undo": True})
    assert explorer.marks.table()["sample"].tolist() == [5, 6]
    (line,) = re.findall(r"<code>(td\.drop.*?)</code>", session.html)
    assert eval(unescape(line), {"td": td}).sizes["sample"] == N - 2


def test_pages__say_what_to_add_where_samples_are_missing(
    explorer: Explorer, tmp_path: Path
) -> None:
    targets = td.save(data(M, 1), tmp_path / "targets.zarr", estimator=None, progress=False)
    alone = Session(td.explore(explorer.features, targets), View())
    assert re.search(r"trakdask explore \S*train.zarr \S*targets.zarr --samples", alone.html)
    assert "--samples" not in Session(explorer, View()).html


def test_pages__show_intervals_effects_and_the_grade() -> None:
    train, targets = halves()
    train = train.drop_vars("label")  # by which the first groups would be, two of a third each
    explorer = td.explore(train, targets, estimator=TRAK)
    session = opened(explorer, View(page="target", target=3, k=N))
    grade = td.evaluate.cross_validate(train, targets, TRAK)
    text = f"{float(grade.lds_mean):.2f} ± {float(grade.error):.2f}"
    assert session.html.count(text) == 1  # in the head
    assert "computing" not in session.html
    n_sections = session.html.count("<section")
    show(session, View())
    assert session.html.count(text) == 1
    effect = explorer.credit(View(group_by="source")).iloc[0]
    assert f"<strong>{signed(effect['score'], effect['spread'], 0).split()[0]}" in session.html
    show(session, View(page="target", target=3, k=N))
    assert session.html.count(text) == 1
    assert session.html.count("<section") == n_sections
    top = explorer.top(View(target=3, k=N))
    n_unsure = int((top["score"].abs() < top["spread"]).sum())
    assert 0 < n_unsure < N
    assert session.html.count('class="card unsure"') == 2 * n_unsure
    show(session, View(targets_where="label > 100"))
    assert "No target meets the condition" in session.html
    assert "message error" not in session.html


@pytest.mark.parametrize("page", ["target", "targets"])
def test_pages__say_in_words_what_groups_did(page: str) -> None:
    """Target 11 is of class 2, which only samples of the source d have."""
    train, targets = halves()
    explorer = td.explore(train, targets, estimator=TRAK)
    sums = td.group_score(train, targets, TRAK, by="source").sel(source="a").values
    # Targets that a helped, so that its effect on their loss is sure.
    where = f"sample in {[*map(int, np.argsort(sums)[-30:])]}"
    view = View(page=page, target=11, group_by="source", targets_where=where)
    is_loss = page == "targets"
    table = (explorer.credit if is_loss else explorer.groups)(view)
    html = sections(explorer, view)["credit" if is_loss else "groups"]()
    text = unescape(re.sub("<[^>]*>", "", html))
    what = "their mean loss" if is_loss else "the right answer's margin"
    known = table.dropna(subset="score")
    sure = known[known["score"].abs() > known["spread"]]
    found = re.findall(rf"Without source (\w), {what} would be ([\d.]+) (\w+) \(([\d.]+) to", text)
    ends = [rows for rows in (sure[sure["score"] > 0], sure[sure["score"] < 0]) if len(rows)]
    assert len(found) == len(ends) > 0
    for (name, size, way, low), rows in zip(found, ends, strict=True):
        row = rows.loc[rows["score"].abs().idxmax()]
        assert (name, way) == (row["source"], "lower" if row["score"] > 0 else "higher")
        assert float(size) == pytest.approx(abs(row["score"]), abs=row["spread"] / 10)
        assert float(low) == pytest.approx(
            abs(row["score"]) - row["spread"], abs=row["spread"] / 10
        )
    unsure = len(known) - len(sure)
    assert ("cannot be told from zero." in text) == (unsure > 0)
    # Green is what helped: it raised the margin, or lowered the loss.
    shown = re.findall(r'<span class="(more )?(helpful|harmful)( unsure)?"', html)
    more = (known["score"] > 0).tolist()
    assert [bool(is_more) for is_more, _, _ in shown] == more
    assert [kind == "helpful" for _, kind, _ in shown] == [x != is_loss for x in more]
    assert [bool(x) for _, _, x in shown].count(True) == unsure
    assert html.count("<i style") == len(known)
    assert text.count("all of a class") == 1
    assert f"{'share' if is_loss else 'sum'} " in text
