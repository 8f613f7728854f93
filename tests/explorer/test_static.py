"""A view as a file: what it shows, nothing to click, and no script."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import trakdask as td
from trakdask.explorer import Explorer, View
from trakdask.explorer.static import document

EVIL = "</style><script>alert(1)</script><form>"


class Tags(HTMLParser):
    """Collects the elements of a page, with their attributes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def explorer() -> Explorer:
    train, targets = (td.testing.simulate_features(n, 4, 3, seed=n) for n in (30, 8))
    notes = np.array([f"{EVIL} {i}" for i in range(30)], object)
    features = train.assign_coords(note=("sample", notes))
    images = td.from_arrays({"image": np.ones((30, 1, 4, 4), "f4")})
    return td.explore(features, targets, samples=images, estimator="trak", damping=0.1)


@pytest.mark.parametrize("page", ["targets", "target", "sample", "corpus"])
def test_save_html__shows_text_and_asks_nobody(
    explorer: Explorer, tmp_path: Path, page: str
) -> None:
    explorer.save_html(tmp_path / "v.html", View(page=page, target=3))
    html = (tmp_path / "v.html").read_text("utf-8")
    tags = Tags(html)
    names = {name for name, _ in tags.found}
    assert not names & {"script", "form", "input", "button", "a", "iframe", "link", "object"}
    assert ("img" in names) == (page != "targets")
    outside = [
        attrs[name] for _, attrs in tags.found for name in ("src", "href", "action")
        if name in attrs and not str(attrs[name]).startswith("data:")
    ]  # fmt: skip
    assert outside == []
    assert (EVIL in tags.text) == (page != "targets")
    assert "30 training samples" in tags.text
    policy = next(a["content"] for n, a in tags.found if n == "meta" and "http-equiv" in a)
    assert "default-src 'none'" in policy
    assert [path.name for path in tmp_path.iterdir()] == ["v.html"]


def test_save_html__contains_what_is_ranked(explorer: Explorer, tmp_path: Path) -> None:
    view = View(page="target", target=3, k=4)
    explorer.save_html(tmp_path / "v.html", view)
    text = Tags((tmp_path / "v.html").read_text("utf-8")).text
    scores = td.score(explorer.features, explorer.targets, estimator="trak", damping=0.1).values
    for sample in np.argsort(scores[:, 3])[[0, 1, 2, 3, -4, -3, -2, -1]]:
        assert f"sample {sample}" in text


@pytest.mark.parametrize("path", [".", "memory://v.html"])
def test_save_html__of_no_file(
    explorer: Explorer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"v(iew)?\.html"):
        explorer.save_html(path)


def test_document__keeps_what_is_seen() -> None:
    html = '<nav><a href="?x">go</a></nav><p><a href="?target=1" class="c">1 &lt;a&gt;</a> is</p>'
    kept = document(View(), html)
    assert "<p><span>1 &lt;a&gt;</span> is</p>" in kept
    assert "go" not in Tags(kept).text
