"""Measure what scores of tokens cost against features of sequences, in CPU seconds.

    taskset -c 1 python tests/benchmarks/tokens.py

One run compares all: the same model, sequences, projector and thread, in turns. It prints CPU
seconds per sequence, which other processes of the machine disturb less than they do the clock.
Vectors of targets are given, so that no gram matrix is solved: that takes the same for any scores.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
import xarray as xr
from _machine import parser_of
from _models import Gpt

import trakdask as td
from trakdask.projection import Projector

TASK = td.tasks.CausalLM(inputs="input_ids", positional=True)
N_TARGETS = (1, 10, 100)


def cpu_seconds(build: Callable[[], xr.DataArray]) -> float:
    start = time.process_time()
    build().compute(scheduler="sync")
    return time.process_time() - start


def targets_like(features: xr.Dataset, n: int) -> xr.Dataset:
    """Return n targets: random combinations of features, which cost what real ones do."""
    mixed = np.random.default_rng(n).standard_normal((n, features.sizes["sample"]))
    names = (f"target {i}" for i in range(n))
    return td.combine(features, weights=dict(zip(names, mixed, strict=True))).compute()


def ways(
    model: td.Model, samples: xr.Dataset, projector: Projector
) -> dict[str, Callable[[], xr.DataArray]]:
    features = td.featurize(samples, model, projector=projector).compute()
    found: dict[str, Callable[[], xr.DataArray]] = {
        "features of sequences": lambda: td.featurize(samples, model, projector=projector).feature,
        "scores of modules, 1 target": scores(model, samples, features, 1, ["blocks", "tokens"]),
    }
    for n in N_TARGETS:
        title = f"scores of tokens, {n} target{'s' * (n > 1)}"
        found[title] = scores(model, samples, features, n, "token")
    return found


def scores(
    model: td.Model, samples: xr.Dataset, features: xr.Dataset, n: int, parts: str | list[str]
) -> Callable[[], xr.DataArray]:
    targets = targets_like(features, n)
    options = {"of": samples, "parts": parts, "estimator": "grad_dot"}
    return lambda: td.score_parts(features, targets, model, **options)


def main() -> None:
    options = parser_of(__doc__, sequences=16, tokens=128, proj_dim=2048, turns=3).parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = td.Model(Gpt(length=options.tokens), task=TASK)
    ids = np.random.default_rng(0).integers(0, 1000, (options.sequences, options.tokens))
    samples = td.from_arrays({"input_ids": ids}, chunks=options.sequences)
    n_parameters = sum(int(np.prod(shape)) for shape in model.shapes.values())
    print(
        f"{n_parameters} parameters, {options.sequences} sequences of {options.tokens} tokens, "
        f"proj_dim {options.proj_dim}"
    )
    print(f"{'projector':<12}{'what':<32}{'CPU s per sequence':>20}{'ratio':>8}")
    for projector in (td.SJLT(options.proj_dim), td.Rademacher(options.proj_dim)):
        each = ways(model, samples, projector)
        seconds: dict[str, list[float]] = {name: [] for name in each}
        for turn in range(options.turns + 1):
            for name, build in each.items():
                taken = cpu_seconds(build)
                if turn:  # the first one checks the model and compiles
                    seconds[name].append(taken)
        medians = {n: statistics.median(x) / options.sequences for n, x in seconds.items()}
        for name, taken in medians.items():
            ratio = taken / medians["features of sequences"]
            print(
                f"{type(projector).__name__:<12}{name:<32}{taken:>20.4f}{ratio:>8.2f}", flush=True
            )


if __name__ == "__main__":
    main()
