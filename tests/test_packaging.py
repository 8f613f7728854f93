"""Build the wheel, install it beside the environment, and use it from there."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import cloudpickle
import pytest

import trakdask as td

ROOT = Path(__file__).resolve().parents[1]

PROBE = """
import json, runpy, sys, trakdask
from trakdask.projection.cuda.launch import kernel_folder
runpy.run_path(sys.argv[1], run_name="__main__")
kernels = {file.name: file.read_text("utf-8") for file in kernel_folder().iterdir()}
print(json.dumps([trakdask.__file__, trakdask.__version__, kernels]))
"""


def oracle_kernels() -> dict[str, str]:
    folder = ROOT / "kernels"
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_text("utf-8") for path in found}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, run_python) -> Path:
    out = tmp_path_factory.mktemp("dist")
    run_python("-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT), cwd=out)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory, run_python) -> Path:
    site = tmp_path_factory.mktemp("site")
    run_python("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site),
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
def test_wheel__installed_attributes_a_small_model(installed: Path, run_python) -> None:
    """And reads its kernels."""
    smoke = str(ROOT / ".ci" / "smoke.py")
    printed = run_python("-c", PROBE, smoke, cwd=installed.parent, PYTHONPATH=str(installed))
    package, version, kernels = json.loads(printed.splitlines()[-1])
    assert Path(package).is_relative_to(installed)
    assert version == td.__version__
    assert kernels == oracle_kernels() != {}
