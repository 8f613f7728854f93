"""What was done to a store: runs of save, and edits that rewrite nothing.

A run is a small file: when, where and with what versions blocks were stored. An edit is a numbered
group beside the parts: samples that were dropped, or coords that were assigned. The last edit of
each kind stands for all before.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import dask
import zarr

from trakdask._version import __version__
from trakdask.files import Folder
from trakdask.provenance import digest
from trakdask.storage.blocks import Done
from trakdask.storage.parts import ASSIGNED, DROPS, FACTORS, METADATA, Part
from trakdask.storage.zarr_stores import Arrays, Complete, Recorded, checksum, zarr_store

__all__ = [
    "KINDS",
    "RUNS",
    "Edit",
    "damaged_files",
    "has_ended",
    "last_edit",
    "obsolete_edits",
    "record_run",
    "remove_obsolete",
    "runs",
    "write_edit",
]

RUNS = "runs"
KINDS = (DROPS, ASSIGNED, FACTORS)


# ------------------------------------------------------------------------------------------- runs


@contextmanager
def record_run(part: Part) -> Iterator[list[Done]]:
    """Record a run over the block, which adds what was done to the list that it is given."""
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
    _write_run(part, name, run)
    steps: list[Done] = []
    yield steps
    fields = ("hosts", "devices", "kernels")
    all_of = {field: sorted(set().union(*(getattr(s, field) for s in steps))) for field in fields}
    _write_run(part, name, {**run, "ended": _now(), **all_of})


def runs(parts: Sequence[Part]) -> dict[str, Any]:
    """Return the first start and the last end, the number of hosts and of runs, and versions.

    And the devices that gradients were taken on, with the kernels that projected them there, as far
    as the tasks that stored the blocks know.
    """
    every = [run for part in parts for run in _runs(part)]
    if not every:
        return {}
    ended = [run["ended"] for run in every if run["ended"]]
    return {
        "started": min(run["started"] for run in every),
        "ended": max(ended) if ended else None,
        "runs": len(every),
        "hosts": len(_all(every, "hosts")),
        "devices": _all(every, "devices"),
        "kernels": _all(every, "kernels"),
        "versions": every[-1]["versions"],
    }


def has_ended(part: Part) -> bool:
    """Return whether a call of save came to its end here: then all blocks were there."""
    return any(run.get("ended") for run in _runs(part))


def _runs(part: Part) -> list[dict[str, Any]]:
    """Return the runs of a part; one that cannot be read is left out, since no number needs it."""
    folder, readable = part.records / RUNS, []
    for name in folder.names():
        with suppress(ValueError):
            run = folder.read_json(name)
            if isinstance(run, dict) and {"started", "ended", "versions"} <= set(run):
                readable.append(run)
    return readable


def _all(every: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    return sorted({value for run in every for value in run.get(name, ())})


def _write_run(part: Part, name: str, run: dict[str, Any]) -> None:
    part.records.write(f"{RUNS}/{name}", json.dumps(run).encode())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


# ------------------------------------------------------------------------------------------ edits


@dataclass(frozen=True)
class Edit:
    """An edit that was written whole.

    Parameters
    ----------
    folder
        Its zarr group.
    attrs
        ``pieces``, how many parts of the store it is about; its ``files`` with their sizes and
        checksums; and what its kind adds.
    """

    folder: Folder
    attrs: Mapping[str, Any]

    @property
    def n_parts(self) -> int:
        """How many parts of the store it is about."""
        return int(self.attrs["pieces"])

    @property
    def files(self) -> dict[str, list[int]]:
        """Size and checksum of its files, without its own metadata, which hold this."""
        return {path: about for path, about in self.attrs["files"].items() if path != METADATA}

    def store(self) -> Complete:
        """Return its zarr store, which rejects changed and lost files."""
        token = str(self.attrs["files"])
        arrays = Arrays(zarr_store(self.folder, read_only=True))
        return Complete(arrays, self.folder, token, known=self.files, may_be_replaced=True)

    def group(self) -> zarr.Group:
        """Open its zarr group."""
        return zarr.open_group(self.store(), mode="r", zarr_format=3)


def last_edit(folder: Folder, kind: str) -> Edit | None:
    """Return the last edit of a kind that was not cut short.

    Raises
    ------
    ValueError
        If its own metadata were changed since.
    """
    for number in sorted(_numbers(folder, kind), reverse=True):
        edited = folder / kind / str(number)
        # Version 0.1 wrote its attributes one by one, and this last.
        if METADATA in edited.names() and "files" in (attrs := _attrs(edited)):
            return Edit(edited, attrs)
    return None


def write_edit(
    folder: Folder, kind: str, attrs: Mapping[str, Any], fill: Callable[[Recorded], None]
) -> None:
    """Write an edit: ``fill`` is given the zarr store of its group; then those before it go."""
    before = last_edit(folder, kind)
    number = 1 if before is None else int(before.folder.name) + 1
    zarr.open_group(zarr_store(folder), mode="r+", zarr_format=3).require_group(kind)
    folder.remove(f"{kind}/{number}")  # what an attempt that was killed left
    store = Recorded(zarr_store(folder / kind / str(number)))
    zarr.create_group(store, zarr_format=3)
    fill(store)
    group = zarr.open_group(store, mode="r+", zarr_format=3)
    whole = {**group.attrs, **attrs, "files": dict(store.written)}
    group.update_attributes({**whole, "digest": digest(whole)})  # one write: from now on it counts
    remove_obsolete(folder, kind)


def remove_obsolete(folder: Folder, kind: str) -> None:
    """Remove edits that were cut short, and those that a later one stands for."""
    for edited in obsolete_edits(folder, kind):
        edited.remove()


def obsolete_edits(folder: Folder, kind: str) -> list[Folder]:
    """Return the folders of edits that were cut short, and those that a later one stands for."""
    last = last_edit(folder, kind)
    numbers = [n for n in _numbers(folder, kind) if last is None or str(n) != last.folder.name]
    return [folder / kind / str(number) for number in numbers]


def damaged_files(edit: Edit, *, checksums: bool) -> Iterator[str]:
    """Yield the files of an edit that are lost or changed."""
    sizes = edit.folder.sizes()
    for path, (size, known) in edit.files.items():
        if sizes.get(path) != size or (checksums and checksum(edit.folder.read(path)) != known):
            yield path


def _numbers(folder: Folder, kind: str) -> list[int]:
    return [int(name) for name in (folder / kind).names() if name.isdigit()]


def _attrs(edited: Folder) -> dict[str, Any]:
    try:
        store = zarr_store(edited, read_only=True)
        attrs = dict(zarr.open_group(store, mode="r", zarr_format=3).attrs)
        recorded = attrs.pop("digest", None)  # version 0.1 wrote none
        is_whole = recorded is None or recorded == digest(attrs)
        if "files" in attrs:
            is_whole &= type(attrs["pieces"]) is int and isinstance(attrs["files"], dict)
    except (ValueError, KeyError, TypeError):
        is_whole = False
    if not is_whole:
        raise ValueError(
            f"expected the metadata of {edited.url!r} as they were written, got other bytes; try "
            f"restoring {edited.url}/{METADATA} from a backup, or delete that folder and repeat "
            "the td.drop or td.assign_coords that wrote it"
        )
    return attrs
