"""The bar counts completed work, in terminals and notebooks."""

from __future__ import annotations

from pathlib import Path

import pytest

import trakdask as td
from trakdask import execution


@pytest.mark.parametrize("scheduler", ["threads", "cluster"])
def test_save__the_same_bar_with_and_without_a_client(
    scheduler: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    if scheduler == "cluster":
        request.getfixturevalue("client")
    features = td.testing.simulate_features(40, 8, chunks=16)
    for _ in range(2):  # and again where all is there
        td.save(features, tmp_path / "f.zarr")
        assert "save f.zarr" in (shown := capsys.readouterr().out)
        assert "6/6" in shown


def test_polled_bar__says_what_is_resumed(capsys: pytest.CaptureFixture[str]) -> None:
    for done in (0, 3, 5):
        with execution.polled_bar("title", 5, lambda: done):  # noqa: B023
            pass
        assert (f"{done} of 5 were stored before" in capsys.readouterr().out) == (done > 0)
