"""Every public function has a row in some table of bad inputs, and there are enough rows."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import trakdask as td
from tests.bad_inputs.bad_input import BadInput

HERE = Path(__file__).parent

ACCEPTS_ANYTHING: dict[str, str] = {
    "testing.raise_if_dask_computes": "takes no argument",
    "examples.digits_cnn": "takes no argument",
    "examples.digits_mlp": "takes no argument",
    "Projector": "is abstract",
    "Task": "is a protocol",
    "tasks.Task": "is a protocol",
    "tasks.TrakTask": "is a protocol",
    "tasks.Forward": "is made by trakdask",
}
"""Public names that cannot be given a bad input, with the reason."""


def all_rows() -> list[BadInput]:
    rows = []
    for path in sorted(HERE.glob("test_*.py")):
        if path.name != Path(__file__).name:
            module = importlib.import_module(f"tests.bad_inputs.{path.stem}")
            rows += list(module.ROWS)
    return rows


def public_callables() -> set[str]:
    """What users can call: of the top level, and of the modules that are public themselves."""
    found = set()
    for name in td.__all__:
        thing = getattr(td, name)
        if inspect.ismodule(thing):
            found |= {f"{name}.{each}" for each in thing.__all__ if is_called(getattr(thing, each))}
        elif is_called(thing):
            found.add(name)
    return found


def is_called(thing: object) -> bool:
    is_error = inspect.isclass(thing) and issubclass(thing, Exception)
    return (inspect.isfunction(thing) or inspect.isclass(thing)) and not is_error


def test_bad_inputs__every_public_function_has_a_row() -> None:
    covered = {row.function for row in all_rows()}
    missing = public_callables() - covered - set(ACCEPTS_ANYTHING)
    assert not missing, f"add rows of bad inputs for {sorted(missing)}"


def test_bad_inputs__rows_and_exceptions_name_what_exists() -> None:
    known = public_callables() | {f"accessor.{name}" for name in ("samples", "features", "scores")}
    unknown = {row.function for row in all_rows()} - known
    assert not unknown, sorted(unknown)
    assert not set(ACCEPTS_ANYTHING) - public_callables()
    assert not set(ACCEPTS_ANYTHING) & {row.function for row in all_rows()}


def test_bad_inputs__at_least_300() -> None:
    assert len(all_rows()) >= 300
