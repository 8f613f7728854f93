"""The plan of gpu.py, on any machine, and without what it promises not to need."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("gpu.py")

BARE = f"""
import importlib.util, runpy, sys

class Absent:
    names = {{"dask", "distributed", "fsspec", "lazy_loader", "pandas", "xarray", "zarr"}}

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            raise ModuleNotFoundError(name)

find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name in Absent.names else find_spec(name, *a)
sys.meta_path.insert(0, Absent())
sys.argv = ["gpu.py", "--dry-run"]
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


@pytest.mark.slow
def test_dry_run__prints_the_plan_with_torch_and_numpy_alone(
    run_python: Callable[..., str], tmp_path: Path
) -> None:
    *plan, last = run_python("-c", BARE, cwd=tmp_path).splitlines()
    assert last.startswith(f"{len(plan)} measurements. Here: ")
    for place in ("D=11700000    p=4096  B=512", "D=1000000000  p=4096  B=32"):
        assert any("rademacher int8x2" in line and place in line for line in plan)
    for name in ("int8", "bf16", "copy", "fast_jl", "sjlt s=1", "featurize, traker", "quantize"):
        assert any(f" {name} " in line for line in plan), name
