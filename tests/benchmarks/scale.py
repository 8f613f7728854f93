"""What the graphs of queries cost at 10⁶ to 10⁸ training samples, before anything is computed.

    python tests/benchmarks/scale.py [--rows 1000000 10000000] [--limit 600]

The features are lazy arrays of the shapes that a store has, which are never read: 3 checkpoints of
2048 columns in blocks of 4096 rows, with five coords in memory. Each line is measured in a process
of its own, because memory is part of the question:

- build: the seconds of CPU until the lazy result is there, which other users of the machine disturb
  less than the clock;
- tasks: how many the scheduler gets, after all optimizations;
- scheduler: the seconds of CPU in which a scheduler without workers takes the graph, with what the
  client does to send it; running a task costs it about a millisecond more;
- sent: the bytes of the graph as ``result.compute()`` sends it to the scheduler, pickled;
- tasks' bytes: the sum and the largest of the pickles that workers get (up to 256 of each kind of
  task are pickled; the sum is extrapolated);
- memory: what the process holds beyond the coords, at the highest point of all of this.
"""

from __future__ import annotations

import argparse
import gc
import pickle
import resource
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import dask
import dask.array as da
import distributed
import numpy as np
import psutil
import torch
import xarray as xr
from _machine import parser_of, peak_memory
from distributed.protocol import deserialize, serialize, to_serialize

import trakdask as td
import trakdask.arrays.graphs
from trakdask.variables import VARIABLES

_SAMPLED = 256
_MEMORY_LIMIT = 16 * 2**30
_BLOCK, _PROJ_DIM, _CHECKPOINTS, _TARGETS = 4096, 2048, 3, 100


class Stored:
    """An array that looks as if it were in a store, and must not be read."""

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        self.shape, self.ndim, self.dtype = shape, len(shape), np.dtype(dtype)

    def __getitem__(self, index: object) -> np.ndarray:
        raise AssertionError("expected lazy results only, but an array was read")


def main() -> None:
    parser = parser_of(__doc__, rows=[10**6, 10**7], limit=600.0)
    parser.add_argument("--only", nargs="+", choices=_QUERIES, default=list(_QUERIES))
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        measure(args.rows[0], args.only[0])
        return
    versions = {m.__name__: m.__version__ for m in (dask, distributed, np, xr)}
    print("; ".join(f"{name} {version}" for name, version in versions.items()))
    print(f"blocks of {_BLOCK} × {_PROJ_DIM}, {_CHECKPOINTS} checkpoints, {_TARGETS} targets")
    for n in args.rows:
        print(f"\n{n:,} samples in {-(-n // _BLOCK):,} blocks")
        titles = ("sent", "tasks sum", "largest", "memory")
        print(f"{'':22}{'build':>9}{'tasks':>11}{'scheduler':>11}"
              f"{''.join(f'{title:>12}' for title in titles)}")  # fmt: skip
        for name in args.only:
            run_alone(n, name, args.limit)


def run_alone(n: int, name: str, limit: float) -> None:
    command = [sys.executable, __file__, "--one", "--rows", str(n), "--only", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        print(f"{name:22} not finished within {limit:g} s", flush=True)
        return
    last = done.stderr.strip().splitlines()[-1:] or [f"ended by signal {-done.returncode}"]
    print(done.stdout.rstrip() if done.returncode == 0 else f"{name:22} {last[0]:.80}", flush=True)


def measure(n: int, name: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_LIMIT, _MEMORY_LIMIT))
    _QUERIES[name](_BLOCK, metadata(_BLOCK))  # so that all modules are imported
    coords = metadata(n)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # from here on, the peak is measured anew
    before = psutil.Process().memory_info().rss
    start = time.process_time()
    result = _QUERIES[name](n, coords)
    built = time.process_time() - start
    expression, keys = given_to_scheduler(result)
    header, frames = serialize(to_serialize(expression))
    sent = sum(memoryview(frame).nbytes for frame in frames)
    tasks = dict(deserialize(header, frames).__dask_graph__())
    del header, frames
    total, largest = task_bytes(tasks)
    sizes = (sent, total, largest, peak_memory() - before)
    n_tasks = len(tasks)
    del tasks
    print(f"{name:22}{built:7.2f} s{n_tasks:11,}{scheduler_s(expression, keys, n_tasks):9.2f} s"
          f"{''.join(map(megabytes, sizes))}")  # fmt: skip


class Given(Exception):
    """What a scheduler was given."""


def given_to_scheduler(result: xr.Dataset | xr.DataArray) -> tuple[Any, Any]:
    """Return the optimized graph that ``result.compute()`` gives to a scheduler, and its keys."""

    def schedule(expression: Any, keys: Any, **_: object) -> None:
        raise Given(expression, keys)

    try:
        result.compute(scheduler=schedule)
    except Given as given:
        return given.args
    raise AssertionError("a lazy result is computed by a scheduler")


def scheduler_s(expression: Any, keys: Any, n_tasks: int) -> float:
    """Return the CPU seconds until a scheduler in this process has all tasks of a graph."""
    options = {"n_workers": 0, "processes": False, "dashboard_address": None}
    with distributed.LocalCluster(**options) as cluster, distributed.Client(cluster) as client:
        start = time.process_time()
        futures = client.get(expression, keys, sync=False)
        while len(cluster.scheduler.tasks) < 0.9 * n_tasks:  # clients may fuse otherwise
            time.sleep(0.01)
        seconds = time.process_time() - start
        del futures
    return seconds


