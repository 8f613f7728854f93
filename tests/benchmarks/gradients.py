"""Time the engines of per-sample gradients beside a plain batched backward pass, on one core.

    taskset -c 1 python tests/benchmarks/gradients.py

Every engine runs at each micro-batch in turns; the table has its best. Gradients are handed to a
sink that drops them: forming them is what is timed, with f and Q. ``--memory`` prints the peak
memory of processes that compute features of the ResNet, and of their imports.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from _machine import in_a_process, peak_memory
from _models import SUBJECTS, Subject

from trakdask.models.gradients import ENGINES
from trakdask.models.model import Model

PLAIN = "plain"
LOOP_SAMPLES, N_SAMPLES = 8, 128


def plain(model: Model, batch: Any) -> None:
    """One forward and backward of the summed outputs: what a training step costs."""
    forward = model.forward(model.checkpoints[0])
    names = tuple(model.shapes)
    parameters = {name: forward.parameters[name].detach().requires_grad_() for name in names}
    output = model.task.output(forward.with_parameters(parameters), batch)
    torch.autograd.grad(output.sum(), list(parameters.values()))


def run_of(engine: str, model: Model, batch: Any) -> Callable[[], object]:
    if engine == PLAIN:
        return lambda: plain(model, batch)
    forward, names = model.forward(model.checkpoints[0]), tuple(model.shapes)
    return lambda: ENGINES[engine](forward, model.task, batch, names, lambda *_: None)


def seconds(run: Callable[[], object], at_least: float = 0.2) -> float:
    start, n = time.perf_counter(), 0
    while not n or time.perf_counter() - start < at_least:
        run()
        n += 1
    return (time.perf_counter() - start) / n


def measure(subject: Subject, engines: list[str], repeats: int) -> dict[str, dict[int, float]]:
    """Samples per second by engine and micro-batch: medians over turns."""
    torch.manual_seed(0)
    model = Model(subject.build(), task=subject.task)
    runs = {}
    for engine in engines:
        for n in subject.batches if engine != "loop" else (LOOP_SAMPLES,):
            runs[engine, n] = run_of(engine, model, subject.inputs(n))
            runs[engine, n]()
    found: dict[tuple[str, int], list[float]] = {key: [] for key in runs}
    for _ in range(repeats):
        for key, run in runs.items():
            found[key].append(key[1] / seconds(run))
    rates: dict[str, dict[int, float]] = {engine: {} for engine in engines}
    for (engine, n), values in found.items():
        rates[engine][n] = statistics.median(values)
    return rates


def show(name: str, rates: dict[str, dict[int, float]]) -> None:
    best = {engine: max(by_batch.values()) for engine, by_batch in rates.items()}
    print(f"\n{name}: samples per s, at the best micro-batch")
    for engine, by_batch in rates.items():
        at = max(by_batch, key=by_batch.__getitem__)
        ratios = [
            f"{best[engine] / best[other]:6.2f} x {other}" for other in best if other != engine
        ]
        print(f"  {engine:6} {best[engine]:10.1f}  (batch {at:4})  {'  '.join(ratios)}", flush=True)


# --- memory --------------------------------------------------------------------------------------

WAYS = {"imports": None, "sjlt": "auto", "sjlt-whole": N_SAMPLES}
"""Micro-batches of ``featurize``, or imports alone."""


def peak_mb(way: str) -> float:
    """Return the peak memory of this process after features of the ResNet, and their imports."""
    import numba  # noqa: F401

    import trakdask as td

    subject, size = SUBJECTS["resnet"], WAYS[way]
    model, projector = td.Model(subject.build(), task=subject.task), td.SJLT(2048)
    if size is not None:
        arrays = {key: value.numpy() for key, value in subject.inputs(N_SAMPLES).items()}
        samples = td.from_arrays(arrays, chunks=N_SAMPLES)
        features = td.featurize(samples, model, projector=projector, batch_size=size)
        features.compute(scheduler="sync")
    return peak_memory() / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", choices=list(SUBJECTS), default=list(SUBJECTS))
    parser.add_argument("--engines", nargs="+", default=[PLAIN, *ENGINES])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory", action="store_true", help="measure memory, and nothing else")
    parser.add_argument("--way", choices=list(WAYS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.way:
        print(json.dumps(peak_mb(options.way)))
        return
    if options.memory:
        print(f"ResNet, {N_SAMPLES} samples in one block, proj_dim 2048: peak MB of the process")
        for way in WAYS:
            print(f"  {way:10} {in_a_process(__file__, '--way', way):7.0f}", flush=True)
        return
    for name in options.models:
        show(name, measure(SUBJECTS[name], options.engines, options.repeats))


if __name__ == "__main__":
    main()
