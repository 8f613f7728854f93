"""Blocks of features: the tasks that store them, and the lazy arrays that read them.

A task stores the chunks of its block first, and then the record that says that they are there.
"""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import dask
import dask.array as da
import numpy as np
import xarray as xr
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph
from distributed import as_completed, futures_of

from trakdask._version import __version__
from trakdask.execution import scheduling
from trakdask.execution.layers import bundle_of, save_layer
from trakdask.files import explained
from trakdask.provenance import digest
from trakdask.storage.mapping import lazy_array
from trakdask.storage.parts import (
    ERROR,
    FEATURE_NAMES,
    REDUCTIONS,
    SCALE,
    Part,
)
from trakdask.storage.zarr_stores import Writable
from trakdask.variables import VARIABLES

__all__ = [
    "Done",
    "Tasks",
    "about",
    "answer",
    "decoded",
    "encoded",
    "opened",
    "run",
    "save_blocks",
    "stored",
    "storing",
]

_LARGEST_EXPONENT = 15
"""The largest element of a row comes to lie in [2^14, 2^15): float16 ends at 65504."""
_LAST_EXPONENT = 128 - _LARGEST_EXPONENT  # of rows that go up to the end of float32
_BELOW_LARGEST = 2**_LARGEST_EXPONENT - 16  # the largest float16 below 2^15

_EVENTS_AT_ONCE = 500
"""A scheduler forgets all but the last 1000 events of a topic."""


# --------------------------------------------------------------------------------------- writing


@dataclass(frozen=True)
class Done:
    """Where tasks ran: ``hosts``; and where gradients were taken, by what ``kernels``."""

    hosts: frozenset[str] = frozenset()
    devices: frozenset[str] = frozenset()
    kernels: frozenset[str] = frozenset()


def save_blocks(
    part: Part, features: xr.Dataset, index: int, done: set[str], retries: int = 0
) -> Done:
    """Compute and store the blocks of a checkpoint that are not done yet."""
    topic, known = f"trakdask-{uuid4().hex}", [done]
    missing = functools.partial(_missing, part, features, index, topic, known)
    compute = functools.partial(run, topic=topic, **scheduling.gpu_options(features))
    return scheduling.run(missing, retries=retries, compute=compute) or Done()


def _missing(
    part: Part, features: xr.Dataset, index: int, topic: str, known: list[set[str]]
) -> Tasks | None:
    """Return the tasks of the blocks that are missing; a second attempt looks for them itself."""
    done = known.pop() if known else part.done(index)
    todo = [block for block in range(part.n_blocks) if str(block) not in done]
    if not todo:
        return None
    arrays = {name: features[name].data for name in (*FEATURE_NAMES, ERROR) if name in features}
    feature = arrays["feature"]
    if (bundle := bundle_of(arrays)) is not None:
        axes, given = "sc", [bundle, "sc"]
    else:  # some of the arrays may be lazy, and others in memory
        others = (arrays[name].rechunk({0: feature.chunks[0]}) for name in list(arrays)[1:])
        axes, given = "spc", [feature, "spc", *(item for each in others for item in (each, "sc"))]
    arrays_of = part.writable((*FEATURE_NAMES, ERROR, SCALE))
    token = digest({"to": part.folder.url, "of": feature.name, "checkpoint": index, "todo": todo})
    numbers = da.map_blocks(
        _number, chunks=((1,) * part.n_blocks,), name=f"number-{token[:32]}",
        dtype=np.int64, meta=np.empty(0, np.int64),
    )  # fmt: skip
    # Tasks of all blocks: those of a selection of blocks would not be fused with what makes them.
    written = da.blockwise(
        functools.partial(_write_block, part, arrays_of, index, tuple(arrays), topic),
        axes, numbers, "s", *given, name=save_layer(token[:32], fused=bundle is not None),
        concatenate=True, align_arrays=False, adjust_chunks={"s": 1, "p": 1},
        dtype=object, meta=np.empty((0,) * len(axes), object),
    )  # fmt: skip
    middle = (0,) * (len(axes) - 2)
    return Tasks(written.dask, tuple((written.name, block, *middle, index) for block in todo))


