"""The message while kernels are compiled."""

from __future__ import annotations

import logging

import numba
import pytest

from trakdask.errors import forget_warnings
from trakdask.projection.compiled import jit as module
from trakdask.projection.compiled.jit import jit


def test_jit__says_once_that_it_compiles(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        numba.njit(lambda x: x - 1)(2)  # of somebody else
        assert caplog.messages == []
        kernel = jit(eval("lambda x: x + 1"))  # without a file, so that no machine code is kept
        assert (kernel(2), kernel(0.5)) == (3, 1.5)
        assert len(caplog.messages) == 1
        assert "compiles its kernels" in caplog.messages[0]


def test_jit__says_it_in_the_log_of_a_process_that_another_one_started(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_warnings()
    monkeypatch.setattr(module, "parent_process", lambda: object())
    with caplog.at_level(logging.INFO, logger=module.__name__):
        assert jit(eval("lambda x: x + 1"))(2) == 3
    assert [(record.levelname, record.name) for record in caplog.records] == [
        ("INFO", module.__name__)
    ]
