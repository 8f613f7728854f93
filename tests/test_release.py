"""What a release is made of agrees: versions, dependencies of the recipe, files of workflows."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement

import trakdask as td

ROOT = Path(__file__).resolve().parents[1]
# Names of packages in conda-forge, where they differ.
IN_CONDA = {"torch": "pytorch", "dask": "dask-core"}


def recipe() -> dict:
    return yaml.safe_load((ROOT / ".ci" / "conda" / "recipe.yaml").read_text("utf-8"))


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def test_recipe__has_the_dependencies_of_pyproject() -> None:
    needed = {
        IN_CONDA.get(each.name, each.name): str(each.specifier)
        for each in map(Requirement, project()["dependencies"])
    }
    run = dict(line.split(" ", 1) for line in recipe()["requirements"]["run"])
    assert run.pop("python") == ">=${{ python_min }}"
    assert run == needed
    assert project()["requires-python"] == f">={recipe()['context']['python_min']}"


def test_recipe__builds_with_the_build_system_of_pyproject() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    (needed,) = settings["build-system"]["requires"]
    assert needed.replace(">=", " >=") in recipe()["requirements"]["host"]


def test_versions__are_the_same_everywhere() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert cited["version"] == recipe()["context"]["version"] == td.__version__
    assert cited["license"] == recipe()["about"]["license"] == project()["license"]


def test_workflows__name_files_and_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = path.read_text("utf-8")
        assert yaml.safe_load(text)["jobs"]
        assert set(re.findall(r"\bmake ([a-z-]+)$", text, re.MULTILINE)) <= targets
        for file in re.findall(r"\.ci/[\w./]*\w", text):
            assert (ROOT / file).exists(), f"{path.name} names {file}"
