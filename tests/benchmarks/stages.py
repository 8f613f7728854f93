"""Which stages of features by ``td.fit`` take the time, beside the least that this processor needs.

    python tests/benchmarks/stages.py

One micro-batch on one thread. Each run has one stage more than the run before, and the stage takes
the difference. Its roof is the time of its matrix products at the rate of large ones, in float32 or
in int8, or of the bytes that it has to read and write at the speed of a copy in the cache,
whichever is longer; the sketch's additions count as nothing. All rates are of the same run, all
times CPU seconds, the least of several turns.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from timeit import timeit
from unittest.mock import patch

import torch
from _machine import parser_of
from _models import SUBJECTS
from featurizing import JOBS, _fitted_maps
from torch.utils.flop_counter import FlopCounterMode

from trakdask.models.gradients import hooks_gradients
from trakdask.models.tasks import Forward, ImageClassification
from trakdask.projection.maps import _FittedStream
from trakdask.projection.stream import ProjectionStream
from trakdask.torch_internals import int8_matmul


def nothing(*arguments: object) -> None:
    """Take the place of a stage."""


def least(runs: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Return the CPU seconds of each run, after one that draws and compiles."""
    found = [
        {name: timeit(run, timer=time.process_time, number=1) for name, run in runs.items()}
        for _ in range(turns + 1)
    ]
    return {name: min(seconds[name] for seconds in found[1:]) for name in runs}


def rates(turns: int, n: int = 1024) -> dict[str, float]:
    """Return how many bytes of 4 MB are copied in a second, and the operations of products."""
    a, b, small = torch.rand(n, n), torch.rand(n, n), torch.ones(n, n, dtype=torch.int8)
    runs = {
        "bytes": lambda: [a.copy_(b) for _ in range(100)],
        "float32": lambda: torch.mm(b, b, out=a),
        "int8": lambda: int8_matmul(small, small, a.view(torch.int32)),
    }
    work = dict.fromkeys(runs, 2 * n**3) | {"bytes": 200 * a.nbytes}
    return {name: work[name] / took for name, took in least(runs, turns).items()}


def show(model: str, turns: int, rate: dict[str, float]) -> None:
    subject, n = SUBJECTS[model], JOBS[model][0]
    net, batch = subject.build().eval(), subject.inputs(n)
    parameters = {name: p.detach() for name, p in net.named_parameters()}
    maps = _fitted_maps(net)
    forward = Forward(net, parameters, dict(net.named_buffers()))
    gradients = partial(hooks_gradients, forward, ImageClassification(), batch, list(parameters))

    def features() -> None:
        gradients(stream := maps.open(n), maps.rotations)
        stream.result()

    no_product = patch.object(_FittedStream, "result", nothing)
    no_sketch = patch.object(ProjectionStream, "_project", nothing)
    no_leading = patch.object(_FittedStream, "_keep_leading", nothing)
    size, (width, columns) = sum(p.numel() for p in parameters.values()), maps.components.shape
    runs_and_bytes = {  # that a stage has to read or write
        "gradients by hooks": (lambda: gradients(nothing), 4 * size),
        "their coordinates": (lambda: gradients(nothing, maps.rotations), 0),
        "scales and copies": (no_product(no_sketch(no_leading(features))), 8 * size),
        "leading coordinates": (no_product(no_sketch(features)), 8 * len(maps.leading_rows)),
        "sketch": (no_product(features), 4 * size),
        "last product": (features, 4 * (width + columns + width * columns / n)),
    }
    seconds = least({stage: run for stage, (run, _) in runs_and_bytes.items()}, turns)
    print(f"\n{model}, micro-batch of {n}: {size:,} parameters, {width:,} columns to {columns:,}")
    print("  per sample                    µs     Mflop        kB   roof µs   share   int8 µs")
    before = flops_before = 0.0
    for stage, (run, n_bytes) in runs_and_bytes.items():
        with FlopCounterMode(display=False) as counter:
            run()
        took, flops = (seconds[stage] - before) / n, counter.get_total_flops() / n - flops_before
        before, flops_before = seconds[stage], flops_before + flops
        roof, small = (max(n_bytes / rate["bytes"], flops / rate[k]) for k in ("float32", "int8"))
        print(
            f"  {stage:22}{1e6 * took:10.1f}{flops / 1e6:10.3f}{n_bytes / 1e3:10.1f}"
            f"{1e6 * roof:10.1f}{roof / took:8.0%}{1e6 * small:10.1f}"
        )
    print(f"  {'all':22}{1e6 * before / n:10.1f}")


def main() -> None:
    options = parser_of(__doc__, models=["cnn", "resnet"], turns=9).parse_args()
    os.environ["TRAKDASK_NUMBA"] = "1"  # from the first element on
    torch.set_num_threads(1)
    speeds = rates(options.turns)
    print(", ".join(f"{name} {speed / 1e9:.0f}e9" for name, speed in speeds.items()), "per second")
    for model in options.models:
        show(model, options.turns, speeds)


if __name__ == "__main__":
    main()
