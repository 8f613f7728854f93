"""Build the wheel, install it beside the environment, and use it from there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import cloudpickle
import pytest

import trakdask as td

ROOT = Path(__file__).resolve().parents[1]

PROBE = """
import json, trakdask
from trakdask.projection.cuda.launch import kernel_folder
print(json.dumps({
    "package": trakdask.__file__,
    "version": trakdask.__version__,
    "kernels": {file.name: file.read_text("utf-8") for file in kernel_folder().iterdir()},
}))
"""


def oracle_kernels() -> dict[str, str]:
    folder = ROOT / "kernels"
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_text("utf-8") for path in found}


def oracle_version() -> str:
    found = re.search(r'"(\d[^"]*)"', (ROOT / "trakdask" / "_version.py").read_text("utf-8"))
    assert found
    return found[1]


def run(*arguments: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    run("-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT), cwd=out)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("site")
    run("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site),
        str(wheel), cwd=site)  # fmt: skip
    return site


@pytest.mark.slow
def test_package__pickles_with_functions_that_name_it() -> None:
    # lazy_loader guards a function that has its own module's name by a class of modules that
    # cloudpickle refuses: no function of a notebook that names ``td`` would reach a cluster.
    function = cloudpickle.loads(cloudpickle.dumps(lambda: td))
    assert function() is td


def test_wheel__holds_the_package_the_kernels_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    folders = {name.split("/")[0].split("-")[0] for name in names}
    assert folders == {"trakdask"}
    assert "trakdask/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    packaged = {name.removeprefix("trakdask/_kernels/") for name in names if "/_kernels/" in name}
    assert packaged == set(oracle_kernels())


@pytest.mark.slow
def test_wheel__installed_imports_and_reads_every_kernel_file(installed: Path) -> None:
    elsewhere = installed.parent
    found = json.loads(run("-c", PROBE, cwd=elsewhere, PYTHONPATH=str(installed)))
    assert Path(found["package"]).is_relative_to(installed)
    assert found["version"] == oracle_version()
    assert found["kernels"] == oracle_kernels() != {}


@pytest.mark.slow
def test_wheel__installed_attributes_a_small_model(installed: Path) -> None:
    elsewhere = installed.parent
    printed = run(str(ROOT / ".ci" / "smoke.py"), cwd=elsewhere, PYTHONPATH=str(installed))
    assert f"from {installed}" in printed
