"""The store that all tests of a file begin with: its function ``fill`` makes it once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    store = tmp_path_factory.mktemp("template") / "f.zarr"
    request.module.fill(store)
    return store


@pytest.fixture
def store(template: Path, tmp_path: Path) -> Path:
    return shutil.copytree(template, tmp_path / "f.zarr")
