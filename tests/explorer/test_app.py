"""Sessions of the app without a browser: what each page shows, and what a click changes."""

from __future__ import annotations

import os
import re
import signal
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode

import dask.array as da
import numpy as np
import panel
import pytest
import torch
import xarray as xr
from distributed import Client, LocalCluster

import trakdask as td
from tests.explorer import test_new_targets as new_targets
from tests.waiting import PATIENCE_S
from trakdask.explorer import Explorer, Marks, View
from trakdask.explorer.app import Session
from trakdask.explorer.view import PAGES

N, M = 60, 30
TRAK = td.Trak(damping=0.1)
SCRIPT = "<script>alert(1)</script>"


def data(n: int, seed: int) -> xr.Dataset:
    features = td.testing.simulate_features(n, 8, 3, seed=seed)
    source = np.array([SCRIPT, "web & co", "'book\""])[np.arange(n) % 3]
    return features.assign_coords(source=("sample", source))


@pytest.fixture
def explorer() -> Explorer:
    images = [td.from_arrays({"image": np.random.default_rng(0).random((n, 6, 5))}) for n in (N, M)]
    return td.explore(
        data(N, 0), data(M, 1),
        samples=images[0].assign(words=("sample", [f"{SCRIPT} {i}" for i in range(N)])),
        target_samples=images[1], estimator=TRAK,
    )  # fmt: skip


def opened(explorer: Explorer, view: View) -> Session:
    session = Session(explorer, view)
    session.wait(PATIENCE_S)
    assert 'aria-busy="true"' not in session.page.html
    return session


def links(session: Session) -> list[View]:
    hrefs = re.findall(r'href="\?([^"]*)"', session.page.html)
    return [View.from_query(unescape(href)) for href in hrefs]


def best(target: int) -> list[int]:
    """Return the ten samples that helped a target most."""
    scores = td.score(data(N, 0), data(M, 1), TRAK).values[:, target]
    return [int(i) for i in np.argsort(-scores)[:10]]


def cards(session: Session) -> list[int]:
    return [int(i) for i in re.findall(r"<a [^>]*>sample (\d+)</a></header>", session.page.html)]


class Gate:
    """Lets a function of blocks or images begin, and waits until the test opens the gate."""

    def __init__(self, function: Callable[[Any], Any] = np.copy) -> None:
        self._function = function
        self.started, self._opened = threading.Event(), threading.Event()

    def __call__(self, value: Any) -> Any:
        self.started.set()
        assert self._opened.wait(PATIENCE_S)
        return self._function(value)

    def open(self) -> None:
        self._opened.set()

    def before(self, features: xr.Dataset) -> xr.Dataset:
        """Return features whose blocks wait."""
        x = features.feature.data
        lazy = da.map_blocks(self, x, dtype=x.dtype, meta=x._meta)
        return features.assign(feature=(features.feature.dims, lazy))


def go(session: Session, message: dict[str, Any]) -> str:
    """Send what a browser would, and return the page when it is complete."""
    session.page._handle_msg(message)
    session.wait(PATIENCE_S)
    return str(session.page.html)


@pytest.mark.parametrize("page", PAGES)
def test_session__shows_every_page_and_escapes_all_data(explorer: Explorer, page: str) -> None:
    session = opened(explorer, View(page=page))
    html = session.page.html
    assert "message error" not in html
    assert "<script" not in html
    assert ("&lt;script&gt;" in html) == (page not in ("new", "marks"))  # which show no data here
    assert session.page.query == View(page=page).to_query()
    assert html.count("<main>") == html.count("<h1>") == 1
    assert all(not view.errors for view in links(session))
    # Each field has a name.
    assert not re.findall(r"<label>\s*<(?:select|input)(?![^>]* aria-label)", html)


def test_session__follows_links_forms_and_filters(explorer: Explorer) -> None:
    session = opened(explorer, View())
    assert "Target 3" in go(session, {"query": "?page=target&target=3"})
    go(session, {"query": "?page=target&target=3&where='web'+in+source"})
    assert {i % 3 for i in cards(session)} == {1}


