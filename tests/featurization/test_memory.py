"""Memory of tasks: what the scheduler says of its workers, or what this machine has."""

from __future__ import annotations

import math

import dask
import pytest
import torch
from distributed import Client
from distributed.system import MEMORY_LIMIT

from trakdask.featurization import devices as memory


def test_largest_memory__of_this_machine() -> None:
    # A worker inside this process may have made a client of its own, which is active then.
    with dask.config.set(scheduler="threads"):
        assert memory.largest_memory() == MEMORY_LIMIT


def test_largest_memory__of_the_workers_of_a_client(client: Client) -> None:
    limits = client.run(lambda dask_worker: dask_worker.memory_manager.memory_limit)
    known = [limit for limit in limits.values() if limit]
    assert memory.largest_memory() == (max(known) if len(known) == len(limits) else math.inf)


def test_budget_bytes__grows_with_the_weights_of_large_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 2**40)
    small, large = torch.empty(1000, device="meta"), torch.empty(10**9, device="meta")
    assert memory.budget_bytes({"a": small}) == 96 * 2**20
    assert memory.budget_bytes({"a": small, "b": large}) == 8 * 4 * (10**9 + 1000)
    monkeypatch.setattr(memory, "available_bytes", lambda device: 2**30)
    assert memory.budget_bytes({"a": small, "b": large}) == 2**29
