"""Memory of tasks: what the scheduler says of its workers, or what this machine has."""

from __future__ import annotations

import math
from types import SimpleNamespace

import dask
import pytest
from distributed import Client
from distributed.system import MEMORY_LIMIT

from trakdask.featurization import memory


def test_largest_memory__of_this_machine() -> None:
    # A worker inside this process may have made a client of its own, which is active then.
    with dask.config.set(scheduler="threads"):
        assert memory.largest_memory() == MEMORY_LIMIT


def test_largest_memory__of_the_workers_of_a_client(client: Client) -> None:
    limits = client.run(lambda dask_worker: dask_worker.memory_manager.memory_limit)
    known = [limit for limit in limits.values() if limit]
    assert memory.largest_memory() == (max(known) if len(known) == len(limits) else math.inf)


@pytest.mark.parametrize(
    ("limits", "expected"), [([], math.inf), ([2**30, 0], math.inf), ([2**30, 2**31], 2**31)]
)
def test_largest_memory__limits(
    limits: list[int], expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = {str(i): {"memory_limit": limit} for i, limit in enumerate(limits)}
    fake = SimpleNamespace(scheduler_info=lambda n_workers: {"workers": workers})
    monkeypatch.setattr(memory, "active_client", lambda: fake)
    assert memory.largest_memory() == expected
