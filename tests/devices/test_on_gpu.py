"""The script for ten minutes on a real GPU runs through on the one that stands for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "on_gpu.sh"


def run(python: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    variables = {"DEVICE": "fakegpu", "ONLY": "perceptron", "OUT": folder, "PYTHON": python}
    variables["PATIENCE"] = 20  # a busy machine is no failure
    environment = os.environ | {name: str(value) for name, value in variables.items()}
    return subprocess.run(["bash", SCRIPT], env=environment, capture_output=True, text=True)


def test_script__runs_every_step(fake_gpu: None, tmp_path: Path) -> None:
    done = run(sys.executable, tmp_path)
    assert done.returncode == 0, done.stdout
    assert f"failed: none; logs are in {tmp_path}" in done.stdout
    assert "kernels: exit 0" in done.stdout
    measured = (tmp_path / "speed.log").read_text()
    for line in ("memory roof", "SJLT, sparsity 4", "cnn, SJLT, 16 threads", "top_k"):
        assert line in measured


def test_script__says_what_failed(fake_gpu: None, tmp_path: Path) -> None:
    fails = tmp_path / "python"
    fails.write_text("#!/bin/sh\necho FAILED to import\n")
    fails.chmod(0o755)
    done = run(fails, tmp_path)
    assert done.returncode == 1
    assert "failed: kernels devices speed; logs" in done.stdout
