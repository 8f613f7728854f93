"""What a session marks is its own to undo; what it says is in words."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import trakdask as td
from trakdask.explorer import Explorer, View
from trakdask.explorer.pages import sections
from trakdask.explorer.pages.marks import as_csv
from trakdask.explorer.session_marks import SessionMarks, positions


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


def test_set__marks_and_takes_back(explorer: Explorer) -> None:
    marks = SessionMarks(explorer)
    assert marks.set(2, "remove", wanted=True) == "Sample 2 is marked as remove."
    assert marks.marked() == ["2 remove"]
    assert explorer.marks.samples("remove").tolist() == ["<i>c</i>"]
    assert marks.set(2, "remove", wanted=False) == "Sample 2 is no longer marked as remove."
    assert marks.marked() == []
    assert marks.undo() == "Undone: 1 mark."
    assert marks.marked() == ["2 remove"]


def test_set__by_two_who_agree_keeps_the_mark(explorer: Explorer) -> None:
    for session in (SessionMarks(explorer), SessionMarks(explorer)):
        session.set(2, "remove", wanted=True)
        assert session.marked() == ["2 remove"]


def test_undo__is_of_the_session(explorer: Explorer) -> None:
    ada, bob = SessionMarks(explorer), SessionMarks(explorer)
    ada.set(0, "duplicate", wanted=True)
    bob.set(4, "duplicate", wanted=True)
    assert ada.marked() == bob.marked() == ["0 duplicate", "4 duplicate"]
    assert ada.undo() == "Undone: 1 mark."
    assert bob.marked() == ["4 duplicate"]
    assert ada.undo() == "Undone: 0 marks."


def test_marked__samples_that_share_a_label(explorer: Explorer) -> None:
    marks = SessionMarks(explorer)
    marks.set(3, "wrong label", wanted=True)
    assert sorted(marks.marked()) == ["1 wrong label", "3 wrong label"]
    explorer.marks.mark(["of another store"], "remove")
    assert sorted(positions(explorer, explorer.marks)["position"]) == [1, 3]


def test_set__says_what_went_wrong(explorer: Explorer) -> None:
    marks = SessionMarks(explorer)
    assert "'old'" in marks.set(1, "old", wanted=True)
    explorer.marks.path.write_text("mine")
    assert "m.parquet" in marks.set(1, "remove", wanted=True)
    assert explorer.marks.path.read_text() == "mine"


def test_session_marks__without_marks(explorer: Explorer) -> None:
    without = td.explore(explorer.features, explorer.targets, estimator="trak", damping=0.1)
    marks = SessionMarks(without)
    assert marks.set(1, "remove", wanted=True) == "No marks are kept here."
    assert (marks.undo(), marks.marked()) == ("Undone: 0 marks.", [])


def test_page__lists_marks_as_text(explorer: Explorer) -> None:
    view = View(page="corpus")
    assert "Marks" not in [each.title for each in sections(explorer, view)]
    explorer.marks.mark(["<i>c</i>", "=1+1", "e"], "remove")
    (section,) = (each for each in sections(explorer, view) if each.title == "Marks")
    html = section.html()
    assert "<i>" not in html
    assert "<b>" not in html
    assert "&lt;b&gt;Ada&lt;/b&gt;" in html
    assert "sample=2" in html
    csv = base64.b64decode(re.search('base64,([^"]+)', html).group(1)).decode()
    names = [row.split(",")[0] for row in csv.splitlines()]
    assert names == ["sample", "<i>c</i>", "'=1+1", "e"]  # a spreadsheet would compute =1+1


def test_as_csv__numbers_stay_numbers() -> None:
    frame = pd.DataFrame({"a": [-1, 2], "b": ["-1", "a=b"], "c": ["@x", "+y"], "d": ["\tz", ""]})
    expected = ["a,b,c,d", "-1,'-1,'@x,'\tz", "2,a=b,'+y,"]
    assert as_csv(frame).splitlines() == expected
