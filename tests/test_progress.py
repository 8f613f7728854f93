"""The bar counts completed work, in terminals and notebooks."""

from __future__ import annotations

import time

import IPython.display
import pytest

from trakdask import progress


def test_polled_bar__polls_while_the_block_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_INTERVAL_S", 0.01)
    asked: list[float] = []

    def count() -> int:
        asked.append(time.monotonic())
        return min(len(asked), 5)

    with progress.polled_bar("title", 5, count):
        time.sleep(0.2)
    assert len(asked) > 5
    assert "title" in capsys.readouterr().out


def test_polled_bar__silent(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.polled_bar("title", 5, lambda: 1 / 0, show=False):
        pass
    assert capsys.readouterr().out == ""


def test_polled_bar__error_passes_through() -> None:
    with pytest.raises(KeyError), progress.polled_bar("title", 5, lambda: 2):
        raise KeyError


def test_notebook_bar__updates_one_display(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    class Handle:
        def update(self, html: IPython.display.HTML) -> None:
            shown.append(html.data)

    def display(html: IPython.display.HTML, display_id: bool) -> Handle:
        shown.append(html.data)
        return Handle()

    monkeypatch.setattr(IPython.display, "display", display)
    with progress._NotebookBar("title", 3) as bar:
        for done in (0, 3):
            bar.update(done)
    assert ["0/3" in shown[0], "3/3" in shown[1], len(shown)] == [True, True, 2]
