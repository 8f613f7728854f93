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
from trakdask.storage.zarr_stores import (
    Complete,
    Recorded,
    checksum,
    read_attributes,
    zarr_store,
)

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
    "require_subgroup",
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
        store, token = zarr_store(self.folder, read_only=True), str(self.attrs["files"])
        return Complete(store, self.folder, self.files, token=token, may_be_replaced=True)


def last_edit(folder: Folder, kind: str) -> Edit | None:
    """Return the last edit of a kind that was not cut short.

    Raises
    ------
    ValueError
        If its own metadata were changed since.
    """
    return _last(folder / kind, _numbers(folder, kind))


def _last(edits: Folder, numbers: list[int]) -> Edit | None:
    for number in sorted(numbers, reverse=True):
        edited = edits / str(number)
        # Version 0.1 wrote its attributes one by one, and this last.
        if "files" in (attrs := _attrs(edited)):
            return Edit(edited, attrs)
    return None


def write_edit(
    folder: Folder,
    kind: str,
    attrs: Mapping[str, Any],
    fill: Callable[[Folder, Recorded], Mapping[str, Any] | None],
) -> Edit:
    """Write an edit; then those before it go.

    ``fill`` is given its folder and the zarr store of its group, which it fills with arrays. If it
    returns attributes, they are added.
    """
    edits, numbers = folder / kind, _numbers(folder, kind)
    before = _last(edits, numbers)
    edited = edits / str(1 if before is None else int(before.folder.name) + 1)
    if not numbers:
        require_subgroup(folder, kind)
    edited.remove()  # what an attempt that was killed left
    store = Recorded(zarr_store(edited))
    group = zarr.create_group(store, zarr_format=3)
    added = fill(edited, store)
    whole = {**read_attributes(edited), **(added or {}), **attrs, "files": dict(store.written)}
    whole["digest"] = digest(whole)
    group.update_attributes(whole)  # one write: from now on it counts
    for number in map(str, numbers):
        if number != edited.name:
            (edits / number).remove()
    return Edit(edited, {name: value for name, value in whole.items() if name != "digest"})


def require_subgroup(folder: Folder, name: str) -> None:
    """Make a zarr group in another if there is none."""
    zarr.open_group(zarr_store(folder), mode="r+", zarr_format=3).require_group(name)


def remove_obsolete(folder: Folder, kind: str) -> Edit | None:
    """Remove edits that were cut short, and those that a later one stands for; return that one."""
    last, obsolete = _edits(folder, kind)
    for edited in obsolete:
        edited.remove()
    return last


def obsolete_edits(folder: Folder, kind: str) -> list[Folder]:
    """Return the folders of edits that were cut short, and those that a later one stands for."""
    return _edits(folder, kind)[1]


def _edits(folder: Folder, kind: str) -> tuple[Edit | None, list[Folder]]:
    edits, numbers = folder / kind, _numbers(folder, kind)
    last = _last(edits, numbers)
    others = (str(number) for number in numbers if last is None or str(number) != last.folder.name)
    return last, [edits / name for name in others]


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
        attrs = read_attributes(edited)
        recorded = attrs.pop("digest", None)  # version 0.1 wrote none
        is_whole = recorded is None or recorded == digest(attrs)
        if "files" in attrs:
            is_whole &= type(attrs["pieces"]) is int and isinstance(attrs["files"], dict)
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError):
        is_whole = False
    if not is_whole:
        raise ValueError(
            f"expected the metadata of {edited.url!r} as they were written, got other bytes; try "
            f"restoring {edited.url}/{METADATA} from a backup, or delete that folder and repeat "
            "the td.drop or td.assign_coords that wrote it"
        )
    return attrs
