"""A check that nothing is computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import dask


@contextmanager
def raise_if_dask_computes() -> Iterator[None]:
    """Fail if Dask computes anything inside the block."""

    def fail(*args: Any, **kwargs: Any) -> NoReturn:
        raise AssertionError("expected lazy results only, got a computation by Dask")

    with dask.config.set(scheduler=fail):
        yield
