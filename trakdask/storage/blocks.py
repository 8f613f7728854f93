"""Blocks of features: the tasks that store them, and which of them are stored.

A task puts the record of a block last, so a block is stored if that is there.
"""

from __future__ import annotations

import functools
import itertools
import logging
import socket
import time
from collections.abc import Sequence
from typing import Any

import dask
import dask.array as da
import numpy as np
import xarray as xr
import zarr
from dask.base import get_scheduler, tokenize
from dask.typing import Key

from trakdask import bars, execution
from trakdask.arrays.blocks import Block, Unread, block_of
from trakdask.arrays.damping import warn_client
from trakdask.arrays.graphs import bounds, graph_of, plain
from trakdask.checks import shown
from trakdask.errors import StoreMismatchError, warn_once
from trakdask.files import Folder
from trakdask.storage import unfinished
from trakdask.storage.group import ERROR, SCALE, Group
from trakdask.storage.reading import dropped_mask, from_half
from trakdask.variables import (
    CHECKPOINT,
    FITTED,
    NORM,
    PROJ_DIM,
    SAMPLE,
    TRAINED_ON,
    TRIANGLE,
    VARIABLES,
    checkpoint_names,
)

_LARGEST_EXPONENT = 15
"""The largest element of a row comes to lie in [2^14, 2^15): float16 ends at 65504."""
_BELOW_LARGEST = 2**_LARGEST_EXPONENT - 16  # the largest float16 below 2^15

_TOLERANCE, _TOLERANCE_IN_16_BITS = 0.01, 0.1
"""How much rows that are computed again may differ, as a share of their length.

On the same machine, with the same batches, not one bit differs. But other batches, processors or
kernels of torch change the last digits, which are fewer in 16 bits; changed code changes the first.
"""

_LONGEST, _ENOUGH_ROWS = 30, 16
"""Length of features in medians of their block, and its least rows. On 29 tasks no feature was
longer than 7 times the median of all; see ``2026-11-24-outliers.txt``."""

_NOTHING = {TRAINED_ON: True, ERROR: ""}
"""Values that say nothing of a sample."""

_log = logging.getLogger(__name__)


# ------------------------------------------------------------------------------------- writing


def save_fit(group: Group, features: xr.Dataset, retries: int) -> None:
    """Store the values of a fitted projector, of the checkpoints that lack them.

    Raises
    ------
    StoreMismatchError
        If the features do not have what the store lacks, or in another dtype.
    """
    names = checkpoint_names(features)
    got = {name: features[name].dtype.name for name in FITTED if name in features}
    for variable in [name for name in FITTED if name in group.arrays]:
        expected = group.array(variable).dtype.name
        stored = {index[-1] for index in group.stored_chunks(variable)}
        lacking = [name for i, name in enumerate(group.checkpoints) if i not in stored]
        if got.get(variable) != expected and set(lacking) & set(names):
            raise StoreMismatchError(
                f"expected {variable!r} ({expected}) in features of the checkpoints {lacking}, "
                f"which the store {group.folder.url!r} lacks, got {got}; try "
                "td.featurize(samples, model, projector) without like=, and with the projector of "
                "td.fit(samples, model, store=...) where the store is older"
            )
        # Checkpoints that these features have, one at a time, since a chunk has one.
        for name in lacking if variable in features else ():
            if name in names:
                position = names.index(name)
                value = da.asarray(features[variable].data[..., position : position + 1])
                value = value.rechunk(-1)
                save_sums(group, [variable], [value], group.checkpoints.index(name), retries)


