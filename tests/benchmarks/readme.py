"""Run the Python lines of the README, and print what they print and what they cost.

python tests/benchmarks/_machine.py tests/benchmarks/readme.py
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import tempfile
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "README.md"


def main() -> None:
    """Run the lines in an empty folder, in this process."""
    (lines,) = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), flags=re.DOTALL)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        exec(lines, {})
        stored = sum(p.stat().st_size for p in Path("train.zarr").rglob("*") if p.is_file())
        print(f"{stored / 1e6:.0f} MB in train.zarr, {os.listdir()} in the folder")
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(f"{used.ru_utime + used.ru_stime:.0f} CPU seconds")


if __name__ == "__main__":
    main()
