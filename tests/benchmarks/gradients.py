"""Time the engines of per-sample gradients beside a plain batched backward pass, on one core.

    taskset -c 1 python tests/benchmarks/gradients.py --out gradients.json

Every engine runs at each micro-batch in turns; the table has its best. Gradients are handed to a
sink that drops them: forming them is what is timed, with f and Q. With ``--end-to-end`` also
featurize of the ResNet, gradients and projection, beside traker: each in a process of its own, with
its peak memory, and what of this are imports.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from _models import SUBJECTS, Subject

from trakdask.models.gradients import ENGINES
from trakdask.models.model import Model

PLAIN = "plain"
LOOP_SAMPLES = 8


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


# --- end to end ----------------------------------------------------------------------------------

PROJ_DIM = 2048


def featurize_by_trakdask(kind: str, n: int) -> float:
    import trakdask as td

    subject, batch = SUBJECTS["resnet"], SUBJECTS["resnet"].inputs(n)
    torch.manual_seed(0)
    model = td.Model(subject.build(), task=subject.task)
    projector = td.Rademacher(PROJ_DIM) if kind == "rademacher" else td.SJLT(PROJ_DIM)
    size = n if kind == "sjlt-whole" else "auto"

    def run(batch: dict[str, torch.Tensor]) -> None:
        samples = td.from_arrays({k: v.numpy() for k, v in batch.items()}, chunks=n)
        features = td.featurize(samples, model, projector=projector, batch_size=size)
        features.compute(scheduler="sync")

    run(subject.inputs(4))
    start = time.perf_counter()
    run(batch)
    return time.perf_counter() - start


def featurize_by_traker(kind: str, n: int) -> float:
    from trak import TRAKer

    subject, batch = SUBJECTS["resnet"], SUBJECTS["resnet"].inputs(n)
    torch.manual_seed(0)
    model = subject.build().eval()
    with tempfile.TemporaryDirectory() as folder:
        traker = TRAKer(
            model=model,
            task="image_classification",
            train_set_size=n + 4,
            save_dir=folder,
            device="cpu",
            proj_dim=PROJ_DIM,
            use_half_precision=False,
            logging_level=40,
        )
        traker.load_checkpoint(model.state_dict(), model_id=0)
        small = subject.inputs(4)
        traker.featurize([small["image"], small["label"]], num_samples=4)
        start = time.perf_counter()
        traker.featurize([batch["image"], batch["label"]], num_samples=n)
        return time.perf_counter() - start


def import_trakdask(kind: str, n: int) -> float:
    """Import what features need, compiled kernels included."""
    start = time.perf_counter()
    import numba  # noqa: F401

    import trakdask as td

    getattr(td, "featurize")  # noqa: B009
    return time.perf_counter() - start


WAYS = {
    "traker": featurize_by_traker,
    "rademacher": featurize_by_trakdask,
    "sjlt": featurize_by_trakdask,
    "sjlt-whole": featurize_by_trakdask,
    "imports": import_trakdask,
}
"""``sjlt-whole`` asks for all samples in one micro-batch."""


def end_to_end(n: int, ways: list[str]) -> dict[str, dict[str, float]]:
    """Samples per second and peak memory of each way, in a fresh process."""
    found: dict[str, dict[str, float]] = {}
    print(f"\nend to end: ResNet, {n} samples in one block, proj_dim {PROJ_DIM}, 1 checkpoint")
    for way in ways:
        done = subprocess.run(
            [sys.executable, __file__, "--way", way, "--samples", str(n)],
            capture_output=True,
            text=True,
            check=True,
        )
        found[way] = json.loads(done.stdout.splitlines()[-1])
        rate, peak = (found[way][key] for key in ("samples_per_s", "peak_mb"))
        text = "" if way == "imports" else f"{rate:7.2f} samples per s"
        if "traker" in found and text:
            first = found["traker"]
            text += f" ({rate / first['samples_per_s']:5.2f} x traker)"
            text += f", {peak / first['peak_mb']:4.2f} of its memory"
        print(f"  {way:10} peak {peak:7.0f} MB  {text}", flush=True)
    return found


def obey(way: str, n: int) -> None:
    seconds = WAYS[way](way, n)
    print(json.dumps({"samples_per_s": n / seconds, "peak_mb": peak_mb()}))


def peak_mb() -> float:
    """Peak of this program alone: ``ru_maxrss`` begins with that of the process that started it."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", choices=list(SUBJECTS), default=list(SUBJECTS))
    parser.add_argument("--engines", nargs="+", default=[PLAIN, *ENGINES])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--end-to-end", action="store_true", help="needs the extra peers")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--samples", type=int, default=128, help="of the end-to-end run")
    parser.add_argument("--way", choices=list(WAYS), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.way:
        obey(options.way, options.samples)
        return
    print(
        f"{date.today()}  torch {torch.__version__}  {platform.processor() or platform.machine()}"
    )
    results: dict[str, Any] = {}
    for name in options.models:
        results[name] = measure(SUBJECTS[name], options.engines, options.repeats)
        show(name, results[name])
    if options.end_to_end:
        results["end to end"] = end_to_end(options.samples, options.ways)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
