"""What it costs that Dask's workers return freed memory to the system at once.

    python tests/benchmarks/worker_memory.py

Two worker processes compute features of 4,800 MNIST digits and train small networks, with Dask's
setting of the allocator and with one by which a process keeps the memory that it frees. Printed are
CPU seconds of both workers: the median of three clusters each, and the peak memory of a worker.
"""

from __future__ import annotations

import logging
import resource
import statistics
import tempfile

import dask
from distributed import Client

import trakdask as td
from trakdask import examples

N_CHECKPOINTS, REPEATS = 3, 3
KEPT = {"MALLOC_TRIM_THRESHOLD_": 2**28, "MALLOC_MMAP_THRESHOLD_": 2**25}


def used() -> tuple[float, float]:
    """Return the CPU seconds and the peak memory in MB of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1e3


def measure(environ: dict[str, int]) -> tuple[float, float, float]:
    """Return CPU seconds of features and of training, and the peak memory, on a new cluster."""
    train, _ = examples.mnist()
    states = [examples.mnist_cnn().state_dict() for _ in range(N_CHECKPOINTS)]
    model = td.Model(examples.mnist_cnn, states, "image_classification")
    prefix = "distributed.nanny.pre-spawn-environ."
    quiet = {"dashboard_address": ":0", "silence_logs": logging.CRITICAL}
    with (
        dask.config.set({prefix + name: value for name, value in environ.items()}),
        Client(n_workers=2, threads_per_worker=1, **quiet) as client,
        tempfile.TemporaryDirectory() as folder,
    ):

        def lap() -> float:
            return sum(seconds for seconds, _ in client.run(used).values())

        def fit(name: str) -> None:
            halves = f"{folder}/{name}"
            td.train_on_halves(examples.fit_mnist_cnn, train, halves, 4, progress=False)

        features = td.featurize(train, model, td.SJLT(512))
        features.isel(sample=slice(1024)).compute()  # imports, and compiles
        fit("first")
        times = [lap()]
        features.compute()
        times.append(lap())
        fit("second")
        times.append(lap())
        peak = max(memory for _, memory in client.run(used).values())
    return times[1] - times[0], times[2] - times[1], peak


def main() -> None:
    """Print both settings."""
    print(f"{'':24}{'features':>10}{'training':>10}{'peak, MB':>10}")
    settings = {"Dask's setting": {}, "freed memory is kept": KEPT}
    runs: dict[str, list[tuple[float, float, float]]] = {name: [] for name in settings}
    for _ in range(REPEATS):
        for name, environ in settings.items():
            runs[name].append(measure(environ))
    for name, values in runs.items():
        features, training, peak = (
            statistics.median(column) for column in zip(*values, strict=True)
        )
        print(f"{name:24}{features:10.1f}{training:10.1f}{peak:10.0f}")


if __name__ == "__main__":
    main()
