"""The kernel folder, in an installed wheel or in a checkout."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from trakdask.projection.cuda import launch

FOLDER = Path(__file__).resolve().parents[3] / "kernels"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand the loader in an empty package folder of its own."""
    folder = tmp_path / "site-packages" / "trakdask"
    folder.mkdir(parents=True)
    monkeypatch.setattr(launch, "files", lambda name: folder)
    monkeypatch.setattr(launch, "__file__", str(folder / "projection" / "cuda" / "launch.py"))
    return folder


def test_kernel_folder__packaged_wins_over_checkout(package: Path) -> None:
    shutil.copytree(FOLDER, package.parent / "kernels")
    with pytest.raises(FileNotFoundError, match=r"no _kernels folder.*pip install"):
        launch.kernel_folder()  # a folder of another distribution
    (package.parent / "pyproject.toml").write_text("")
    assert launch.kernel_folder() == package.parent / "kernels"
    (package / "_kernels").mkdir()
    assert launch.kernel_folder() == package / "_kernels"


def test_kernel_program__puts_included_files_in_place(package: Path) -> None:
    (package / "_kernels").mkdir()
    (package / "_kernels" / "a.cu").write_text('// a\n#include "b.cuh"\nint a;\n')
    (package / "_kernels" / "b.cuh").write_text('#include "c.cuh"\nint b;')
    (package / "_kernels" / "c.cuh").write_text("int c;")
    assert launch.kernel_program("a.cu") == "// a\nint c;\nint b;\nint a;\n"
