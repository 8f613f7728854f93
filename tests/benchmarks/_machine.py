"""Run a benchmark between a header, which says on what it runs, and the time that it took.

python tests/benchmarks/_machine.py tests/benchmarks/store.py --blocks 100
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "numpy", "numba", "dask", "xarray", "zarr", "traker")


def cpu_name() -> str:
    """Return the name that the processor gives itself, where the system tells it."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def version_of(package: str) -> str:
    """Return the version of a package, or say that it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def in_a_process(script: str, *order: str, **variables: str) -> Any:
    """Run a script on one thread; return what it prints last."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    # As for users, the byte code of modules is on disk.
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    env = {**inherited, **threads, "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, script, *order]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def parser_of(doc: str, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser of options: a number each, or one or more where the default is several."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    for name, default in defaults.items():
        several = {"nargs": "+"} if isinstance(default, list | tuple) else {}
        kind = type(default[0] if several else default)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, **several)
    return parser


def made_once(path: Path, write: Callable[[Path], object]) -> Path:
    """Let a file be written, as a whole or not at all, unless it is there; return its path."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"partial-{path.name}")
        write(partial)
        partial.replace(path)
    return path


def peak_memory() -> int:
    """Return the most bytes that this process held: ``ru_maxrss`` begins with its parent's."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s*(\d+) kB", status)[1])  # type: ignore[index]


def timed(call: Callable[[], object]) -> list[float]:
    """Return the seconds of a call, by the clock and of CPU, also in processes that it uses."""
    wall, used = time.perf_counter(), _cpu_seconds()
    call()
    return [time.perf_counter() - wall, _cpu_seconds() - used]


def _cpu_seconds() -> float:
    this = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in [this, *this.children(recursive=True)])


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main() -> None:
    load = ", ".join(f"{tasks:.1f}" for tasks in os.getloadavg())
    threads = os.environ.get("OMP_NUM_THREADS", "any number of")
    print(f"$ python {' '.join(sys.argv[1:])}")
    print(
        f"{datetime.now():%Y-%m-%d %H:%M}, commit {_commit()}, {cpu_name()}, {os.cpu_count()} cores"
    )
    print(f"load average {load}, OMP_NUM_THREADS={threads}, Python {platform.python_version()}")
    print(", ".join(f"{name} {version_of(name)}" for name in PACKAGES) + "\n", flush=True)
    start = time.monotonic()
    status = subprocess.run([sys.executable, *sys.argv[1:]], check=False).returncode
    print(f"\n{time.monotonic() - start:.0f} seconds in all")
    sys.exit(status)


if __name__ == "__main__":
    main()
