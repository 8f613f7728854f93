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


def test_kernel_files__packaged_wins_over_checkout(package: Path) -> None:
    shutil.copytree(FOLDER, package.parent / "kernels")
    with pytest.raises(FileNotFoundError, match=r"no _kernels folder.*pip install"):
        sources.kernel_files()  # a folder of another distribution
    (package.parent / "pyproject.toml").write_text("")
    assert read_all() == oracle(FOLDER)
    shutil.copytree(FOLDER, package / "_kernels")
    (package / "_kernels" / "README.md").write_text("packaged")
    (package / "_kernels" / ".hidden").write_text("")
    assert read_all() == oracle(FOLDER) | {"README.md": "packaged"}


def test_kernel_program__puts_included_files_in_place(package: Path) -> None:
    (package / "_kernels").mkdir()
    (package / "_kernels" / "a.cu").write_text('// a\n#include "b.cuh"\nint a;\n')
    (package / "_kernels" / "b.cuh").write_text('#include "c.cuh"\nint b;')
    (package / "_kernels" / "c.cuh").write_text("int c;")
    assert sources.kernel_program("a.cu") == "// a\nint c;\nint b;\nint a;\n"
