"""Pages: everything from data is escaped, links and forms keep the view, files have no script."""

from __future__ import annotations

import ast
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlencode

import numpy as np
import pandas as pd
import pytest

import trakdask as td
from trakdask.explorer import Explorer, Marks
from trakdask.explorer.html import signed
from trakdask.explorer.pages import sections
from trakdask.explorer.view import View

EVIL = "</style><script>alert(1)</script><form>\"'&"


class Tags(HTMLParser):
    """Collects the elements of a page, with their attributes, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: text or "" for name, text in attrs}))

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attrs for name, attrs in self.elements if name == tag]


@pytest.fixture
def explorer(tmp_path: Path) -> Explorer:
    train, targets = (td.testing.simulate_features(n, 4, 3, seed=n) for n in (30, 8))
    notes = np.array([f"{EVIL} {i}" for i in range(30)], object)
    features = train.assign_coords(note=("sample", notes), sample=("sample", notes))
    images = td.from_arrays({"image": np.ones((30, 1, 4, 4), "f4")})
    marks = Marks(tmp_path / "marks.parquet")
    return td.explore(
        features, targets, samples=images, marks=marks, estimator=td.Trak(damping=0.1)
    )


def html_of(explorer: Explorer, view: View) -> str:
    return "".join(html() for html in sections(explorer, view).values())


def sent(html: str) -> list[View]:
    """Return the views that the forms of a page lead to if nothing is changed in them."""
    views = []
    for form in re.findall(r"<form method.*?</form>", html, re.DOTALL):
        pairs = re.findall(r'<select name="(\w+)".*?<option selected>([^<]*)', form, re.DOTALL)
        for field in Tags(form).all("input"):
            if field.get("type", "hidden") == "hidden" or "checked" in field:
                pairs.append((field["name"], field["value"]))
        views.append(View.from_query(urlencode(pairs)))
    return views


@pytest.mark.parametrize("name", ["targets", "target", "corpus", "sample"])
def test_forms__keep_the_view(explorer: Explorer, name: str) -> None:
    where = f"note != {EVIL!r}"
    view = View(
        page=name, target=3, sample=5, where=where, targets_where="label < 9", k=5,
        group_by="label",
    )  # fmt: skip
    views = sent(html_of(explorer, view))
    assert views == [view] * len(views)
    assert len(views) == {"targets": 2, "target": 3, "corpus": 1, "sample": 1}[name]


def test_target__links_filter_and_bars_are_as_long_as_their_sums(explorer: Explorer) -> None:
    view = View(page="target", target=3, k=4, group_by="label")
    html = html_of(explorer, view)
    groups = explorer.groups(view)["score"]
    shares = re.findall(r'class="(?:more )?(?:helpful|harmful)" style="--length:([\d.]+)"', html)
    np.testing.assert_allclose([float(x) for x in shares], groups.abs() / groups.abs().max(), 1e-3)
    conditions = {View.from_query(attrs["href"]).where for attrs in Tags(html).all("a")}
    top = [explorer.top(view, largest=largest) for largest in (True, False)]
    assert {"label == 0", "label == 1", f"note == {top[0]['note'].iloc[0]!r}"} <= conditions
    scores = [signed(*row, 0) for each in top for row in each[["score", "spread"]].values]
    shown = re.findall(r"<strong>(\S+)</strong> <span class=\"quiet\">(± [\d.,]+)<", html)
    assert [" ".join(pair) for pair in shown] == scores


def test_pages__read_a_long_condition_once_and_not_for_each_link(
    explorer: Explorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = " and ".join(f"label != {i + 5}" for i in range(300))
    written: list[object] = []
    unparse = ast.unparse
    monkeypatch.setattr(ast, "unparse", lambda node: written.append(node) or unparse(node))
    html = html_of(explorer, View(page="corpus", where=where))
    assert html.count("where=") > 20
    assert len(written) < 2000


@pytest.mark.parametrize("name", ["targets", "target", "sample", "corpus", "marks"])
def test_save_html__shows_text_and_asks_nobody(
    explorer: Explorer, tmp_path: Path, name: str
) -> None:
    explorer.marks.mark([f"{EVIL} 7"], "remove")
    explorer.save_html(tmp_path / "v.html", View(page=name, target=3, where="label < 9"))
    html = (tmp_path / "v.html").read_text("utf-8")
    tags = Tags(html)
    tag_names = {tag for tag, _ in tags.elements}
    for tag in ("script", "form", "input", "button", "iframe", "link", "object", "details"):
        assert tag not in tag_names
    assert "a" not in tag_names
    assert ("img" in tag_names) == (name != "targets")
    outside = [
        attrs[key] for _, attrs in tags.elements for key in ("src", "href", "action")
        if not attrs.get(key, "data:").startswith("data:")
    ]  # fmt: skip
    assert outside == []
    assert (EVIL in tags.text) == (name != "targets")
    assert f"trakdask: {View(page=name, target=3).name}" in tags.text
    dead = "Choose|Keys:|button|Clear|Rank all|Take back|To see|change"
    assert re.findall(dead, Tags(html.partition("<body>")[2]).text) == []
    assert "30 training samples" in tags.text
    policy = next(a["content"] for a in tags.all("meta") if "http-equiv" in a)
    assert "default-src 'none'" in policy


def test_save_html__says_of_what_it_is(tmp_path: Path) -> None:
    store = tmp_path / "train.zarr"
    saved = td.save(td.testing.simulate_features(60, 4, 3), store, progress=False)
    explorer = td.explore(saved, saved.load(), estimator=td.Trak(damping=0.1))
    view = View(page="target", target=3, where="label == 1")
    explorer.save_html(tmp_path / "v.html", view)
    text = Tags((tmp_path / "v.html").read_text("utf-8")).text
    about = text[text.rindex("Condition on training samples") :]
    facts = "label == 1", "Trak(damping=0.1)", "c0, c1, c2", str(store)
    assert [fact for fact in facts if fact not in about] == []
    assert f"{pd.Timestamp.now('UTC'):%Y-%m-%d}" in about


def test_marks__are_listed_as_text(explorer: Explorer) -> None:
    view = View(page="marks")
    assert "No sample is marked" in html_of(explorer, view)
    texts = {"label": EVIL, "note": f'"{EVIL}'}
    explorer.marks.mark([f"{EVIL} 2", "=1+1", f"{EVIL} 5"], "remove", **texts)
    html = html_of(explorer, view)
    assert "<script" not in html
    fields = [tag for tag in Tags(html).all("input") if tag["name"] in texts]
    assert [tag["value"] for tag in fields] == [*texts.values()] * 2
    assert "sample=2" in html
