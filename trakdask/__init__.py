"""Training-data attribution as array programs on Dask, xarray and torch.

Public names load on first use, so that a machine without Dask or xarray can import the modules
that do not need them. ``__init__.pyi`` lists the public names by module.
"""

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import lazy_loader

from trakdask._version import __version__ as __version__

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


class _AccessorAfterXarray:
    """A finder of modules that registers the ``.trak`` accessor once xarray has been imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "xarray":
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((each for each in specs if each is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            importlib.import_module("trakdask.accessor")

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


if "xarray" in sys.modules:
    importlib.import_module("trakdask.accessor")
else:
    sys.meta_path.insert(0, _AccessorAfterXarray())
