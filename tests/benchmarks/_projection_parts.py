"""What :mod:`projection` measures: engines, roofs, memory, errors and bits."""

from __future__ import annotations

import ctypes
import math
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from trakdask.projection import (
    ROW_BLOCK,
    SJLT,
    Kronecker,
    Mask,
    Projector,
    Rademacher,
    RowMap,
    integer_products,
    philox,
    project,
)

PEER = "traker"
MASK_ROWS = 65536
SMALL_ROWS = 70_000
FASTEST_ROUND = 0.05  # seconds: what is faster is run several times in a row
Run = Callable[[Tensor], Tensor]


# --- engines --------------------------------------------------------------------------------------

WAYS = {
    "fastest": {},
    "float32 product": {"int8_matmul_is_usable": False},
}
"""Way of a dense product -> what its module must believe of this machine to take it."""


@contextmanager
def taking(way: str) -> Iterator[None]:
    with ExitStack() as stack:
        for name, answer in WAYS[way].items():
            stack.enter_context(mock.patch.object(integer_products, name, return_value=answer))
        yield


@dataclass(frozen=True)
class Engine:
    """One column of the comparison: a projector, and how it is to be computed."""

    what: str
    projector: Callable[[int], Projector]  # of proj_dim
    numba: bool = True
    way: str = "fastest"

    def prepare(self, n_rows: int, proj_dim: int) -> Run:
        projector, row_map = self.bound(n_rows, proj_dim)

        def run(gradients: Tensor) -> Tensor:
            os.environ["TRAKDASK_NUMBA"] = str(int(self.numba))
            with taking(self.way):
                return project(projector, {"g": gradients}, row_map, 0)

        return run

    def bound(self, n_rows: int, proj_dim: int) -> tuple[Projector, RowMap]:
        """Return the projector and its rows: one vector, or for Kronecker a matrix."""
        projector = self.projector(proj_dim)
        shape = (n_rows // 500, 500) if isinstance(projector, Kronecker) else (n_rows,)
        row_map = RowMap.from_shapes({"g": shape}, alignment=projector.row_alignment)
        return projector.bind(row_map), row_map

    def dense_operations(self, n_rows: int, proj_dim: int) -> int:
        """Operations of the int8 product per sample; 0 for other kinds."""
        projector = self.projector(proj_dim)
        return projector.cost(n_rows).operations if isinstance(projector, Rademacher) else 0


@dataclass(frozen=True)
class Peer:
    """traker's projector, as ``TRAKer(device="cpu", use_half_precision=False)`` makes it."""

    what: str = "traker BasicProjector, normal, float32, 100 columns at a time"

    def prepare(self, n_rows: int, proj_dim: int) -> Run:
        from trak.projectors import BasicProjector, ProjectionType

        projector = BasicProjector(
            grad_dim=n_rows,
            proj_dim=proj_dim,
            seed=0,
            proj_type=ProjectionType.normal,
            device="cpu",
            dtype=torch.float32,
        )
        return lambda gradients: projector.project(gradients, model_id=0)

    def dense_operations(self, n_rows: int, proj_dim: int) -> int:
        return 0


def engines() -> dict[str, Engine | Peer]:
    return {PEER: Peer(), **dense_engines(), **sparse_engines()}


def own_engines(names: list[str]) -> dict[str, Engine]:
    known = engines()
    return {name: engine for name in names if isinstance(engine := known[name], Engine)}


def dense_engines() -> dict[str, Engine]:
    def signs(p: int) -> Projector:
        return Rademacher(p)

    return {
        "int8x2": Engine("Rademacher, int8x2", signs),
        "int8x2-numpy": Engine("Rademacher, int8x2, without numba", signs, numba=False),
        "int8x1": Engine("Rademacher, int8x1", lambda p: Rademacher(p, arithmetic="int8x1")),
        "int8x3": Engine("Rademacher, int8x3", lambda p: Rademacher(p, arithmetic="int8x3")),
    }


def sparse_engines() -> dict[str, Engine]:
    found = {}
    for s in (4, 1):
        projector = partial(SJLT, sparsity=s)
        found[f"sjlt{s}"] = Engine(f"SJLT, s = {s}", projector)
        found[f"sjlt{s}-numpy"] = Engine(f"SJLT, s = {s}, without numba", projector, numba=False)
    return {
        **found,
        "grass": Engine(
            f"Mask, {MASK_ROWS} rows kept, then SJLT, s = 4",
            lambda p: Mask(MASK_ROWS, then=SJLT(proj_dim=p)),
        ),
        "kronecker": Engine(
            "Kronecker, 64 × p / 64, of a matrix D / 500 × 500", lambda p: Kronecker(64, p // 64)
        ),
    }


def warm_up(names: list[str]) -> None:
    """Import and compile everything before anything is timed."""
    gradients = gaussian_gradients(2, SMALL_ROWS)
    for name in names:
        engines()[name].prepare(SMALL_ROWS, 512)(gradients)


def gaussian_gradients(batch: int, n_rows: int) -> Tensor:
    return torch.randn(batch, n_rows, generator=torch.Generator().manual_seed(0))


def seconds_of(run: Callable[[], object], at_least: float = FASTEST_ROUND) -> float:
    """Time one call; the mean of several where one is too short to be timed."""
    start = time.perf_counter()
    run()
    first = time.perf_counter() - start
    if first >= at_least:
        return first
    n = math.ceil(at_least / max(first, 1e-6))
    start = time.perf_counter()
    for _ in range(n):
        run()
    return (time.perf_counter() - start) / n


# --- memory ---------------------------------------------------------------------------------------


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6  # Linux counts in kB


def forget_peak() -> bool:
    """Let the peak start again at what is held now, where the system can."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def held_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def working_memory(names: list[str], n_rows: int, batch: int, proj_dim: int) -> dict[str, float]:
    """MB that an engine takes beside the gradients; each in a new thread, with buffers of its own.

    An engine that only reuses what another one gave back would seem to take nothing: the allocator
    is asked to return it first.
    """
    gradients = gaussian_gradients(batch, n_rows)
    trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)
    found = {}
    for name in names:
        trim(0)
        if not forget_peak():
            return {}
        before = held_mb()
        work = partial(engine_once, name, proj_dim, gradients)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        found[name] = peak_mb() - before
    return found


def engine_once(name: str, proj_dim: int, gradients: Tensor) -> None:
    engines()[name].prepare(gradients.shape[1], proj_dim)(gradients)


# --- roofs ----------------------------------------------------------------------------------------


def best(run: Callable[[], object]) -> float:
    return min(seconds_of(run, 0.02) for _ in range(5))


def int8_rate(m: int, k: int, n: int) -> float:
    a = torch.randint(0, 2, (m, k), dtype=torch.int8)
    b = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    out = torch.empty(m, n, dtype=torch.int32)
    return 2 * m * k * n / best(lambda: torch._int_mm(a, b.T, out=out))


def float_rate(m: int, k: int, n: int) -> float:
    a, b, out = torch.randn(m, k), torch.randn(k, n), torch.empty(m, n)
    return 2 * m * k * n / best(lambda: torch.mm(a, b, out=out))


def copy_rate() -> float:
    source = torch.zeros(2**26)
    target = torch.empty_like(source)
    return 2 * source.nbytes / best(lambda: target.copy_(source))


def bit_rate(*, numba: bool) -> float:
    os.environ["TRAKDASK_NUMBA"] = str(int(numba))
    out = np.empty((2048, ROW_BLOCK // 128, 2), np.uint64)
    address = {"seed": 0, "checkpoint": 0, "stream": 0}
    return 64 * out.size / best(lambda: philox.fill_words(out, 0, 0, **address))


def roofs(batches: list[int]) -> dict[str, float]:
    """Operations, bytes or bits per second of this machine, now."""
    slab = integer_products.SLAB_ROWS
    found = {
        f"int8 product, 2048 × {slab} × {2 * batch}": int8_rate(2048, slab, 2 * batch)
        for batch in batches
    }
    found["int8 product, 4096 × 4096 × 4096"] = int8_rate(4096, 4096, 4096)
    found["float32 product, 2048 × 2048 × 2048"] = float_rate(2048, 2048, 2048)
    found["float32 product, 512 × 100000 × 100, as traker"] = float_rate(512, 100_000, 100)
    found["copy, bytes read and written"] = copy_rate()
    found["random bits, numba"] = bit_rate(numba=True)
    found["random bits, numpy"] = bit_rate(numba=False)
    return found


# --- accuracy and bits ----------------------------------------------------------------------------


def with_outliers(gradients: Tensor, ratio: float) -> Tensor:
    """Raise one element of every row block to ``ratio`` times the rms of the others."""
    changed = gradients.clone()
    changed[:, 77::ROW_BLOCK] = ratio * torch.sign(changed[:, 77::ROW_BLOCK])
    return changed


def rademacher_matrix(first: int, n_rows: int, proj_dim: int) -> Tensor:
    """Rows of P, float64."""
    packed = integer_products.sign_bits(
        first, n_rows, 0, proj_dim, seed=0, checkpoint=0, stream=philox.STREAM_RADEMACHER
    )
    return integer_products.signs_of(packed, first, n_rows).T


def matrix_by_unit_vectors(projector: Projector, first: int, n_rows: int) -> Tensor:
    """Rows of P by projecting unit vectors, which every arithmetic does exactly."""
    width = projector.width(first + n_rows)
    found = torch.zeros(n_rows, width, dtype=torch.float64)
    for start in range(0, n_rows, 512):
        rows = slice(start, min(start + 512, n_rows))
        unit = torch.eye(n_rows)[rows] if n_rows < 2048 else _unit(rows, n_rows)
        projector.project_block(unit, first, 0, found[rows])
    return found


def _unit(rows: slice, n_rows: int) -> Tensor:
    unit = torch.zeros(rows.stop - rows.start, n_rows)
    unit[range(len(unit)), range(rows.start, rows.stop)] = 1
    return unit


def exact(projector: Projector, gradients: list[Tensor]) -> list[Tensor]:
    """Features in float64, without the scale."""
    n_rows, width = gradients[0].shape[1], projector.width(gradients[0].shape[1])
    sums = [torch.zeros(len(g), width, dtype=torch.float64) for g in gradients]
    for first in range(0, n_rows, ROW_BLOCK):
        rows = slice(first, min(first + ROW_BLOCK, n_rows))
        size = rows.stop - first
        if isinstance(projector, Rademacher):
            matrix = rademacher_matrix(first, size, width)
        else:
            matrix = matrix_by_unit_vectors(projector, first, size)
        for total, g in zip(sums, gradients, strict=True):
            total += g[:, rows].double() @ matrix
    return sums


def accuracy(names: list[str], n_rows: int = 100_000, proj_dim: int = 512) -> dict[str, Any]:
    """Engine -> gradients -> relative error against float64; a mask has none of its own."""
    plain = gaussian_gradients(8, n_rows)
    inputs = {"Gaussian": plain}
    inputs |= {f"max/rms {k}": with_outliers(plain, k) for k in (30, 100, 1000)}
    found: dict[str, Any] = {}
    references: dict[str, list[Tensor]] = {}
    for name, engine in own_engines(names).items():
        projector, _ = engine.bound(n_rows, proj_dim)
        if projector.selected_rows(0) is not None:
            continue
        key = reference_key(projector)
        if key not in references:
            references[key] = exact(projector, list(inputs.values()))
        run, scale = engine.prepare(n_rows, proj_dim), projector.scale(n_rows)
        found[name] = {
            what: relative_error(run(g), scale * reference)
            for (what, g), reference in zip(inputs.items(), references[key], strict=True)
        }
    return found


def reference_key(projector: Projector) -> str:
    """What the matrix depends on: the spec, less the arithmetic."""
    return str({k: v for k, v in projector.spec().items() if k != "arithmetic"})


def relative_error(found: Tensor, reference: Tensor) -> float:
    return float((found.double() - reference).norm() / reference.norm())


@contextmanager
def threads(n: int) -> Iterator[None]:
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(1)


def same_bits(names: list[str]) -> dict[str, dict[str, bool]]:
    """Engine -> what was changed -> whether every bit of the features stayed."""
    gradients = gaussian_gradients(8, SMALL_ROWS)
    return {
        name: {what: torch.equal(*two) for what, two in pairs(engine, gradients)}
        for name, engine in own_engines(names).items()
        if engine.numba
    }


def pairs(engine: Engine, gradients: Tensor) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """Yield what is changed, and the features before and after."""

    def features(engine: Engine) -> Tensor:
        return engine.prepare(gradients.shape[1], 320)(gradients)

    run = engine.prepare(gradients.shape[1], 320)
    reference = run(gradients)
    yield "without numba", (reference, features(replace(engine, numba=False)))
    yield "int8 products", (reference, features(replace(engine, way="int8 product")))
    yield "float32 products", (reference, features(replace(engine, way="float32 product")))
    yield "batch in two", (reference, torch.cat([run(gradients[:3]), run(gradients[3:])]))
    with threads(2):
        yield "two threads", (reference, run(gradients))
