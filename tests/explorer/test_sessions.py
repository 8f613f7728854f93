"""Sessions of the app without a browser: clicks, marks, and going on after errors."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from distributed import Client, LocalCluster

import trakdask as td
from tests.explorer import test_new_targets as new_targets
from tests.explorer.sessions import TRAK, Gate, M, N, best, cards, data, opened, show, through, wait
from tests.waiting import PATIENCE_S
from trakdask.explorer import Marks
from trakdask.explorer.app import Session
from trakdask.explorer.view import View


def test_session__ranks_training_samples_by_loss_before_it_reads_features() -> None:
    gate, features = Gate(), data(N, 0).assign_attrs(loss_kind="squared error")
    targets = data(M, 1).assign_attrs(loss_kind=features.loss_kind)
    explorer = td.explore(gate.before(features), targets, estimator=TRAK)
    view = View(page="corpus", where="label == 1")
    session = Session(explorer, view)
    session._handle_msg({"shown": True})
    assert gate.started.wait(PATIENCE_S)
    loss = (features.out_to_loss.values**2).mean(axis=1) / 2
    by_loss = [i for i in np.argsort(-loss, kind="stable") if i % 2]
    assert cards(session) == by_loss[:24]
    assert "computing" in session.html
    gate.open()
    wait(session)
    show(session, view.replace(first=24, order="self_influence"))
    influence = td.self_influence(features, TRAK).values
    assert cards(session) == [i for i in np.argsort(-influence) if i % 2][24:]


def test_session__marks_samples_and_takes_it_back_step_by_step(tmp_path: Path) -> None:
    names = [f"id {i}" for i in range(N - 1)]
    features = data(N, 0).assign_coords(sample=[*names, "id 8"])  # two share a label
    marks = Marks(tmp_path / "marks.parquet")
    explorer = td.explore(features, data(M, 1), marks=marks, estimator=TRAK)
    session, other = (opened(explorer, View(page="target")) for _ in range(2))
    assert 'data-mark="wrong label"' in session.html
    for position, label in ((7, "wrong label"), (8, "remove"), (7, "remove"), (7, "remove")):
        session._handle_msg({"mark": label, "sample": position, "wanted": True})
        assert session.said["text"] == f"Sample {position} is marked as {label}."
    assert sorted(session.marked) == ["59 remove", "7 remove", "7 wrong label", "8 remove"]
    other._handle_msg({"mark": "duplicate", "sample": 7, "wanted": True})
    marks.mark(["of another store"], "remove")
    show(session, View(page="sample", sample=3))  # what can be undone is not lost on the way
    left = []
    while session.said["undo"]:
        session._handle_msg({"undo": True})
        left.append((session.said["text"], session.said["undo"]))
    undone = [f"The last change of sample {position} is undone." for position in (7, 8, 7)]
    assert left == list(zip(undone, (2, 1, 0), strict=True))
    session._handle_msg({"undo": True})
    assert "nothing" in session.said["text"]
    assert session.marked == ["7 duplicate"]
    assert other.said["undo"] == 1
    session._handle_msg({"mark": "duplicate", "sample": 7, "wanted": False})
    assert session.marked == []
    assert session.said["text"] == "Sample 7 is no longer marked as duplicate."


def test_session__that_is_left_adds_no_target() -> None:
    gate = Gate(new_targets.prepared)
    explorer = new_targets.explorer_of_images(gate)
    session = opened(explorer, View(page="new"))
    upload = new_targets.upload(new_targets.images(1, 7)[0])
    session._handle_msg({"new": {"image": upload, "label": "2"}})
    assert gate.started.wait(PATIENCE_S)
    before = session._thread
    session.go(View())
    gate.open()
    assert before is not None
    before.join(PATIENCE_S)
    wait(session)
    assert session.questions is explorer
    assert session.view == View()


def deadly(block: np.ndarray, switch: str) -> np.ndarray:
    """Kill the process that computes a block, if there is such a file, which it removes first."""
    with suppress(FileNotFoundError):
        os.unlink(switch)
        os.kill(os.getpid(), signal.SIGKILL)
    return block


@pytest.mark.parametrize("change", ["append", "drop"])
def test_session__of_a_store_that_others_change_says_so_and_goes_on_marking(
    tmp_path: Path, change: str
) -> None:
    store = tmp_path / "train.zarr"
    td.save(data(N, 0).chunk(sample=25), store, progress=False)
    marks = Marks.beside(store)
    explorer = td.explore(td.open(store), data(M, 1), marks=marks, estimator=TRAK)
    if change == "append":
        td.save(data(9, 5), store, append_dim="sample", progress=False)
    else:
        td.drop(store, where="sample < 3")
    session = opened(explorer, View(page="target", target=1))
    assert session.html.count("A part of the store is gone.") == 1  # and not in every section
    session._handle_msg({"mark": "remove", "sample": 50, "wanted": True})
    assert session.said["text"] == "Sample 50 is marked as remove."
    assert session.marked == ["50 remove"]
    every = td.open(store, dropped=True)
    assert Marks.beside(store).ids(every)[50] in marks.samples("remove")


def test_session__works_again_when_what_killed_a_worker_is_gone(
    tmp_path: Path,
    process_client: Client,
    process_cluster: LocalCluster,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_cluster.scheduler, "allowed_failures", 0)
    switch = tmp_path / "kill"
    mortal = through(deadly, data(N, 0), str(switch))
    explorer = td.explore(mortal, data(M, 1), estimator=TRAK)
    assert explorer.client is process_client
    switch.touch()
    session = opened(explorer, View(page="target", target=1))
    assert "A worker process ended" in session.html
    show(session, View(page="target", target=2))
    assert "message error" not in session.html
    assert cards(session)[:10] == best(target=2)
