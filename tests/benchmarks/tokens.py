"""Measure what features of tokens cost against features of whole sequences, in CPU seconds.

    taskset -c 1 python tests/benchmarks/tokens.py

One run compares both: the same model, sequences, projector and thread, in turns. It prints CPU
seconds per sequence, which other processes of the machine disturb less than they do the clock.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
import xarray as xr
from _models import Gpt

import trakdask as td

TASK = td.tasks.CausalLM(inputs="input_ids", positional=True)


def cpu_seconds(build: Callable[[], xr.Dataset]) -> float:
    start = time.process_time()
    build().feature.compute(scheduler="sync")
    return time.process_time() - start


def measured(
    model: td.Model, samples: xr.Dataset, projector: td.Projector, turns: int
) -> tuple[float, float]:
    """Return CPU seconds per sequence: of whole sequences, and of their tokens."""
    lazy = {
        "whole": lambda: td.featurize(samples, model, projector=projector),
        "token": lambda: td.featurize_parts(samples, model, projector=projector, parts="token"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in lazy}
    for turn in range(turns + 1):
        for name, build in lazy.items():
            taken = cpu_seconds(build)
            if turn:  # the first one checks the model and compiles
                seconds[name].append(taken)
    whole, token = (statistics.median(each) / samples.sizes["sample"] for each in seconds.values())
    return whole, token


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--proj-dim", type=int, default=2048)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = Gpt(length=options.tokens)
    model = td.Model(net, task=TASK)
    ids = np.random.default_rng(0).integers(0, 1000, (options.sequences, options.tokens))
    samples = td.from_arrays({"input_ids": ids}, chunks=options.sequences)
    n_parameters = sum(int(np.prod(shape)) for shape in model.shapes.values())
    print(f"{n_parameters} parameters, {options.tokens} tokens, proj_dim {options.proj_dim}")
    print(f"{'projector':<24}{'whole, CPU s':>14}{'tokens, CPU s':>16}{'ratio':>8}")
    p = options.proj_dim
    for projector in (td.SJLT(p), td.SJLT(p, sparsity=1), td.Mask(keep=p)):
        whole, token = measured(model, samples, projector, options.turns)
        name = f"{type(projector).__name__} {getattr(projector, 'sparsity', '')}"
        print(f"{name:<24}{whole:>14.4f}{token:>16.4f}{token / whole:>8.2f}")


if __name__ == "__main__":
    main()
