"""The cost of computing features, before all of it is paid."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

import dask
import dask.array as da
import numpy as np
import pandas as pd
import xarray as xr
from dask.base import tokenize
from dask.utils import format_bytes, format_time

from trakdask import arrays
from trakdask.checks import shown
from trakdask.execution import gpu_options, n_slots
from trakdask.projection import Projector, RowMap
from trakdask.projection.acceleration import stop_waiting
from trakdask.projection.protocol import from_spec
from trakdask.variables import CHECKPOINT, PROJ_DIM, SAMPLE, validate

__all__ = ["Pilot", "Plan", "PlannedProjection", "plan"]


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
        One or more other projectors to compare with, on the same samples and model.
    pilot
        Compute the first block of the first checkpoint, twice, on the active client or on threads,
        and estimate from it how long :func:`~trakdask.save` will take.

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
    the time for storing.

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
    shapes = features.attrs["parameters"]
    n_samples, n_checkpoints = features.sizes[SAMPLE], features.sizes[CHECKPOINT]
    own, others = from_spec(features.attrs["projector"]), _checked(projectors)
    # Principal components are fewer than the columns of the projector that comes before them.
    widths = [(own, features.sizes[PROJ_DIM]), *((projector, None) for projector in others)]
    return Plan(
        n_samples=n_samples,
        n_blocks=len(features.feature.variable.chunksizes.get(SAMPLE, (n_samples,))),
        n_checkpoints=n_checkpoints,
        n_parameters=RowMap.from_shapes(shapes, alignment=1).n_parameters,
        batch_size=features.attrs.get("batch_size"),
        projections=tuple(
            _planned(projector, width, shapes, n_samples, n_checkpoints)
            for projector, width in widths
        ),
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
    total_operations
        The same for all samples and checkpoints.
    random_bits
        Bits of the random matrix, drawn once per micro-batch and checkpoint.
    gram_operations
        Operations for the gram matrices of all checkpoints; twice as many with weights.
    feature_bytes
        Bytes of all features, float32: samples × proj_dim × checkpoints × 4.
    store_bytes
        Bytes that :func:`~trakdask.save` writes, without metadata: features, their norms, output,
        out_to_loss and gram matrices.
    gradient_bytes
        Bytes of one gradient, float32: rows × 4.
    buffer_bytes
        Working memory of one thread, in addition to gradients and features, for micro-batches of
        512 samples.
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
    total_operations: int
    gram_operations: int
    random_bits: int
    feature_bytes: int
    store_bytes: int
    gradient_bytes: int
    buffer_bytes: int
    rounding_error: float
    product_error: float
    worst_product_error: float


@dataclass(frozen=True)
class Pilot:
    """Measurements of one block of samples at one checkpoint.

    Parameters
    ----------
    n_samples
        Samples of the block.
    first_s
        Seconds of the first run, which includes what a process does once: loading the model and
        checking the gradients.
    block_s
        Seconds of the second run, which estimates those of every other block.
    gram_s
        Seconds of the product φᵀφ alone.
    n_slots
        Number of tasks that the scheduler runs at once.
    """

    n_samples: int
    first_s: float
    block_s: float
    gram_s: float
    n_slots: int

    def __str__(self) -> str:
        return (
            f"Pilot: {_counted(self.n_samples, 'sample')} at 1 checkpoint took "
            f"{format_time(self.block_s)} ({format_time(self.first_s)} the first time), their "
            f"gram matrix {format_time(self.gram_s)}; all on {_counted(self.n_slots, 'thread')}"
        )


@dataclass(frozen=True, repr=False)
class Plan:
    """The cost of computing features, as returned by :func:`~trakdask.plan`.

    Parameters
    ----------
    n_samples, n_blocks, n_checkpoints
        Numbers of samples, of blocks of samples, and of checkpoints.
    n_parameters
        Number of parameters with respect to which gradients are computed.
    batch_size
        Samples per micro-batch, if the features' ``attrs`` name it.
    projections
        The features' own projector, then those to compare with.
    pilot
        The measured block, if one was requested.
    """

    n_samples: int
    n_blocks: int
    n_checkpoints: int
    n_parameters: int
    batch_size: int | None
    projections: tuple[PlannedProjection, ...]
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

    def to_dataframe(self) -> pd.DataFrame:
        """Return one row per projector; columns are the fields of :class:`PlannedProjection`."""
        frame = pd.DataFrame([asdict(projection) for projection in self.projections])
        return frame.astype({"total_operations": float})  # may exceed 64 bits

    def __repr__(self) -> str:
        named = [f"{number}: {p.projector}" for number, p in enumerate(self.projections, start=1)]
        table = self._table().set_axis(range(1, len(named) + 1), axis="columns")
        return "\n".join([*self._titles(), *named, "", table.to_string()])

    def _repr_html_(self) -> str:
        titles = "".join(f"<p>{escape(title)}</p>" for title in self._titles())
        return titles + self._table().T.to_html(border=0)

    def _table(self) -> pd.DataFrame:
        """Return one column per projector, in units that people read."""
        table = pd.DataFrame([asdict(p) for p in self.projections]).set_index("projector")
        for name, column in table.items():
            table[name] = [_readable(str(name), value) for value in column.tolist()]
        return table.T

    def _titles(self) -> list[str]:
        batches = "" if self.batch_size is None else f" and micro-batches of {self.batch_size}"
        title = (
            f"Plan: {_counted(self.n_samples, 'sample')} in {_counted(self.n_blocks, 'block')}"
            f"{batches}, {_counted(self.n_checkpoints, 'checkpoint')}, "
            f"{_counted(self.n_parameters, 'parameter')}: {_counted(self.n_tasks, 'task')}"
        )
        if self.pilot is None or self.estimated_s is None:
            return [title]
        return [title, f"{self.pilot}: about {format_time(self.estimated_s)}"]


def _checked(projectors: Projector | Iterable[Projector] | None) -> list[Projector]:
    listed = [projectors] if isinstance(projectors, Projector | str) else list(projectors or ())
    for projector in listed:
        if not isinstance(projector, Projector):
            raise TypeError(
                f"expected projectors only, got {shown(projector)} in projectors; try "
                "projectors=[td.SJLT(proj_dim=2048)]"
            )
    return listed


def _planned(
    projector: Projector,
    width: int | None,
    shapes: Mapping[str, Any],
    n_samples: int,
    n_checkpoints: int,
) -> PlannedProjection:
    row_map = RowMap.from_shapes(shapes, alignment=projector.row_alignment)
    bound = projector.bind(row_map)
    cost, width = bound.cost(row_map.n_rows), width or bound.width(row_map.n_rows)
    feature_bytes = 4 * n_samples * width * n_checkpoints
    gram_bytes = width**2 * n_checkpoints * arrays.gram.accumulation_dtype(width).itemsize
    output_bytes = (4 + 4 + 8) * n_samples * n_checkpoints  # norms are float64
    return PlannedProjection(
        projector=repr(projector),
        proj_dim=width,
        n_rows=row_map.n_rows,
        sample_operations=cost.operations,
        total_operations=cost.operations * n_samples * n_checkpoints,
        gram_operations=n_samples * width**2 * n_checkpoints,
        random_bits=cost.random_bits,
        feature_bytes=feature_bytes,
        store_bytes=feature_bytes + output_bytes + gram_bytes,
        gradient_bytes=4 * row_map.n_rows,
        buffer_bytes=cost.buffer_bytes,
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
    """Run the first block of the first checkpoint twice, on the active scheduler."""
    data = features.feature.variable.data
    if not isinstance(data, da.Array):
        raise ValueError(
            "expected lazy features for pilot=True, got features that are already computed; try "
            "td.plan(features), or td.plan(td.featurize(samples, model), pilot=True)"
        )
    n = data.chunks[0][0]
    first = [features[name].data[:n, ..., :1] for name in ("feature", "output", "out_to_loss")]
    options = gpu_options(features)
    seconds, gram_s = [], 0.0
    for attempt in range(2):
        task = da.blockwise(
            _gram_seconds, "s", first[0], "spc", first[1], "sc", first[2], "sc",
            name=f"pilot-{attempt}-{tokenize(data.name)}", concatenate=True, align_arrays=False,
            adjust_chunks={"s": 1}, dtype=np.float64, meta=np.empty(0),
        )  # fmt: skip
        start = time.perf_counter()
        ((gram_s,),) = dask.compute(task, **options)
        seconds.append(time.perf_counter() - start - gram_s)
    first_s, block_s = map(float, seconds)
    return Pilot(n, first_s, block_s, float(gram_s), n_slots(options.get("resources")))


def _gram_seconds(feature: np.ndarray, *others: np.ndarray) -> np.ndarray:
    stop_waiting()  # the second run is as fast as the others will be
    start = time.perf_counter()
    phi = feature[:, :, 0]
    np.matmul(phi.T, phi)
    return np.array([time.perf_counter() - start])
