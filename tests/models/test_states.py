"""The cache of state dicts: what is read once, and what goes first."""

from __future__ import annotations

import threading

import pytest
import torch

from trakdask.models.checkpoints import State, States

BYTES = 4 * 10


def read(states: States, digest: str) -> list[str]:
    """Ask for a state dict; return the digest if it had to be read."""
    reads = []

    def reading() -> State:
        reads.append(digest)
        return {"weight": torch.full((10,), float(digest))}

    state = states.get(digest, reading)
    assert state["weight"].tolist() == [float(digest)] * 10
    return reads


@pytest.mark.parametrize(
    ("most_bytes", "kept"), [(0, "34"), (2 * BYTES, "34"), (3 * BYTES, "234"), (9 * BYTES, "1234")]
)
def test_get__keeps_what_fits_and_the_last_two(most_bytes: int, kept: str) -> None:
    states = States()
    states.most_bytes = most_bytes
    assert [read(states, digest) for digest in "1234"] == [["1"], ["2"], ["3"], ["4"]]
    assert states.digests() == list(kept)
    assert read(states, "4") == read(states, "3") == []


def test_get__what_was_used_last_stays() -> None:
    states = States()
    states.most_bytes = 3 * BYTES
    for digest in "1231":
        read(states, digest)
    assert read(states, "4") == ["4"]
    assert states.digests() == ["3", "1", "4"]


def test_get__less_memory_than_before() -> None:
    states = States()
    states.most_bytes = 4 * BYTES
    for digest in "1234":
        read(states, digest)
    states.most_bytes = 0
    assert read(states, "4") == []
    assert states.digests() == ["3", "4"]


def test_get__an_error_is_not_kept() -> None:
    states = States()
    with pytest.raises(ZeroDivisionError):
        states.get("1", lambda: 1 / 0)  # type: ignore[arg-type,return-value]
    assert read(states, "1") == ["1"]


def test_get__threads_wait_for_the_one_that_reads() -> None:
    states, reads = States(), list[str]()
    ask = lambda: reads.extend(read(states, "1"))  # noqa: E731
    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert reads == ["1"]
