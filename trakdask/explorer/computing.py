"""Computing what a page shows: with progress, and given up when it is no longer wanted."""

from __future__ import annotations

import contextvars
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import dask
import dask.array as da
import xarray as xr
from dask.base import get_scheduler
from distributed import Client, Future

from trakdask.execution.scheduling import active_client

__all__ = ["Abandoned", "Work", "compute", "computed", "persist"]

T = TypeVar("T", xr.Dataset, xr.DataArray)


class Abandoned(Exception):
    """The answer is no longer wanted."""


class Work:
    """What one click computes."""

    def __init__(self) -> None:
        self._progress: Callable[[int, int], None] | None = None
        self._abandoned = threading.Event()
        self._futures: tuple[Client, list[Future[Any]]] | None = None

    @property
    def is_abandoned(self) -> bool:
        """Whether the answer is no longer wanted."""
        return self._abandoned.is_set()

    def on_progress(self, progress: Callable[[int, int], None]) -> None:
        """Call a function with the number of tasks that are done and that of all tasks.

        It is called from the thread that computes, and not on a cluster.
        """
        self._progress = progress

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make :func:`compute` of this thread part of this work."""
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)

    def abandon(self) -> None:
        """Cancel what runs on a cluster; on threads, start no further task."""
        self._abandoned.set()
        if running := self._futures:
            client, futures = running
            client.cancel(futures)

    def require_wanted(self) -> None:
        """Raise :class:`Abandoned` if the answer is no longer wanted."""
        if self._abandoned.is_set():
            raise Abandoned

    def compute(self, *lazy: Any) -> tuple[Any, ...]:
        """Return what ``dask.compute`` returns, unless the work is abandoned."""
        self.require_wanted()
        if (client := active_client()) is not None:
            return self._on_cluster(client, lazy)
        if get_scheduler() is not None:  # synchronous, or somebody's own
            made: tuple[Any, ...] = dask.compute(*lazy)
            return made
        watch = (None, self._started, self._before_task, self._after_task, None)
        # Threads of BLAS within those of dask would wait for each other: ten times as slow.
        with _ONE_THREAD:
            made = dask.compute(*lazy, scheduler="threads", callbacks=[watch])
        return made

    def _on_cluster(self, client: Client, lazy: tuple[Any, ...]) -> tuple[Any, ...]:
        futures = client.compute(list(lazy))
        self._futures = client, futures
        try:
            self.require_wanted()
            return tuple(client.gather(futures))
        except BaseException:
            self.require_wanted()  # a future that was cancelled raises its own error
            raise
        finally:
            self._futures = None
            client.cancel(futures)

    def _started(self, graph: Any, state: Any) -> None:
        self._report(state)

    def _before_task(self, key: Any, graph: Any, state: Any) -> None:
        self.require_wanted()

    def _after_task(self, key: Any, result: Any, graph: Any, state: Any, worker: Any) -> None:
        self._report(state)

    def _report(self, state: Any) -> None:
        if self._progress is not None:
            done = len(state["finished"])
            total = done + sum(len(state[name]) for name in ("ready", "waiting", "running"))
            self._progress(done, total)


class _OneThread:
    """While any thread is inside, BLAS computes on one thread; after the last one as before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._limit: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._limit = _blas().limit(limits=1, user_api="blas")
                self._limit.__enter__()
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._limit.__exit__(None, None, None)


@functools.cache
def _blas() -> Any:
    from threadpoolctl import ThreadpoolController  # optional dependency

    return ThreadpoolController()


_ONE_THREAD = _OneThread()
_CURRENT: contextvars.ContextVar[Work | None] = contextvars.ContextVar("work", default=None)


def compute(*lazy: Any) -> tuple[Any, ...]:
    """Return what ``dask.compute`` returns, as part of the work that is active in this thread."""
    return (_CURRENT.get() or Work()).compute(*lazy)


def persist(*lazy: da.Array) -> tuple[da.Array, ...]:
    """Return arrays of the same names and chunks, in the memory of the cluster or of this process.

    On threads this is part of the work that is active in this thread; on a cluster it does not
    wait.
    """
    if active_client() is not None:
        return tuple(dask.persist(*lazy))
    pairs = zip(lazy, compute(*lazy), strict=True)
    return tuple(da.from_array(value, chunks=x.chunks, name=x.name) for x, value in pairs)


def computed(array: T) -> T:
    """Return a Dataset or DataArray whose arrays are computed by :func:`compute`."""
    if isinstance(array, xr.DataArray):
        name = array.name
        whole = computed(array.rename("array").to_dataset())["array"].rename(name)
        return whole
    lazy = [name for name, variable in array.variables.items() if variable.chunks is not None]
    values = compute(*(array[name].data for name in lazy))
    made = {
        name: (array[name].dims, each, array[name].attrs)
        for name, each in zip(lazy, values, strict=True)
    }
    coords = {name: value for name, value in made.items() if name in array.coords}
    return array.assign_coords(coords).assign({n: v for n, v in made.items() if n not in coords})
