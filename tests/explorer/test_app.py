"""Sessions of the app without a browser: the content of each page."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlencode

import numpy as np
import panel
import pytest
import torch

import trakdask as td
from tests.explorer.sessions import SCRIPT, TRAK, M, N, data, go, links, opened
from trakdask.explorer import Explorer, Marks
from trakdask.explorer.view import PAGES, View


@pytest.fixture
def explorer() -> Explorer:
    images = [td.from_arrays({"image": np.random.default_rng(0).random((n, 6, 5))}) for n in (N, M)]
    return td.explore(
        data(N, 0), data(M, 1),
        samples=images[0].assign(words=("sample", [f"{SCRIPT} {i}" for i in range(N)])),
        target_samples=images[1], estimator=TRAK,
    )  # fmt: skip


@pytest.mark.parametrize("page", PAGES)
def test_session__shows_every_page_and_escapes_all_data(explorer: Explorer, page: str) -> None:
    session = opened(explorer, View(page=page))
    html = session.html
    assert "message error" not in html
    assert "<script" not in html
    assert ("&lt;script&gt;" in html) == (page not in ("new", "marks"))  # which show no data here
    assert session.query == View(page=page).to_query()
    assert html.count("<main>") == html.count("<h1>") == 1
    assert all(not view.errors for view, _ in links(html))
    # Each field has a name.
    assert not re.findall(r"<label>\s*<(?:select|input)(?![^>]* aria-label)", html)


def test_session__shows_words_with_their_scores_and_asks_a_tokenizer() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9))
    model = td.Model(net, task=td.tasks.CausalLM(inputs="input_ids", positional=True))
    samples = td.from_arrays({"input_ids": np.arange(60).reshape(20, 3) % 9})
    features = td.featurize(samples, model, projector=td.Rademacher(16)).compute(scheduler="sync")
    texts = [SCRIPT, *"bcdefghi"]
    tokenizer = SimpleNamespace(decode=texts.__getitem__)
    explorer = td.explore(
        features, features.isel(sample=slice(M)), samples=samples, model=model,
        text=texts, estimator=TRAK,
    )  # fmt: skip
    html = opened(explorer, View(page="target")).html
    assert "Words that helped" in html
    assert "<script" not in html
    words = explorer.words(View(target=3), np.array([5, 2]))
    scores = td.score(features, features.isel(sample=[3]), TRAK).values
    np.testing.assert_allclose(words.sum("token"), scores[[5, 2], 0], rtol=0.02)
    of_words = {"samples": samples, "model": model, "text": texts}
    assert not td.explore(features, features, estimator="grad_cos", **of_words).has_words
    without = td.explore(features, features, samples=samples, text=tokenizer, estimator=TRAK)
    html = opened(without, View(page="target")).html
    assert "Words that helped" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;bc" in html


def test_session__tells_what_it_did_not_understand(explorer: Explorer) -> None:
    html = opened(explorer, View.from_query("?target=x<b>")).html
    assert "One part of the address, target" in html
    assert "x<b>" not in html
    for name in ("sort", "group_by"):
        html = unescape(go(session := opened(explorer, View()), {"query": f"{name}=<b>"}))
        text = "There is no column '<b>'; there are label, source"
        assert f"One part of the address, {name}, was left out. {text}" in html
        assert session.view == View()
        with pytest.raises(ValueError, match=f"{name}: {text}"):
            explorer.checked(f"{name}=<b>")
    assert explorer.checked("sort=output") == View(sort="output")
    wrong = View.from_query("k=many")
    assert explorer.checked(wrong) is wrong  # a page shows its errors
    for kind, n in (("target", M), ("sample", N), ("sample", 10**22)):
        missing = opened(explorer, View(page=kind, **{kind: n})).html
        name = "training sample" if kind == "sample" else kind
        assert missing.count(f"There is no {name} {n}:") == 1  # and not in every section
        assert missing.count('role="alert"') == 1
        assert "Traceback" not in missing


@pytest.mark.parametrize(
    "view",
    [
        View(page="target", target=3, targets_where="nothing == 1"),
        View.from_query("page=target&target=3&targets_where=label+="),
        View(page="sample", sample=3, of="ranking", where="nothing == 1"),
        View(page="sample", sample=3, of="helpful", target=M),
    ],
)
def test_session__shows_a_sample_also_if_its_list_cannot_be(explorer: Explorer, view: View) -> None:
    html = opened(explorer, view).html
    assert html.count('role="alert"') == 1
    assert f"4 of {M if view.page == 'target' else N}" in html
    assert '<div class="one">' in html


def test_session__beyond_the_end_of_a_table_shows_its_last_rows(explorer: Explorer) -> None:
    for page, n in (("targets", M), ("corpus", N)):
        session = opened(explorer, View(page=page, first=5000))
        html, first = session.html, (n - 1) // 24 * 24
        assert f"{first + 1}–{n} of {n}" in html
        assert "No training sample" not in html
        assert View(page=page, first=first - 24) in [view for view, _ in links(html)]


def test_session__says_that_no_sample_is_in_a_group(explorer: Explorer) -> None:
    html = opened(explorer, View(page="target", group_by="label", where="label == 77")).html
    assert html.count("No training sample meets the condition.") == 3  # helpful, harmful, groups
    assert "<table" not in html


@pytest.mark.parametrize(
    ("query", "problems", "typed"),
    [
        ({"page": "targets", "targets_where": "nothing == 1"}, ["targets_where"], "nothing == 1"),
        ({"page": "target", "where": "source == 3"}, ["where"], "source == 3"),
        ({"page": "corpus", "where": "label ="}, ["where"], "label ="),
        ({"page": "target", "k": "x"}, ["k"], ""),
    ],
)  # fmt: skip
def test_session__says_beside_its_field_what_is_wrong(
    explorer: Explorer, query: dict[str, str], problems: list[str], typed: str
) -> None:
    html = go(opened(explorer, View()), {"query": f"?{urlencode(query)}"})
    assert "message error" not in html
    assert re.findall(r'id="problem-(\w+)"', html) == problems
    inputs = re.findall(r'<input name="\w*where" value="([^"]*)"[^>]* aria-invalid', html)
    assert [unescape(text) for text in inputs] == [typed] * bool(typed)


def test_session__says_how_much_the_ranked_samples_are(explorer: Explorer) -> None:
    html = opened(explorer, View(page="target", target=4, k=7)).html
    scores = td.score(explorer.features, explorer.targets.features, TRAK).values
    row, label = scores[:, 4], explorer.features.label.values
    for sign, effect in ((1, "raised"), (-1, "lowered")):
        order = np.argsort(-sign * row)[:7]
        share = 100 * row[order].sum() / row[sign * row > 0].sum()
        most = np.bincount(label[order]).argmax()
        n = (label[order] == most).sum()
        common = f"; {n} of them have label {most}" if n > 3 else ""
        verb = {"raised": "helped", "lowered": "harmed"}[effect]
        text = f"7 samples that {verb} most make up {share:.0f} % of all that {effect} the output"
        assert f"The {text}{common}." in html


def test_session__says_why_it_cannot_mark(tmp_path: Path, explorer: Explorer) -> None:
    session = opened(explorer, View())
    session._handle_msg({"mark": "remove", "sample": 1, "wanted": True})
    assert session.said["text"] == "No marks are kept here."
    features = data(N, 0).assign_coords(sample=range(N))
    marks = Marks(tmp_path / "m.parquet")
    session = opened(td.explore(features, data(M, 1), marks=marks), View())
    for sample in (-1, N, 1.7, "1", None, True):  # and marks no other sample than was named
        session._handle_msg({"mark": "remove", "sample": sample, "wanted": True})
        assert marks.table().empty
        assert f"got {sample!r}" in session.said["text"]
    Path(marks.path).write_text("mine")
    session._handle_msg({"mark": "remove", "sample": 1, "wanted": True})
    assert "m.parquet" in session.said["text"]
    assert session.said["undo"] == 0
    assert Path(marks.path).read_text() == "mine"


def test_explorer__in_a_notebook_without_the_extension(
    explorer: Explorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(panel.extension, "_loaded", False)
    assert "panel.extension()" in explorer._repr_mimebundle_()["text/plain"]


def test_explore__without_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=re.escape("trakdask[explore]")):
        td.explore(data(N, 0), data(M, 1))
