"""The cost of computing features, before all of it is paid: bytes, operations, memory, time."""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from html import escape
from typing import Any

import dask
import dask.array as da
import numpy as np
import pandas as pd
import psutil
import torch
import xarray as xr
from dask.utils import format_bytes, format_time

from trakdask import arrays
from trakdask.checks import shown
from trakdask.execution import active_client, gpu_options, n_slots
from trakdask.projection import Projector, RowMap
from trakdask.projection.acceleration import NUMPY_ELEMENTS, count_elements
from trakdask.projection.fitted import Fitted
from trakdask.provenance import as_values
from trakdask.variables import CHECKPOINT, FITTED, PROJ_DIM, SAMPLE, validate

__all__ = ["Pilot", "Plan", "PlannedProjection", "plan"]

_MOST_PER_COLUMN = 2
"""With more samples than this per random column, every task that was measured lost 0.04 or more of
its LDS with one checkpoint (``tests/benchmarks/results/2026-11-23-columns.txt``)."""
_MOST_COLUMNS = 8192
"""With more columns, :func:`trakdask.save` makes no eigenvectors."""
_SAMPLING_S = 0.001


def plan(
    features: xr.Dataset,
    projectors: Projector | Iterable[Projector] | None = None,
    *,
    pilot: bool = False,
) -> Plan:
    """Estimate the cost of features, and the error of their products as gradient products.

    Parameters
    ----------
    features
        Dataset of :func:`featurize` or :func:`open`. Its samples and checkpoints are counted, so a
        selection can be planned, too.
    projectors
        One or more other projectors to compare with, on the same samples and model. By default
        those with two and four times as many columns, where there are more than two samples per
        random column.
    pilot
        Compute the first two blocks, on the active client or on a thread, and estimate from them
        how long :func:`~trakdask.save` will take, and how much memory.

    Returns
    -------
    The plan. It is displayed as a table of the attributes of
    :class:`~trakdask.planning.PlannedProjection`, which explains them; ``plan.projections`` has
    their values, ``plan.to_dataframe()`` as columns.

    Raises
    ------
    TypeError
        If ``features`` is not a Dataset, or one of ``projectors`` is not a projector.
    ValueError
        If the features' ``attrs`` do not say how they were made, or name a projector that this
        version does not know; if a projector cannot be used with the model; or if a pilot is
        requested for features that are in memory.

    Notes
    -----
    Without a pilot nothing is computed or read: all numbers follow from shapes and ``attrs``.
    Errors are those expected from theory and arithmetic, not measurements of these features. A
    pilot's estimate assumes that all threads are as fast as the one that ran it, and leaves out
    the time for storing. Memory is measured in the process in which the pilot runs, and includes
    whatever else that holds: run it where nothing was computed before.

    Examples
    --------
    >>> import numpy as np, torch, trakdask as td
    >>> samples = td.from_arrays({"image": np.zeros((100, 4), "f4"), "label": np.zeros(100, int)})
    >>> features = td.featurize(samples, td.Model(torch.nn.Linear(4, 3)))
    >>> plan(features, [td.Rademacher(proj_dim=512)]).to_dataframe().feature_bytes.tolist()
    [819200, 204800]
    >>> plan(features, pilot=True).pilot.n_samples
    100
    """
    validate(features, ["feature"], what="features")
    if missing := {"projector", "parameters"} - features.attrs.keys():
        raise ValueError(
            "expected features with the attrs that td.featurize writes, got none named "
            f"{sorted(missing)}; try features.assign_attrs(original.attrs)"
        )
    attrs = as_values(features.attrs)
    shapes = attrs["parameters"]
    n_samples, n_checkpoints = features.sizes[SAMPLE], features.sizes[CHECKPOINT]
    n_parameters = RowMap.from_shapes(shapes, alignment=1).n_parameters
    used = Fitted.from_spec(attrs["projector"])
    # A fitted projector chooses its columns: they are not random.
    wider = _wider(used.projector, min(n_samples, n_parameters)) if used.is_random else []
    others = wider if projectors is None else _checked(projectors)
    fit_bytes = sum(features[name].nbytes for name in FITTED if name in features)
    sizes = features.feature.variable.chunksizes.get(SAMPLE, (n_samples,))
    return Plan(
        n_samples=n_samples,
        n_blocks=len(sizes),
        block_bytes=4 * max(sizes) * features.sizes[PROJ_DIM],
        n_checkpoints=n_checkpoints,
        n_parameters=n_parameters,
        batch_size=features.attrs.get("batch_size"),
        projections=tuple(
            _planned(projector, shapes, n_samples, n_checkpoints, n_bytes)
            for projector, n_bytes in [(used, fit_bytes), *((Fitted.of(p), 0) for p in others)]
        ),
        has_few_columns=bool(wider),
        pilot=_run_pilot(features) if pilot else None,
    )


