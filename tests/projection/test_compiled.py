"""When numba is taken up, and the message while kernels are compiled."""

from __future__ import annotations

import logging
import sys

import numba
import pytest

from trakdask.errors import forget_warnings
from trakdask.projection import acceleration
from trakdask.projection import compiled as module
from trakdask.projection.compiled import jit


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


def test_numba_kernels__when_they_are_worth_their_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAKDASK_NUMBA")
    monkeypatch.setattr(acceleration, "_spent_s", 0.0)
    assert acceleration.numba_kernels() is None
    monkeypatch.setattr(acceleration, "PATIENCE_S", 1e-9)
    with acceleration.timed():
        assert acceleration.numba_kernels() is None
    assert acceleration.numba_kernels() is module
    monkeypatch.setattr(acceleration, "PATIENCE_S", 1e9)
    assert acceleration.numba_kernels() is None
    acceleration.stop_waiting()
    assert acceleration.numba_kernels() is module


def test_numba_kernels__none_where_numba_does_not_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    acceleration._load.cache_clear()
    try:
        assert acceleration.numba_kernels() is None
    finally:
        acceleration._load.cache_clear()
