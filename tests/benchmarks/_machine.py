"""Run a benchmark between a header, which says on what it runs, and the time that it took.

python tests/benchmarks/_machine.py tests/benchmarks/store.py --blocks 100
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

PACKAGES = ("torch", "numpy", "numba", "dask", "xarray", "zarr", "traker", "dattri")


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


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main() -> None:
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
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