@dataclass(frozen=True)
class Tasks:
    """Some tasks of an array's graph, as a collection of dask.

    A selection of the array's blocks would add a task for each that only renames it, which takes
    time between the end of a task and its release.
    """

    graph: HighLevelGraph
    keys: tuple[tuple[str | int, ...], ...]
    results: tuple[Any, ...] = ()
    """Of the tasks, or futures of them, once they are computed."""

    __dask_optimize__ = staticmethod(da.Array.__dask_optimize__)
    __dask_scheduler__ = staticmethod(da.Array.__dask_scheduler__)

    def __dask_graph__(self) -> HighLevelGraph | dict[Any, Any]:
        return dict(zip(self.keys, self.results, strict=True)) if self.results else self.graph

    def __dask_keys__(self) -> list[tuple[str | int, ...]]:
        return list(self.keys)

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        return self.keys

    def __dask_postcompute__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return list, ()

    def __dask_postpersist__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return self._computed, ()

    def _computed(self, results: Mapping[Any, Any], **_: Any) -> Tasks:
        return replace(self, results=tuple(results[key] for key in self.keys))


def run(tasks: Tasks, topic: str, **options: Any) -> Done:
    """Compute tasks for what they store, or raise what the first raises.

    Each returns an :func:`answer`. ``options`` are those of :meth:`distributed.Client.persist`; on
    threads there are none.

    On a cluster each is released as soon as it is done, without asking for its answer, which the
    scheduler would compute again if the worker that holds it died; answers come as events of a
    topic, too. Between the end of a task and its release lie three messages: a worker that dies
    just then has a block computed twice.
    """
    (tasks,) = dask.persist(tasks, **options)
    if not (futures := futures_of(tasks)):  # threads, or this thread: all is done
        return _done([socket.gethostname()], [each.item() for each in tasks.results])
    client, finished = futures[0].client, as_completed(futures)
    del tasks, futures
    made, n_finished = [], 0
    for future in finished:  # not enumerated: that would keep the last one until the next is done
        if future.status != "finished":
            future.result()
        del future  # at once, and not when the next is done
        n_finished += 1  # noqa: SIM113 (see above)
        if n_finished % _EVENTS_AT_ONCE == 0:
            made += scheduling.reported(client, topic)
    made += scheduling.reported(client, topic)
    return _done([str(urlsplit(at).hostname) for at in client.nthreads()], made)


def answer(made: Mapping[str, Any], topic: str) -> np.ndarray:
    """Return the answer of a task that :func:`run` computes: where its gradients were taken."""
    scheduling.report(topic, made)
    only = np.empty(1, object)
    only[0] = made
    return only


def _done(hosts: Collection[str], made: Collection[Mapping[str, Any]]) -> Done:
    devices = frozenset(each["device"] for each in made if "device" in each)
    kernels = frozenset(name for each in made for name in each.get("kernels", ()))
    return Done(frozenset(hosts), devices, kernels)


def about(started: float) -> dict[str, Any]:
    """Return what a record says of the task that wrote it."""
    return {
        "host": socket.gethostname(),
        "started": started,
        "ended": time.time(),
        "trakdask_version": __version__,
    }


@contextmanager
def storing(part: Part, what: str) -> Iterator[None]:
    """Say what could not be stored, and that the rest is safe."""
    try:
        yield
    except OSError as err:
        remedy = "try"
        if isinstance(err, FileNotFoundError):
            host = socket.gethostname()
            remedy = f"{host} does not see it: try a path or URL that every worker does, and"
        text = (
            f"expected to store {what} in {part.folder.url!r}, but could not "
            f"({type(err).__name__}: {err}); completed blocks are safe. When the "
            f"cause is gone, {remedy} the same td.save(...) again: it goes on from here"
        )
        raise explained(err, text) from err


def _number(block_id: tuple[int, ...]) -> np.ndarray:
    return np.array(block_id)


def _write_block(
    part: Part,
    arrays_of: Writable,
    index: int,
    names: tuple[str, ...],
    topic: str,
    block: np.ndarray,
    *values: Any,
) -> np.ndarray:
    """Store a block, given its variables, or all of them in a tuple as featurize makes it."""
    started = time.time()
    *arrays, made = values[0] if len(values) < len(names) else (*values, {})
    number = block.item()
    with storing(part, f"block {number} of checkpoint {index}"):
        start = number * part.layout["block"]
        rows = slice(start, start + len(arrays[0]))
        stored = _as_stored(part, dict(zip(names, arrays, strict=True)))
        # No chunk of errors means none; one that an earlier attempt wrote is removed.
        files = arrays_of.write(stored, (rows, ..., slice(index, index + 1)), sparse=(ERROR,))
        part.write_record(index, str(number), files, {**about(started), **made})
    return answer(made, topic)


