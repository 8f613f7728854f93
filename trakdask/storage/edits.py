"""Edits of a store that rewrite nothing: numbered groups beside its pieces.

A drop is one, and so are coords that were assigned. The last of each kind stands for all before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import zarr

from trakdask.files import Folder
from trakdask.provenance import digest
from trakdask.storage.piece import ASSIGNED, DROPS, FACTORS
from trakdask.storage.template import METADATA
from trakdask.storage.zarr_stores import Arrays, Complete, Recorded, checksum, zarr_store

__all__ = ["KINDS", "Edit", "damaged", "latest", "left", "sweep", "write"]

KINDS = (DROPS, ASSIGNED, FACTORS)


@dataclass(frozen=True)
class Edit:
    """An edit that was written whole.

    Parameters
    ----------
    place
        Its zarr group.
    attrs
        ``pieces``, how many pieces of the store it is about; its ``files`` with their sizes and
        checksums; and what its kind adds.
    """

    place: Folder
    attrs: Mapping[str, Any]

    @property
    def number(self) -> int:
        """Which edit of its kind it is."""
        return int(self.place.url.rpartition("/")[2])

    @property
    def pieces(self) -> int:
        """How many pieces of the store it is about."""
        return int(self.attrs["pieces"])

    @property
    def files(self) -> dict[str, list[int]]:
        """Size and checksum of its files, without its own metadata, which hold this."""
        return {path: about for path, about in self.attrs["files"].items() if path != METADATA}

    def store(self) -> Complete:
        """Return its zarr store, which refuses changed and lost files."""
        token = str(self.attrs["files"])
        arrays = Arrays(zarr_store(self.place, read_only=True))
        return Complete(arrays, self.place, token, known=self.files)

    def group(self) -> zarr.Group:
        """Open its zarr group."""
        return zarr.open_group(self.store(), mode="r", zarr_format=3)


def latest(place: Folder, kind: str) -> Edit | None:
    """Return the last edit of a kind that was not cut short.

    Raises
    ------
    ValueError
        If its own metadata were changed since.
    """
    for number in sorted(_numbers(place, kind), reverse=True):
        at = place / kind / str(number)
        # Version 0.1 wrote its attributes one by one, and this last.
        if METADATA in at.names() and "files" in (attrs := _attrs(at)):
            return Edit(at, attrs)
    return None


def write(
    place: Folder, kind: str, attrs: Mapping[str, Any], fill: Callable[[Recorded], None]
) -> None:
    """Write an edit: ``fill`` is given the zarr store of its group; then those before it go."""
    before = latest(place, kind)
    number = 1 if before is None else before.number + 1
    zarr.open_group(zarr_store(place), mode="r+", zarr_format=3).require_group(kind)
    place.remove(f"{kind}/{number}")  # what an attempt that was killed left
    store = Recorded(zarr_store(place / kind / str(number)))
    zarr.create_group(store, zarr_format=3)
    fill(store)
    group = zarr.open_group(store, mode="r+", zarr_format=3)
    whole = {**group.attrs, **attrs, "files": dict(store.written)}
    group.update_attributes({**whole, "digest": digest(whole)})  # one write: from now on it counts
    sweep(place, kind)


def sweep(place: Folder, kind: str) -> None:
    """Remove edits that were cut short, and those that a later one stands for."""
    for at in left(place, kind):
        place.remove(f"{kind}/{at.url.rpartition('/')[2]}")


def left(place: Folder, kind: str) -> list[Folder]:
    """Return the edits that were cut short, and those that a later one stands for."""
    kept = latest(place, kind)
    numbers = [n for n in _numbers(place, kind) if kept is None or n != kept.number]
    return [place / kind / str(number) for number in numbers]


def damaged(edit: Edit, *, checksums: bool) -> Iterator[str]:
    """Yield the files of an edit that are lost or changed."""
    sizes = edit.place.sizes()
    for path, (size, known) in edit.files.items():
        if sizes.get(path) != size or (checksums and checksum(edit.place.read(path)) != known):
            yield path


def _numbers(place: Folder, kind: str) -> list[int]:
    return [int(name) for name in (place / kind).names() if name.isdigit()]


def _attrs(at: Folder) -> dict[str, Any]:
    try:
        attrs = dict(zarr.open_group(zarr_store(at, read_only=True), mode="r", zarr_format=3).attrs)
        recorded = attrs.pop("digest", None)  # version 0.1 wrote none
        is_whole = recorded is None or recorded == digest(attrs)
        if "files" in attrs:
            is_whole &= type(attrs["pieces"]) is int and isinstance(attrs["files"], dict)
    except (ValueError, KeyError, TypeError):
        is_whole = False
    if not is_whole:
        raise ValueError(
            f"expected the metadata of {at.url!r} as they were written, got other bytes; try "
            f"restoring {at.url}/{METADATA} from a backup, or delete that folder and repeat the "
            "td.drop or td.assign_coords that wrote it"
        )
    return attrs
