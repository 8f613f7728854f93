"""The last drop of a store: which samples it leaves out, and the sums over the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import dask.array as da
import numpy as np
import xarray as xr
import zarr

from trakdask.storage.piece import SUMS, array
from trakdask.storage.place import Complete, Place
from trakdask.variables import CHECKPOINT, VARIABLES

__all__ = ["DROPS", "Drop", "latest"]

DROPS = "drops"


@dataclass(frozen=True)
class Drop:
    """A drop that was written whole: it stands for all before it.

    Parameters
    ----------
    place
        Its zarr group.
    attrs
        ``pieces``, how many its sums are over; their ``checkpoints``; its ``files``.
    """

    place: Place
    attrs: dict[str, Any]

    @property
    def number(self) -> int:
        """Which drop of the store it is."""
        return int(self.place.url.rpartition("/")[2])

    def mask(self, n_samples: int) -> np.ndarray:
        """Return which samples are dropped; none that were appended since."""
        mask = np.zeros(n_samples, bool)
        found = np.asarray(array(self._group(), "dropped")[:], bool)
        mask[: len(found)] = found
        return mask

    def sums(self) -> xr.Dataset:
        """Return the sums over the samples that are left, lazy."""
        group = self._group()
        found = {name: array(group, name) for name in SUMS if name in group}
        data = {
            name: (VARIABLES[name].dims, da.from_zarr(of), dict(of.attrs))
            for name, of in found.items()
        }
        return xr.Dataset(data, coords={CHECKPOINT: self.attrs["checkpoints"]})

    def _group(self) -> zarr.Group:
        store = Complete(self.place.zarr(read_only=True), self.place, str(self.attrs["files"]))
        return zarr.open_group(store, mode="r", zarr_format=3)


def latest(place: Place) -> Drop | None:
    """Return the last drop of a store that was not cut short."""
    numbers = sorted(
        (int(name) for name in (place / DROPS).names() if name.isdigit()), reverse=True
    )
    for number in numbers:
        at = place / DROPS / str(number)
        if "zarr.json" in at.names():
            attrs = dict(zarr.open_group(at.zarr(read_only=True), mode="r", zarr_format=3).attrs)
            if "pieces" in attrs:
                return Drop(at, attrs)
    return None
