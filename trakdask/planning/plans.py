"""The cost of computing features, before all of it is paid: bytes, operations, memory, time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from html import escape
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from dask.utils import format_bytes

from trakdask.arrays import memory, spectra
from trakdask.bars import duration
from trakdask.checks import require_flags, require_integer, shown
from trakdask.derived import LEAST_DIM, MOST_DIM
from trakdask.execution import memory_limit
from trakdask.planning.fits import N_SAMPLES, fit_seconds, planned_fit
from trakdask.planning.pilot import Pilot, counted, run_pilot
from trakdask.projection import Projector, RowMap
from trakdask.projection.fitted import Fitted
from trakdask.provenance import as_values
from trakdask.variables import CHECKPOINT, FITTED, PROJ_DIM, SAMPLE, validate

_SHOWN = {
    "proj_dim": "columns",
    "store_bytes": "store",
    "save_bytes": "memory of a task of save",
    "query_bytes": "memory of a task of a query",
    "product_error": "error of a product",
    "worst_product_error": "error in the worst case",
}
"""What people ask first, in words; the other numbers are in a fold, and in ``projections``."""

MOST_PER_COLUMN = 2
"""With more samples than this per random column, every task that was measured lost 0.04 or more of
its LDS with one checkpoint (``tests/benchmarks/results/2026-11-23-columns.txt``)."""
_TARGETS = 100
"""The number of targets of the query whose memory a plan has."""


def plan(
    features: xr.Dataset,
    projectors: Projector | Iterable[Projector] | None = None,
    *,
    n_fitted: int = N_SAMPLES,
    pilot: bool = False,
) -> Plan:
    """Estimate the cost of features and of a fit, and the error of products of features.

    Parameters
    ----------
    features
        Dataset of :func:`featurize` or :func:`open`. Its samples and checkpoints are counted, so a
        selection can be planned, too.
    projectors
        One or more other projectors to compare with, on the same samples and model. By default
        projectors of two and four times as many columns, where there are more than two samples per
        random column.
    n_fitted
        ``n_samples`` of :func:`~trakdask.fit`, which is planned for features that are not fitted
        yet: with its defaults, or as the ``attrs`` of the features say.
    pilot
        Compute the first two blocks, on the active client or on a thread, and estimate from them
        how long :func:`~trakdask.save` and :func:`~trakdask.fit` will take, and how much memory.

    Returns
    -------
    The plan. It is displayed with time, bytes and memory first, and the projectors as a table.
    ``plan.projections`` is a DataFrame of all their numbers.

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
    Memory is a bound by the sizes of
    blocks (``trakdask.arrays.memory``), and leaves out gradients, which only a pilot measures.
    Errors are those expected from theory and arithmetic, not measurements of these features. A
    pilot's estimate assumes that all threads are as fast as the one that ran it, and leaves out
    the time for storing. Memory is measured in the process in which the pilot runs, and includes
    whatever else that holds: run it where nothing was computed before.

    Examples
    --------
    >>> import numpy as np, torch, trakdask as td
    >>> samples = td.from_arrays({"image": np.zeros((100, 4), "f4"), "label": np.zeros(100, int)})
    >>> features = td.featurize(samples, td.Model(torch.nn.Linear(4, 3)))
    >>> plan(features, [td.Rademacher(proj_dim=512)]).projections.feature_bytes.tolist()
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
    require_flags(pilot=pilot)
    n_fitted = require_integer("n_fitted", n_fitted, 1, remedy="try n_fitted=2000")
    # 1. What the features are, by shapes and attrs alone.
    attrs = as_values(features.attrs)
    shapes = attrs["parameters"]
    n_samples, n_checkpoints = features.sizes[SAMPLE], features.sizes[CHECKPOINT]
    # In memory they are one block.
    blocks = features.feature.variable.chunksizes.get(SAMPLE, (n_samples,))
    n_parameters = RowMap.from_shapes(shapes, alignment=1).n_parameters
    # 2. The projectors: that of the features first.
    used = Fitted.from_spec(attrs["projector"])
    # A fitted projector chooses its columns: that rule was measured on random ones.
    more = _wider(used.projector, min(n_samples, n_parameters)) if used.is_random else []
    others = more
    if projectors is not None:
        # A text is no list of its letters: the error below is to show all of it.
        others = [projectors] if isinstance(projectors, Projector | str) else list(projectors)
    for projector in others:
        if not isinstance(projector, Projector):
            raise TypeError(
                f"expected projectors only, got {shown(projector)} in projectors; try "
                "projectors=[td.SJLT(proj_dim=2048)]"
            )
    # 3. A fit, unless features hold the values of theirs.
    fit_bytes = sum(features[name].nbytes for name in FITTED if name in features)
    n_fitted = min(n_fitted, n_samples)
    fit = None if fit_bytes else planned_fit(used, attrs, n_fitted, n_checkpoints)
    return Plan(
        n_samples=n_samples,
        n_blocks=len(blocks),
        block_bytes=4 * max(blocks) * features.sizes[PROJ_DIM],
        n_checkpoints=n_checkpoints,
        n_parameters=n_parameters,
        batch_size=features.attrs.get("batch_size"),
        projections=pd.DataFrame(
            _planned(projector, shapes, n_samples, max(blocks), n_checkpoints, n_bytes)
            for projector, n_bytes in [(used, fit_bytes), *((Fitted.of(p), 0) for p in others)]
        ),
        has_few_columns=bool(more),
        pilot=run_pilot(features) if pilot else None,
        worker_bytes=memory_limit(),
        fit=fit,
    )


