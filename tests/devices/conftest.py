"""The device of these tests: the fake GPU, or the real one that TESTS_WITH names, as "cuda"."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests import fakegpu
from trakdask import tensors


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """Return the name of an accelerator that this process has, or skip."""
    kind = os.environ.get("TESTS_WITH", "fakegpu")
    if kind == "fakegpu":
        request.getfixturevalue("fake_gpu")
    elif not torch.get_device_module(kind).is_available():
        pytest.skip(f"torch {torch.__version__} sees no {kind}")
    return kind


@pytest.fixture
def no_float64(fake_gpu: None) -> Iterator[str]:
    """Return the name of a device that has no float64, as Apple's GPUs."""
    fakegpu.allow_float64(False)
    tensors.float64_device.cache_clear()
    yield "fakegpu"
    tensors.float64_device.cache_clear()
