"""Resolve the paths of results so that they mean the same on every worker."""

from __future__ import annotations

import os

import fsspec

__all__ = ["location"]


def location(path: str | os.PathLike[str]) -> str:
    """Return the absolute path of a local folder; other URLs are returned unchanged.

    Workers may have a different working directory than the process that calls this.

    Raises
    ------
    TypeError
        If it is not a path.
    ValueError
        If it is empty, cannot be a file name, or is a URL with a protocol unknown to fsspec.
    ImportError
        If the package that opens such URLs is not installed.
    OSError
        If the path is too long or contains a cycle of symbolic links.

    Examples
    --------
    >>> location("train.zarr/") == os.path.join(os.getcwd(), "train.zarr")
    True
    >>> location("memory://bucket/train.zarr")
    'memory://bucket/train.zarr'
    """
    given = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(given, str):
        raise TypeError(
            f"expected a path or URL as text, got {given!r:.60} ({type(given).__name__}); try "
            "'features.zarr'"
        )
    if not given.strip():
        raise ValueError(f"expected a path or URL, got {given!r}; try 'features.zarr'")
    if "://" in given:
        _require_known(given)
        if not given.startswith(("file://", "local://")):
            return given
    local: str = os.path.abspath(fsspec.core.url_to_fs(given)[1])
    _require_path(local)
    return local


def _require_known(url: str) -> None:
    for part in url.split("::"):
        protocol = part.partition("://")[0]
        try:
            fsspec.get_filesystem_class(protocol)
        except ValueError as err:
            raise ValueError(
                f"expected a path, or a URL that fsspec knows, got {url!r} with the unknown "
                f"protocol {protocol!r}; try file://, s3:// or gs://"
            ) from err
        except ImportError as err:
            raise ImportError(
                f"expected a package that opens {protocol!r} URLs such as {url!r}, got none "
                f"({err}); try installing it"
            ) from err


def _require_path(path: str) -> None:
    """Reject a path that the file system cannot represent, whether or not it exists."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return  # whoever opens the path reports these
    except OSError as err:
        raise OSError(
            err.errno,
            f"expected a path to a folder, got {path!r:.200} ({err.strerror}); try another path",
        ) from err
    except ValueError as err:  # a NUL character, or text that cannot be encoded as a file name
        raise ValueError(
            f"expected a path to a folder, got {path!r:.200} ({err}); try another path"
        ) from err
