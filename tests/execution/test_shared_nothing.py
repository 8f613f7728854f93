"""Workers that share nothing with the driver but an object store give what one process gives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clusters_isolated import (
    ROOT,
    free_port,
    isolated,
    require_namespaces,
    scheduler_command,
    worker_command,
)

pytestmark = pytest.mark.slow


def drive(tmp_path: Path, variables: dict[str, str], port: int, *arguments: str) -> None:
    folders = {"HOME": tmp_path / "home", "TMPDIR": tmp_path / "files"}
    for folder in (*folders.values(), tmp_path / "work"):
        folder.mkdir()
    env = os.environ | variables | {"PYTHONPATH": str(ROOT)}
    env |= {name: str(folder) for name, folder in folders.items()}
    done = subprocess.run(
        [sys.executable, "-m", "tests.execution._driver", str(port), *arguments],
        cwd=tmp_path / "work", env=env, capture_output=True, text=True,
    )  # fmt: skip
    logs = (tmp_path / "cluster.log").read_text()
    assert done.returncode == 0, f"{logs[-3000:]}\n--- driver\n{done.stderr[-6000:]}"


@pytest.mark.faults
@pytest.mark.parametrize("scheduler", ["elsewhere", "here"])
def test_featurize_to_top_k(tmp_path: Path, s3: dict[str, str], scheduler: str) -> None:
    require_namespaces()
    port = free_port()
    variables = {
        **{"AWS_ACCESS_KEY_ID": s3["key"], "AWS_SECRET_ACCESS_KEY": s3["secret"]},
        **{"AWS_ENDPOINT_URL": s3["endpoint_url"], "TRAKDASK_NUMBA": "0"},  # slow to import
    }
    commands = [worker_command(port), worker_command(port)]
    if scheduler == "elsewhere":
        commands.insert(0, scheduler_command(port))
    with isolated(commands, tmp_path / "cluster.log", variables):
        drive(tmp_path, variables, port, scheduler, f"scheduler-{scheduler}")
