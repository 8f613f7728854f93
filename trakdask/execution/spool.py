"""Files by which processes hand objects to each other, wherever those processes run.

The process that builds a graph writes a file into its spool folder. Other processes open it there
if they see it, as on one machine or a shared disk. Otherwise they fetch a copy: from the spool's
URL if it has one, else through the scheduler, which asks the process that wrote the file.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

import fsspec

from trakdask.files import Folder, location, retried

__all__ = [
    "COURIERS",
    "OFFERS",
    "SPOOL_VARIABLE",
    "Courier",
    "SpoolFile",
    "download",
    "fetched",
    "is_current",
    "local_path",
    "offer",
    "require_private",
    "spool_folder",
    "uploaded",
    "write_once",
]

SPOOL_VARIABLE = "TRAKDASK_SPOOL"
"""Environment variable that names the spool: a folder, or a URL such as ``s3://bucket/spool``."""

OFFERS: dict[str, Callable[[], str]] = {}
"""What this process can send to others: by name in the spool, a function that returns a path."""

_CHUNK_BYTES = 16 * 1024**2


class Courier(Protocol):
    """Brings files from the process that built a graph to those that run it."""

    def offer(self) -> None:
        """Let other processes ask this one for :data:`OFFERS`."""

    def fetch(self, name: str, target: IO[bytes]) -> None:
        """Write a file that another process offers to ``target``; raises if it cannot."""

    def folder(self) -> Path | None:
        """Return where this process keeps what was brought, if not in its spool folder."""


COURIERS: list[Courier] = []
"""``trakdask.execution.delivery`` adds itself, so that this module does not depend on Dask."""


@dataclass(frozen=True)
class SpoolFile:
    """A file for other processes, and the ways to it.

    Parameters
    ----------
    name
        Identifies the content.
    path
        Where the process that built the graph has it.
    size
        In bytes, if the file is complete only with them.
    url
        Where an object store has it.
    digest
        sha256 of what is at the URL; None if the reader verifies the content itself.
    """

    name: str
    path: str
    size: int | None = None
    url: str | None = None
    digest: str | None = None


# ----------------------------------------------------------------------------------------- writing


def spool_folder() -> Path:
    """Return the folder that this process writes spool files to, creating it if needed.

    Returns
    -------
    ``$TRAKDASK_SPOOL`` if that is a folder, else a temporary folder that is removed when this
    process exits.

    Raises
    ------
    PermissionError
        If others can write to the named folder, and so could run code in the workers.
    NotADirectoryError
        If the path is a file.
    """
    named = os.environ.get(SPOOL_VARIABLE)
    if not named or _is_url(named):
        return _temporary_folder(os.getpid())
    folder = Path(location(named))
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(
            f"expected a folder or URL in {SPOOL_VARIABLE}, got the file {str(folder)!r}; try the "
            "path of a folder"
        )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    require_private(os.stat(folder), str(folder))
    return folder


def _is_url(named: str) -> bool:
    return "://" in named and not named.startswith(("file://", "local://"))


@functools.cache
def _temporary_folder(pid: int) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="trakdask-spool-"))
    atexit.register(_remove_folder, folder, pid)
    return folder


