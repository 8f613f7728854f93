"""What gpu.py does without: small packages that machines with a GPU may lack, and pytest.

python tests/benchmarks/_bare.py FILE    # run the tests in a file
"""

from __future__ import annotations

import importlib.util
import itertools
import pickle
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def stand_in(name: str, **members: Any) -> None:
    """Put members in the place of a package that is not installed."""
    if importlib.util.find_spec(name) is None:
        module = ModuleType(name)
        vars(module).update(members)
        sys.modules[name] = module


def prepare() -> None:
    """Make trakdask importable from here; what it needs beside torch and numpy is not used."""
    sys.path.insert(0, str(ROOT))
    stand_in("lazy_loader", attach_stub=lambda *_: (None, lambda: [], []))
    stand_in("cloudpickle", Pickler=pickle.Pickler, dump=pickle.dump)


class Mark:
    """``pytest.mark``: keeps what tests are called with."""

    def __getattr__(self, name: str) -> Any:
        return self

    def parametrize(
        self, names: str | tuple[str, ...], values: Any, **_: Any
    ) -> Callable[..., Any]:
        keys = [key.strip() for key in names.split(",")] if isinstance(names, str) else list(names)

        def keep(test: Any) -> Any:
            cases = [dict(zip(keys, v if len(keys) > 1 else [v], strict=True)) for v in values]
            test.cases = [*getattr(test, "cases", []), cases]
            return test

        return keep


def calls(test: Any) -> Iterator[dict[str, Any]]:
    """Yield the arguments of each call of a test."""
    for parts in itertools.product(*getattr(test, "cases", [])):
        yield {key: value for part in parts for key, value in part.items()}


def run_tests(file: Path) -> tuple[int, int]:
    """Run the tests of a file that needs no fixtures; return how many passed and failed."""
    pytest = ModuleType("pytest")
    pytest.mark = Mark()  # type: ignore[attr-defined]
    sys.modules["pytest"] = pytest
    tests = {n: t for n, t in runpy.run_path(str(file)).items() if n.startswith("test_")}
    passed = failed = 0
    for name, test in tests.items():
        for arguments in calls(test):
            try:
                test(**arguments)
                passed += 1
            except Exception:
                failed += 1
                print(f"FAILED {name} {arguments}", flush=True)
                traceback.print_exc(limit=-2, file=sys.stdout)
    return passed, failed


if __name__ == "__main__":
    prepare()
    n_passed, n_failed = run_tests(Path(sys.argv[1]))
    print(f"{n_passed} passed, {n_failed} failed")
    sys.exit(n_failed > 0)
