"""When, where and with what versions a store was written: one small file per call of save."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import dask
import zarr

from trakdask._version import __version__
from trakdask.execution.scheduling import on_all_workers
from trakdask.storage.piece import Piece

__all__ = ["RUNS", "has_ended", "note_device", "recorded_run", "runs"]

RUNS = "runs"
_used: dict[str, dict[str, set[str]]] = {}  # devices and kernels, by the digest of a piece


@contextmanager
def recorded_run(piece: Piece) -> Iterator[set[str]]:
    """Record a run over the block, which adds the hosts that took part to the set it is given."""
    hosts: set[str] = set()
    name = f"{_now().replace(':', '')}-{uuid4().hex[:8]}.json"
    run: dict[str, Any] = {
        "started": _now(),
        "ended": None,
        "hosts": [],
        "devices": [],
        "kernels": [],
        "versions": {
            "trakdask": __version__, "dask": dask.__version__, "zarr": zarr.__version__
        },
    }  # fmt: skip
    _write(piece, name, run)
    yield hosts
    used = on_all_workers(devices_used, piece.digest)
    run |= {field: _all(used, field) for field in ("devices", "kernels")}
    _write(piece, name, {**run, "ended": _now(), "hosts": sorted(hosts)})


def note_device(digest: str, made: Mapping[str, Any]) -> None:
    """Note in this process the device and kernels that computed a block which it has stored."""
    used = _used.setdefault(digest, {"devices": set(), "kernels": set()})
    used["devices"] |= {made["device"]} if "device" in made else set()
    used["kernels"] |= set(made.get("kernels", ()))


def devices_used(digest: str) -> dict[str, list[str]]:
    """Return the devices and kernels that this process has noted for the features of a digest."""
    return {field: sorted(values) for field, values in _used.get(digest, {}).items()}


def runs(pieces: Sequence[Piece]) -> dict[str, Any]:
    """Return the first start and the last end, the number of hosts and of runs, and versions.

    And the devices that gradients were taken on, with the kernels that projected them there, as far
    as those who stored the blocks know.
    """
    found = [run for piece in pieces for run in _recorded(piece)]
    if not found:
        return {}
    ended = [run["ended"] for run in found if run["ended"]]
    return {
        "started": min(run["started"] for run in found),
        "ended": max(ended) if ended else None,
        "runs": len(found),
        "hosts": len(_all(found, "hosts")),
        "devices": _all(found, "devices"),
        "kernels": _all(found, "kernels"),
        "versions": found[-1]["versions"],
    }


def has_ended(piece: Piece) -> bool:
    """Return whether a call of save came to its end here: then all blocks were there."""
    return any(run.get("ended") for run in _recorded(piece))


def _recorded(piece: Piece) -> list[dict[str, Any]]:
    """Return the runs of a piece; one that cannot be read is left out, since no number needs it."""
    folder, found = piece.records / RUNS, []
    for name in folder.names():
        with suppress(ValueError):
            run = folder.read_json(name)
            if isinstance(run, dict) and {"started", "ended", "versions"} <= set(run):
                found.append(run)
    return found


def _all(found: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    return sorted({value for run in found for value in run.get(name, ())})


def _write(piece: Piece, name: str, run: dict[str, Any]) -> None:
    piece.records.write(f"{RUNS}/{name}", json.dumps(run).encode())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
