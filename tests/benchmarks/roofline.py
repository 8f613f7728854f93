"""How fast could per-sample gradients be? A lower bound of their time, layer by layer.

    taskset -c 1 python tests/benchmarks/roofline.py

Every sample's gradient has to be written, which a plain backward pass never does: it only adds them
up. What cannot be avoided is one forward pass, a backward pass to the activations, and for each
parameter the bytes of its gradients and of the arrays that they are made of, or the operations,
whichever takes longer at the highest rates that torch reaches in the same run. The second bound has
the time of torch's own kernels (a product, a batched matrix product, a sum) instead of that. All
times are CPU seconds of one thread, the least of several turns.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from _models import SUBJECTS, Subject
from gradients import PLAIN, run_of
from torch import Tensor

from trakdask.models.hooks import GradientCollector
from trakdask.models.layers import Call, hook_plan
from trakdask.models.model import Model
from trakdask.models.rules import SLICEABLE, Rule, _conv_weight

PASSES = "passes"
_CACHED = 2**20  # float32 elements: a slice of 4 MB, as the hooks write it
_MULTIPLYING = {*SLICEABLE, _conv_weight}


def least_seconds(run: Callable[[], object], turns: int = 5, at_least: float = 0.05) -> float:
    run()
    found = []
    for _ in range(turns):
        start, n = time.process_time(), 0
        while time.process_time() - start < at_least:
            run()
            n += 1
        found.append((time.process_time() - start) / n)
    return min(found)


def rates() -> tuple[float, float]:
    """Return bytes and operations per second: filling or copying 4 MB, and a matrix product."""
    one, other = torch.rand(_CACHED), torch.rand(_CACHED)
    a, b, out = torch.rand(1024, 1024), torch.rand(1024, 1024), torch.empty(1024, 1024)
    filled = one.nbytes / least_seconds(lambda: one.fill_(1.0))
    copied = 2 * one.nbytes / least_seconds(lambda: one.copy_(other))
    return max(filled, copied), 2 * 1024**3 / least_seconds(lambda: torch.mm(a, b, out=out))


@dataclass
class Work:
    """What the gradients of a parameter take, for all samples of a micro-batch."""

    n_bytes: int = 0
    operations: int = 0
    seconds: float = 0.0

    def bound(self, bandwidth: float, speed: float) -> float:
        return max(self.n_bytes / bandwidth, self.operations / speed)


class TimedCollector(GradientCollector):
    """A collector that measures the time in which gradients are formed."""

    work: defaultdict[str, Work]

    def _receive(self, call: Call, name: str, rule: Rule, x: Tensor, delta: Tensor) -> None:
        work, parameter = self.work[name], self._forward.parameters[name]
        start = time.process_time()
        super()._receive(call, name, rule, x, delta)
        work.seconds += time.process_time() - start
        inputs = x.nbytes if parameter.ndim > 1 or "norm" in type(call.module).__name__ else 0
        work.n_bytes += len(x) * parameter.nbytes + inputs + delta.nbytes
        if rule in _MULTIPLYING:
            positions = delta.numel() // len(delta) // parameter.shape[0]
            work.operations += 2 * len(x) * positions * parameter.numel()


def recorded(model: Model, batch: Any) -> dict[str, Work]:
    """Form all gradients once."""
    forward, names = model.forward(model.checkpoints[0]), tuple(model.shapes)
    hookable = hook_plan(forward, model.task, batch, names)
    once = forward.caching()
    collector = TimedCollector(once, hookable.layers, batch.size, lambda *_: None)
    collector.work = defaultdict(Work)
    with collector.listening():
        output = model.task.output(once, batch)
    collector.differentiate(output)
    collector.release()
    return collector.work


def passes(model: Model, batch: Any) -> None:
    """f, Q, and the backward pass to the activations of the first layer with a bias or scale."""
    forward, names = model.forward(model.checkpoints[0]), tuple(model.shapes)
    parameters = {name: forward.parameters[name].detach() for name in names}
    first = next(name for name in names if parameters[name].ndim == 1)
    parameters[first].requires_grad_()
    once = forward.with_parameters(parameters).caching()
    output = model.task.output(once, batch)
    with torch.no_grad():
        model.task.out_to_loss(once, batch)
    torch.autograd.grad(output.sum(), parameters[first])


def seconds_of(subject: Subject, model: Model, turns: int) -> dict[str, tuple[float, int]]:
    """Return seconds per sample at the best micro-batch, and that micro-batch, by what was run."""
    runs = {}
    for n in subject.batches:
        batch = subject.inputs(n)
        for engine in (PLAIN, "hooks", "vmap"):
            runs[engine, n] = run_of(engine, model, batch)
        runs[PASSES, n] = partial(passes, model, batch)
    found: dict[tuple[str, int], float] = {}
    for _ in range(turns):
        for key, run in runs.items():
            took = least_seconds(run, 1, 0.2) / key[1]
            found[key] = min(found.get(key, took), took)
    return {
        engine: min((took, n) for (kind, n), took in found.items() if kind == engine)
        for engine in (PLAIN, "hooks", "vmap", PASSES)
    }


def show(name: str, turns: int, bandwidth: float, speed: float) -> None:
    subject = SUBJECTS[name]
    torch.manual_seed(0)
    model = Model(subject.build(), task=subject.task)
    found = seconds_of(subject, model, turns)
    n = found["hooks"][1]
    works = [recorded(model, subject.inputs(n)) for _ in range(max(3, turns))]
    print(f"\n{name}: per sample, in micro-batches of {n}")
    print(f"  {'parameter':32}{'KB':>9}{'Mflop':>9}{'bound µs':>10}{'torch µs':>10}{'share':>8}")
    total, by_torch = 0.0, 0.0
    for parameter, work in works[0].items():
        bound = work.bound(bandwidth, speed) / n
        took = min(each[parameter].seconds for each in works) / n
        total, by_torch = total + bound, by_torch + took
        print(
            f"  {parameter:32}{work.n_bytes / n / 1e3:9.1f}{work.operations / n / 1e6:9.3f}"
            f"{1e6 * bound:10.2f}{1e6 * took:10.2f}{bound / took:8.0%}"
        )
    hooks, plain, vmap, both = (found[what][0] for what in ("hooks", PLAIN, "vmap", PASSES))
    for what, took in {
        "f, Q, and backward to the activations": both,
        "bound: gradients at the rates above": both + total,
        "bound: gradients by torch's kernels": both + by_torch,
        "hooks": hooks,
        "plain": plain,
        "vmap": vmap,
    }.items():
        print(
            f"  {what:40}{1e6 * took:10.2f} µs, {took / hooks:6.2f} of hooks; "
            f"times plain {plain / took:5.2f}, times vmap {vmap / took:6.2f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS))
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    bandwidth, speed = rates()
    print(f"one thread: {bandwidth / 1e9:.0f} GB/s in 4 MB, {speed / 1e9:.0f} GFLOP/s (float32)")
    for name in options.models:
        show(name, options.turns, bandwidth, speed)


if __name__ == "__main__":
    main()
