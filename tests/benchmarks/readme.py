"""Run the Python lines of the README, and print what they print and what they cost.

python tests/benchmarks/_machine.py tests/benchmarks/readme.py
"""

from __future__ import annotations

import contextlib
import re
import tempfile
import time
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "README.md"


def main() -> None:
    """Run the blocks that define all names in an empty folder, one after the other."""
    _, *blocks = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), flags=re.DOTALL)
    names: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for lines, store in zip(blocks, ("train.zarr", "halves.zarr"), strict=True):
            before = time.process_time()
            exec(lines, names)
            used = time.process_time() - before
            stored = sum(p.stat().st_size for p in Path(store).rglob("*") if p.is_file())
            print(f"{used:.0f} CPU seconds, {stored / 1e6:.0f} MB in {store}")


if __name__ == "__main__":
    main()
