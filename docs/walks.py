"""Print how far a call walks through the package: ``python docs/walks.py``.

A walk is every call of a function of trakdask that one call of its public API makes, in this
process and thread. An entry is such a call from a function of another module of trakdask. Functions
without a name (comprehensions, lambdas) belong to what is around them, and a generator counts once.
Arrays are small, and everything was called once before, so that neither imports nor what a process
computes once are counted.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import dask
import numpy as np
import torch

import trakdask as td

PACKAGE = Path(td.__file__).parent
SUBJECT = "estimators"
_RESUMED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_SHORT_MODULE = 15  # lines; shorter ones only name what a folder holds


@dataclass
class Walk:
    """The calls of functions of the package, counted while it is a profile function."""

    calls: Counter[str] = field(default_factory=Counter)
    """By module."""
    entries: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By the module that they come from, and the one that they lead to."""
    functions: Counter[str] = field(default_factory=Counter)
    _begun: dict[int, FrameType] = field(default_factory=dict)

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Count a call; as ``sys.setprofile`` wants it."""
        module = module_of(frame.f_code)
        if event != "call" or module is None or frame.f_code.co_name.startswith("<"):
            return
        if frame.f_code.co_flags & _RESUMED:  # called again for each value that it yields
            if id(frame) in self._begun:
                return
            self._begun[id(frame)] = frame  # alive, so that its id stays its own
        self.calls[module] += 1
        self.functions[f"{module}.{frame.f_code.co_qualname}"] += 1
        caller = frame.f_back
        while caller is not None and module_of(caller.f_code) is None:
            caller = caller.f_back
        if caller is not None and (before := module_of(caller.f_code)) not in (None, module):
            self.entries[before or "", module] += 1

    def row(self) -> tuple[int, int, int, int]:
        """Return the numbers of calls, modules, entries, and entries into estimators."""
        into = sum(n for (_, to), n in self.entries.items() if to.endswith(SUBJECT))
        return self.calls.total(), len(self.calls), self.entries.total(), into


@functools.cache
def module_of(code: CodeType) -> str | None:
    """Return the module of the package that some code is from, if it is from one."""
    path = Path(code.co_filename)
    if PACKAGE not in path.parents:
        return None
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def walked(call: Callable[[], object]) -> Walk:
    """Return the walk of a call."""
    walk = Walk()
    sys.setprofile(walk)
    try:
        call()
    finally:
        sys.setprofile(None)
    return walk


def walks() -> Iterator[tuple[str, Walk]]:
    """Yield the name and the walk of each call that is followed."""
    options = {"n_checkpoints": 2, "proj_dim": 4}
    features = td.testing.simulate_features(n_samples=16, chunks=8, **options)
    targets = td.testing.simulate_features(n_samples=4, seed=1, **options)
    samples = td.from_arrays({"image": np.ones((16, 4), "f4"), "label": np.zeros(16, int)})
    model = td.Model(torch.nn.Linear(4, 2), task="image_classification")
    with tempfile.TemporaryDirectory() as folder, dask.config.set(scheduler="synchronous"):
        saved = td.save(features, f"{folder}/once.zarr", progress=False)
        for name, ds in (("computed", features), ("saved", saved)):
            td.score(ds, targets)
            yield f"score, {name}", walked(functools.partial(td.score, ds, targets))
        steps: dict[str, Callable[[], object]] = {
            "save": lambda: td.save(features, f"{folder}/f.zarr", progress=False),
            "save, resumed": lambda: td.save(features, f"{folder}/f.zarr", progress=False),
            "open": lambda: td.open(f"{folder}/f.zarr"),
            "featurize": lambda: td.featurize(samples, model),
        }
        td.featurize(samples, model)
        for name, step in steps.items():
            yield name, walked(step)


def bodies() -> list[int]:
    """Return the lines of every function's body, without its docstring."""
    trees = [ast.parse(path.read_text("utf-8")) for path in PACKAGE.rglob("*.py")]
    functions = [
        node
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return sorted(map(_lines, functions))


def _lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = function.body[ast.get_docstring(function) is not None :]
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def modules() -> list[Path]:
    """Return the modules that hold more than names."""
    paths = PACKAGE.rglob("*.py")
    return [path for path in paths if len(path.read_text("utf-8").splitlines()) > _SHORT_MODULE]


def main() -> None:
    """Print the table; with the name of a walk, its entries and functions, the most first."""
    if len(sys.argv) > 1:
        walk = dict(walks())[sys.argv[1]]
        for (before, to), n in walk.entries.most_common():
            print(f"{n:6} {before} -> {to}")
        for name, n in walk.functions.most_common():
            print(f"{n:6} {name}")
        return
    lines = bodies()
    ninth = lines[math.ceil(0.9 * len(lines)) - 1]
    print(f"modules over {_SHORT_MODULE} lines: {len(modules())}")
    print(f"body of a function, lines: median {lines[len(lines) // 2]}, p90 {ninth}, ", end="")
    print(f"max {lines[-1]}")
    print(f"\n{'walk':18}{'calls':>8}{'modules':>9}{'entries':>9}  into {SUBJECT}")
    for name, walk in walks():
        calls, n, entries, into = walk.row()
        print(f"{name:18}{calls:>8}{n:>9}{entries:>9}  {into:>{5 + len(SUBJECT)}}")


if __name__ == "__main__":
    main()