@dataclass(frozen=True)
class PlannedProjection:
    """The cost of one projector for the samples and checkpoints of a plan.

    Parameters
    ----------
    projector
        Its ``repr``.
    proj_dim
        Feature columns.
    n_rows
        Elements of one gradient: the parameters, and the padding between tensors.
    sample_operations
        Arithmetic operations of the projection per sample and checkpoint; a multiplication and an
        addition count as two.
    random_bits
        Bits of the random matrix, drawn once per micro-batch and checkpoint.
    gram_operations
        Operations for the gram matrices of all checkpoints; twice as many with weights.
    decomposition_operations
        Operations for their eigenvectors.
    feature_bytes
        Bytes of all features, float32: samples × proj_dim × checkpoints × 4.
    store_bytes
        Bytes that :func:`~trakdask.save` writes, without metadata: features, their norms, output,
        out_to_loss, gram matrices and their eigenvectors, and what the projector was fitted with.
    buffer_bytes
        Working memory of one thread, in addition to gradients and features, for micro-batches of
        512 samples.
    decomposition_bytes
        Memory of the task that decomposes the gram matrix of a checkpoint.
    rounding_error
        Relative error of the features of Gaussian gradients against exact arithmetic.
    product_error
        Standard deviation of the error of φ·φ' for two gradients of norm 1 that are spread over
        many rows.
    worst_product_error
        The same in the worst case.
    """

    projector: str
    proj_dim: int
    n_rows: int
    sample_operations: int
    gram_operations: int
    decomposition_operations: int
    random_bits: int
    feature_bytes: int
    store_bytes: int
    buffer_bytes: int
    decomposition_bytes: int
    rounding_error: float
    product_error: float
    worst_product_error: float


@dataclass(frozen=True)
class Pilot:
    """Measurements of two blocks of samples, one after the other.

    Parameters
    ----------
    n_samples
        Samples of each block.
    first_s
        Seconds of the first, which includes what a process does once: loading the model and
        checking the gradients.
    block_s
        Seconds of the second, which estimates the time of every other block. It is the first block
        again if there is no other.
    gram_s
        Seconds of the product φᵀφ alone.
    n_slots
        Number of tasks that the scheduler runs at once.
    process_bytes
        Memory of the process between the blocks: what it has imported, the weights of the model,
        and whatever else it holds.
    task_bytes
        The most memory that the process held while it computed the blocks, less ``process_bytes``.
    gpu_bytes
        The most memory that torch held on the GPU; 0 without one.
    """

    n_samples: int
    first_s: float
    block_s: float
    gram_s: float
    n_slots: int
    process_bytes: int
    task_bytes: int
    gpu_bytes: int

    def __str__(self) -> str:
        on_gpu = f", {format_bytes(self.gpu_bytes)} on the GPU" if self.gpu_bytes else ""
        return (
            f"Pilot: {_counted(self.n_samples, 'sample')} at 1 checkpoint took "
            f"{format_time(self.block_s)} ({format_time(self.first_s)} the first time){on_gpu}, "
            f"their gram matrix {format_time(self.gram_s)}; all on "
            f"{_counted(self.n_slots, 'thread')}"
        )


