"""What a session marks is its own to undo; what it says is in words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import trakdask as td
from trakdask.explorer import Explorer, View
from trakdask.explorer.marking import Marking, positions
from trakdask.explorer.pages import sections


@pytest.fixture
def explorer(tmp_path: Path) -> Explorer:
    """Return an explorer of samples with labels, two of which share one."""
    features = td.testing.simulate_features(6, 4, 3)
    names = np.array(["a", "b", "<i>c</i>", "b", "d", "e"], object)
    targets = td.testing.simulate_features(4, 4, 3, seed=1)
    return td.explore(
        features.assign_coords(sample=("sample", names)),
        targets,
        marks=td.Marks(tmp_path / "m.parquet", who="<b>Ada</b>"),
        estimator="trak",
        damping=0.1,
    )


def test_toggle__marks_and_takes_back(explorer: Explorer) -> None:
    marking = Marking(explorer)
    assert marking.toggle(2, "remove") == "Sample 2 is marked as remove."
    assert marking.marked() == ["2 remove"]
    assert explorer.marks.samples("remove").tolist() == ["<i>c</i>"]
    assert marking.toggle(2, "remove") == "Sample 2 is no longer marked as remove."
    assert marking.marked() == []
    assert marking.undo() == "Undone: 1 mark."
    assert marking.marked() == ["2 remove"]


def test_undo__is_of_the_session(explorer: Explorer) -> None:
    ada, bob = Marking(explorer), Marking(explorer)
    ada.toggle(0, "duplicate")
    bob.toggle(4, "duplicate")
    assert ada.marked() == bob.marked() == ["0 duplicate", "4 duplicate"]
    assert ada.undo() == "Undone: 1 mark."
    assert bob.marked() == ["4 duplicate"]
    assert ada.undo() == "Undone: 0 marks."


def test_marked__samples_that_share_a_label(explorer: Explorer) -> None:
    marking = Marking(explorer)
    marking.toggle(3, "wrong label")
    assert sorted(marking.marked()) == ["1 wrong label", "3 wrong label"]
    explorer.marks.mark(["of another store"], "remove")
    assert sorted(positions(explorer, explorer.marks)["position"]) == [1, 3]


def test_toggle__says_what_went_wrong(explorer: Explorer) -> None:
    marking = Marking(explorer)
    assert "'old'" in marking.toggle(1, "old")
    explorer.marks.path.write_text("mine")
    assert "m.parquet" in marking.toggle(1, "remove")
    assert explorer.marks.path.read_text() == "mine"


def test_marking__without_marks(explorer: Explorer) -> None:
    without = td.explore(explorer.features, explorer.targets, estimator="trak", damping=0.1)
    marking = Marking(without)
    assert marking.toggle(1, "remove") == "No marks are kept here."
    assert (marking.undo(), marking.marked()) == ("Undone: 0 marks.", [])


def test_page__lists_marks_as_text(explorer: Explorer) -> None:
    view = View(page="corpus")
    assert "Marks" not in [each.title for each in sections(explorer, view)]
    explorer.marks.mark(["<i>c</i>"], "remove")
    (section,) = (each for each in sections(explorer, view) if each.title == "Marks")
    html = section.html()
    assert "<i>" not in html
    assert "<b>" not in html
    assert "&lt;b&gt;Ada&lt;/b&gt;" in html
    assert "sample=2" in html
