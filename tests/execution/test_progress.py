"""The bar counts completed work, in terminals and notebooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import IPython.display
import pytest
import rich

import trakdask as td
from trakdask.execution import progress


def test_bar__updates_one_display_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    class Handle:
        def update(self, table: Any) -> None:
            shown.append(table._repr_mimebundle_([], [])["text/plain"])

    def display(table: Any, display_id: bool) -> Handle:
        Handle().update(table)
        return Handle()

    monkeypatch.setattr(IPython.display, "display", display)
    monkeypatch.setattr(rich.get_console(), "is_jupyter", True)
    with progress._bar("title", 10, 4) as update:
        for done in (8, 10):
            update(done)
    assert [f"{done}/10" in text for done, text in zip((4, 8, 10), shown, strict=True)] == 3 * [
        True
    ]


@pytest.mark.parametrize("scheduler", ["threads", "cluster"])
def test_save__the_same_bar_with_and_without_a_client(
    scheduler: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    if scheduler == "cluster":
        request.getfixturevalue("client")
    features = td.testing.simulate_features(40, 8, chunks=16)
    for _ in range(2):  # and again where all is there
        td.save(features, tmp_path / "f.zarr")
        assert "save f.zarr" in (shown := capsys.readouterr().out)
        assert "6/6" in shown


def test_polled_bar__says_what_is_resumed(capsys: pytest.CaptureFixture[str]) -> None:
    for done in (0, 3, 5):
        with progress.polled_bar("title", 5, lambda: done):  # noqa: B023
            pass
        assert ("3 of 5 were stored before" in capsys.readouterr().out) == (done == 3)
