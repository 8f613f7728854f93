"""Peak memory of gram, score and top_k on large features, and of features beside their plan.

    python tests/benchmarks/memory.py [--samples 200000 --proj-dim 1024 --targets 200 ...]

The features are written to a store first, by another process: what is measured is one process that
opens the store, reduces the gram matrices, solves, scores and ranks, on two threads. Then, for each
of some models, what ``td.plan(features, pilot=True)`` predicts in a fresh process, and the most
that others held, which ran ``td.save`` on one and on two threads (pip install transformers).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import dask
import numpy as np
import torch
from _machine import in_a_process, parser_of, peak_memory
from torch import nn

import trakdask as td
from trakdask import testing


class Logits(nn.Module):
    """A model of transformers with random weights, whose logits are its output."""

    def __init__(self, kind: str, head: str, **options: int) -> None:
        super().__init__()
        import transformers  # not of the extras that all benchmarks need

        config = getattr(transformers, f"{kind}Config")(**options, attn_implementation="eager")
        self.model = getattr(transformers, f"{kind}{head}")(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).logits


def cnn() -> nn.Module:
    convolutions = nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1)
    return nn.Sequential(
        *convolutions, nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(4096, 9)
    )


PHOTO = (3, 224, 224)
IMAGES = "ForImageClassification"
MODELS = {  # how it is built, the shape of a sample, and samples per block
    "perceptron": (
        lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 9)),
        (64,),
        512,
    ),
    "CNN": (cnn, (3, 32, 32), 128),
    "ResNet-50": (lambda: Logits("ResNet", IMAGES, num_labels=1000), PHOTO, 8),
    "ViT-B/16": (lambda: Logits("ViT", IMAGES, num_labels=1000), PHOTO, 4),
    "GPT-2": (lambda: Logits("GPT2", "LMHeadModel"), (128,), 4),
}


def print_planned(names: list[str]) -> None:
    print("\nMB of a process that saves features, on 1 and on 2 threads")
    for name in names:
        predicted, *measured = (
            in_a_process(__file__, "--stage", stage, "--models", name)
            for stage in ("plan", "1", "2")
        )
        for n, (plan, peak) in enumerate(zip(predicted, measured, strict=True), start=1):
            print(f"{name:10} {n}: planned {plan / 1e6:5.0f}, held {peak / 1e6:5.0f}, "
                  f"{100 * plan / peak - 100:+.0f} %", flush=True)  # fmt: skip


def planned_or_saved(name: str, stage: str) -> list[int] | int:
    build, shape, block = MODELS[name]
    n, rng = 2 * block, np.random.default_rng(0)
    torch.manual_seed(0)
    model = td.Model(build, [build().state_dict()], task="image_classification")
    data = {"image": rng.random((n, *shape), np.float32), "label": np.arange(n) % 9}
    if name == "GPT-2":
        model = td.Model(build, [build().state_dict()], task="causal_lm")
        data = {"input_ids": rng.integers(0, 50_000, (n, *shape))}
    features = td.featurize(td.from_arrays(data, chunks=block), model)
    if stage == "plan":
        plan = td.plan(features, pilot=True)
        return [plan.memory_bytes(threads) for threads in (1, 2)]
    with tempfile.TemporaryDirectory() as folder:
        with dask.config.set(scheduler="threads", num_workers=int(stage)):
            td.save(features, f"{folder}/train.zarr", progress=False)
        return peak_memory()


def main() -> None:
    args = parse_args()
    if args.stage == "write":
        write(args)
    elif args.stage == "measure":
        measure(args)
    elif args.stage:
        print(json.dumps(planned_or_saved(args.models[0], args.stage)))
    else:
        run_stages(args)
        print_planned(args.models)


def parse_args() -> argparse.Namespace:
    sizes = {"samples": 200_000, "targets": 200, "proj_dim": 1024, "checkpoints": 2}
    parser = parser_of(__doc__, **sizes, chunks=4096, k=10, models=list(MODELS))
    parser.add_argument("--folder", type=Path)
    parser.add_argument(
        "--stage", choices=["write", "measure", "plan", "1", "2"], help=argparse.SUPPRESS
    )
    return parser.parse_args()


def run_stages(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for stage in ("write", "measure"):
            order = [*sys.argv[1:], "--stage", stage, "--folder", folder]
            subprocess.run([sys.executable, __file__, *order], check=True)


def write(args: argparse.Namespace) -> None:
    for name, n in (("train", args.samples), ("targets", args.targets)):
        features = testing.simulate_features(
            n, args.proj_dim, args.checkpoints, chunks=args.chunks, seed=len(name)
        )
        with dask.config.set(scheduler="threads", num_workers=2):
            td.save(features, args.folder / f"{name}.zarr", gram=False, progress=False)


def measure(args: argparse.Namespace) -> None:
    before = peak_memory()
    features, targets = (td.open(args.folder / f"{name}.zarr") for name in ("train", "targets"))
    size = features.feature.nbytes
    with dask.config.set(scheduler="threads", num_workers=2):
        start = time.perf_counter()
        gram = td.gram(features).persist()
        gram_seconds, gram_rss = time.perf_counter() - start, peak_memory()
        start = time.perf_counter()
        scores = td.score(features.assign(gram=gram), targets)
        top = td.top_k(scores, args.k).compute()
        top_seconds, top_rss = time.perf_counter() - start, peak_memory()
    print(
        f"n={args.samples} p={args.proj_dim} m={args.targets} C={args.checkpoints}: features "
        f"{size / 1e9:.2f} GB, scores {4e-9 * args.samples * args.targets:.2f} GB"
    )
    print(f"peak RSS at start          {before / 1e6:8.0f} MB")
    print(f"peak RSS after gram        {gram_rss / 1e6:8.0f} MB   {gram_seconds:6.1f} s")
    print(f"peak RSS after top_k       {top_rss / 1e6:8.0f} MB   {top_seconds:6.1f} s")
    check(features, targets, gram, top)


def check(features, targets, gram, top) -> None:  # type: ignore[no-untyped-def]
    """Compare the ranking of the first target with float64 numpy, block by block."""
    total = np.zeros(features.sizes["sample"])
    for c in range(features.sizes["checkpoint"]):
        k = gram.isel(checkpoint=c).values.astype("f8")
        damping = 0.03 * np.sum(k * k) / np.trace(k)
        phi = targets.feature.isel(checkpoint=c, sample=0).values.astype("f8")
        solved = np.linalg.solve(k + damping * np.eye(len(k)), phi)
        blocks = features.feature.isel(checkpoint=c).data.blocks
        total += np.concatenate([blocks[i].compute() @ solved for i in range(blocks.size)])
    total *= features.out_to_loss.values.mean(1)
    best = np.argsort(-total)[: top.sizes["rank"]]
    same = np.array_equal(best, top.position.values[0])
    print(f"ranking of the first target equals float64 numpy: {same}")


if __name__ == "__main__":
    main()
