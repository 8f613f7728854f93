"""Arrays of a part that a task writes to without reading their metadata again.

zarr reads the metadata of an array whenever it opens it. On an object store that took ten requests
for the arrays of a block, against five to write it. A process parses them once instead.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any

import zarr
from zarr.abc.store import Store
from zarr.storage import StorePath

from trakdask.files import Folder
from trakdask.storage.parts import METADATA, Part, listed
from trakdask.storage.zarr_stores import Complete, zarr_store

__all__ = ["Writable", "writable"]

_MOST_PARSED = 1024
_parsed: OrderedDict[tuple[str, str, int, int], Any] = OrderedDict()
"""Metadata of arrays, by the URL of the part, the name, and the size and checksum of the file."""
_lock = Lock()


@dataclass(frozen=True)
class Writable:
    """Some arrays of a part, as its list of files describes them; small when pickled.

    Parameters
    ----------
    folder
        The part.
    known
        Size and checksum of the arrays' metadata, by the names of the arrays.
    """

    folder: Folder
    known: Mapping[str, tuple[int, int]]

    def array(self, name: str, store: Store) -> zarr.Array[Any]:
        """Return an array that writes to the given store, chunks that are all NaN as well.

        Raises
        ------
        ValueError
            If its metadata are not those that were written.
        """
        path = StorePath(store, name)
        opened = zarr.AsyncArray(self._metadata(name), path, {"write_empty_chunks": True})
        return zarr.Array(opened)

    def _metadata(self, name: str) -> Any:
        """Return the parsed metadata of an array, those that have the known checksum."""
        size, checksum = self.known[name]
        key = (self.folder.url, name, size, checksum)
        with _lock:
            if key not in _parsed:
                file = f"{name}/{METADATA}"
                source = zarr_store(self.folder, read_only=True)
                store = Complete(source, self.folder, known={file: self.known[name]})
                opened = zarr.open_array(store, path=name, mode="r", zarr_format=3)
                _parsed[key] = opened.metadata
            _parsed.move_to_end(key)
            while len(_parsed) > _MOST_PARSED:
                _parsed.popitem(last=False)
            return _parsed[key]


def writable(part: Part, names: Iterable[str]) -> Writable:
    """Return arrays of a part to write to, those of the names that it has."""
    files = listed(part)
    paths = {name: f"{name}/{METADATA}" for name in names}
    known = {name: (files[p][0], files[p][1]) for name, p in paths.items() if p in files}
    return Writable(part.folder, known)