def save_blocks(
    before: Group, features: xr.Dataset, rows: range, retries: int, *, progress: bool
) -> None:
    """Compute and store the blocks that are missing, one checkpoint after the other.

    Parameters
    ----------
    before
        The store as it counts, which knows what an unfinished append is to add.
    features
        Lazy, in any chunks.
    rows
        Where their samples belong.
    retries
        Further attempts.
    progress
        Show a bar.
    """
    # 1. Features that say nothing of failures, or of training sets, had none, and were trained on.
    for name, none in _NOTHING.items():
        if name in before.arrays and name not in features:
            dtype = before.array(name).dtype
            data = da.full_like(features.out_to_loss.data, none, dtype=dtype)
            features = features.assign({name: (VARIABLES[name].dims, data)})
    features = features[[name for name in before.features if name in features]]
    # 2. Later calls must not bring back what was erased, whatever stands at these places.
    if "erased" in before.attrs:
        shown = xr.DataArray(_shown(before, rows), dims=SAMPLE)
        features = features.assign(
            {n: x.where(shown, _NOTHING.get(str(n), np.nan)) for n, x in features.data_vars.items()}
        )
    # 3. In blocks of the store. The first one is partial if it begins within a chunk.
    edges = [*unfinished.starts(rows, before.block), rows.stop]
    sizes = tuple(np.diff(edges).tolist())
    chunked = features.chunk({SAMPLE: sizes, PROJ_DIM: -1, CHECKPOINT: 1})
    blocks = {str(name): plain(variable.data) for name, variable in chunked.data_vars.items()}
    checkpoints = before.target().checkpoints
    columns = [checkpoints.index(name) for name in checkpoint_names(features)]
    total = len(sizes) * len(columns)

    def count() -> int:
        records = unfinished.stored_records(before)
        return total - sum(
            len(unfinished.missing_blocks(before, rows, c, records)) for c in columns
        )

    with bars.polled_bar(f"save {before.folder.name}", total, count, show=progress):
        for position, index in enumerate(columns):
            tasks = functools.partial(_missing, before, blocks, rows, position, index)
            execution.run(tasks, retries=retries, compute=_compute)


def _compute(tasks: tuple[da.Array, list[Key]], **options: Any) -> None:
    """Compute tasks for what they store; on a cluster each is forgotten as soon as it is done.

    Otherwise the scheduler would compute a stored block again if its worker dies later.
    """
    array, keys = tasks
    graph = graph_of(array, keys)
    client = execution.active_client()
    if client is None:
        get_scheduler(collections=[array])(graph, keys)
        return
    from distributed import as_completed  # slow to import

    finished = as_completed(client.get(graph, keys, sync=False, **options))
    for future in finished:
        future.result()
        del future


