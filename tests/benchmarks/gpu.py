"""Prove the kernels on a GPU, then time them, beside fast_jl, beside cuBLAS and beside the roofs.

    python tests/benchmarks/gpu.py --dry-run                 # what would be measured; needs no GPU
    python tests/benchmarks/gpu.py --out gpu.json            # minutes

Needs torch, cupy and numpy. What needs more says so where it is missing, and the rest goes on:
``--build-fast-jl`` nvcc, the rows of traker traker. Has not run on a GPU yet.
Every number printed was measured by this run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import _bare  # noqa: E402

_bare.prepare()

from _resnet import resnet18  # noqa: E402

from trakdask.projection import (  # noqa: E402
    SJLT,
    FastJL,
    ProjectionStream,
    Rademacher,
    RowMap,
)
from trakdask.projection.cuda import kernels_for, layout, missing, products  # noqa: E402

D_MODEL, D_LARGE = 11_700_000, 10**9
WIDTHS, BATCHES = (2048, 4096), (8, 32, 128, 512)
ARITHMETIC = ("int8x1", "int8x2", "int8x3")
CHUNK = 64 * layout.ROW_BLOCK  # rows of a gradient that is made piece by piece
WARM_UP, LEAST_RUNS, MOST_SECONDS = 2, 5, 3.0

Prepare = Callable[[], Callable[[], object]]


@dataclass(frozen=True)
class Measurement:
    """One row of the table: how to prepare it, and how many rows of work a run stands for."""

    group: str
    name: str
    rows: int
    width: int
    batch: int
    prepare: Prepare
    runs_for_all: int = 1
    """A run does this part of the work; its time is multiplied."""
    work: float = 0
    """Operations, or bytes where the group says so, of all of the work."""


# ------------------------------------------------------------------------------------ what to run


def gradients(batch: int, rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(batch, rows, device="cuda").to(dtype)


def roof(kind: str) -> Prepare:
    def prepare() -> Callable[[], object]:
        if kind == "copy":
            source = torch.empty(2**30, device="cuda")
            return partial(torch.empty_like(source).copy_, source)
        n = 8192
        if kind == "bf16":
            left = torch.randn(n, n, device="cuda").bfloat16()
            return partial(torch.mm, left, left.T)
        integers = torch.randint(-9, 9, (n, n), device="cuda").to(torch.int8)
        return partial(torch._int_mm, integers, integers.T)

    return prepare


def projection(projector: Any, batch: int, rows: int) -> Prepare:
    def prepare() -> Callable[[], object]:
        flat = gradients(batch, rows)
        out = torch.zeros(batch, projector.proj_dim, dtype=torch.float64, device="cuda")
        return partial(projector.project_rows, flat, 0, 1, out)

    return prepare


def fast_jl(width: int, batch: int, rows: int) -> Prepare:
    return lambda: projection(FastJL(width), batch, rows)()


def materialised(width: int, batch: int) -> Prepare:
    """Multiply by a matrix that is there, drawn or not: what is left if drawing were free."""

    def prepare() -> Callable[[], object]:
        matrix = torch.ones(CHUNK, width, device="cuda", dtype=torch.bfloat16)
        return partial(torch.mm, gradients(batch, CHUNK, torch.bfloat16), matrix)

    return prepare


def part(name: str, width: int, batch: int) -> Prepare:
    """Time one step of the Rademacher product on 64 row blocks, or on one tile of columns."""

    def prepare() -> Callable[[], object]:
        kernels = kernels_for(torch.device("cuda"))
        flat, run = gradients(batch, CHUNK), layout.Run(0, 64, layout.ROW_BLOCK)
        columns = next(iter(layout.dense_columns(width, kernels.cache_bytes)))
        quantized = products.quantize(kernels, flat, run, 2)
        sums = torch.zeros(64, layout.lines(batch, 2), columns.padded, device="cuda")
        sums = sums.to(torch.int32)
        out = torch.zeros(batch, columns.n, dtype=torch.float64, device="cuda")
        bits = torch.zeros(columns.padded, layout.ROW_BLOCK, dtype=torch.int8, device="cuda")
        steps: dict[str, Callable[[], object]] = {
            "quantize": lambda: products.quantize(kernels, flat, run, 2),
            "draw bits": lambda: products.fill_bits(
                kernels, bits, 0, columns, seed=0, checkpoint=0
            ),
            "int8 product": lambda: torch._int_mm(quantized.digits[0], bits.T, out=sums[0]),
            "combine": lambda: products.combine(
                kernels, sums, quantized.totals, quantized.steps, 2, out
            ),
        }
        return steps[name]

    return prepare


# ------------------------------------------------------------------------------------ end to end


def images(batch: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, 32, 32, device="cuda"), torch.zeros(batch, device="cuda").long()


def featurize_ours(projector: Any, batch: int) -> Prepare:
    def prepare() -> Callable[[], object]:
        from trakdask.models.gradients import hooks_gradients
        from trakdask.models.tasks import Batch, Forward, resolve_task

        model, task = resnet18().cuda(), resolve_task("image_classification")
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        forward = Forward(model, parameters, dict(model.named_buffers()))
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        row_map = RowMap.from_shapes(shapes, alignment=projector.row_alignment)
        image, label = images(batch)

        def run() -> Tensor:
            stream = ProjectionStream(projector, row_map, batch, 0, "cuda")
            samples = Batch(image=image, label=label)
            hooks_gradients(forward, task, samples, row_map.names, stream.add)
            return stream.result()

        return run

    return prepare


def featurize_traker(width: int, batch: int) -> Prepare:
    def prepare() -> Callable[[], object]:
        from trak import TRAKer

        folder = tempfile.mkdtemp()
        model = resnet18().cuda()
        traker = TRAKer(
            model=model, task="image_classification", train_set_size=10**6, save_dir=folder,
            proj_dim=width, device="cuda", use_half_precision=False, logging_level=40,
        )  # fmt: skip
        traker.load_checkpoint(model.state_dict(), model_id=0)
        batch_of_images = images(batch)
        return lambda: traker.featurize(batch=batch_of_images, num_samples=batch)

    return prepare


# ---------------------------------------------------------------------------------------- the plan


def plan() -> Iterator[Measurement]:
    n = 8192
    for kind in ("int8", "bf16"):
        yield Measurement("roof", kind, n, n, n, roof(kind), work=2 * n**3)
    yield Measurement("roof (bytes)", "copy", 0, 0, 0, roof("copy"), work=8 * 2**30)
    for width in WIDTHS:
        for batch in BATCHES:
            yield from model_sized(width, batch)
    for step in ("quantize", "draw bits", "int8 product", "combine"):
        yield Measurement("part", step, CHUNK, 4096, 128, part(step, 4096, 128))
    pieces = -(-D_LARGE // CHUNK)
    for projector in (Rademacher(4096), Rademacher(4096, arithmetic="int8x1"), SJLT(4096)):
        run = projection(projector, 32, CHUNK)
        work = 2 * 32 * D_LARGE * 4096
        yield Measurement("streamed", name_of(projector), D_LARGE, 4096, 32, run, pieces, work)
    for batch in (32, 128):
        for projector in (Rademacher(2048), SJLT(2048)):
            run = featurize_ours(projector, batch)
            name = f"featurize, {name_of(projector)}"
            yield Measurement("ResNet-18", name, D_MODEL, projector.proj_dim, batch, run)
        run = featurize_traker(2048, batch)
        yield Measurement("ResNet-18", "featurize, traker", D_MODEL, 2048, batch, run)


def model_sized(width: int, batch: int) -> Iterator[Measurement]:
    work = 2 * batch * D_MODEL * width
    for arithmetic in ARITHMETIC:
        projector = Rademacher(width, arithmetic=arithmetic)
        run = projection(projector, batch, D_MODEL)
        yield Measurement("projection", name_of(projector), D_MODEL, width, batch, run, 1, work)
    run = fast_jl(width, batch, D_MODEL)
    yield Measurement("projection", "fast_jl", D_MODEL, width, batch, run, 1, work)
    run, pieces = materialised(width, batch), -(-D_MODEL // CHUNK)
    name = "cuBLAS bf16, matrix at hand"
    yield Measurement("projection", name, D_MODEL, width, batch, run, pieces, work)
    for sparsity in (1, 4):
        run = projection(SJLT(width, sparsity), batch, D_MODEL)
        name, n_bytes = f"sjlt s={sparsity}", 4 * batch * D_MODEL
        group = "projection (bytes)"
        yield Measurement(group, name, D_MODEL, width, batch, run, 1, n_bytes)


def name_of(projector: Any) -> str:
    arithmetic = getattr(projector, "arithmetic", "")
    return f"{type(projector).__name__.lower()} {arithmetic}".strip()


# --------------------------------------------------------------------------------------- measuring


def milliseconds(run: Callable[[], object]) -> float:
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


def measure(measurement: Measurement) -> dict[str, Any]:
    row = {key: value for key, value in asdict(measurement).items() if key != "prepare"}
    try:
        row["ms"] = milliseconds(measurement.prepare()) * measurement.runs_for_all
        if measurement.work:
            row["per_second"] = 1e3 * measurement.work / row["ms"]
    except Exception as err:  # a row that fails must not cost the others
        row["failed"] = f"{type(err).__name__}: {' '.join(str(err).split())[:200]}"
    torch.cuda.empty_cache()
    return row


def line(row: dict[str, Any]) -> str:
    place = f"{row['group']:20} {row['name']:34} D={row['rows']:<11} p={row['width']:<5} "
    found = row.get("failed") or f"{row['ms']:10.3f} ms  {row.get('per_second', 0) / 1e12:8.3f} T/s"
    return f"{place}B={row['batch']:<5} {found}"


def summary(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield what rows come to: shares of the roofs, and how much faster than fast_jl and traker."""
    measured = [row for row in rows if "ms" in row]
    roofs = {row["name"]: row["per_second"] for row in measured if row["group"].startswith("roof")}
    others = {"projection": "fast_jl", "projection (bytes)": "fast_jl", "ResNet-18": "traker"}
    before = {
        (other, row["width"], row["batch"]): row["ms"]
        for other in set(others.values())
        for row in measured
        if row["name"].endswith(other)
    }
    for row in measured:
        said = []
        digits = re.search(r"int8x(\d)$", row["name"])
        if digits and "per_second" in row and "int8" in roofs:
            said.append(f"{int(digits[1]) * row['per_second'] / roofs['int8']:.0%} of int8")
        if row["group"].endswith("(bytes)") and row["name"] != "copy" and "copy" in roofs:
            said.append(f"{row['per_second'] / roofs['copy']:.0%} of copy")
        key = (others.get(row["group"]), row["width"], row["batch"])
        if key in before and not row["name"].endswith(str(key[0])):
            said.append(f"{before[key] / row['ms']:.2f} x as fast as {key[0]}")
        if said:
            yield f"{row['name']:34} p={row['width']:<5} B={row['batch']:<5} {', '.join(said)}"


