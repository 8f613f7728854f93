"""The size of the house, in lines and in ideas: a feature that needs more room has to find it.

A limit is raised only by a change that says why. Lines are those with code: no docstrings, comments
and blank lines. Named types are classes and aliases.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "tests" / "benchmarks"

LINES_OF_PACKAGE = 23_597
LINES_OF_TESTS = 24_619
LINES_OF_BENCHMARKS = 1_990
NAMED_TYPES = 186
PUBLIC_NAMES = 100

PUBLIC_MODULES = (
    *("trakdask", "trakdask.fits", "trakdask.models.tasks", "trakdask.evaluate", "trakdask.plots"),
    *("trakdask.explorer", "trakdask.examples", "trakdask.testing", "trakdask.errors"),
    "trakdask.trak",
)


def modules(folder: Path) -> dict[Path, str]:
    return {path: path.read_text("utf-8") for path in folder.rglob("*.py")}


def code_lines(text: str) -> int:
    """Count what is neither blank nor a comment, and in no docstring."""
    with_docstrings = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    documented: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, with_docstrings) and ast.get_docstring(node) is not None:
            first = node.body[0]
            documented.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in documented
        for number, line in enumerate(text.splitlines(), 1)
    )


def named_types(text: str) -> Iterator[str]:
    """Yield the classes of a module, and the aliases at its top, also those for type checkers."""
    tree = ast.parse(text)
    yield from (node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    for outer in tree.body:
        for node in outer.body if isinstance(outer, ast.If) else [outer]:
            match node:
                case ast.Assign(targets=[ast.Name(name)], value=value):
                    pass
                case ast.AnnAssign(target=ast.Name(name), value=ast.expr() as value):
                    pass
                case _:
                    continue
            made = isinstance(value, ast.Call) and getattr(value.func, "id", "") in (
                *("TypeVar", "NewType", "ParamSpec", "NamedTuple"),
            )
            spelled = isinstance(value, ast.Subscript | ast.BinOp | ast.Attribute | ast.Name)
            if (made or spelled) and re.fullmatch(r"_?[A-Z][a-z]+[A-Za-z0-9]*|_?[A-Z]", name):
                yield name


def public_names() -> dict[str, list[str]]:
    """Return the functions and classes that each public module lists, each of them once."""
    found: dict[str, list[str]] = {path: [] for path in PUBLIC_MODULES}
    seen: list[object] = []
    for path in PUBLIC_MODULES:
        module = importlib.import_module(path)
        for name in module.__all__:
            value = getattr(module, name)
            if not isinstance(value, ModuleType | str) and value not in seen:
                found[path].append(name)
                seen.append(value)
    return found


@pytest.mark.parametrize(
    ("of_benchmarks", "folder", "most"),
    [
        (False, ROOT / "trakdask", LINES_OF_PACKAGE),
        (False, ROOT / "tests", LINES_OF_TESTS),
        (True, BENCHMARKS, LINES_OF_BENCHMARKS),
    ],
)
def test_code__is_of_at_most_so_many_lines(of_benchmarks: bool, folder: Path, most: int) -> None:
    counted = {
        path: code_lines(text)
        for path, text in modules(folder).items()
        if (BENCHMARKS in path.parents) == of_benchmarks
    }
    largest = sorted(counted, key=counted.__getitem__, reverse=True)[:5]
    assert sum(counted.values()) <= most, [f"{path.name} {counted[path]}" for path in largest]


def test_package__names_at_most_so_many_types() -> None:
    found = [name for text in modules(ROOT / "trakdask").values() for name in named_types(text)]
    assert len(found) <= NAMED_TYPES


def test_package__has_at_most_so_many_public_names() -> None:
    names = public_names()
    assert sum(map(len, names.values())) <= PUBLIC_NAMES, names
