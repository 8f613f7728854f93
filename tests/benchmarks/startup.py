"""What a process pays before it computes anything: the first and the second ``save`` of 16 samples.

    python tests/benchmarks/startup.py

Each step is measured in fresh processes, in CPU seconds of the process, which other programs on the
machine change little, and in seconds of the clock. The machine code of numba is on disk already,
except where its compilation is what is measured. The last part is a small job: features of 1200
digits, and the ten highest scores for each of 200 others, by a convolutional network.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise

N_PROCESSES = 5
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
    """Print the CPU seconds of a job after its imports and its model."""
    import numpy as np
    import torch

    from trakdask import examples

    torch.set_num_threads(1)
    torch.manual_seed(0)
    train, targets = (tuple(a[:1200] for a in part) for part in examples.digits_arrays(200))
    net = examples.digits_cnn().eval()
    with tempfile.TemporaryDirectory() as folder:
        if by == "traker":
            from trak import TRAKer

            start = time.process_time()
            scores = _scores_by_traker(TRAKer, net, train, targets, folder)
            np.argsort(-scores, axis=0)[:10]
        else:
            import trakdask as td

            start = time.process_time()
            model = td.Model(examples.digits_cnn, [net.state_dict()], task="image_classification")
            samples = [td.from_arrays({"image": x, "label": y}) for x, y in (train, targets)]
            lazy = [td.featurize(each, model) for each in samples]
            features = td.save(lazy[0], f"{folder}/train.zarr", progress=False)
            td.top_k(td.score(features, lazy[1]), k=10).compute()
        print(json.dumps(time.process_time() - start))


def _scores_by_traker(kind, net, train, targets, folder: str):  # type: ignore[no-untyped-def]
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
    traker.finalize_features()
    traker.start_scoring_checkpoint("queries", net.state_dict(), 0, m)
    for part in (slice(i, i + size) for i in range(0, m, size)):
        traker.score([queries[part], labels[part]], num_samples=len(queries[part]))
    return traker.finalize_scores("queries")


def _in_a_process(*order: str, **variables: str) -> float:
    """Return the number that a fresh process prints last."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    done = subprocess.run(
        [sys.executable, __file__, *order],
        env={**os.environ, **threads, **variables}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return float(json.loads(done.stdout.splitlines()[-1]))


def print_compilation() -> None:
    """Print how long the first projections after an installation take."""
    for kind in ("SJLT", "Rademacher"):
        with tempfile.TemporaryDirectory() as cache:
            fresh = {"NUMBA_CACHE_DIR": cache, "TRAKDASK_NUMBA": "1"}
            first = _in_a_process("compilation", kind, **fresh)
            later = _in_a_process("compilation", kind, **fresh)
        print(f"numba, first projection by {kind:10}: {first:.2f} CPU s, later {later:.2f}")


def print_small_jobs() -> None:
    """Print how long the small job takes, beside traker."""
    ours = statistics.median(_in_a_process("job", "trakdask") for _ in range(3))
    print(f"1200 samples, 200 targets: trakdask {ours:.2f} CPU s", end="")
    if importlib.util.find_spec("trak"):
        peer = _in_a_process("job", "traker")
        print(f", traker {peer:.2f}, ratio {peer / ours:.1f}", end="")
    print()


def main() -> None:
    """Run the processes one after another and print medians."""
    runs = [
        json.loads(
            subprocess.run(
                [sys.executable, __file__, "measure"], capture_output=True, text=True, check=True
            ).stdout
        )
        for _ in range(N_PROCESSES)
    ]
    print(f"{'median of ' + str(N_PROCESSES) + ' processes':32} {'CPU s':>8} {'wall s':>8}")
    for i, step in enumerate(STEPS):
        cpu, wall = (statistics.median(run[i][j] for run in runs) for j in (0, 1))
        print(f"{step:32} {cpu:8.2f} {wall:8.2f}")


if __name__ == "__main__":
    orders = {"measure": measure, "compilation": compilation, "job": small_job}
    if sys.argv[1:]:
        orders[sys.argv[1]](*sys.argv[2:])
    else:
        main()
        print_compilation()
        print_small_jobs()