def gpu_tests() -> str:
    """Run the tests that are marked ``gpu``, in a process of their own, and return the outcome."""
    file = HERE.parent / "projection" / "cuda" / "test_gpu.py"
    command = [sys.executable, str(HERE / "_bare.py"), str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout[-6000:], done.stderr[-2000:], flush=True)
    return (done.stdout.strip() or done.stderr.strip() or "no outcome").splitlines()[-1]


def build_fast_jl(archive: Path | None) -> str:
    """Build fast_jl for the GPU here: as published, it asks nvcc for one that nvcc 13 dropped."""
    folder = Path(tempfile.mkdtemp())
    architecture = "{}.{}".format(*torch.cuda.get_device_capability())
    pip = [sys.executable, "-m", "pip"]
    fetch = ["download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "fast_jl"]
    install = ["install", "--no-deps", "--no-build-isolation", "--target", str(folder / "built")]
    try:
        if archive is None:
            subprocess.run([*pip, *fetch, "-d", str(folder)], check=True)
            (archive,) = folder.glob("fast_jl-*.tar.gz")
        subprocess.run(["tar", "xzf", str(archive), "-C", str(folder)], check=True)
        (setup,) = folder.glob("fast_jl-*/setup.py")
        setup.write_text(re.sub(r"7\.0\+PTX", architecture, setup.read_text()))
        subprocess.run([*pip, *install, str(setup.parent)], check=True)
    except (OSError, ValueError, subprocess.CalledProcessError) as err:
        return f"not built: {err}"
    sys.path.insert(0, str(folder / "built"))
    return f"patched to build for {architecture}, and nothing else"


def driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as err:
        return f"unknown: {err}"
    return "; ".join(done.stdout.split("\n")).strip("; ")


def circumstances() -> dict[str, Any]:
    import cupy

    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "gpu": kernels_for(torch.device("cuda")).description,
        "driver": driver(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "cupy": cupy.__version__,
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    parser.add_argument("--only", default="", help="measure rows whose line has this in it")
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--build-fast-jl", action="store_true", help="needs nvcc")
    parser.add_argument(
        "--fast-jl", type=Path, help="its source archive, where there is no network"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = [row for row in plan() if options.only in f"{row.group} {row.name}"]
    if options.dry_run:
        for row in rows:
            print(f"{row.group:20} {row.name:34} D={row.rows:<11} p={row.width:<5} B={row.batch}")
        print(f"{len(rows)} measurements. Here: {missing() or 'a GPU, and all that is needed'}")
        return
    if why := missing():
        print(f"{why}; nothing was measured. Type --dry-run to see what would be.")
        return
    found: dict[str, Any] = {"circumstances": circumstances()}
    print(json.dumps(found["circumstances"], indent=1), flush=True)
    found["tests"] = "not run" if options.no_tests else gpu_tests()
    if options.build_fast_jl:
        found["fast_jl"] = build_fast_jl(options.fast_jl)
        print("fast_jl:", found["fast_jl"], flush=True)
    found["rows"] = []
    for row in rows:
        found["rows"].append(measure(row))
        print(line(found["rows"][-1]), flush=True)
        if options.out:
            options.out.write_text(json.dumps(found, indent=1))
    print("", *summary(found["rows"]), sep="\n")


if __name__ == "__main__":
    main()
