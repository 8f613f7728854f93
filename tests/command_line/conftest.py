"""A small job, and the command that runs it in this process or in one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from trakdask.command_line.commands import app

MODULE = '''
"""A linear model of random samples; it can kill the process once a block is stored."""
import glob, os, signal
import numpy as np, torch
import trakdask as td

X = np.random.default_rng(0).standard_normal((60, 4)).astype("f4")
LABEL = np.arange(60) % 3


class Samples:
    def __len__(self):
        return 60

    def __getitem__(self, i):
        if os.environ.get("KILLED") and glob.glob("train.zarr/feature/c.*"):
            os.kill(os.getpid(), signal.SIGKILL)
        if i == 50 and os.environ.get("BROKEN"):
            raise OSError("the disk of sample 50 is gone")
        return X[i], LABEL[i]


def build():
    return torch.nn.Linear(4, 3)


def checkpoints(n):
    torch.manual_seed(0)
    return {f"[c{i}]": build().state_dict() for i in range(n)}


def targets(kind=""):
    return td.from_arrays({"image": X[:6] + 1, "label": LABEL[:6]}, coords={"name": list("uvwxyz")})


def not_samples(kind):
    return 3
'''
JOB = """
data:
  kind: torch
  dataset: tiny:Samples
  names: [image, label]
  coords: samples.csv
  chunks: 20
targets: {kind: function, function: tiny:targets, arguments: {kind: six}}
model:
  build: tiny:build
  checkpoints: {function: tiny:checkpoints, arguments: {n: 2}}
projector: {kind: Rademacher, proj_dim: 8}
stores: {train: train.zarr, targets: targets.zarr}
score: {estimator: trak, damping: 1e-1}
save: {progress: false}
top_k: {k: 3}
groups: {by: source}
outputs: {score: scores.zarr, top_k: top.parquet, groups: groups.parquet}
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Return the file of a job on threads, in a folder with what it needs."""
    (tmp_path / "tiny.py").write_text(MODULE)
    rows = (f"{'web' if i % 2 else '[books]'},{i}" for i in range(60))
    (tmp_path / "samples.csv").write_text("\n".join(["source,row", *rows]))
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run a command in this process, which is cheap."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str | Path) -> Result:
        sys.modules.pop("tiny", None)  # that of another test
        return CliRunner().invoke(app, list(map(str, arguments)))

    return run


@pytest.fixture
def run_process(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command in a process of its own, as users do."""

    def run(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "trakdask", *map(str, arguments)],
            cwd=tmp_path,
            env={**os.environ, "COLUMNS": "200", **variables},
            capture_output=True,
            text=True,
            timeout=280,
        )

    return run
