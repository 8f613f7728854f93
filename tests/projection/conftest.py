from __future__ import annotations

import pytest


@pytest.fixture(params=["0", "1"], ids=["numpy", "numba"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test by numpy and torch alone, and by numba."""
    monkeypatch.setenv("TRAKDASK_NUMBA", request.param)
    return str(request.param)
