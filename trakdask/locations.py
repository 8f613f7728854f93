"""Where results go, told so that every worker finds the same place."""

from __future__ import annotations

import os

import fsspec

__all__ = ["location"]


def location(path: str | os.PathLike[str]) -> str:
    """Return an absolute path for a local folder, and any other URL as it is.

    A worker may have another working directory than the notebook.

    Examples
    --------
    >>> location("train.zarr/") == os.path.join(os.getcwd(), "train.zarr")
    True
    >>> location("s3://bucket/train.zarr")
    's3://bucket/train.zarr'
    """
    given = os.fspath(path)
    if "://" in given and not given.startswith(("file://", "local://")):
        return given
    local: str = fsspec.core.url_to_fs(given)[1]
    return os.path.abspath(local)
