"""The tasks that store blocks: chunks first, then the record that says they are there."""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import dask
import dask.array as da
import numpy as np
import xarray as xr
from distributed import as_completed, futures_of

from trakdask._version import __version__
from trakdask.arrays.half import encode
from trakdask.execution import scheduling
from trakdask.execution.layers import block_key, token_of
from trakdask.files import explained
from trakdask.provenance import digest
from trakdask.storage.piece import ERROR, FEATURE_NAMES, SCALE, Piece, array
from trakdask.storage.runs import note_device
from trakdask.storage.zarr_stores import Recorded, zarr_store

__all__ = ["about", "run", "save_checkpoint", "storing"]


def save_checkpoint(piece: Piece, features: xr.Dataset, index: int, retries: int = 0) -> set[str]:
    """Compute and store the blocks of a checkpoint that are not there; return the hosts."""
    missing = functools.partial(_missing, piece, features, index)
    compute = functools.partial(run, **scheduling.gpu_options(features))
    return scheduling.run(missing, retries=retries, compute=compute) or set()


def _missing(piece: Piece, features: xr.Dataset, index: int) -> da.Array | None:
    done = piece.done(index)
    todo = [block for block in range(piece.n_blocks) if str(block) not in done]
    if not todo:
        return None
    names = [name for name in (*FEATURE_NAMES, ERROR) if name in features]
    feature, *others = (features[name].data for name in names)
    # Some of the arrays may be lazy, and others in memory.
    others = [other.rechunk({0: feature.chunks[0]}) for other in others]
    token = digest({"to": piece.place.url, "of": feature.name, "checkpoint": index, "todo": todo})
    written: da.Array = da.blockwise(
        functools.partial(_write_block, piece, index, feature.name), "s",
        feature.blocks[todo, :, index], "spc",
        *(item for other in others for item in (other.blocks[todo, index], "sc")),
        da.from_array(np.array(todo), chunks=1), "s",
        name=f"save-{token[:32]}",
        concatenate=True, align_arrays=False, adjust_chunks={"s": 1},
        dtype=bool, meta=np.empty(0, bool),
    )  # fmt: skip
    return written


def run(written: da.Array, **options: Any) -> set[str]:
    """Compute tasks for what they store; return the hosts, or raise what the first raises.

    ``options`` are those of :meth:`distributed.Client.persist`; on threads there are none.

    On a cluster each is released as soon as it is done, without asking for its empty answer, which
    the scheduler would compute again if the worker that holds it died. Between the end of a task
    and its release lie three messages: a worker that dies just then has a block computed twice.
    """
    (written,) = dask.persist(written, **options)
    if not (futures := futures_of(written)):
        return {socket.gethostname()}  # threads, or this thread: all is done
    client, finished = futures[0].client, as_completed(futures)
    del written, futures
    for future in finished:
        if future.status != "finished":
            future.result()
        del future  # at once, and not when the next is done
    return {str(urlsplit(address).hostname) for address in client.nthreads()}


def about(started: float) -> dict[str, Any]:
    """Return what a record tells of the task that wrote it."""
    return {
        "host": socket.gethostname(),
        "started": started,
        "ended": time.time(),
        "trakdask_version": __version__,
    }


@contextmanager
def storing(piece: Piece, what: str) -> Iterator[None]:
    """Say what could not be stored, and that the rest is safe."""
    try:
        yield
    except OSError as err:
        remedy = "try"
        if isinstance(err, FileNotFoundError):
            host = socket.gethostname()
            remedy = f"{host} does not see it: try a path or URL that every worker does, and"
        text = (
            f"expected to store {what} in {piece.place.url!r}, but could not "
            f"({type(err).__name__}: {err}); completed blocks are safe. When the "
            f"cause is gone, {remedy} the same td.save(...) again: it goes on from here"
        )
        raise explained(err, text) from err


def _write_block(piece: Piece, index: int, layer: str, *blocks: np.ndarray) -> np.ndarray:
    started = time.time()
    *values, (block,) = blocks
    with storing(piece, f"block {block} of checkpoint {index}"):
        store = Recorded(zarr_store(piece.place))
        group = piece.group(store)
        start = int(block) * piece.layout["block"]
        rows = slice(start, start + len(values[0]))
        for name, value in _stored(piece, values).items():
            # No chunk of errors means none; one that an earlier attempt wrote is removed.
            of = array(group, name).with_config({"write_empty_chunks": name != ERROR})
            of[(rows, ..., slice(index, index + 1))] = value
        made = scheduling.recall(block_key(token_of(layer) or layer, index, start))
        piece.write_record(index, str(block), store.written, {**about(started), **made})
        note_device(piece.digest, made)
    return np.ones(1, bool)


def _stored(piece: Piece, values: list[np.ndarray]) -> dict[str, np.ndarray]:
    named = dict(zip((*FEATURE_NAMES, ERROR), values, strict=False))
    named.setdefault(ERROR, np.full(values[1].shape, "", np.dtypes.StringDType()))
    if piece.layout["dtype"] == "float16":
        named["feature"], named[SCALE] = encode(named["feature"])
    return named
