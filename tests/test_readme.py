"""The first screen of the README runs as it stands and prints what it shows."""

from __future__ import annotations

import re
import subprocess
import sys
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
def test_readme__first_screen_prints_what_it_shows(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", block("python")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout[done.stdout.index("target_label") :]
    assert shape_of(printed) == shape_of(block("text"))
