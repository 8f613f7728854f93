"""The ``.trak`` accessor: the public functions as methods, without state of its own.

Importing this module loads nothing but xarray; each method loads what it calls on first use.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import xarray as xr

# Names are looked up in a call only: this module is a part of the import of `trakdask`, and the
# functions behind the names need torch.
import trakdask as td

_OF_SCORES = ("top_k", "to_zarr", "to_parquet")
_OF_FEATURES = (
    *("save", "combine", "gram", "damping", "score", "group_score"),
    *("top_k", "self_influence", "to_zarr", "to_parquet"),
)


@xr.register_dataarray_accessor("trak")
@xr.register_dataset_accessor("trak")
class Accessor:
    """The public functions as methods: ``scores.trak.top_k(10)`` is ``td.top_k(scores, 10)``.

    Scores, a DataArray, have ``top_k``, ``to_zarr`` and ``to_parquet``. Features, scores with
    intervals and rankings, which are Datasets, also have ``save``, ``combine``, ``gram``,
    ``damping``, ``score``, ``group_score`` and ``self_influence``.
    """

    def __init__(self, data: xr.DataArray | xr.Dataset) -> None:
        self._data = data

    def __dir__(self) -> list[str]:
        return [*(_OF_SCORES if isinstance(self._data, xr.DataArray) else _OF_FEATURES)]

    def __repr__(self) -> str:
        return f"<trakdask: {', '.join(map('.trak.{}()'.format, dir(self)))}>"

    def __getattr__(self, name: str) -> Any:
        # A copy or a pickle asks for such names before there is `_data`, for which `dir(self)`
        # would ask again, without end.
        if name.startswith("_") or name not in dir(self):
            raise AttributeError(f"expected a method as in dir(data.trak), got {name!r}; try td")
        return MethodType(getattr(td, name), self._data)