@dataclass(frozen=True, repr=False)
class Plan:
    """The cost of computing features, as returned by :func:`~trakdask.plan`.

    Parameters
    ----------
    n_samples, n_blocks, n_checkpoints
        Numbers of samples, of blocks of samples, and of checkpoints.
    block_bytes
        Bytes of the float32 features of a block.
    n_parameters
        Number of parameters with respect to which gradients are computed.
    batch_size
        Samples per micro-batch, if the features' ``attrs`` name it.
    projections
        The features' own projector, then those to compare with.
    has_few_columns
        Whether there are more than two samples (and parameters) per random column.
    pilot
        The measured blocks, if they were requested.
    """

    n_samples: int
    n_blocks: int
    n_checkpoints: int
    block_bytes: int
    n_parameters: int
    batch_size: int | None
    projections: tuple[PlannedProjection, ...]
    has_few_columns: bool = False
    pilot: Pilot | None = None

    @property
    def n_tasks(self) -> int:
        """Number of tasks that compute gradients, one per block of samples and checkpoint."""
        return self.n_blocks * self.n_checkpoints

    @property
    def estimated_s(self) -> float | None:
        """Seconds that all tasks will take, estimated from the pilot."""
        if (pilot := self.pilot) is None:
            return None
        waves = self.n_checkpoints * math.ceil(self.n_blocks / pilot.n_slots)
        once = max(pilot.first_s - pilot.block_s, 0)
        return once + waves * (pilot.block_s + pilot.gram_s)

    def memory_bytes(self, n_threads: int = 1) -> int | None:
        """Return the most memory that a process with some threads will hold, by the pilot.

        All of its threads compute blocks, and in the end one decomposes the gram matrix. Weights of
        further checkpoints, which a worker keeps in up to a fifth of its memory, are not counted.
        Dask stops giving tasks to a worker at 80 % of its ``memory_limit``.
        """
        if (pilot := self.pilot) is None:
            return None
        last = self.projections[0].decomposition_bytes
        return pilot.process_bytes + max(n_threads * pilot.task_bytes, last)

    def to_dataframe(self) -> pd.DataFrame:
        """Return one row per projector; columns are the fields of :class:`PlannedProjection`."""
        return pd.DataFrame(list(self.projections))

    def __repr__(self) -> str:
        named = [f"{number}: {p.projector}" for number, p in enumerate(self.projections, start=1)]
        table = self._table().set_axis(range(1, len(named) + 1), axis="columns")
        return "\n".join([*self._titles(), *named, "", table.to_string()])

    def _repr_html_(self) -> str:
        titles = "".join(f"<p>{escape(title)}</p>" for title in self._titles())
        return titles + self._table().T.to_html(border=0)

    def _table(self) -> pd.DataFrame:
        """Return one column per projector, in units that people read."""
        table = self.to_dataframe().set_index("projector")
        for name, column in table.items():
            table[name] = [_readable(str(name), value) for value in column.tolist()]
        return table.T

    def _titles(self) -> list[str]:
        batches = "" if self.batch_size is None else f" and micro-batches of {self.batch_size}"
        title = (
            f"Plan: {_counted(self.n_samples, 'sample')} in {_counted(self.n_blocks, 'block')}"
            f" of {format_bytes(self.block_bytes)}"
            f"{batches}, {_counted(self.n_checkpoints, 'checkpoint')}, "
            f"{_counted(self.n_parameters, 'parameter')}: {_counted(self.n_tasks, 'task')}"
        )
        titles = [title]
        if self.pilot is not None:
            one, two = (format_bytes(self.memory_bytes(n) or 0) for n in (1, 2))
            titles += [
                f"{self.pilot}: about {format_time(self.estimated_s or 0)}",
                f"Memory: about {one} in a process with 1 thread, {two} with 2",
            ]
        if self.has_few_columns:
            titles.append(
                f"More than {_MOST_PER_COLUMN} samples per random column: where this was measured, "
                "it cost 0.04 to 0.10 of LDS with 1 checkpoint, up to 0.08 with 3; try more "
                "columns, as in the table, or td.fit"
            )
        return titles


def _checked(projectors: Projector | Iterable[Projector] | None) -> list[Projector]:
    listed = [projectors] if isinstance(projectors, Projector | str) else list(projectors or ())
    for projector in listed:
        if not isinstance(projector, Projector):
            raise TypeError(
                f"expected projectors only, got {shown(projector)} in projectors; try "
                "projectors=[td.SJLT(proj_dim=2048)]"
            )
    return listed


def _wider(projector: Projector, rank: int) -> list[Projector]:
    """Return projectors with more columns, if a gram matrix of this rank has too few."""
    columns: int | None = getattr(projector, "proj_dim", None)
    if columns is None or rank <= _MOST_PER_COLUMN * columns:
        return []
    widths = [factor * columns for factor in (2, 4) if factor * columns <= _MOST_COLUMNS]
    return [replace(projector, proj_dim=width) for width in widths]  # type: ignore[call-arg]