def _as_stored(part: Part, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    values.setdefault(ERROR, np.full(values["output"].shape, "", np.dtypes.StringDType()))
    if part.layout["dtype"] == "float16":
        values["feature"], values[SCALE] = encoded(values["feature"])
    return values


# --------------------------------------------------------------------------------------- reading


def stored(part: Part, *, complete: bool = True) -> dict[str, xr.Variable]:
    """Return features and reductions of a part, lazy; features in the dtype that they are used in.

    A lost chunk raises when it is read; if it need not be complete, it reads as NaN.
    """
    names = (*FEATURE_NAMES, SCALE, *REDUCTIONS)
    token = tokenize(part.folder.url, part.token, complete)
    # Every task gets a copy of what its store knows, so that is of these arrays alone.
    store, lazy = part.store(complete=complete, only=names), {}
    for name in filter(part.arrays.__contains__, names) if complete else names:
        with suppress(KeyError):  # it has none of this name
            source = store.array(name)
            label = name.replace("_", "-")  # as task names, of which a dashboard shows the words
            data = lazy_array(part.folder, name, source, token=f"open-{label}-{token}")
            lazy[name] = xr.Variable(VARIABLES[name].dims, data, dict(source.attrs))
    if (scale := lazy.pop(SCALE, None)) is not None:
        lazy["feature"].data = decoded(lazy["feature"].data, scale.data)
    return lazy


def opened(part: Part, *, complete: bool = True, without: Collection[str] = ()) -> xr.Dataset:
    """Return the arrays of a part as they are on disk, except those that are named.

    Nothing is read yet. If it is to be complete, files that were changed or lost raise an error
    when they are.
    """
    # The version is given, because the older format has codecs that run code.
    ds: xr.Dataset = xr.open_zarr(
        part.store(complete=complete),
        consolidated=False,
        chunks=None,
        zarr_format=3,
        drop_variables=list(without),
    )
    return ds


# --------------------------------------------------------------------------------------- float16


def encoded(feature: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (rows, p, 1) features as float16, and the scale (rows, 1) to multiply them with.

    The scale is an exact power of two per sample and checkpoint. Relative to the largest element of
    its row, no element is off by more than 2^-11. Zeros, infinities and NaN stay what they are;
    other elements of their rows are scaled by the finite.

    Examples
    --------
    >>> stored, scale = encoded(np.array([[[3.0], [-0.75]], [[0.0], [np.inf]]], "f4"))
    >>> (stored[..., 0].astype("f4") * scale).tolist()
    [[3.0, -0.75], [0.0, inf]]
    """
    finite = np.where(np.isfinite(feature), feature, feature.dtype.type(0))
    _, exponent = np.frexp(np.abs(finite).max(axis=1, initial=0))  # largest = m 2^e, m in [½, 1)
    exponent = exponent - _LARGEST_EXPONENT
    halves = np.ldexp(feature, -exponent[:, None, :]).astype(np.float16)
    if (is_last := exponent == _LAST_EXPONENT).any():  # rounded up, it would overflow float32
        is_bounded = is_last[:, None, :] & np.isfinite(feature)
        bound = np.where(is_bounded, _BELOW_LARGEST, np.inf).astype(np.float16)
        halves = np.clip(halves, -bound, bound)
    return halves, np.ldexp(1.0, exponent)


def decoded(halves: da.Array, scale: da.Array) -> da.Array:
    """Return the features as float32, lazy."""
    feature: da.Array = da.blockwise(
        _decode, "spc", halves, "spc", scale, "sc",
        name="feature-of-half-" + tokenize(halves.name, scale.name), align_arrays=False,
        dtype=np.float32, meta=np.empty((0, 0, 0), np.float32),
    )  # fmt: skip
    return feature


def _decode(halves: np.ndarray, scale: np.ndarray) -> np.ndarray:
    is_missing = np.isnan(scale)  # a block that was never stored
    _, exponent = np.frexp(np.where(is_missing, 1, scale))
    feature: np.ndarray = np.ldexp(halves.astype(np.float32), exponent[:, None, :] - 1)
    feature[is_missing[:, 0]] = np.nan
    return feature
