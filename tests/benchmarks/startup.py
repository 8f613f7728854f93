"""What a process pays before it computes anything: the first and the second ``save`` of 16 samples.

    python tests/benchmarks/startup.py

Each step is measured in fresh processes of one thread, in CPU seconds of the process, which other
programs on the machine change little, and in seconds of the clock. The machine code of numba is on
disk already, except where its compilation is what is measured. The last part is a small job, by
stage: features of 1200 digits in a store, and the ten highest scores for each of 200 others, by a
convolutional network of 78 thousand parameters and one checkpoint.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

N_PROCESSES = 5
N_TRAIN, N_TARGETS, N_JOBS = 1200, 200, 3
STAGES = {
    "write": ("save-", "store-map"),
    "gradients, projected": ("featurize",),
    "choice of λ": ("left-out", "completeness", "mean-trace", "damping", "known-spectrum"),
    "scores and top-k": ("solve", "score", "top-k"),
    "eigenvectors": ("spectrum", "decomposition"),
    "gram matrix": ("merge-gram", "gram-products"),
}
OUTSIDE = "imports of trakdask, graphs, metadata"
STEPS = ("import torch", "import trakdask, samples, model", "first save", "second save")


def measure() -> None:
    """Print the CPU and wall seconds of each step as JSON."""
    times = [(time.process_time(), time.perf_counter())]

    def lap() -> None:
        times.append((time.process_time(), time.perf_counter()))

    import torch

    lap()
    import numpy as np

    import trakdask as td

    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 10)
    )
    image = np.random.default_rng(0).normal(size=(16, 1, 8, 8)).astype("f4")
    samples = td.from_arrays({"image": image, "label": np.arange(16) % 10})
    model = td.Model(net, [net.state_dict()], task="image_classification")
    lap()
    with tempfile.TemporaryDirectory() as folder:
        for name in ("first", "second"):
            features = td.featurize(samples, model, projector=td.SJLT(proj_dim=512, seed=0))
            td.save(features, f"{folder}/{name}.zarr", progress=False)
            lap()
    spent = [
        [after - before for before, after in zip(one, other, strict=True)]
        for one, other in pairwise(times)
    ]
    print(json.dumps(spent))


def compilation(kind: str) -> None:
    """Print the CPU seconds of a projector's first projection, which compiles its kernels."""
    import torch

    import trakdask as td
    from trakdask.projection import RowMap, project

    rows = RowMap.from_shapes({"weight": (20_000,)}, alignment=512)
    gradients = {"weight": torch.ones(40, 20_000)}
    start = time.process_time()
    project(getattr(td, kind)(512), gradients, rows, checkpoint=0)
    print(json.dumps(time.process_time() - start))


def small_job(by: str) -> None:
    """Print the seconds of a job by stage, [CPU, wall] each, after the import of torch."""
    import numpy as np
    import torch

    from trakdask import examples

    torch.set_num_threads(1)
    torch.manual_seed(0)
    train, targets = (
        (ds.image.values[:N_TRAIN], ds.label.values[:N_TRAIN]) for ds in examples.digits(N_TARGETS)
    )
    net = examples.digits_cnn().eval()
    with tempfile.TemporaryDirectory() as folder:
        if by == "traker":
            from trak import TRAKer

            laps = Laps()
            scores = _scores_by_traker(TRAKer, net, train, targets, folder, laps)
            np.argsort(-scores, axis=0)[:10]
            laps.end("scores and top-k")
        else:
            laps = _job_by_trakdask(net, train, targets, folder)
    print(json.dumps(laps.spent))


class Laps:
    """CPU and wall seconds by name."""

    def __init__(self) -> None:
        self.spent: dict[str, list[float]] = {}
        self._last = _now()

    def end(self, name: str, *, without: Iterable[str] = ()) -> None:
        """Add the time since the last lap to a name, but for what other names have of it."""
        now = _now()
        self.add(name, [b - a for a, b in zip(self._last, now, strict=True)])
        for other in without:
            self.add(name, [-seconds for seconds in self.spent[other]])
        self._last = now

    def add(self, name: str, seconds: Iterable[float]) -> None:
        """Add CPU and wall seconds to a name."""
        before = self.spent.get(name, [0.0, 0.0])
        self.spent[name] = [a + b for a, b in zip(before, seconds, strict=True)]


def _now() -> tuple[float, float]:
    return time.process_time(), time.perf_counter()


