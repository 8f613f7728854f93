"""The whole repository: its top level, commands, versions, pins and imports."""

from __future__ import annotations

import operator
import re
import subprocess
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import trakdask as td

ROOT = Path(__file__).resolve().parents[1]

TOP_LEVEL = {
    *("trakdask", "kernels", "notebooks", "tests"),
    *("pyproject.toml", "README.md", "Makefile", "LICENSE", "CHANGELOG.md", "constraints.txt"),
    *(".ci", ".github", ".gitignore", ".pre-commit-config.yaml", "CITATION.cff", "docs"),
}
HEAVY = ("dask", "distributed", "zarr")
OPTIONAL = ("numba", "cupy", "fast_jl", "matplotlib", "sklearn", "bokeh", "panel", "trak")


def read(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def pinned() -> dict[str, str]:
    lines = (line.split("#")[0].strip() for line in read("constraints.txt").splitlines())
    pairs = (line.split("==") for line in lines if line)
    return {canonicalize_name(name): version for name, version in pairs}


def required(name: str, extras: frozenset[str], found: set[str]) -> set[str]:
    """Walk the requirements of an installed distribution, as pip does."""
    for line in requires(name) or ():
        requirement = Requirement(line)
        marker = requirement.marker
        if marker and not any(marker.evaluate({"extra": extra}) for extra in extras | {""}):
            continue
        known = canonicalize_name(requirement.name)
        if known not in found or requirement.extras:
            found.add(known)
            required(known, frozenset(requirement.extras), found)
    return found


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_top_level__holds_only_the_agreed_names() -> None:
    listed = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert {line.split("/")[0] for line in listed.stdout.splitlines()} <= TOP_LEVEL


def test_makefile__has_every_target_that_pages_and_workflows_name() -> None:
    pages = ["README.md", ".github/CONTRIBUTING.md", "docs/developers/contributing.md"]
    text = "\n".join(map(read, [*pages, "docs/start/first_attribution.md"]))
    named = set(re.findall(r"(?:`|^)make ([a-z-]+)\b", text, flags=re.MULTILINE))
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        steps = path.read_text("utf-8")
        assert yaml.safe_load(steps)["jobs"]
        named |= set(re.findall(r"\bmake ([a-z-]+)$", steps, re.MULTILINE))
        for file in re.findall(r"\.ci/[\w./]*\w", steps):
            assert (ROOT / file).exists(), f"{path.name} names {file}"
    assert named <= set(re.findall(r"^([a-z-]+):", read("Makefile"), flags=re.MULTILINE))


def test_forms_of_issues__ask_for_what_there_is() -> None:
    forms = {path.name: path.read_text("utf-8") for path in (ROOT / ".github").rglob("*TE/*.yml")}
    assert "td.show_versions()" in forms["fault.yml"]
    for name, text in forms.items():
        assert yaml.safe_load(text), name
        for path in re.findall(r"\btd\.([\w.]+\w)\(", text):
            assert operator.attrgetter(path)(td), f"{name} names td.{path}"
        for page in re.findall(r"docs/[\w/]+\.md", text):
            assert (ROOT / page).exists(), f"{name} names {page}"


IN_CONDA = {"torch": "pytorch", "dask": "dask-core"}
"""Names of packages in conda-forge, where they differ."""


def test_recipe__agrees_with_pyproject_and_the_citation() -> None:
    recipe = yaml.safe_load(read(".ci/conda/recipe.yaml"))
    settings, cited = tomllib.loads(read("pyproject.toml")), yaml.safe_load(read("CITATION.cff"))
    project = settings["project"]
    needed = {
        IN_CONDA.get(requirement.name, requirement.name): str(requirement.specifier)
        for requirement in map(Requirement, project["dependencies"])
    }
    run = dict(line.split(" ", 1) for line in recipe["requirements"]["run"])
    assert run == {"python": ">=${{ python_min }}", **needed}
    assert project["requires-python"] == f">={recipe['context']['python_min']}"
    (build,) = settings["build-system"]["requires"]
    assert build.replace(">=", " >=") in recipe["requirements"]["host"]
    assert cited["version"] == recipe["context"]["version"] == td.__version__
    assert cited.get("repository-code") == project["urls"].get("Repository")
    assert cited["license"] == recipe["about"]["license"] == project["license"]


SLEEPS = {
    "tests/waiting.py",  # where all others wait
    "tests/faults/_run.py",  # the time that computing a block takes
    "tests/faults/_fit.py",  # the same
    "tests/faults/test_kills.py",  # kills at random moments
}


def test_tests__wait_for_conditions_and_have_no_time_limits_of_their_own() -> None:
    """A second here is a minute where the machine is busy; see tests/waiting.py."""
    limit = re.compile(r"timeout=\d|\b(wait|result|communicate)\([1-9]")
    for path in (ROOT / "tests").rglob("*.py"):
        name, text = path.relative_to(ROOT).as_posix(), path.read_text("utf-8")
        if "benchmarks" not in path.parts:
            assert [line for line in text.splitlines() if limit.search(line)] == [], name
            assert name in SLEEPS or not re.search(r"\bsleep\((?!0\))", text), name


def test_constraints__pin_everything_the_two_commands_install() -> None:
    missing = required("trakdask", frozenset({"dev", "demo", "docs"}), set()) - set(pinned())
    assert missing == set()


@pytest.mark.slow
def test_import__takes_what_xarray_takes_and_nothing_optional(run_python) -> None:
    """A shell waits for no arithmetic, which needs no cluster and no store.

    The public modules are there at once.
    """
    code = (
        "import sys, trakdask.command_line.commands\n"
        "assert not {'torch', 'dask', 'distributed'} & {*sys.modules}\n"
        "import trakdask as td, trakdask.projection.cuda, trakdask.models.model\n"
        f"print([name for name in {HEAVY + OPTIONAL} if name in sys.modules])\n"
        "td.tasks.Task, td.plots, td.examples, td.testing\n"
        "import xarray; xarray.DataArray([1]).trak, xarray.Dataset().trak"
    )
    assert run_python("-W", "error", "-c", code).strip() == "[]"
