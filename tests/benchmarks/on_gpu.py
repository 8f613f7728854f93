"""Measure on a GPU what no CPU shows, one line each; an error fails its line and not the others.

    bash tests/benchmarks/on_gpu.sh               # first, with the tests: ten minutes in all
    python tests/benchmarks/on_gpu.py cuda        # this part alone, four minutes
    python tests/benchmarks/on_gpu.py fakegpu     # a rehearsal on a CPU, with small sizes

What needs CuPy, fast_jl or traker is left out where these are missing. Has not run on a GPU yet.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import dask
import numpy as np
import torch
import xarray as xr
from _models import SUBJECTS
from torch import Tensor, nn

import trakdask as td
from trakdask.models.tasks import Batch
from trakdask.projection import ROW_BLOCK, FastJL
from trakdask.projection.cuda import missing

DEVICE = sys.argv[1] if len(sys.argv) == 2 else "fakegpu"
IS_REAL = DEVICE != "fakegpu"
N_ROWS = 11_700_000 if IS_REAL else 40_000  # parameters of a ResNet-18
BATCHES, WIDTH = ((8, 32, 128), 2048) if IS_REAL else ((2,), 64)
CHUNK = 64 * ROW_BLOCK if IS_REAL else 20_000  # rows of a random matrix that is at hand
MODELS = {"cnn": 20_000, "resnet": 1024, "gpt2": 512} if IS_REAL else {"cnn": 8}  # and samples
MICRO, FEW = 128, slice(8)
N_STORED = 50_000 if IS_REAL else 400  # training samples of a query
MOST_SECONDS = 1.5 if IS_REAL else 0.0

Run = Callable[[], Any]


def shown(name: str, measured: Callable[..., str], *arguments: Any) -> None:
    try:
        print(f"{name:40} {measured(*arguments)}", flush=True)
    except Exception as err:
        print(
            f"FAILED {name}: {type(err).__name__}: {' '.join(str(err).split())[:300]}", flush=True
        )
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def seconds(run: Run) -> float:
    """Return the median time of several runs, after one that compiles and proves kernels."""
    wait, found = torch.get_device_module(DEVICE).synchronize, [0.0]
    run()
    while len(found) < 2 or (sum(found) < MOST_SECONDS and len(found) < 30):
        wait()
        start = time.perf_counter()
        run()
        wait()
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])


def has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


# --------------------------------------------- projections: beside fast_jl, and the memory's speed


def roof() -> float:
    """Return the bytes per second of the memory, by a copy that reads and writes."""
    memory = torch.empty(2**30 if IS_REAL else 2**20, dtype=torch.uint8, device=DEVICE)
    return 2 * len(memory) / seconds(memory.clone)


def projection(projector: Any, batch: int, bytes_per_second: float) -> str:
    gradients = torch.randn(batch, N_ROWS, device=DEVICE)
    out = torch.zeros(batch, WIDTH, dtype=torch.float64, device=DEVICE)
    taken = seconds(lambda: projector.project_rows(gradients, 0, 1, out))
    share = gradients.nbytes / bytes_per_second / taken
    return f"{1e3 * taken:9.3f} ms, {share:4.0%} of the memory roof"


def at_hand(batch: int) -> str:
    """Multiply by a matrix that is there, drawn or not: what is left if drawing were free."""
    both = [torch.ones(s, device=DEVICE).bfloat16() for s in ((batch, CHUNK), (CHUNK, WIDTH))]
    return f"{1e3 * seconds(lambda: torch.mm(*both)) * N_ROWS / CHUNK:9.3f} ms"


def projections() -> None:
    """Wanted: SJLT and Rademacher twice as fast as fast_jl, and SJLT at 60 % of the roof."""
    fastest = roof()
    kernels = "torch alone" if DEVICE != "cuda" else missing() or "CUDA"
    print(f"memory roof {fastest / 1e9:.0f} GB/s; projections by {kernels}", flush=True)
    projectors = {f"SJLT, sparsity {s}": td.SJLT(WIDTH, s) for s in (4, 1)}
    for n in (1, 2):
        projectors[f"Rademacher int8x{n}"] = td.Rademacher(WIDTH, arithmetic=f"int8x{n}")
    if has("fast_jl"):
        projectors["fast_jl"] = FastJL(WIDTH)
    for batch in BATCHES:
        shown(f"batch {batch}, bfloat16, matrix at hand", at_hand, batch)
        for name, projector in projectors.items():
            shown(f"batch {batch}, {name}", projection, projector, batch, fastest)


# ------------------------------------------------- features: beside a backward pass, and traker


def parts(batch: Batch) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(batch[name].split(MICRO) for name in ("image", "label")), strict=True)


def backward(net: nn.Module, batch: Batch) -> None:
    """Train without a step: micro-batches that come from host memory."""
    for x, y in parts(batch):
        nn.functional.cross_entropy(net(x.to(DEVICE)), y.to(DEVICE)).backward()


def by_traker(net: nn.Module, batch: Batch) -> None:
    from trak import TRAKer

    with tempfile.TemporaryDirectory() as folder:
        options = {"save_dir": folder, "device": DEVICE, "proj_dim": WIDTH, "logging_level": 40}
        traker = TRAKer(net, "image_classification", train_set_size=batch.size, **options)
        traker.load_checkpoint(net.state_dict(), model_id=0)
        for part in parts(batch):
            traker.featurize([tensor.to(DEVICE) for tensor in part], num_samples=len(part[0]))


def beside(plain: float, run: Run) -> str:
    taken = seconds(run)
    return f"{taken:8.3f} s, {taken / plain:7.2f} × the backward pass"


def agreement(features: Run, few: Run) -> str:
    """Two runs should differ in no bit, and from the CPU by rounding; TF32 would show as 1e-3."""
    one, other, cpu = (run().feature.compute().values for run in (features, features, few))
    error = np.linalg.norm(one[: len(cpu)] - cpu) / np.linalg.norm(cpu)
    return (
        f"error {error:.1e}; {np.count_nonzero(one != other)} of {one.size} differ when run again"
    )


def features(name: str, n: int) -> None:
    """Wanted: features take at most 1.3 times as long as a plain backward pass."""
    subject, batch = SUBJECTS[name], SUBJECTS[name].inputs(n)
    torch.manual_seed(0)
    net = subject.build().eval()
    there, model = copy.deepcopy(net).to(DEVICE), td.Model(net, task="image_classification")
    samples = td.from_arrays({key: tensor.numpy() for key, tensor in batch.items()}).chunk(sample=n)
    plain = seconds(lambda: backward(there, batch))
    print(f"{name}, {n} samples: {plain:.3f} s for a backward pass", flush=True)

    def lazy(samples: xr.Dataset, projector: Any, device: str = DEVICE, **options: Any) -> Any:
        return td.featurize(samples, model, projector, device=device, **options)

    for kind, projector in {"SJLT": td.SJLT(WIDTH), "Rademacher": td.Rademacher(WIDTH)}.items():
        run = partial(lazy, samples, projector)
        shown(f"{name}, {kind}", beside, plain, lambda run=run: run().compute())
    run, few = (partial(lazy, some, td.SJLT(WIDTH)) for some in (samples, samples.isel(sample=FEW)))
    shown(f"{name}, SJLT, bits", agreement, run, partial(few, device="cpu"))
    shown(f"{name}, SJLT, bfloat16", beside, plain, lambda: run(dtype="bfloat16").compute())
    if has("trak"):
        shown(f"{name}, traker", beside, plain, partial(by_traker, there, batch))
    many = lazy(samples.chunk(sample=max(1, n // 32)), td.SJLT(WIDTH))
    with dask.config.set(scheduler="threads", num_workers=16):
        shown(f"{name}, SJLT, 16 threads", beside, plain, many.compute)


# --------------------------------------------------------- gram matrices, scores and ranks by CuPy


def queries(xp: str) -> dict[str, Any]:
    """Return the gram matrix with its inverse, scores and the best of them, and their seconds."""
    os.environ["TRAKDASK_XP"] = xp
    rng = np.random.default_rng(0)
    train, targets = (
        td.from_features(rng.standard_normal((n, WIDTH)).astype("f4"), "noise", chunks=n // 4 + 1)
        for n in (N_STORED, 200)
    )
    start, scores = time.perf_counter(), td.score(train, targets, td.Trak(damping=0.1))
    found = scores.compute()
    middle, best = time.perf_counter(), td.top_k(scores, k=10).score.compute()
    return {"scores": found, "best": best, "times": (middle - start, time.perf_counter() - middle)}


def arrays() -> str:
    expected = queries("numpy")
    if missing() or DEVICE != "cuda":
        return f"{expected['times'][0]:.2f} s by numpy; CuPy left out"
    queries("cupy")  # compiles
    found = queries("cupy")
    errors = [
        abs(found[k] - expected[k]).max() / abs(expected[k]).max() for k in ("scores", "best")
    ]
    shown = [
        f"{a:.2f} s, numpy {b:.2f} s"
        for a, b in zip(found["times"], expected["times"], strict=True)
    ]
    return f"scores {shown[0]}; with top_k {shown[1]}; errors {errors[0]:.0e}, {errors[1]:.0e}"


def main() -> None:
    if not IS_REAL:
        from tests import fakegpu

        fakegpu.start()
    dask.config.set(scheduler="sync")
    torch.backends.cudnn.allow_tf32 = False  # float32 on both sides
    projections()
    for name, n in MODELS.items():
        features(name, n)
    shown("gram matrix, solve, scores, top_k", arrays)
    print(f"peak of torch {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
