"""Computations of a page: with progress, and given up when the answer is no longer wanted."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import dask
import dask.array as da
import xarray as xr
from dask import threaded

from trakdask.execution import active_client

if TYPE_CHECKING:  # functions import distributed, which is slow and threads do not need
    from distributed import Client, Future

_ASKED_EVERY_S = 0.2
"""How often a click is noticed while a cluster computes."""

_TOLD_EVERY_S = 0.25
"""How often the progress of a computation is told."""


@dataclass(eq=False)
class Computation:
    """The computation of one click.

    ``progress`` is called with the number of tasks that are done and the number of all tasks, by
    the thread that computes; a cluster is not asked. Once ``is_abandoned`` is true, no further task
    starts; on a cluster, except tasks that others still wait for. It uses ``client``, while that is
    connected.
    """

    client: Client | None = None
    progress: Callable[[int, int], None] | None = None
    is_abandoned: bool = False
    told_at: float = field(default_factory=time.monotonic)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make :func:`compute` of this thread part of this computation."""
        is_usable = self.client is not None and self.client.status == "running"
        token = _CURRENT.set(self)
        try:
            with self.client.as_current() if self.client and is_usable else nullcontext():
                yield
        finally:
            _CURRENT.reset(token)

    def require_wanted(self, *task: Any) -> None:
        """Raise an error if the answer is no longer wanted; Dask asks before each task."""
        if self.is_abandoned:
            raise CancelledError

    def compute(self, *lazy: Any) -> tuple[Any, ...]:
        """Return what ``dask.compute`` returns, unless the computation is abandoned."""
        self.require_wanted()
        # On a cluster, `wait` looks every 0.2 s whether the answer is still wanted. A plain
        # computation could not be left.
        if (client := active_client()) is not None:
            from distributed import futures_of

            results = client.compute(list(lazy))
            futures = futures_of(results)  # numpy stays numpy
            try:
                self.wait(futures)
                return tuple(client.gather(results))
            finally:
                _release(futures)
        if dask.config.get("scheduler", None) is not None:  # synchronous, or somebody's own
            return dask.compute(*lazy)
        watch = (None, None, self.require_wanted, self._after_task, None)
        # Threads of BLAS inside threads of dask would wait for each other: ten times as slow.
        with one_blas_thread():
            # The function, because dask would import distributed for the name of a scheduler.
            return dask.compute(*lazy, scheduler=threaded.get, callbacks=[watch])

    def wait(self, futures: Sequence[Future[Any]]) -> None:
        """Wait until futures have a result or an error, unless the computation is abandoned.

        They are released and not cancelled then: equal tasks of another user go on.
        """
        from distributed import wait

        while not all(future.done() for future in futures):
            self.require_wanted()
            with suppress(TimeoutError):
                wait(futures, timeout=_ASKED_EVERY_S)

    def _after_task(self, key: Any, result: Any, graph: Any, state: Any, worker: Any) -> None:
        if self.progress is not None and time.monotonic() - self.told_at >= _TOLD_EVERY_S:
            self.told_at = time.monotonic()
            done = len(state["finished"])
            total = done + sum(len(state[name]) for name in ("ready", "waiting", "running"))
            self.progress(done, total)


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """While any thread is inside, BLAS computes on one thread; after the last one as before.

    Another thread sets and lifts the limit, because threadpoolctl heeds only the thread that set
    it, and the last to leave need not be the first that came.
    """
    from threadpoolctl import threadpool_limits  # optional dependency

    with _LOCK:
        limit = _INSIDE[0] if _INSIDE else _LIMITING.submit(threadpool_limits, 1, "blas").result()
        _INSIDE.append(limit)
    try:
        yield
    finally:
        with _LOCK:
            limit = _INSIDE.pop()
            if not _INSIDE:
                _LIMITING.submit(limit.restore_original_limits).result()


_LOCK, _LIMITING = threading.Lock(), ThreadPoolExecutor(1, thread_name_prefix="trakdask-blas")
_INSIDE: list[Any] = []
"""The limit of BLAS, once for each thread that is inside."""

_CURRENT: ContextVar[Computation | None] = ContextVar("computation", default=None)


def compute(*lazy: Any) -> tuple[Any, ...]:
    """Return what ``dask.compute`` returns, in the computation that is active in this thread."""
    return (_CURRENT.get() or Computation()).compute(*lazy)


def persist(*lazy: da.Array) -> tuple[da.Array, ...]:
    """Return arrays of the same names and chunks, in the memory of the cluster or of this process.

    This is part of the computation that is active in this thread.
    """
    if active_client() is None:
        # With their old names: what is built upon them has the same tokens as before.
        pairs = zip(lazy, compute(*lazy), strict=True)
        return tuple(da.from_array(value, chunks=x.chunks, name=x.name) for x, value in pairs)
    from distributed import futures_of

    kept = tuple(dask.persist(*lazy))
    futures = futures_of(kept)
    try:
        (_CURRENT.get() or Computation()).wait(futures)
        for future in futures:
            if future.status != "finished":
                future.result()  # raises what went wrong
    except BaseException:
        _release(futures)
        raise
    return kept


def released_if_failed(array: xr.Dataset) -> bool:
    """Return whether the cluster has lost arrays that :func:`persist` has put there, for good.

    This happens if workers die again and again while they compute them once more. The cluster then
    forgets the error, so that a new :func:`persist` can succeed.
    """
    if "distributed" not in sys.modules:  # whose import takes long, and which made no future then
        return False
    from distributed import futures_of

    futures = futures_of(array)
    # "lost" is no failure: the cluster computes such a result once more.
    has_failed = any(future.status in ("error", "cancelled") for future in futures)
    if has_failed:
        _release(futures)
    return has_failed


def _release(futures: Sequence[Future[Any]]) -> None:
    """Release futures, before the same tasks may be asked for again."""
    for future in futures:
        future.release()
    for client in {future.client for future in futures}:
        with suppress(RuntimeError, ValueError):  # of a client that has been closed
            client.sync(asyncio.sleep, 0)  # its event loop handles the releases first