def test_session__shows_words_with_their_scores_and_asks_a_tokenizer() -> None:
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
    html = opened(explorer, View(page="target")).page.html
    assert "Words that helped" in html
    assert "<script" not in html
    without = td.explore(features, features, samples=samples, text=tokenizer, estimator=TRAK)
    html = opened(without, View(page="target")).page.html
    assert "Words that helped" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;bc" in html


def test_session__keeps_the_curve_when_a_bar_of_it_is_chosen() -> None:
    features = data(200, 0)
    shifted = features.feature + np.float32(1)
    output = shifted.sum("proj_dim") + features.output
    features = features.assign(feature=shifted, output=output).assign_attrs(
        task="ImageClassification()", default_estimator="soft"
    )
    explorer = td.explore(features, features.isel(sample=slice(M)), estimator="soft")
    view = View(page="target")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of how λ is chosen for made-up features
        session = opened(explorer, view)
        (bar, *_) = [view for view in links(session) if view.damping]
        again = opened(explorer, bar)
    assert bar.damping == "0.01 tr(K)/n"
    chosen = explorer.questions.setting(bar).damping
    assert chosen is not None
    trace = (explorer.questions.setting(bar).features.gram.values.diagonal().sum(axis=1)) / 200
    np.testing.assert_allclose(chosen.damping, 0.01 * trace)
    assert [view for view in links(again) if "tr(K)/n" in view.damping]
    assert 'class="marked"' in again.page.html


def test_session__tells_what_it_did_not_understand(explorer: Explorer) -> None:
    html = opened(explorer, View.from_query("?target=x<b>")).page.html
    assert "One part of the address, target" in html
    assert "x<b>" not in html
    missing = opened(explorer, View(page="target", target=M)).page.html
    assert missing.count(f"There is no target {M}") == 1  # and not in every section
    assert "Traceback" not in missing


@pytest.mark.parametrize(
    ("query", "problems", "typed"),
    [
        ({"page": "targets", "targets_where": "nothing == 1"}, ["targets_where"], "nothing == 1"),
        ({"page": "target", "where": "source == 3"}, ["where"], "source == 3"),
        ({"page": "corpus", "where": "label ="}, ["where"], "label ="),
        (
            {"page": "target", "k": "x", "damping": "lots"}, ["k", "damping"], "",
        ),
    ],
)  # fmt: skip
def test_session__says_beside_its_field_what_is_wrong(
    explorer: Explorer, query: dict[str, str], problems: list[str], typed: str
) -> None:
    html = go(opened(explorer, View()), {"query": f"?{urlencode(query)}"})
    assert "message error" not in html
    assert re.findall(r'id="problem-(\w+)"', html) == problems
    assert ("Correct the condition" in html) == bool(typed)
    inputs = re.findall(r'<input name="\w*where" value="([^"]*)"[^>]* aria-invalid', html)
    assert [unescape(text) for text in inputs] == [typed] * bool(typed)


@pytest.mark.parametrize(
    ("label", "q", "verdict"),
    [
        (1, 0.25, "label 1, read as 1 (75 %)"),
        (1, 0.75, "label 1, read as 0 (75 %)"),
        # neither class of the training
        (7, 0.75, "label 7, read as another class (25 % for the label)"),
        (7, 0.125, "label 7, read as 7 (88 %)"),
    ],
)
def test_session__says_what_the_model_makes_of_a_target(label: int, q: float, verdict: str) -> None:
    features, targets = (
        data(n, seed).assign_attrs(task="ImageClassification()", default_estimator="soft")
        for n, seed in ((N, 0), (M, 1))
    )
    targets = targets.isel(sample=[0]).assign_coords(label=("sample", [label]))
    targets = targets.assign(out_to_loss=targets.out_to_loss * 0 + q)
    explorer = td.explore(features, targets, estimator=TRAK)
    html = opened(explorer, View(page="target")).page.html
    (reading, *_) = re.findall(r'<p class="reading">(.*?)</p>', html, re.DOTALL)
    assert re.sub("<[^>]*>", "", reading) == verdict


