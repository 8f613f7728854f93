"""Review: what is predicted, filters by a click, marks of many samples, keys."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import trakdask as td
from tests.explorer import test_new_targets as new_targets
from tests.explorer.browser import Tab, chromium, served
from trakdask.explorer import Explorer, View
from trakdask.explorer.app import Session
from trakdask.explorer.pages import sections
from trakdask.explorer.tables import condition_mask

N, M = 90, 40
IMAGES = td.from_arrays({"image": np.random.default_rng(0).random((N, 8, 8))})


@pytest.fixture
def explorer(tmp_path: Path) -> Explorer:
    stored = []
    for name, n in (("train", N), ("targets", M)):
        features = td.testing.simulate_features(n, 8, 3, chunks=25, seed=n)
        source = np.array(["web", "it's", "book"], object)[np.arange(n) % 3]
        features = features.assign_coords(source=("sample", source))
        path = tmp_path / f"{name}.zarr"
        stored.append(td.save(features, path, gram=name == "train", progress=False))
    marks = td.Marks.beside(tmp_path / "train.zarr", who="Ada")
    return td.explore(*stored, samples=IMAGES, marks=marks, estimator="trak", damping=0.1)


def links(explorer: Explorer, view: View, name: str) -> list[tuple[View, str]]:
    """Return the views that a section links to, and the texts of the links."""
    html = next(section for section in sections(explorer, view) if section.name == name).html()
    found = re.findall(r'<a [^>]*href="\?([^"]*)"[^>]*>(.*?)</a>', html, re.DOTALL)
    return [
        (View.from_query(unescape(href)), unescape(re.sub("<[^>]*>", "", text)))
        for href, text in found
    ]


@pytest.mark.parametrize("is_there", [True, False])
def test_predictions__are_those_of_the_model(is_there: bool) -> None:
    explorer = new_targets.explorer_of_images()
    samples = new_targets.samples(new_targets.M, 1)
    if not is_there:
        explorer = td.explore(explorer.features, explorer.targets, damping=0.1)
    table = explorer.questions.targets.whole
    p = np.zeros((new_targets.M, new_targets.CLASSES))
    for state in new_targets.states().values():
        net = new_targets.network()
        net.load_state_dict(state)
        p += net(torch.as_tensor(samples.image.values)).softmax(1).detach().numpy() / 3
    label = samples.label.values
    is_known = is_there | (p[np.arange(len(p)), label] >= 0.5)
    assert (p.argmax(1) != label).any()
    expected = np.where(is_known, p.argmax(1), np.nan)
    np.testing.assert_array_equal(table["predicted"], expected)
    np.testing.assert_allclose(table["probability"], np.where(is_known, p.max(1), np.nan), 1e-5)
    wrong = View(targets_where="predicted != label")
    page = explorer.questions.targets.page(wrong)
    assert sorted(page.table.index) == np.flatnonzero(expected != label).tolist()
    shown = dict((text, view) for view, text in links(explorer, View(), "targets"))
    assert shown[f"wrong {page.found}"].targets_where == wrong.targets_where


@pytest.mark.parametrize(
    "where", ["", "label == 1", 'source == "it\'s" and (label == 0 or sample > 9)']
)
def test_facets__count_what_a_click_shows(explorer: Explorer, where: str) -> None:
    table = explorer.questions.metadata
    for view, text in links(explorer, View(page="corpus", where=where), "corpus"):
        name, n = text.rsplit(" ", 1)[0], text.rsplit(" ", 1)[-1]
        if not n.isdigit():
            continue
        is_chosen = view.where == "" or len(view.where) < len(where)
        if not is_chosen:
            assert condition_mask(table, view.where).sum() == int(n), (view.where, name)


@pytest.mark.parametrize(("page", "name"), [("target", "scores"), ("corpus", "influences")])
def test_histogram__a_bar_shows_its_samples(explorer: Explorer, page: str, name: str) -> None:
    view = View(page=page, target=3, k=100)
    questions = explorer.questions
    histogram = (
        questions.score_histogram(view)
        if page == "target"
        else (questions.influence_histogram(view))
    )
    bars = [bar for bar, _ in links(explorer, view, name)]
    chosen = [
        len(questions.top(bar)) if page == "target" else questions.ranking(bar).found
        for bar in bars
    ]
    assert chosen == histogram.counts[histogram.counts > 0].tolist()
    assert sum(chosen) == N
    again = [bar for bar, _ in links(explorer, bars[2], name)]
    assert again[2].where == ""  # a second click on the same bar
    assert bars[2].replace(page="sample").where == ""  # where nothing has such a column


def test_heat__cells_lead_to_their_samples(explorer: Explorer) -> None:
    view = View(page="corpus", group_by="source")
    cells = [(v.where, v.targets_where) for v, text in links(explorer, view, "heat")]
    names = [f"source == {value!r}" for value in ("book", "it's", "web")]
    assert {(row, column) for row in names for column in names} <= {*cells}
    assert {*((name, "") for name in names), *(("", name) for name in names)} <= {*cells}


def test_marks_page__of_many_samples_and_people(explorer: Explorer) -> None:
    assert explorer.marks is not None
    explorer.marks.by("Bob").mark([5, 6], "remove")
    view = View(page="target", target=2, k=4)
    session = Session(explorer, view)
    session.wait(60)
    session.page._handle_msg({"mark": "wrong label", "of": "harmful", "wanted": True})
    worst = explorer.questions.top(view, largest=False)["sample"].tolist()
    assert explorer.marks.samples("wrong label").tolist() == worst
    assert session.page.said == {"sample": -1, "undo": 1} | {
        "text": "4 samples are marked as wrong label."
    }
    counts = [text for _, text in links(explorer, View(page="marks"), "marks")]
    assert {"Ada 4", "Bob 2", "remove 2", "wrong label 4"} <= {*counts}
    session.go(View(page="marks", marks_where="who == 'Bob'"))
    session.wait(60)
    assert len(re.findall("<td>Bob</td>", session.page.html)) == 2
    assert "<td>Ada</td>" not in session.page.html
    session.page._handle_msg({"mark": "remove", "of": "marks", "wanted": False})
    session.wait(60)
    assert explorer.marks.samples("remove").tolist() == []
    for left in (1, 0):
        session.page._handle_msg({"undo": True})
        assert session.page.said["undo"] == left
    pd.testing.assert_series_equal(
        explorer.marks.table()["sample"], pd.Series([5, 6], name="sample")
    )
    (line,) = re.findall(r"<code>(td\.drop.*?)</code>", opened(explorer))
    dropped = eval(unescape(line), {"td": td})
    assert dropped.sizes["sample"] == N - 2


def opened(explorer: Explorer) -> str:
    return "".join(section.html() for section in sections(explorer, View(page="marks")))


def test_pages__say_what_to_add_where_samples_are_missing(explorer: Explorer) -> None:
    alone = td.explore(explorer.features, explorer.targets, damping=0.1)
    session = Session(alone, View())
    assert re.search(r"trakdask explore \S*train.zarr \S*targets.zarr --samples", session.page.html)
    assert "--samples" not in Session(explorer, View()).page.html


def test_review__by_keys_and_clicks(explorer: Explorer) -> None:
    def focused(tab: Tab) -> Any:
        return tab.page.locator(".card:focus-within").inner_text()

    assert explorer.marks is not None
    view = View(page="target", target=2, k=4)
    best = explorer.questions.top(view)["sample"].tolist()
    with chromium() as browser, served(explorer) as url, Tab(browser) as tab:
        tab.open(f"{url}?{view.to_query()}", "Target 2")
        press = tab.page.keyboard.press
        for key in ("ArrowRight", "ArrowRight", "1", "ArrowLeft", "3"):
            press(key)
        tab.page.wait_for_selector(f"text=Sample {best[0]} is marked as remove.")
        assert f"sample {best[0]}" in focused(tab)
        assert explorer.marks.samples("wrong label").tolist() == [best[1]]
        press("Control+z")
        tab.page.wait_for_selector("text=is undone")
        assert tab.page.inner_text("[data-count]") == "1"
        press("Enter")
        tab.wait(f"Training sample {best[0]}")
        tab.open(f"{url}?page=corpus&self_influence=1", "Training samples")
        box = tab.page.locator(".card img").first.bounding_box()
        tab.page.mouse.click(box["x"] + 20, box["y"] + 20)
        tab.wait("Training sample")
        tab.open(f"{url}?sort=", "Targets")
        box = tab.page.locator("tbody tr").nth(2).bounding_box()
        tab.page.mouse.click(box["x"] + box["width"] - 9, box["y"] + 9)
        tab.wait("Target 2")