def _remove_folder(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked child also runs its parent's exit functions
        shutil.rmtree(folder, ignore_errors=True)


def write_once(path: Path, write: Callable[[IO[bytes]], None]) -> None:
    """Write a file whole or not at all, unless it exists: its name says what is in it."""
    if path.exists():
        return
    named = os.environ.get(SPOOL_VARIABLE)
    is_lasting = named is not None and not _is_url(named)
    with Folder(str(path.parent)).writing(path.name, mode=0o600, durable=is_lasting) as file:
        write(file)


def offer(name: str, path: Callable[[], str]) -> None:
    """Let workers that do not see a file of this process ask for it; ``path`` may write it."""
    OFFERS[name] = path
    for courier in COURIERS:
        courier.offer()


def is_current(file: SpoolFile) -> bool:
    """Return whether a file is still in the spool of this process."""
    named = os.environ.get(SPOOL_VARIABLE, "")
    url = f"{Folder.at(named).url}/" if _is_url(named) else ""
    is_here = Path(file.path).parent == spool_folder() and os.path.exists(file.path)
    return is_here and (file.url or "").rpartition("/")[0] == url.rstrip("/")


def uploaded(file: SpoolFile) -> SpoolFile:
    """Copy a file to the spool's URL unless it is there, and return it with its URL there.

    If ``$TRAKDASK_SPOOL`` is no URL, the file is returned as it is.
    """
    named = os.environ.get(SPOOL_VARIABLE)
    if not named or not _is_url(named):
        return file
    folder = Folder.at(named)
    with open(file.path, "rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    # Named by its bytes: what others write to the bucket under this name is not taken for it.
    name = digest + Path(file.name).suffix
    if not _exists(f"{folder.url}/{name}", os.path.getsize(file.path)):
        with folder.writing(name) as target, open(file.path, "rb") as content:
            shutil.copyfileobj(content, target, _CHUNK_BYTES)
    return SpoolFile(file.name, file.path, file.size, f"{folder.url}/{name}", digest)


def _exists(url: str, size: int) -> bool:
    fs, path = fsspec.core.url_to_fs(url, use_listings_cache=False)
    try:
        return bool(retried(lambda: fs.size(path)) == size)
    except FileNotFoundError:
        return False


# ----------------------------------------------------------------------------------------- reading


def local_path(file: SpoolFile) -> str:
    """Return a path at which this process can open the file, fetching a copy if needed.

    Raises
    ------
    FileNotFoundError
        If the file is not visible here and no way leads to a copy; the message names the host.
    """
    is_seen = os.path.exists(file.path)
    if is_seen and file.size in (None, os.path.getsize(file.path)):
        return file.path
    return fetched(file)


def fetched(file: SpoolFile) -> str:
    """Return the path of this process's own copy of a file, which is fetched at the first call.

    Raises
    ------
    FileNotFoundError
        If no way leads to a copy; the message names the host and what was tried.
    """
    copy = _cache_folder() / file.name
    failures = []
    for way in (_from_url, _from_courier):
        try:
            write_once(copy, functools.partial(way, file))
            return str(copy)
        except Exception as err:
            failures.append(str(err) or repr(err))
    raise FileNotFoundError(
        f"expected {file.path!r}, which the process that built the graph wrote or read, to be "
        f"visible on host {socket.gethostname()!r}, or a copy to be within reach, got neither "
        f"({'; '.join(failures)}); try setting {SPOOL_VARIABLE} to a folder that all workers can "
        "read, or to a URL such as 's3://bucket/spool', and building the graph again"
    )


def _cache_folder() -> Path:
    """Return where this process keeps copies: in a named folder, or as long as the worker lives."""
    named = os.environ.get(SPOOL_VARIABLE)
    folders = (courier.folder() for courier in COURIERS if not named or _is_url(named))
    return next((folder for folder in folders if folder is not None), None) or spool_folder()


def _from_url(file: SpoolFile, target: IO[bytes]) -> None:
    if file.url is None:
        raise FileNotFoundError("the spool is not at a URL")
    digest = download(file.url, target)
    if file.digest not in (None, digest):
        raise OSError(
            f"expected the sha256 {file.digest} of {file.url}, got {digest}: it was changed"
        )


def download(url: str, target: IO[bytes]) -> str:
    """Write what is at a URL to an open file, and return its sha256."""

    def attempt() -> str:
        target.seek(0)
        target.truncate()
        digest = hashlib.sha256()
        with fsspec.open(url, "rb") as source:
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                target.write(chunk)
        return digest.hexdigest()

    digest = retried(attempt)
    target.flush()
    return digest


def _from_courier(file: SpoolFile, target: IO[bytes]) -> None:
    if not COURIERS:
        raise FileNotFoundError("there is no scheduler to ask")
    for courier in COURIERS:
        courier.fetch(file.name, target)


def require_private(status: os.stat_result, path: str) -> None:
    """Reject a file or folder that others could have written: unpickling would run their code."""
    if not hasattr(os, "getuid"):  # not POSIX
        return
    others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if status.st_uid not in (os.getuid(), 0) or others:
        raise PermissionError(
            f"expected a spool that only user {os.getuid()} can write to, got {path!r} of user "
            f"{status.st_uid} with the mode {stat.S_IMODE(status.st_mode):o} (its files are "
            "unpickled, so anyone who can write there could run code in this process); try "
            f"chmod go-w, or setting {SPOOL_VARIABLE} to a folder of your own, with workers that "
            "run as the same user"
        )
