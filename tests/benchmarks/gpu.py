"""Time projections on a GPU, beside fast_jl and beside a product with a matrix that is at hand.

    python -m pytest -m gpu tests           # first: the kernels give the bits of the CPU
    python tests/benchmarks/gpu.py          # minutes

Needs torch and cupy; fast_jl is left out where it is not installed. Has not run on a GPU yet.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trakdask.projection import ROW_BLOCK, SJLT, FastJL, Rademacher
from trakdask.projection.cuda import kernels_for, missing

N_ROWS = 11_700_000
WIDTHS, BATCHES = (2048, 4096), (8, 32, 128, 512)
CHUNK = 64 * ROW_BLOCK  # rows of a matrix that fits the memory
WARM_UP, LEAST_RUNS, MOST_SECONDS = 2, 5, 3.0

Run = Callable[[], object]


def gradients(batch: int, rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(batch, rows, device="cuda").to(dtype)


def projection(projector: Any, batch: int) -> Run:
    out = torch.zeros(batch, projector.proj_dim, dtype=torch.float64, device="cuda")
    return partial(projector.project_rows, gradients(batch, N_ROWS), 0, 1, out)


def materialised(width: int, batch: int) -> Run:
    """Multiply by a matrix that is there, drawn or not: what is left if drawing were free."""
    matrix = torch.ones(CHUNK, width, device="cuda", dtype=torch.bfloat16)
    return partial(torch.mm, gradients(batch, CHUNK, torch.bfloat16), matrix)


def measurements(width: int, batch: int) -> Iterator[tuple[str, Callable[[], Run], float]]:
    """Yield a name, what prepares a run, and how often it has to run to take all rows."""
    yield "cuBLAS bf16, matrix at hand", partial(materialised, width, batch), N_ROWS / CHUNK
    for arithmetic in ("int8x1", "int8x2", "int8x3"):
        projector = Rademacher(width, arithmetic=arithmetic)
        yield f"Rademacher {arithmetic}", partial(projection, projector, batch), 1
    for sparsity in (1, 4):
        yield f"SJLT {sparsity}", partial(projection, SJLT(width, sparsity), batch), 1
    yield "fast_jl", lambda: projection(FastJL(width), batch), 1


def milliseconds(run: Run) -> float:
    """Return the median of several runs, by the clock of the GPU."""
    for _ in range(WARM_UP):
        run()
    found: list[float] = []
    while len(found) < LEAST_RUNS or (sum(found) < 1e3 * MOST_SECONDS and len(found) < 50):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        stop.synchronize()
        found.append(start.elapsed_time(stop))
    return statistics.median(found)


def main() -> None:
    if why := missing():
        print(f"{why}; nothing was measured")
        return
    print(f"{kernels_for(torch.device('cuda')).description}; milliseconds for {N_ROWS} rows")
    for width in WIDTHS:
        for batch in BATCHES:
            for name, prepare, times in measurements(width, batch):
                try:
                    shown = f"{milliseconds(prepare()) * times:10.3f}"
                except (ImportError, RuntimeError) as error:
                    shown = f"failed: {' '.join(str(error).split())[:100]}"
                print(f"p = {width}, batch {batch}: {name:28} {shown}", flush=True)
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
