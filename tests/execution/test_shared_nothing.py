"""Workers that share nothing with the driver but an object store give what one process gives.

They share no folder with this process: each has a mount namespace of its own.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

HIDDEN = sorted({"/tmp", "/var/tmp", "/dev/shm", os.path.realpath(tempfile.gettempdir())})
"""Where this process writes: other processes see an empty folder of their own there."""

_ENTER = """
set -e
for folder in {hidden}; do mount -t tmpfs tmpfs "$folder"; done
mkdir /tmp/home /tmp/files /tmp/work
cd /tmp/work
exec "$@"
"""


def require_namespaces() -> None:
    """Skip where the system does not let this user hide folders from a process."""
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare")
    tried = subprocess.run([*_isolated(), "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"folders cannot be hidden from a process: {tried.stderr.strip()}")
    for needed in (ROOT, Path(sys.prefix), Path(sys.base_prefix)):
        if any(needed.resolve().is_relative_to(folder) for folder in HIDDEN):
            pytest.skip(f"{needed} is in a temporary folder, and all must see it")


def free_port() -> int:
    """Return a port that nobody listens on, and that the system gives nobody else meanwhile."""
    while True:
        port = random.randrange(20_000, 32_000)  # Linux gives those from 32,768 on
        with socket.socket() as opened, suppress(OSError):
            opened.bind(("127.0.0.1", port))
            return port


def scheduler_command(port: int) -> list[str]:
    """Return the command of a scheduler."""
    where = ["--host", "127.0.0.1", "--port", str(port)]
    return ["-m", "distributed.cli.dask_scheduler", *where, "--no-dashboard"]


def worker_command(port: int, *more: str) -> list[str]:
    """Return the command of a worker with one thread, which waits for its scheduler."""
    options = ["--no-nanny", "--nthreads", "1", "--no-dashboard"]
    where = ["--host", "127.0.0.1", f"tcp://127.0.0.1:{port}", "--death-timeout", str(PATIENCE_S)]
    return ["-m", "distributed.cli.dask_worker", *where, *options, *more]


@contextmanager
def isolated(
    commands: Sequence[Sequence[str]], log: Path, environment: dict[str, str]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run Python with these arguments, in namespaces of their own; all are killed at the end."""
    private = {"HOME": "/tmp/home", "TMPDIR": "/tmp/files", "PYTHONPATH": str(ROOT)}
    patient = {
        "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": f"{PATIENCE_S}s",
        "DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP": f"{PATIENCE_S}s",
        "DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "null",
    }
    env = {**os.environ, "OMP_NUM_THREADS": "1", **patient, **environment, **private}
    with ExitStack() as stack:
        processes = []
        for command in commands:
            file = stack.enter_context(log.open("ab"))
            process = subprocess.Popen(
                [*_isolated(), sys.executable, *command], stdout=file, stderr=file, env=env
            )
            stack.callback(_end, process)
            processes.append(process)
        yield processes


def _isolated() -> list[str]:
    script = _ENTER.format(hidden=" ".join(HIDDEN))
    return ["unshare", "--mount", "--propagation", "private", "--", "sh", "-c", script, "sh"]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


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
