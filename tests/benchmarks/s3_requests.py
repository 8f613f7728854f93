"""How many requests a store on S3 takes, in total and per block.

    python tests/benchmarks/s3_requests.py [--blocks 8 24]

moto's server is the object store, in this process, and counts what arrives. Each step runs on
stores of both sizes; "per block" is the difference of the two totals over the difference in blocks,
so that what a step does once is left out. Counts do not depend on the load of the machine.
"""

from __future__ import annotations

import argparse
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import dask
import distributed
import fsspec
import s3fs
import xarray as xr
import zarr
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

import trakdask as td
from trakdask.testing import simulate_features

_ROWS, _PROJ_DIM = 4, 8
_KINDS = ("PUT", "GET", "HEAD", "LIST", "DELETE", "POST")


class CountingServer:
    """An S3 service that counts requests by their kind."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self, threaded=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        method = environ["REQUEST_METHOD"]
        is_list = method == "GET" and "list-type" in environ.get("QUERY_STRING", "")
        self.counts["LIST" if is_list else method] += 1
        answer: Iterable[bytes] = self._app(environ, start_response)
        return answer

    @contextmanager
    def running(self) -> Iterator[dict[str, Any]]:
        """Yield what fsspec opens its URLs with."""
        thread = threading.Thread(target=self._server.serve_forever)
        thread.start()
        try:
            yield {"key": "k", "secret": "s", "endpoint_url": self.url}
        finally:
            self._server.shutdown()
            thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, nargs=2, default=[8, 24])
    args = parser.parse_args()
    modules = (dask, distributed, xr, zarr, fsspec, s3fs)
    print("; ".join(f"{module.__name__} {module.__version__}" for module in modules))
    print(f"requests with {args.blocks[0]} and {args.blocks[1]} blocks of 1 checkpoint")
    print(f"{'':16}{'total':>12}{'per block':>11}  {'per block, by kind'}")
    server = CountingServer()
    with server.running() as options, dask.config.set(scheduler="threads", num_workers=2):
        small, large = (list(counted(server, options, n)) for n in args.blocks)
    for (name, few), (_, many) in zip(small, large, strict=True):
        print(line(name, few, many, args.blocks[1] - args.blocks[0]))


def counted(
    server: CountingServer, options: dict[str, Any], n: int
) -> Iterator[tuple[str, Counter[str]]]:
    """Yield the name of each step, and the requests that it took with this many blocks."""
    fs = fsspec.filesystem("s3", **options)
    features = simulate_features(
        n_samples=n * _ROWS, proj_dim=_PROJ_DIM, n_checkpoints=1, chunks=_ROWS
    )
    targets = features.isel(sample=slice(2)).compute()
    for gram in (False, True):
        fs.mkdir(f"blocks-{n}-{gram}".lower())
    store, with_gram = (f"s3://blocks-{n}-{gram}/f.zarr".lower() for gram in (False, True))
    save = {"storage_options": options, "progress": False}
    steps: dict[str, Callable[[], Any]] = {
        "save": lambda: td.save(features, store, estimator=None, **save),
        "save, with gram": lambda: td.save(features, with_gram, **save),
        "resume": lambda: td.save(features, store, estimator=None, **save),
        "open": lambda: td.open(store, storage_options=options),
        "read": lambda: td.open(store, storage_options=options).compute(),
        "read features": lambda: td.open(store, storage_options=options).feature.compute(),
        "score": lambda: td.score(td.open(with_gram, storage_options=options), targets).compute(),
    }
    for name, step in steps.items():
        server.counts.clear()
        step()
        yield name, Counter(server.counts)


def line(name: str, few: Counter[str], many: Counter[str], more: int) -> str:
    by_kind = {kind: (many[kind] - few[kind]) / more for kind in _KINDS}
    kinds = ", ".join(f"{number:g} {kind}" for kind, number in by_kind.items() if number)
    total = f"{few.total()}, {many.total()}"
    return f"{name:16}{total:>12}{sum(by_kind.values()):>11g}  {kinds}"


if __name__ == "__main__":
    main()
