"""Nobody runs the benchmarks between two releases: here they are imported, at least."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SCRIPTS = [path.stem for path in sorted(HERE.glob("*.py")) if not path.stem.startswith("test_")]


def test_scripts__can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    for name in SCRIPTS:
        assert importlib.import_module(name).__doc__
        del sys.modules[name]  # other modules have names such as "store", too
