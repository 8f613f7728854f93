"""The message while kernels are compiled."""

from __future__ import annotations

import logging

import numba
import pytest

from trakdask.projection.compiled.jit import jit


def test_jit__says_once_that_it_compiles(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        numba.njit(lambda x: x - 1)(2)  # of somebody else
        assert caplog.messages == []
        kernel = jit(eval("lambda x: x + 1"))  # without a file, so that no machine code is kept
        assert (kernel(2), kernel(0.5)) == (3, 1.5)
        assert len(caplog.messages) == 1
        assert "compiles its kernels" in caplog.messages[0]
