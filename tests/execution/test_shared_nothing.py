"""Workers that share nothing with the driver but an object store give what one process gives."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from moto.server import ThreadedMotoServer

from tests.clusters_isolated import (
    ROOT,
    free_port,
    isolated,
    require_namespaces,
    scheduler_command,
    worker_command,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    """An object store, as the environment variables that lead to it."""
    require_namespaces()
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield {
            "AWS_ACCESS_KEY_ID": "k",
            "AWS_SECRET_ACCESS_KEY": "s",
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "TRAKDASK_NUMBA": "0",  # which each process would import
        }
    finally:
        server.stop()


def drive(tmp_path: Path, s3: dict[str, str], port: int, *arguments: str) -> None:
    folders = {"HOME": tmp_path / "home", "TMPDIR": tmp_path / "files"}
    for folder in (*folders.values(), tmp_path / "work"):
        folder.mkdir()
    env = {**os.environ, **s3, "PYTHONPATH": str(ROOT), **{k: str(v) for k, v in folders.items()}}
    done = subprocess.run(
        [sys.executable, "-m", "tests.execution._driver", str(port), *arguments],
        cwd=tmp_path / "work", env=env, capture_output=True, text=True,
    )  # fmt: skip
    logs = (tmp_path / "cluster.log").read_text()
    assert done.returncode == 0, f"{logs[-3000:]}\n--- driver\n{done.stderr[-6000:]}"


@pytest.mark.faults
@pytest.mark.parametrize("scheduler", ["elsewhere", "here"])
def test_featurize_to_top_k(tmp_path: Path, s3: dict[str, str], scheduler: str) -> None:
    port = free_port()
    commands = [worker_command(port), worker_command(port)]
    if scheduler == "elsewhere":
        commands.insert(0, scheduler_command(port))
    with isolated(commands, tmp_path / "cluster.log", s3):
        drive(tmp_path, s3, port, scheduler, f"scheduler-{scheduler}")
