"""The benchmark of repeated queries runs end to end when small."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import pytest


@pytest.mark.slow
def test_main__prints_a_row_for_every_place_and_number_of_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fresh processes are for the numbers: here only clusters get them, one of each kind."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    queries = importlib.import_module("queries")
    in_subprocess, known = queries.in_subprocess, {}

    def measured(args: argparse.Namespace, folder: Path, where: str, targets: int = 0) -> object:
        if where == "bound":
            return queries.bound(args, folder)
        if where.startswith("cluster"):
            if where not in known:
                known[where] = in_subprocess(args, folder, where, targets)
            return known[where]
        given = {"where": where, "folder": folder, "targets": [targets]}
        return queries.measure(argparse.Namespace(**{**vars(args), **given}))

    monkeypatch.setattr(queries, "in_subprocess", measured)
    sizes = ["--samples", "600", "--proj-dim", "16", "--chunks", "128", "--targets", "1", "3"]
    queries.main([*sizes, "--folder", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith(queries.WHERE)]
    assert len(rows) == 2 * len(queries.WHERE)
    assert sum("bound" in line for line in lines) == 3
