"""The README is short, and its example runs as it stands and prints what it shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trakdask import examples

README = (Path(__file__).parents[1] / "README.md").read_text("utf-8")


def block(language: str, section: str = "# trakdask") -> str:
    text = README[README.index(f"{section}\n") :]
    return re.search(rf"```{language}\n(.*?)```", text, flags=re.DOTALL).group(1)


def shape_of(text: str) -> list[str]:
    """Words and columns; digits depend on the machine that trained the models."""
    return re.sub(r"-?\d+(\.\d+)?(e-?\d+)?", "#", text).split()


def test_readme__first_screen_prints_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Fewer digits and dimensions, for the time; the page on the first attribution has more.
    first = [samples.isel(sample=slice(1000)) for samples in examples.mnist()]
    monkeypatch.setattr(examples, "mnist", lambda **_: first)
    monkeypatch.chdir(tmp_path)
    exec(block("python").replace("proj_dim=2048", "proj_dim=128"), {})
    printed = capsys.readouterr().out
    table = printed[printed.index("target_label") :]
    assert shape_of(table) == shape_of(block("text"))


def test_readme__is_short() -> None:
    assert len(README.splitlines()) <= 80
    assert len([line for line in block("python").splitlines() if line.strip()]) <= 15
