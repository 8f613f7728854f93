"""Fixtures of all tests of commands: a job in a folder, and a function that runs a command."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.command_line.job import Run, job_in
from trakdask.command_line.commands import app


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Return the file of a job on threads, in a folder with what it needs."""
    return job_in(tmp_path)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in this process, which is cheap."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str | Path) -> Result:
        sys.modules.pop("tiny", None)  # the module of another test
        return CliRunner().invoke(app, list(map(str, arguments)))

    return run
