"""Find the source of the CUDA kernels, in an installed wheel or in a checkout."""

from __future__ import annotations

import re
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

__all__ = ["kernel_files", "kernel_program", "kernel_source"]

_INCLUDE = re.compile(r'^#include "([^"]+)"$', re.MULTILINE)


def kernel_files() -> dict[str, Traversable]:
    """List the files of the kernel folder by name.

    A wheel carries the folder inside the package (``trakdask/_kernels``); a checkout or an
    editable install has it beside the package (``kernels``). The packaged one wins.

    Returns
    -------
    Name to file, sorted by name.

    Raises
    ------
    FileNotFoundError
        If neither folder exists.

    Examples
    --------
    >>> from trakdask.projection.cuda.sources import kernel_files
    >>> "README.md" in kernel_files()
    True
    """
    entries = {entry.name: entry for entry in _kernel_folder().iterdir()}
    return {name: entries[name] for name in sorted(entries) if not name.startswith(".")}


def kernel_source(name: str) -> str:
    """Read one file of the kernel folder.

    Parameters
    ----------
    name
        A key of :func:`kernel_files`, such as ``"README.md"``.

    Returns
    -------
    The file's text.

    Examples
    --------
    >>> from trakdask.projection.cuda.sources import kernel_source
    >>> kernel_source("README.md").splitlines()[0]
    '# kernels'
    """
    return kernel_files()[name].read_text(encoding="utf-8")


def kernel_program(name: str) -> str:
    """Read a kernel file with the kernel files that it includes in place.

    Parameters
    ----------
    name
        As for :func:`kernel_source`. Included files are named from the kernel folder.

    Returns
    -------
    One text that can be compiled without reading other files, so the wheel may be a zip file.

    Examples
    --------
    >>> from trakdask.projection.cuda.sources import kernel_program
    >>> "#include" in kernel_program("quantize.cu")
    False
    """
    return _INCLUDE.sub(lambda match: kernel_program(match[1]), kernel_source(name))


def _kernel_folder() -> Traversable:
    packaged = files("trakdask") / "_kernels"
    if packaged.is_dir():
        return packaged
    root = Path(__file__).resolve().parents[3]
    # In site-packages a folder of this name would be another distribution's.
    if (root / "pyproject.toml").is_file() and (root / "kernels").is_dir():
        return root / "kernels"
    raise FileNotFoundError(
        "expected the kernel sources, which every wheel carries, got no _kernels folder in "
        f"{packaged.parent if isinstance(packaged, Path) else packaged} and no checkout around it; "
        "try pip install --force-reinstall --no-deps trakdask"
    )
