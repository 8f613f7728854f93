"""The accessor exists in either order of imports; each method calls its own function as it is."""

from __future__ import annotations

import inspect
import subprocess
import sys
from unittest.mock import Mock

import pytest
import xarray as xr

import trakdask as td
from trakdask.accessor import FeaturesAccessor, ScoresAccessor
from trakdask.testing import simulate_features

FEATURES, TARGETS = simulate_features(20, 4, 2, chunks=8), simulate_features(5, 4, 2, seed=1)

METHODS = [
    pytest.param(accessor, name, id=f"{accessor.__name__}.{name}")
    for accessor in (FeaturesAccessor, ScoresAccessor)
    for name in vars(accessor)
    if not name.startswith("_")
]


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("imports", ["trakdask, xarray", "xarray, trakdask"])
def test_accessor__exists_after_both_imports(imports: str) -> None:
    code = f"import {imports}; print(xarray.DataArray([1]).trak, xarray.Dataset().trak)"
    found = run(code)
    assert "ScoresAccessor" in found
    assert "FeaturesAccessor" in found


def test_import__loads_next_to_nothing() -> None:
    code = """
import sys, xarray
before = set(sys.modules)
import trakdask
new = sorted(name for name in set(sys.modules) - before if name.startswith("trakdask"))
print(new, {"torch", "dask", "distributed", "zarr"} & (set(sys.modules) - before))
"""
    assert run(code) == "['trakdask', 'trakdask._version', 'trakdask.accessor'] set()"


@pytest.mark.parametrize(("accessor", "name"), METHODS)
def test_signature__is_that_of_the_function(accessor: type, name: str) -> None:
    function, method = (inspect.signature(getattr(of, name)) for of in (td, accessor))
    assert list(method.parameters.values())[1:] == list(function.parameters.values())[1:]
    assert method.return_annotation == function.return_annotation


@pytest.mark.parametrize(("accessor", "name"), METHODS)
def test_method__calls_its_own_function(
    accessor: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every argument under its own name, which differs for each."""
    signature = inspect.signature(getattr(td, name))
    data, *arguments = signature.parameters
    given = {argument: object() for argument in arguments}
    function = Mock()
    for other in {method.values[1] for method in METHODS}:
        monkeypatch.setattr(td, other, function if other == name else None)
    labelled = object()
    found = getattr(accessor(labelled), name)(**given)
    (call,) = function.call_args_list
    assert signature.bind(*call.args, **call.kwargs).arguments == {data: labelled, **given}
    assert found is (function.return_value if signature.return_annotation != "None" else None)


def test_method__same_results_as_the_functions() -> None:
    scores = FEATURES.trak.score(TARGETS)
    xr.testing.assert_identical(scores.compute(), td.score(FEATURES, TARGETS).compute())
    xr.testing.assert_identical(scores.trak.top_k(2).compute(), td.top_k(scores, 2).compute())
    grouped = FEATURES.trak.group_score(TARGETS, by="label")
    expected = td.group_score(FEATURES, TARGETS, by="label")
    xr.testing.assert_identical(grouped.compute(), expected.compute())
    assert grouped.dims == ("label", "target")
    xr.testing.assert_identical(FEATURES.trak.gram().compute(), td.gram(FEATURES).compute())
    found = FEATURES.trak.damping(damping=0.1).compute()
    xr.testing.assert_identical(found, td.damping(FEATURES, damping=0.1).compute())