def task_bytes(tasks: Mapping[Any, Any]) -> tuple[float, int]:
    """Return the sum of the pickles of all tasks, and the largest pickle."""
    kinds = defaultdict(list)
    for key in tasks:
        kinds[key[0] if isinstance(key, tuple) else key].append(key)
    total, largest = 0.0, 0
    for keys in kinds.values():
        sampled = _SAMPLED if len(pickled(tasks[keys[-1]])) < 10**6 else 4
        sizes = [len(pickled(tasks[key])) for key in keys[:: -(-len(keys) // sampled)]]
        total += sum(sizes) / len(sizes) * len(keys)
        largest = max(largest, *sizes)
    return total, largest


def pickled(task: object) -> bytes:
    try:
        return pickle.dumps(task, protocol=5)
    except (AttributeError, pickle.PicklingError):  # functions of this script
        return cloudpickle.dumps(task)


def megabytes(n: float) -> str:
    return f"{n / 1e6:9.3f} MB"


def metadata(n: int) -> dict[str, tuple[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    sources = np.array(["web", "books", "code", "news", "forum"], np.dtypes.StringDType())
    day = np.timedelta64(1, "D").astype("timedelta64[ns]")
    coords = {
        "label": rng.integers(0, 10, n),
        "source": sources[rng.integers(0, 5, n, dtype=np.int8)],
        "date": np.datetime64("2020-01-01", "ns") + day * rng.integers(0, 2000, n, dtype=np.int16),
        "length": rng.integers(1, 4096, n, dtype=np.int32),
        "quality": rng.random(n, dtype=np.float32),
    }
    return {name: ("sample", values) for name, values in coords.items()}


def stored(name: str, shape: tuple[int, ...], chunks: tuple[int, ...]) -> da.Array:
    sizes = da.core.normalize_chunks(chunks, shape)
    read = Stored(shape, "f4").__getitem__
    return trakdask.arrays.graphs.stored(read, sizes, "f4", f"open-{name}-{shape[0]}")


def features(n: int, coords: Mapping[str, Any], *, gram: bool = True) -> xr.Dataset:
    """Return features as :func:`trakdask.open` does."""
    p, c = _PROJ_DIM, _CHECKPOINTS
    data = {"feature": stored("feature", (n, p, c), (_BLOCK, p, 1))}
    data |= {x: stored(x, (n, c), (_BLOCK, 1)) for x in ("output", "out_to_loss")}
    ds = xr.Dataset(
        {x: (VARIABLES[x].dims, array) for x, array in data.items()},
        coords={**coords, "checkpoint": [f"c{i}" for i in range(c)]},
        attrs={
            "projector": {"kind": "simulated", "proj_dim": p},
            "task": "simulated",
            "source": "simulated",
        },
    )
    if not gram:
        return ds
    attrs = {**VARIABLES["gram"].attrs, **td.Trak().attrs(ds)}
    matrix = (VARIABLES["gram"].dims, stored("gram", (p, p, c), (p, p, 1)), attrs)
    return ds.assign(gram=matrix)


def scores(n: int, coords: Mapping[str, Any]) -> xr.DataArray:
    targets = features(_TARGETS, metadata(_TARGETS), gram=False)
    return td.score(features(n, coords), targets, td.Trak(damping=0.03))


def group_score(n: int, coords: Mapping[str, Any], by: str = "label") -> xr.DataArray:
    targets = features(_TARGETS, metadata(_TARGETS), gram=False)
    return td.group_score(features(n, coords), targets, td.Trak(damping=0.03), by=by)


def featurize(n: int, coords: Mapping[str, Any]) -> xr.Dataset:
    samples = xr.Dataset(
        {"image": (("sample", "pixel"), stored("image", (n, 8), (_BLOCK, 8)))},
        coords=coords,
        attrs={"source": "simulated"},
    )
    model = td.Model(
        torch.nn.Linear(8, 10),
        checkpoints=[torch.nn.Linear(8, 10).state_dict() for _ in range(_CHECKPOINTS)],
        task=td.tasks.ImageClassification(image="image", label="label"),
    )
    return td.featurize(samples, model, projector=td.Rademacher(proj_dim=16), gradients="hooks")


def in_store(n: int) -> dict[str, tuple[str, da.Array]]:
    """Return coords as ``td.open(store, load_coords=False)`` does."""
    return {name: ("sample", stored(f"coord-{name}", (n,), (_BLOCK,))) for name in metadata(1)}


_QUERIES: dict[str, Callable[[int, Mapping[str, Any]], Any]] = {
    "gram": lambda n, coords: td.gram(features(n, coords, gram=False)),
    "score, 100 samples": lambda n, coords: scores(n, coords).isel(sample=slice(n - 100, n)),
    "score": scores,
    "top_k": lambda n, coords: td.top_k(scores(n, coords), 10),
    "top_k of a mask": lambda n, coords: td.top_k(
        scores(n, coords), 10, where=xr.DataArray(coords["label"][1] == 3, dims="sample")
    ),
    "top_k of a tile mask": lambda n, coords: td.top_k(
        scores(n, coords), 10, where=lambda tile: tile.label == tile.target_label
    ),
    "top_k, lazy coords": lambda n, _: td.top_k(scores(n, in_store(n)), 10),
    "tile mask, lazy coords": lambda n, _: td.top_k(
        scores(n, in_store(n)), 10, where=lambda tile: tile.label == tile.target_label
    ),
    "group_score": group_score,
    "group_score of text": lambda n, coords: group_score(n, coords, by="source"),
    "self_influence": lambda n, coords: td.self_influence(
        features(n, coords), td.Trak(damping=0.03)
    ),
    "featurize": featurize,
}


if __name__ == "__main__":
    main()
