from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from trakdask.projection.cuda import sources

FOLDER = Path(__file__).resolve().parents[3] / "kernels"


def oracle(folder: Path) -> dict[str, str]:
    """Read every file below a folder, by its relative name."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_text("utf-8") for path in found}


def read_all() -> dict[str, str]:
    return {name: sources.kernel_source(name) for name in sources.kernel_files()}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand the loader in an empty package folder of its own."""
    folder = tmp_path / "site-packages" / "trakdask"
    folder.mkdir(parents=True)
    monkeypatch.setattr(sources, "files", lambda name: folder)
    monkeypatch.setattr(sources, "__file__", str(folder / "projection" / "cuda" / "sources.py"))
    return folder


def test_kernel_files__of_the_checkout() -> None:
    assert read_all() == oracle(FOLDER) != {}


def test_kernel_files__packaged_wins_over_checkout(package: Path) -> None:
    (package / "_kernels").mkdir(parents=True)
    (package / "_kernels" / "b.cu").write_text("// packaged")
    (package / "_kernels" / ".hidden").write_text("")
    (package.parent / "kernels").mkdir()
    (package.parent / "kernels" / "b.cu").write_text("// beside")
    (package.parent / "pyproject.toml").write_text("")
    assert list(sources.kernel_files()) == ["b.cu"]
    assert sources.kernel_source("b.cu") == "// packaged"


def test_kernel_files__checkout_when_nothing_is_packaged(package: Path) -> None:
    shutil.copytree(FOLDER, package.parent / "kernels")
    (package.parent / "pyproject.toml").write_text("")
    assert read_all() == oracle(FOLDER)


def test_kernel_files__folder_of_another_distribution_is_not_ours(package: Path) -> None:
    (package.parent / "kernels").mkdir()
    (package.parent / "kernels" / "theirs.cu").write_text("")
    with pytest.raises(FileNotFoundError, match=r"expected.*no _kernels folder.*pip install"):
        sources.kernel_files()


def test_kernel_program__puts_included_files_in_place(package: Path) -> None:
    (package / "_kernels").mkdir(parents=True)
    (package / "_kernels" / "a.cu").write_text('// a\n#include "b.cuh"\nint a;\n')
    (package / "_kernels" / "b.cuh").write_text('#include "c.cuh"\nint b;')
    (package / "_kernels" / "c.cuh").write_text("int c;")
    assert sources.kernel_program("a.cu") == "// a\nint c;\nint b;\nint a;\n"
