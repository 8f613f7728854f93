"""Print how far a call walks through the package: ``python docs/walks.py``.

A walk is every call of a function of trakdask that one call of its public API makes, in this
process and thread. Its **stays** are the functions that the Dataset of features passes through: one
of their arguments is or holds a Dataset, or their result does. Functions without a name
(comprehensions, lambdas) belong to what is around them. Arrays are small, and everything was called
once before, so that neither imports nor what a process computes once are counted.

With the name of a walk, its stays are printed in their order. ``--check`` fails if a walk has more
stays than its budget.
"""

from __future__ import annotations

import dataclasses
import functools
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
import xarray as xr

import trakdask as td

PACKAGE = Path(td.__file__).parent

#: The most stays of a walk. The next feature has to take some away, or to say why it needs more.
BUDGETS = {
    "score, computed": 33,
    "score, saved": 31,
    "group_score": 33,
    "group_score, share": 35,
    "save": 34,
}


@dataclass
class Walk:
    """The functions of the package that are called while it is a profile function."""

    calls: Counter[str] = field(default_factory=Counter)
    modules: set[str] = field(default_factory=set)
    stays: dict[str, None] = field(default_factory=dict)
    """The functions that a Dataset passes through, in the order of their first calls."""

    def __call__(self, frame: FrameType, event: str, result: Any) -> None:
        """Count a call, or look at its result; as ``sys.setprofile`` wants it."""
        code = frame.f_code
        module = module_of(code)
        if module is None or code.co_name.startswith("<") or event not in ("call", "return"):
            return
        name = f"{module}.{code.co_qualname}"
        passed: list[Any] = [result]
        if event == "call":
            self.calls[name] += 1
            self.modules.add(module)
            n = code.co_argcount + code.co_kwonlyargcount
            passed = [frame.f_locals.get(argument) for argument in code.co_varnames[:n]]
        if any(map(holds_dataset, passed)):
            self.stays.setdefault(name)


def holds_dataset(value: Any, depth: int = 2) -> bool:
    """Return whether a value is a Dataset, or a tuple, list or dataclass that holds one."""
    if isinstance(value, xr.Dataset):
        return True
    if not depth:
        return False
    if isinstance(value, tuple | list):
        return any(holds_dataset(item, depth - 1) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [each.name for each in dataclasses.fields(value)]
        return any(holds_dataset(getattr(value, name, None), depth - 1) for name in names)
    return False


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
    source = {"source": ("sample", ["web", "wiki"] * 8)}
    features, targets, five = (
        td.testing.simulate_features(n, 4, c, chunks=8, seed=seed)
        for n, c, seed in ((16, 2, 0), (4, 2, 1), (16, 5, 0))
    )
    features, five = features.assign_coords(source), five.assign_coords(source)
    few = five.isel(sample=slice(4)).drop_vars("source")
    samples = td.from_arrays({"image": np.ones((16, 4), "f4"), "label": np.zeros(16, int)})
    model = td.Model(torch.nn.Linear(4, 2), task="image_classification")
    with tempfile.TemporaryDirectory() as folder, dask.config.set(scheduler="synchronous"):
        saved = td.save(features, f"{folder}/once.zarr", progress=False)
        calls: dict[str, Callable[[], object]] = {
            "score, computed": lambda: td.score(features, targets),
            "score, saved": lambda: td.score(saved, targets),
            "group_score": lambda: td.group_score(saved, targets, by="source"),
            "group_score, share": lambda: td.group_score(five, few, by="source", share=True),
            "save": lambda: td.save(features, f"{folder}/f.zarr", progress=False),
            "save, resumed": lambda: td.save(features, f"{folder}/f.zarr", progress=False),
            "open": lambda: td.open(f"{folder}/f.zarr"),
            "featurize": lambda: td.featurize(samples, model),
        }
        for name, call in calls.items():
            if name != "save":
                call()
            yield name, walked(call)


def main() -> None:
    """Print the table, or the stays of one walk, or fail where a walk is over its budget."""
    found = dict(walks())
    for name in sys.argv[1:]:
        if name in found:
            print("\n".join(found[name].stays))
            return
    print(f"{'walk':22}{'calls':>8}{'functions':>11}{'modules':>9}{'stays':>7}  budget")
    for name, walk in found.items():
        sizes = f"{walk.calls.total():>8}{len(walk.calls):>11}{len(walk.modules):>9}"
        print(f"{name:22}{sizes}{len(walk.stays):>7}  {BUDGETS.get(name, '')}")
    over = [name for name, most in BUDGETS.items() if len(found[name].stays) > most]
    if "--check" in sys.argv and over:
        sys.exit(f"more stays than their budget: {', '.join(over)}; see python docs/walks.py NAME")


if __name__ == "__main__":
    main()