def test_session__says_how_much_the_ranked_samples_are(explorer: Explorer) -> None:
    html = opened(explorer, View(page="target", target=4, k=7)).page.html
    scores = td.score(explorer.features, explorer.targets, TRAK).values
    row, label = scores[:, 4], explorer.features.label.values
    for sign, verb in ((1, "raised"), (-1, "lowered")):
        order = np.argsort(-sign * row)[:7]
        share = 100 * row[order].sum() / row[sign * row > 0].sum()
        most = np.bincount(label[order]).argmax()
        assert f"These 7 samples make up {share:.0f} % of all that {verb} its output. " in html
        assert f"{(label[order] == most).sum()} of them have label {most}." in html


def test_session__a_click_abandons_what_runs() -> None:
    gate = Gate()
    explorer = td.explore(gate.before(data(N, 0)), data(M, 1))
    session = Session(explorer, View(page="corpus"))
    assert gate.started.wait(PATIENCE_S)
    before = session._thread
    session.go(View())
    gate.open()
    session.wait(PATIENCE_S)
    assert before is not None
    before.join(PATIENCE_S)
    assert "Targets" in session.page.html
    assert session.page.html.count("<section") == 2


def test_session__ranks_training_samples_by_loss_before_it_reads_features() -> None:
    gate, features = Gate(), data(N, 0).assign_attrs(task="Regression(target='label')")
    targets = data(M, 1).assign_attrs(task=features.task)
    explorer = td.explore(gate.before(features), targets, estimator=TRAK)
    view = View(page="corpus", where="label == 1", estimator="trak")
    session = Session(explorer, view)
    assert gate.started.wait(PATIENCE_S)
    loss = (features.out_to_loss.values**2).mean(axis=1) / 2
    by_loss = [i for i in np.argsort(-loss, kind="stable") if i % 2]
    assert cards(session) == by_loss[:24]
    assert "computing" in session.page.html
    gate.open()
    session.wait(PATIENCE_S)
    session.go(view.replace(first=24, order="self_influence"))
    session.wait(PATIENCE_S)
    influence = td.self_influence(features, TRAK).values
    assert cards(session) == [i for i in np.argsort(-influence) if i % 2][24:]


def test_session__on_the_client_that_was_active(client: Client) -> None:
    explorer = td.explore(data(N, 0), data(M, 1), estimator=TRAK)
    assert explorer.client is client
    session = opened(explorer, View(page="target", target=2))
    assert cards(session)[:10] == best(target=2)


def test_session__marks_samples_and_takes_it_back_step_by_step(tmp_path: Path) -> None:
    names = [f"id {i}" for i in range(N - 1)]
    features = data(N, 0).assign_coords(sample=[*names, "id 8"])  # two share a label
    marks = Marks(tmp_path / "marks.parquet")
    explorer = td.explore(features, data(M, 1), marks=marks, estimator=TRAK)
    session, other = (opened(explorer, View(page="target")) for _ in range(2))
    assert 'data-mark="wrong label"' in session.page.html
    for position, label in ((7, "wrong label"), (8, "remove"), (7, "remove"), (7, "remove")):
        session.page._handle_msg({"mark": label, "sample": position, "wanted": True})
        assert session.page.said["sample"] == position
        assert session.page.said["text"] == f"Sample {position} is marked as {label}."
    assert sorted(session.page.marked) == ["59 remove", "7 remove", "7 wrong label", "8 remove"]
    marks.by("Bob").mark(names[7], "duplicate")
    other.page._handle_msg({"mark": "duplicate", "sample": 7, "wanted": True})
    marks.mark(["of another store"], "remove")
    session.go(View(page="sample", sample=3))  # what can be undone is not lost on the way
    session.wait(PATIENCE_S)
    left = []
    while session.page.said["undo"]:
        session.page._handle_msg({"undo": True})
        left.append((session.page.said["sample"], session.page.said["undo"]))
    assert left == [(7, 2), (8, 1), (7, 0)]
    session.page._handle_msg({"undo": True})
    assert "nothing" in session.page.said["text"]
    assert session.page.marked == {"7 duplicate": ["Bob", ""]}
    assert other.page.said["undo"] == 1
    session.page._handle_msg({"mark": "duplicate", "sample": 7, "wanted": False})
    assert session.page.marked == {"7 duplicate": ["Bob"]}
    assert session.page.said["text"] == "Sample 7 is no longer marked as duplicate by you."