def _missing(
    before: Group, blocks: dict[str, da.Array], rows: range, position: int, index: int
) -> tuple[da.Array, list[Key]] | None:
    """Return the tasks of the missing blocks of one of the checkpoints of some features.

    ``blocks`` are the arrays that are stored, by name, in blocks of the store.
    """
    todo = unfinished.missing_blocks(before, rows, index, unfinished.stored_records(before))
    if not todo:
        return None
    is_half = SCALE in before.arrays
    write = functools.partial(
        _write_block, before.folder, before.target().array("feature"), is_half, [*blocks], index,
        rows.start,
    )  # fmt: skip
    pairs = [(x, "spc" if x.ndim == 3 else "sc") for x in blocks.values()]
    written = da.blockwise(
        write, "sc",
        bounds(blocks["feature"].chunks[0]), "s", *(item for pair in pairs for item in pair),
        adjust_chunks={"s": 1, "c": 1}, align_arrays=False, dtype=bool,
        meta=np.empty((0, 0), bool),
        name=f"save-block-{tokenize(before.folder.url, rows, index, *(x.name for x, _ in pairs))}",
    )  # fmt: skip
    # Keys, and no selection: of selected features dask would not fuse what makes a block with what
    # stores it, and selected blocks wait for a free thread before the scheduler forgets them.
    b = before.block
    return written, [(written.name, start // b - rows.start // b, position) for start in todo]


def _write_block(
    folder: Folder,
    feature: zarr.Array[Any],
    is_half: bool,
    names: Sequence[str],
    index: int,
    offset: int,
    part: tuple[slice],
    *blocks: Block | Unread,
) -> np.ndarray:
    """Store the rows of a block: its record last, by which the block is known to be stored.

    zarr puts a chunk in one piece. If a chunk has other rows, too, zarr reads and keeps them. Two
    tasks never write the same chunk, since a call of save writes one set of consecutive rows.
    """
    began, (here,) = time.time(), part
    # `here` are rows of this call; the store has others before them.
    rows = slice(offset + here.start, offset + here.stop)
    values = dict(zip(names, map(block_of, blocks), strict=True))
    # 1. A feature that is far longer than the median of its block spoils the scores of all.
    norm = values[NORM][:, 0]
    finite = norm[np.isfinite(norm)]
    median = np.median(finite) if len(finite) >= _ENOUGH_ROWS else 0.0
    long = np.flatnonzero(np.isfinite(norm) & (norm > _LONGEST**2 * median) & (median > 0))
    if len(long):
        warn_once(
            "long features",
            f"expected features of similar length, got features of the samples "
            f"{shown((rows.start + long).tolist())} that are up to "
            f"{np.sqrt(norm[long].max() / median):.0f} times as long as the median of their block. "
            "They make λ too large for the scores of all samples. If there is a fault in them, try "
            "td.drop(store, where=lambda ds: (ds.feature_norm > "
            f"{_LONGEST**2} * ds.feature_norm.median('sample')).any('checkpoint'))",
            warn_client,
        )
    # 2. Features, and then the record.
    if is_half:
        values["feature"], values[SCALE] = encoded(values["feature"])
    feature[rows, :, index : index + 1] = values.pop("feature")
    record = {name: value[:, 0] for name, value in values.items()}
    unfinished.write_record(folder, (rows.start, index), record)
    _log.info(
        "samples %d:%d of checkpoint %d were stored by %s in %.2f s",
        rows.start, rows.stop, index, socket.gethostname(), time.time() - began,
    )  # fmt: skip
    return np.ones((1, 1), bool)


def save_sums(
    group: Group, names: Sequence[str], values: Sequence[da.Array], index: int, retries: int
) -> None:
    """Compute arrays of one checkpoint and store them, each in one chunk."""
    # Symmetric matrices, which compress to half with zeros below the diagonal.
    is_upper = [TRIANGLE in group.arrays[name]["attributes"] for name in names]
    values = [
        da.map_blocks(_upper, v, dtype=v.dtype) if upper else v
        for v, upper in zip(values, is_upper, strict=True)
    ]
    regions = [(*[slice(None)] * (v.ndim - 1), slice(index, index + 1)) for v in values]
    into: Any = [group.array(name) for name in names]
    # Without a lock, since each value is one chunk, which nothing else writes.
    tasks = functools.partial(da.store, values, into, regions=regions, lock=False, compute=False)
    execution.run(tasks, retries=retries)


def _upper(matrix: np.ndarray) -> np.ndarray:
    return np.triu(matrix[:, :, 0])[:, :, None]


# ------------------------------------------------------------------------------ the same features


def difference_of_block(before: Group, features: xr.Dataset, rows: range) -> str | None:
    """Compute a block that is stored again, and compare: code may change under the same name.

    It is the last one, which is the smallest, among the blocks without failures, which this call
    might raise.

    Returns
    -------
    How its rows differ by more than rounding; None if they do not, or none are stored.
    """
    last = _last_block(before, checkpoint_names(features), rows)
    if last is None:
        return None
    here, index, small = last
    group = before.target()
    name, inside = group.checkpoints[index], slice(here.start - rows.start, here.stop - rows.start)
    columns = [checkpoint_names(features).index(name)]
    # 1. The block as these features have it, and as the store does. Features alone are computed.
    again = features.isel({SAMPLE: inside, CHECKPOINT: columns})
    old = np.asarray(group.array("feature")[here.start : here.stop, :, index : index + 1])
    if SCALE in small:
        old = from_half(old, small[SCALE][:, None])
    (new,) = dask.compute(again.feature.data)
    # 2. Numbers that have to be equal: what was erased is not compared.
    shown = _shown(before, here)
    if TRAINED_ON in features and (
        (again[TRAINED_ON].values[:, 0] != small[TRAINED_ON])[shown].any()
    ):
        return (
            f"expected {TRAINED_ON!r} as {group.folder.url!r} has it, got another one for the "
            f"samples {here.start}:{here.stop} of checkpoint {name!r}; try "
            f"td.assign_coords(store, {{{TRAINED_ON!r}: masks}}) to change the store"
        )
    # 3. Features, which may differ by rounding; of erased or failed samples one side is NaN.
    valid = np.isfinite(new) & np.isfinite(old)
    difference, length = (np.linalg.norm(x[valid]) for x in (new - old, old))
    in_16_bits = any("16" in str(features.attrs.get(key)) for key in ("dtype", "autocast"))
    if difference <= (_TOLERANCE_IN_16_BITS if in_16_bits else _TOLERANCE) * length:
        return None
    return (
        f"expected the features that {group.folder.url!r} has, got others when the samples "
        f"{here.start}:{here.stop} of checkpoint {name!r} were computed again (they differ by "
        f"{difference:.2g}, their length is {length:.2g}); try another store if the code of "
        "the model or of the task was changed, or if these are other samples"
    )


def _last_block(
    before: Group, names: Sequence[str], rows: range
) -> tuple[range, int, dict[str, np.ndarray]] | None:
    """Return the last block of some checkpoints without failures: rows, checkpoint, its numbers."""
    records = unfinished.stored_records(before)
    columns = [i for i, name in enumerate(before.target().checkpoints) if name in names]
    edges = [*unfinished.starts(rows, before.block), rows.stop]
    # From the end: the last block of a set is the smallest.
    for start, stop in reversed([*itertools.pairwise(edges)]):
        for index in reversed(columns):
            if before.counts(start, index) or (start, index) in records:
                values = unfinished.numbers_of(before, range(start, stop), index, records)
                if np.isfinite(values["out_to_loss"][_shown(before, range(start, stop))]).all():
                    return range(start, stop), index, values
    return None


def _shown(before: Group, rows: range) -> np.ndarray:
    """Return which rows were not dropped, and so have not been erased."""
    dropped = np.zeros(rows.stop, bool)
    dropped[: before.n_samples] = dropped_mask(before)[: rows.stop]
    return ~dropped[rows.start :]


# --------------------------------------------------------------------------------------- float16


def encoded(feature: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (rows, p, 1) features as float16, and the scale (rows, 1) to multiply them with.

    The scale is an exact power of two per sample and checkpoint. Relative to the largest element of
    its row, no element is off by more than 2^-11. Zeros, infinities and NaN stay what they are;
    other elements of their rows are scaled by the finite.

    Examples
    --------
    >>> stored, scale = encoded(np.array([[[3.0], [-0.75]], [[0.0], [np.inf]]], "f4"))
    >>> (stored[..., 0].astype("f4") * scale).tolist()
    [[3.0, -0.75], [0.0, inf]]
    """
    is_finite = np.isfinite(feature)
    largest = np.abs(np.where(is_finite, feature, feature.dtype.type(0))).max(axis=1, initial=0)
    _, exponent = np.frexp(largest)  # largest = m 2^e, m in [½, 1)
    exponent = exponent - _LARGEST_EXPONENT
    scaled = np.ldexp(feature, -exponent[:, None, :])
    # Rounded up to 2^15, the largest elements of all would overflow float32 when they are read.
    bounded = np.clip(scaled, -_BELOW_LARGEST, _BELOW_LARGEST)
    return np.where(is_finite, bounded, scaled).astype(np.float16), np.ldexp(1.0, exponent)