def _job_by_trakdask(net: Any, train: Any, targets: Any, folder: str) -> Laps:
    import dask
    from dask.callbacks import Callback

    import trakdask as td
    from trakdask import examples

    laps, started = Laps(), []

    class Tasks(Callback):  # type: ignore[misc]
        """Adds what tasks, which run one after another, take to their stages."""

        def _pretask(self, key: Any, dsk: Any, state: Any) -> None:
            started.append(_now())

        def _posttask(self, key: Any, result: Any, dsk: Any, state: Any, worker: Any) -> None:
            spent = (b - a for a, b in zip(started.pop(), _now(), strict=True))
            laps.add(_stage(key), spent)

    with dask.config.set(scheduler="sync"), Tasks():
        model = td.Model(examples.digits_cnn, [net.state_dict()], task="image_classification")
        samples = [td.from_arrays({"image": x, "label": y}) for x, y in (train, targets)]
        lazy = [td.featurize(part, model) for part in samples]
        features = td.save(lazy[0], f"{folder}/train.zarr", progress=False)
        td.top_k(td.score(features, lazy[1]), k=10).compute()
    laps.end(OUTSIDE, without=list(laps.spent))
    return laps


def _stage(key: Any) -> str:
    """Return the stage that a task of this name belongs to."""
    from dask.utils import key_split

    name = key_split(key)
    for stage, parts in STAGES.items():
        if any(part in name for part in parts):
            return stage
    return "other tasks"


def _scores_by_traker(
    kind: Any, net: Any, train: Any, targets: Any, folder: str, laps: Laps
) -> Any:
    import torch

    n, m, size = len(train[0]), len(targets[0]), 128
    traker = kind(
        model=net, task="image_classification", train_set_size=n, save_dir=folder, device="cpu",
        proj_dim=2048, use_half_precision=False, logging_level=40, lambda_reg=1e-3,
    )  # fmt: skip
    (x, y), (queries, labels) = ([torch.as_tensor(a) for a in part] for part in (train, targets))
    traker.load_checkpoint(net.state_dict(), model_id=0)
    for part in (slice(i, i + size) for i in range(0, n, size)):
        traker.featurize([x[part], y[part]], num_samples=len(x[part]))
    laps.end("gradients, projected")
    traker.finalize_features()
    laps.end("gram matrix")
    traker.start_scoring_checkpoint("queries", net.state_dict(), 0, m)
    for part in (slice(i, i + size) for i in range(0, m, size)):
        traker.score([queries[part], labels[part]], num_samples=len(queries[part]))
    laps.end("gradients, projected")
    return traker.finalize_scores("queries")


def print_compilation() -> None:
    """Print how long the first projections after an installation take."""
    for kind in ("SJLT", "Rademacher"):
        with tempfile.TemporaryDirectory() as cache:
            fresh = {"NUMBA_CACHE_DIR": cache, "TRAKDASK_NUMBA": "1"}
            first = in_a_process(__file__, "compilation", kind, **fresh)
            later = in_a_process(__file__, "compilation", kind, **fresh)
        print(f"numba, first projection by {kind:10}: {first:.2f} CPU s, later {later:.2f}")


def print_small_jobs() -> None:
    """Print how long the small job takes, by stage, beside traker."""
    has_peer = importlib.util.find_spec("trak") is not None
    runs: dict[str, list[dict[str, list[float]]]] = {"trakdask": [], "traker": []}
    for _ in range(N_JOBS):  # in turns, as other programs come and go
        for by, results in runs.items():
            if by == "trakdask" or has_peer:
                results.append(in_a_process(__file__, "job", by))
    print(f"\n{N_TRAIN} samples, {N_TARGETS} targets, median of {N_JOBS} processes, after torch")
    totals = {by: _print_stages(by, results) for by, results in runs.items() if results}
    if has_peer:
        print(f"traker / trakdask: {totals['traker'] / totals['trakdask']:.1f} in CPU seconds")


def _print_stages(by: str, runs: list[dict[str, list[float]]]) -> float:
    """Print the medians of each stage; return the CPU seconds of all."""
    totals = [[sum(column) for column in zip(*run.values(), strict=True)] for run in runs]
    cpu, wall = (statistics.median(column) for column in zip(*totals, strict=True))
    print(f"{by:40} {cpu:8.2f} {wall:8.2f}")
    for stage in runs[0]:
        medians = [statistics.median(run[stage][i] for run in runs) for i in (0, 1)]
        print(f"  {stage:38} {medians[0]:8.2f} {medians[1]:8.2f}")
    return cpu


def main() -> None:
    """Run the processes one after another and print medians."""
    in_a_process(__file__, "measure")  # writes the byte code
    runs = [in_a_process(__file__, "measure") for _ in range(N_PROCESSES)]
    print(f"{'median of ' + str(N_PROCESSES) + ' processes':32} {'CPU s':>8} {'wall s':>8}")
    for i, step in enumerate(STEPS):
        cpu, wall = (statistics.median(run[i][j] for run in runs) for j in (0, 1))
        print(f"{step:32} {cpu:8.2f} {wall:8.2f}")


if __name__ == "__main__":
    orders = {"measure": measure, "compilation": compilation, "job": small_job}
    if sys.argv[1:]:
        orders[sys.argv[1]](*sys.argv[2:])
    else:
        from _machine import in_a_process  # imports what the processes that are measured must not

        main()
        print_compilation()
        print_small_jobs()
