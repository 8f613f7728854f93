"""Training-data attribution as array programs on Dask, xarray and torch.

Public names load on first use, so that a machine without Dask or xarray can import the rooms that
do not need them. What there is, by room, stands in ``__init__.pyi``.
"""

import importlib
import sys
from typing import Any

import lazy_loader

from trakdask._version import __version__ as __version__

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    value = _load(name)
    if "xarray" in sys.modules:  # labelled results are near: they come with the .trak accessor
        importlib.import_module("trakdask.accessor")
    return value