def _planned(
    projector: Fitted,
    shapes: Mapping[str, Any],
    n_samples: int,
    n_checkpoints: int,
    fit_bytes: int,
) -> PlannedProjection:
    row_map = RowMap.from_shapes(shapes, alignment=projector.projector.row_alignment)
    bound = projector.bind(row_map)
    cost, width = bound.projector.cost(row_map.n_rows), bound.width(row_map.n_rows)
    feature_bytes = 4 * n_samples * width * n_checkpoints
    gram_bytes = width**2 * n_checkpoints * arrays.gram.accumulation_dtype(width).itemsize
    output_bytes = (4 + 4 + 8) * n_samples * n_checkpoints  # norms are float64
    k = 0
    if width <= _MOST_COLUMNS:
        k = arrays.solve.component_count(n_samples, width, np.dtype(np.float32))
    eigenvector_bytes = 8 * (width + 1) * k * n_checkpoints  # and eigenvalues
    decomposition = 9 * width**3 if k == width else 4 * width * k**2 + 9 * k**3
    return PlannedProjection(
        projector=repr(projector),
        proj_dim=width,
        n_rows=row_map.n_rows,
        sample_operations=cost.operations,
        gram_operations=n_samples * width**2 * n_checkpoints,
        decomposition_operations=decomposition * n_checkpoints,
        random_bits=cost.random_bits,
        feature_bytes=feature_bytes,
        store_bytes=feature_bytes + output_bytes + gram_bytes + eigenvector_bytes + fit_bytes,
        buffer_bytes=cost.buffer_bytes,
        decomposition_bytes=32 * width**2 if k else 0,
        rounding_error=cost.rounding_error,
        product_error=cost.product_error[0],
        worst_product_error=cost.product_error[1],
    )


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _readable(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name.endswith("_error"):
        return f"{np.format_float_positional(100 * value, 2, fractional=False, trim='-')} %"
    if isinstance(value, int):
        return f"{value:,}" if value < 10**6 else f"{value:.1e}"
    return str(value)


def _run_pilot(features: xr.Dataset) -> Pilot:
    """Compute the first two blocks on the active scheduler, one after the other."""
    if not isinstance(features.feature.data, da.Array):
        raise ValueError(
            "expected lazy features for pilot=True, got features that are already computed; try "
            "td.plan(features), or td.plan(td.featurize(samples, model), pilot=True)"
        )
    arrays = [features.feature.data] + [
        variable.data
        for name, variable in features.data_vars.items()
        if {SAMPLE, CHECKPOINT} <= {*variable.dims} and name != "feature"
    ]
    n_blocks, _, n_checkpoints = arrays[0].numblocks
    second = (1, 0) if n_blocks > 1 else (0, n_checkpoints - 1)
    blocks = [[array.blocks[i, ..., j] for array in arrays] for i, j in ((0, 0), second)]
    options, client = gpu_options(features), active_client()
    if client is None:
        measured = _measured(blocks, None)
    else:
        measured = client.submit(_measured, blocks, "sync", pure=False, **options).result()
    n_samples, slots = arrays[0].chunks[0][0], n_slots(options.get("resources"))
    return Pilot(n_samples, n_slots=slots, **measured)


def _measured(blocks: list[list[da.Array]], scheduler: str | None) -> dict[str, Any]:
    """Compute blocks in this process, and return the measured fields of :class:`Pilot`."""
    memory, seconds, held = psutil.Process().memory_info, [], []
    most, is_done = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not is_done.wait(_SAMPLING_S):
            most = max(most, memory().rss)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    count_elements(NUMPY_ELEMENTS)  # numba from the first block on: the second is like the others
    try:
        for block in blocks:
            start = time.perf_counter()
            feature, *_ = dask.compute(*block, scheduler=scheduler, num_workers=1)
            seconds.append(time.perf_counter() - start)
            # glibc keeps freed memory for the next task, which must not count twice.
            with suppress(AttributeError, OSError):
                ctypes.CDLL("libc.so.6").malloc_trim(0)
            held.append(memory().rss)
    finally:
        is_done.set()
        watcher.join()
    phi = feature[:, :, 0]
    start = time.perf_counter()
    np.matmul(phi.T, phi)
    return {
        "first_s": seconds[0],
        "block_s": seconds[1],
        "gram_s": time.perf_counter() - start,
        "process_bytes": held[0],
        "task_bytes": max(most - held[0], 0),
        "gpu_bytes": torch.cuda.max_memory_allocated(),
    }
