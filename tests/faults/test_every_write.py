"""kill -9 at every change that an operation makes to a store: nothing lost, identical bits.

The oracle is the same operation, undisturbed: what it shows, and the bytes of all its files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults._every_write import OPERATIONS

ROOT = Path(__file__).parents[2]


def kill_at_every_change(folder: Path, name: str, *more: str) -> int:
    """Return how many kills there were: as many as there are changes."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.faults._every_write", str(folder), name, *more]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    counted = json.loads(done.stdout.splitlines()[-1])
    assert counted["kills"] == counted["changes"]
    return int(counted["kills"])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("name", "least"), [("append_samples", 40), ("calibrate_by_others", 8)])
def test_store__killed_before_every_file_that_appears_or_goes(
    tmp_path: Path, name: str, least: int
) -> None:
    assert kill_at_every_change(tmp_path, name) > least


@pytest.mark.faults
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", OPERATIONS)
def test_store__killed_at_every_change(tmp_path: Path, name: str) -> None:
    assert kill_at_every_change(tmp_path, name, "every") > 8
