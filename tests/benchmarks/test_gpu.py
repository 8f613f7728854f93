"""The plan of gpu.py, on any machine, without what it promises not to need; and what it prints."""

from __future__ import annotations

import importlib.util
import inspect
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

HERE = Path(__file__).parent

BARE = f"""
import runpy, sys

absent = {{"dask", "distributed", "zarr", "scipy", "numba", "pyarrow", "rich", "matplotlib"}}

class Absent:
    def find_spec(self, name, path=None, target=None):
        if path is None and name in absent:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Absent())
find_spec = __import__("importlib.util").util.find_spec

def found(name, *package):
    try:
        return find_spec(name, *package)
    except ModuleNotFoundError:
        return None

__import__("importlib.util").util.find_spec = found
sys.argv = ["gpu.py", "--dry-run"]
script = runpy.run_path({str(HERE / "gpu.py")!r}, run_name="__main__")

# A ResNet-18 end to end, but on the CPU.
import torch
torch.nn.Module.cuda = lambda self: self
on_cpu = script["featurize_ours"].__globals__
on_cpu["images"] = lambda n: (torch.randn(n, 3, 8, 8), torch.zeros(n).long())
Stream = on_cpu["ProjectionStream"]
on_cpu["ProjectionStream"] = lambda *arguments: Stream(*arguments[:-1], "cpu")
print("end to end", tuple(script["featurize_ours"](script["SJLT"](64), 2)()().shape))
"""


@pytest.mark.slow
def test_dry_run__prints_the_plan_without_dask_and_zarr(
    run_python: Callable[..., str], tmp_path: Path
) -> None:
    *plan, last, end = run_python("-c", BARE, cwd=tmp_path).splitlines()
    assert end == "end to end (2, 64)"
    assert last.startswith(f"{len(plan)} measurements. Here: ")
    for place in ("D=11700000    p=4096  B=512", "D=1000000000  p=4096  B=32"):
        assert any("rademacher int8x2" in line and place in line for line in plan)
    for name in ("int8", "bf16", "copy", "fast_jl", "sjlt s=1", "featurize, traker", "quantize"):
        assert any(f" {name} " in line for line in plan), name


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    monkeypatch.setattr(sys, "path", [*sys.path])

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


def row(group: str, name: str, ms: float, per_second: float = 0, batch: int = 32) -> dict[str, Any]:
    found = {"group": group, "name": name, "width": 2048, "batch": batch, "ms": ms}
    return found | ({"per_second": per_second} if per_second else {})


def test_summary__shares_and_ratios(script: Callable[[str], ModuleType]) -> None:
    rows = [
        row("roof", "int8", 1, 1000.0),
        row("roof (bytes)", "copy", 1, 500.0),
        row("projection", "rademacher int8x2", 4, 250.0),
        row("projection", "rademacher int8x2", 9, 300.0, batch=8),
        row("projection", "fast_jl", 6, 170.0),
        row("projection (bytes)", "sjlt s=1", 2, 200.0),
        row("ResNet-18", "featurize, sjlt", 5),
        row("ResNet-18", "featurize, traker", 15),
        {"group": "projection", "name": "rademacher int8x3", "failed": "RuntimeError: of memory"},
    ]
    found = [" ".join(line.split()) for line in script("gpu").summary(rows)]
    assert found == [
        "rademacher int8x2 p=2048 B=32 50% of int8, 1.50 x as fast as fast_jl",
        "rademacher int8x2 p=2048 B=8 60% of int8",
        "sjlt s=1 p=2048 B=32 40% of copy, 3.00 x as fast as fast_jl",
        "featurize, sjlt p=2048 B=32 3.00 x as fast as traker",
    ]


TESTS = """
import pytest
pytestmark = pytest.mark.gpu

@pytest.mark.parametrize(("a", "b"), [(1, 2), (2, 3)], ids=str)
@pytest.mark.parametrize("c", [3, 6])
def test_sum(a, b, c):
    assert a + b == c

def test_alone():
    pass
"""


def test_run_tests__every_case_of_every_test(
    script: Callable[[str], ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    monkeypatch.setitem(sys.modules, "pytest", pytest)
    assert script("_bare").run_tests(tmp_path / "test_it.py") == (2, 3)
    assert "FAILED test_sum {'c': 6, 'a': 1, 'b': 2}" in capsys.readouterr().out


def test_run_tests__calls_the_tests_of_a_gpu_with_what_they_take(
    script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    bare, run_path, called = script("_bare"), runpy.run_path, []

    def counting(test: Any) -> Any:
        def call(**arguments: Any) -> None:
            inspect.signature(test).bind(**arguments)
            called.append(test)

        call.cases = getattr(test, "cases", [])  # type: ignore[attr-defined]
        return call

    def tests_that_count(path: str) -> dict[str, Any]:
        names = run_path(path)
        return {name: counting(test) for name, test in names.items() if name.startswith("test_")}

    monkeypatch.setitem(sys.modules, "pytest", pytest)
    monkeypatch.setattr(bare, "runpy", SimpleNamespace(run_path=tests_that_count))
    file = HERE.parent / "projection" / "cuda" / "test_gpu.py"
    assert bare.run_tests(file) == (len(called), 0)
    assert len(called) > 100