def test_session__says_why_it_cannot_mark(tmp_path: Path, explorer: Explorer) -> None:
    session = opened(explorer, View())
    session.page._handle_msg({"mark": "remove", "sample": 1, "wanted": True})
    assert session.page.said["text"] == "No marks are kept here."
    features = data(N, 0).assign_coords(sample=range(N))
    marks = Marks(tmp_path / "m.parquet")
    session = opened(td.explore(features, data(M, 1), marks=marks), View())
    for sample in (-1, N, 1.7, "1", None, True):  # and marks no other sample than was named
        session.page._handle_msg({"mark": "remove", "sample": sample, "wanted": True})
        assert marks.table().empty
        assert f"got {sample!r}" in session.page.said["text"]
    marks.path.write_text("mine")
    session.page._handle_msg({"mark": "remove", "sample": 1, "wanted": True})
    assert "m.parquet" in session.page.said["text"]
    assert session.page.said["undo"] == 0
    assert marks.path.read_text() == "mine"


def test_session__that_is_left_adds_no_target() -> None:
    gate = Gate(new_targets.prepared)
    explorer = new_targets.explorer_of_images(gate)
    session = opened(explorer, View(page="new"))
    upload = new_targets.upload(new_targets.images(1, 7)[0])
    session.page._handle_msg({"new": {"image": upload, "label": "2"}})
    assert gate.started.wait(PATIENCE_S)
    before = session._thread
    session.go(View())
    gate.open()
    assert before is not None
    before.join(PATIENCE_S)
    session.wait(PATIENCE_S)
    assert session.attributions is explorer
    assert session.view == View()


def test_session__in_a_notebook_computes_when_the_browser_shows_it(explorer: Explorer) -> None:
    session = Session(explorer, View(), in_notebook=True)
    assert session._thread is None  # what it changed now would be lost
    assert 'aria-busy="true"' in session.page.html
    session.page._handle_msg({"shown": True})
    session.wait(PATIENCE_S)
    assert "<tbody>" in session.page.html
    in_browser = opened(explorer, View(page="target"))
    before = in_browser._thread
    in_browser.page._handle_msg({"shown": True})
    assert in_browser._thread is before


def test_explorer__in_a_notebook_without_the_extension(
    explorer: Explorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(panel.extension, "_loaded", False)
    assert "panel.extension()" in explorer._repr_mimebundle_()["text/plain"]


def test_explore__without_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=re.escape("trakdask[explore]")):
        td.explore(data(N, 0), data(M, 1))


def deadly(block: np.ndarray, switch: str) -> np.ndarray:
    """Kill the process that computes a block, if there is such a file, which it removes first."""
    with suppress(FileNotFoundError):
        os.unlink(switch)
        os.kill(os.getpid(), signal.SIGKILL)
    return block


def test_session__works_again_when_a_store_that_vanished_is_back(tmp_path: Path) -> None:
    store, away = tmp_path / "train.zarr", tmp_path / "away"
    explorer = td.explore(td.save(data(N, 0), store, progress=False), data(M, 1), estimator=TRAK)
    store.rename(away)
    session = opened(explorer, View(page="target", target=1))
    assert "does not exist" in session.page.html
    assert "Traceback" not in session.page.html
    away.rename(store)
    session.go(View(page="target", target=2))
    session.wait(PATIENCE_S)
    assert cards(session)[:10] == best(target=2)


def test_session__works_again_when_what_killed_a_worker_is_gone(
    tmp_path: Path,
    process_client: Client,
    process_cluster: LocalCluster,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_cluster.scheduler, "allowed_failures", 0)
    switch, features = tmp_path / "kill", data(N, 0)
    mortal = da.map_blocks(deadly, features.feature.data, str(switch), dtype=np.float32)
    lazy = features.assign(feature=(features.feature.dims, mortal))
    explorer = td.explore(lazy, data(M, 1), estimator=TRAK)
    switch.touch()
    session = opened(explorer, View(page="target", target=1))
    assert "A worker process ended" in session.page.html
    session.go(View(page="target", target=2))
    session.wait(PATIENCE_S)
    assert "message error" not in session.page.html
    assert cards(session)[:10] == best(target=2)
