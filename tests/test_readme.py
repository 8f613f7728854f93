"""The first screen of the README runs as it stands and prints what it shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text("utf-8")


def block(language: str) -> str:
    return re.search(rf"```{language}\n(.*?)```", README, flags=re.DOTALL).group(1)


def shape_of(text: str) -> list[str]:
    """Words and columns; digits depend on the machine that trained the models."""
    return re.sub(r"-?\d+(\.\d+)?(e-?\d+)?", "#", text).split()


def test_readme__first_screen_is_short() -> None:
    lines = [line for line in block("python").splitlines() if line.strip()]
    assert len(lines) <= 15


@pytest.mark.slow
def test_readme__first_screen_prints_what_it_shows(tmp_path: Path, run_python) -> None:
    printed = run_python("-c", block("python"), cwd=tmp_path)
    table = printed[printed.index("target_label") :]
    assert shape_of(table) == shape_of(block("text"))
