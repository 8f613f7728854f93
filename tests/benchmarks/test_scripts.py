"""Nobody runs the benchmarks between two releases: here they are imported, at least."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
IMPORT = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


@pytest.mark.slow
def test_scripts__can_be_imported(run_python: Callable[..., str]) -> None:
    names = [path.stem for path in sorted(HERE.glob("*.py")) if not path.stem.startswith("test_")]
    assert "projection" in names
    run_python("-c", IMPORT, *names, cwd=HERE)