def _wider(projector: Projector, rank: int) -> list[Projector]:
    """Return projectors with more columns, if a gram matrix of this rank has too few."""
    columns: int | None = getattr(projector, "proj_dim", None)
    if columns is None or rank <= MOST_PER_COLUMN * columns:
        return []
    # Not more columns than `td.save` decomposes a gram matrix of.
    widths = [factor * columns for factor in (2, 4) if factor * columns <= MOST_DIM]
    return [replace(projector, proj_dim=width) for width in widths]  # type: ignore[call-arg]


def _planned(
    projector: Fitted,
    shapes: Mapping[str, Any],
    n_samples: int,
    block_rows: int,
    n_checkpoints: int,
    fit_bytes: int,
) -> dict[str, Any]:
    """Return the cost of a projector for some samples, in blocks of up to so many rows.

    The numbers are those that :class:`~trakdask.planning.Plan` explains.
    """
    row_map = RowMap.from_shapes(shapes, alignment=projector.projector.row_alignment)
    # Only then the number of columns is known: a projector may have as many as there are rows.
    bound = projector.bind(row_map)
    cost, width = bound.projector.cost(row_map.n_rows), bound.width(row_map.n_rows)
    feature_bytes = 4 * n_samples * width * n_checkpoints
    matrix_bytes = 4 * (width * (width + 1) // 2) * n_checkpoints  # its other half is zeros
    output_bytes = (4 + 4 + 8) * n_samples * n_checkpoints  # norms are float64
    k = 0
    if width <= MOST_DIM:
        k = spectra.component_count(n_samples, width, np.dtype(np.float32))
    sizes = memory.Sizes(n_samples, block_rows, width, n_checkpoints, read=True)
    # The solved targets are in memory, and not read from a store as the samples are.
    targets = replace(sizes, n_samples=_TARGETS, rows=_TARGETS, read=False)
    eigenvector_bytes = (4 * width + 8) * k * n_checkpoints * (width > LEAST_DIM)  # and eigenvalues
    # As `arrays.factorization.decompose` counts them, for all eigenvectors and for a part.
    decomposition = 9 * width**3 if k == width else 4 * width * k**2 + 9 * k**3
    decomposition_bytes = memory.eigenvectors(width, k) if k else 0
    return {
        "projector": repr(projector),
        "proj_dim": width,
        "n_rows": row_map.n_rows,
        "sample_operations": cost.operations,
        "gram_operations": n_samples * width**2 * n_checkpoints,
        "decomposition_operations": decomposition * n_checkpoints,
        "random_bits": cost.random_bits,
        "feature_bytes": feature_bytes,
        "store_bytes": feature_bytes + output_bytes + matrix_bytes + eigenvector_bytes + fit_bytes,
        "buffer_bytes": cost.buffer_bytes,
        "save_bytes": max(memory.stored(sizes), memory.gram(sizes), decomposition_bytes),
        "query_bytes": max(memory.score(sizes, targets, ranked=True), memory.solve(targets, width)),
        "rounding_error": cost.rounding_error,
        "product_error": cost.product_error[0],
        "worst_product_error": cost.product_error[1],
    }


@dataclass(frozen=True, repr=False, eq=False)
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
        A row for the features' own projector, then for those to compare with. The columns:

        - projector: its ``repr``
        - proj_dim: feature columns
        - n_rows: elements of one gradient, which are the parameters and the padding between tensors
        - sample_operations: arithmetic operations of the projection per sample and checkpoint; a
          multiplication and an addition count as two
        - random_bits: bits of the random matrix, drawn once per micro-batch and checkpoint
        - gram_operations: operations for the gram matrices of all checkpoints; twice as many with
          weights
        - decomposition_operations: operations for their eigenvectors
        - feature_bytes: bytes of all features, float32: samples × proj_dim × checkpoints × 4
        - store_bytes: bytes that :func:`~trakdask.save` writes, without metadata: features, their
          norms, output, out_to_loss, gram matrices, their eigenvectors above ``proj_dim`` 1024, and
          the values of a fitted projector; what is compressed may take 15 % less
        - buffer_bytes: working memory of one thread, in addition to gradients and features, for
          micro-batches of 512 samples
        - save_bytes: the most memory of a task of :func:`~trakdask.save`, beside gradients: it
          stores a block, or sums a gram matrix, or decomposes it
        - query_bytes: the most memory of a task that ranks all samples for 100 targets, read from
          a store
        - rounding_error: relative error of the features of Gaussian gradients against exact
          arithmetic
        - product_error: standard deviation of the error of φ·φ' for two gradients of norm 1 that
          are spread over many rows
        - worst_product_error: the same in the worst case
    worker_bytes
        Memory of the largest worker of the active client; without one, of this machine.
    has_few_columns
        Whether there are more than two samples (and parameters) per random column.
    pilot
        The measured blocks, if they were requested.
    fit
        The cost of a fit before these features; None if it is done. By name:

        - n_samples: how many samples it uses
        - n_gradients: how many gradients it takes at each checkpoint
        - turning: how many gradients take as long as it takes to turn these into the coordinates
          of the curvature
        - operations: arithmetic operations per checkpoint, beside those of gradients and their
          sketch
        - kept_bytes: bytes of the fitted values of all checkpoints, which a store keeps, if all
          parameters have weight; else a little less
        - memory_bytes: the most memory of one of its tasks, beside gradients
    """

    n_samples: int
    n_blocks: int
    n_checkpoints: int
    block_bytes: int
    n_parameters: int
    batch_size: int | None
    projections: pd.DataFrame
    worker_bytes: float
    has_few_columns: bool = False
    pilot: Pilot | None = None
    fit: Mapping[str, int] | None = None

    @property
    def n_tasks(self) -> int:
        """Number of tasks that compute gradients, one per block of samples and checkpoint."""
        return self.n_blocks * self.n_checkpoints

    @property
    def estimated_s(self) -> float | None:
        """Seconds that all tasks of the features will take, estimated from the pilot."""
        if (pilot := self.pilot) is None:
            return None
        # A checkpoint is one submission of `td.save`: its last wave may leave some slots idle.
        waves = self.n_checkpoints * math.ceil(self.n_blocks / pilot.n_slots)
        # Noise may make the second block the slower one.
        once = max(pilot.first_s - pilot.block_s, 0)
        return once + waves * (pilot.block_s + pilot.gram_s)

    @property
    def estimated_fit_s(self) -> float | None:
        """Seconds that a fit will take, estimated from the pilot."""
        if self.pilot is None or self.fit is None:
            return None
        width = self.block_bytes // (4 * self.pilot.n_samples)
        return fit_seconds(self.fit, self.pilot, self.n_checkpoints, width)

    def memory_bytes(self, n_threads: int = 1) -> int | None:
        """Return the most memory that a process with some threads will hold, by the pilot.

        All of its threads compute blocks, and in the end they sum the gram matrices. Weights of
        further checkpoints, which a worker keeps in up to a fifth of its memory, are not counted.
        Dask stops giving tasks to a worker at 80 % of its ``memory_limit``.
        """
        if (pilot := self.pilot) is None:
            return None
        of_save = int(self.projections.save_bytes[0])
        return pilot.process_bytes + n_threads * max(pilot.task_bytes, of_save)

    def __repr__(self) -> str:
        # A repr of a projector would be too wide as the heading of a column.
        named = [f"{number}: {p}" for number, p in enumerate(self.projections.projector, start=1)]
        table = self._table().loc[list(_SHOWN)].rename(_SHOWN)
        text = table.set_axis(range(1, len(named) + 1), axis="columns").to_string()
        return "\n".join([*self._titles(), *named, "", text])

    def _repr_html_(self) -> str:
        titles = "".join(f"<p>{escape(title)}</p>" for title in self._titles())
        table = self._table()
        shown = table.loc[list(_SHOWN)].rename(_SHOWN).to_html(border=0)
        others = table.drop(index=list(_SHOWN)).to_html(border=0)
        return f"{titles}{shown}<details><summary>All numbers</summary>{others}</details>"

    def _table(self) -> pd.DataFrame:
        """Return one column per projector, in units that people read."""
        table = self.projections.set_index("projector")
        for name, column in table.items():
            table[name] = [_readable(str(name), value) for value in column.tolist()]
        return table.T

    def _of_fit(self) -> list[str]:
        if (fit := self.fit) is None:
            return []
        seconds = self.estimated_fit_s
        time = "" if seconds is None else f"about {duration(seconds)}, "
        gradients = counted(fit["n_gradients"], "sample")
        return [
            f"A td.fit before: {time}gradients of {gradients}, "
            f"{format_bytes(fit['memory_bytes'])} for its largest task, "
            f"{format_bytes(fit['kept_bytes'])} of the store. Random columns need none"
        ]

    def _titles(self) -> list[str]:
        batches = "" if self.batch_size is None else f" and micro-batches of {self.batch_size}"
        own = self.projections.iloc[0]
        task = format_bytes(max(own.save_bytes, own.query_bytes))
        time = "measured by td.plan(features, pilot=True)"
        memory = f"{task} for the largest task, and gradients, which a pilot measures"
        if self.pilot is not None:
            time = f"about {duration(self.estimated_s or 0)}. {self.pilot}"
            one, two = (format_bytes(self.memory_bytes(n) or 0) for n in (1, 2))
            memory = f"about {one} in a process with 1 thread, {two} with 2"
        titles = [
            f"Time: {time}",
            f"Store: {format_bytes(own.store_bytes)}",
            f"Memory: {memory}",
            *self._of_fit(),
            f"Plan: {counted(self.n_samples, 'sample')} in {counted(self.n_blocks, 'block')}"
            f" of {format_bytes(self.block_bytes)}"
            f"{batches}, {counted(self.n_checkpoints, 'checkpoint')}, "
            f"{counted(self.n_parameters, 'parameter')}: {counted(self.n_tasks, 'task')}",
        ]
        for call, n_bytes in {"td.save": own.save_bytes, "a query": own.query_bytes}.items():
            if n_bytes > self.worker_bytes:
                titles.append(
                    f"Too large: a task of {call} takes up to {format_bytes(n_bytes)}, and no "
                    f"worker has more than {format_bytes(int(self.worker_bytes))}; try fewer "
                    "columns, smaller blocks, or larger workers"
                )
        if self.has_few_columns:
            titles.append(
                f"More than {MOST_PER_COLUMN} samples per random column: where this was measured, "
                "scores ranked retrained models worse by 0.04 to 0.10 of LDS with 1 checkpoint, "
                "and by up to 0.08 with 3; try more columns, as in the table, or td.fit"
            )
        return titles


def _readable(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name.endswith("_error"):
        return f"{np.format_float_positional(100 * value, 2, fractional=False, trim='-')} %"
    if isinstance(value, int):
        return f"{value:,}" if value < 10**6 else f"{value:.1e}"
    return str(value)
