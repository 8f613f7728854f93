"""kill -9 at every change that an operation makes to a store: nothing lost, identical bits.

The oracle is the same operation, undisturbed: what it shows, and the bytes of all its files.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults._every_write import OPERATIONS

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        pytest.param("calibrate_by_others", "one", marks=pytest.mark.slow),
        *(pytest.param(name, "all", marks=pytest.mark.faults) for name in OPERATIONS),
    ],
)
def test_store__killed_at_every_change(tmp_path: Path, run_python, name: str, kinds: str) -> None:
    """In short, at the first and the last change of each kind: chunks of an array are alike."""
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = ("-m", "tests.faults._every_write", str(tmp_path), name, kinds)
    printed = run_python(*command, cwd=ROOT, **environment)
    # calibrate writes least, since it finds λ as it is: a lock, two files, and the lock again.
    assert json.loads(printed.splitlines()[-1])["kills"] >= 5
