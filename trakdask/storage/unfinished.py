"""What is unfinished: blocks that do not count yet, each with a record of its other numbers.

A task stores the features of its block and then the record, by which the block is known to be
stored. If outputs, weights and norms had chunks of a block, three of four objects of a store would
have two kilobytes. Therefore, :func:`pack` writes large chunks once all blocks are there. These
chunks are what counts, and the records are removed.
"""

from __future__ import annotations

import io
import itertools
import zipfile
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from trakdask.errors import IncompleteFeaturesError
from trakdask.files import Folder
from trakdask.storage.group import ERROR, RECORDS, Group
from trakdask.variables import CHECKPOINT, SAMPLE

_LEAST_ROWS, _MOST_ROWS, _BLOCKS = 2**18, 2**21, 128
"""Rows and blocks of a packed chunk, which then has 1 to 16 MB. Six arrays in chunks of 128 blocks
are 0.05 objects for each block. But a task that needs one block has the chunk in memory."""

_MOST_SETS = 3
"""Sets of samples that a message names."""


def starts(rows: range, block: int) -> list[int]:
    """Return the first row of each record of consecutive rows, which may begin within a block.

    >>> starts(range(6, 13), 4)
    [6, 8, 12]
    """
    return [rows.start, *range((rows.start // block + 1) * block, rows.stop, block)]


def stored_records(before: Group) -> set[tuple[int, int]]:
    """Return the records of blocks that do not count yet, from one listing."""
    names = (name.split(".") for name in (before.folder / RECORDS).names())
    # A killed writer may have left those of blocks that count by now.
    records = {(int(start), int(index)) for start, index, _ in names}
    return {record for record in records if not before.counts(*record)}


def missing_blocks(
    before: Group, rows: range, index: int, records: Collection[tuple[int, int]]
) -> list[int]:
    """Return the first rows of the blocks of a set of samples that are missing at a checkpoint."""
    return [
        start
        for start in starts(rows, before.block)
        if not before.counts(start, index) and (start, index) not in records
    ]


def unfinished_sets(before: Group, group: Group) -> dict[tuple[str, range], dict[str, int]]:
    """Return the sets of samples that lack blocks of what a store is to have.

    Parameters
    ----------
    before, group
        The store as it counts, and as it is to be.

    Returns
    -------
    Source and rows of a set -> checkpoint -> how many blocks of it are missing.
    """
    records, unfinished = stored_records(before), {}
    for source, rows in group.rows_of_sources():
        counts = {
            name: len(missing_blocks(before, rows, index, records))
            for index, name in enumerate(group.checkpoints)
        }
        if any(counts.values()):
            unfinished[source, rows] = {name: n for name, n in counts.items() if n}
    return unfinished


def about_unfinished(before: Group) -> str:
    """Name the unfinished append, the samples that it lacks, and how to finish it."""
    target = before.target()
    dim = SAMPLE if target.n_samples > before.n_samples else CHECKPOINT
    unfinished = unfinished_sets(before, target)
    n_blocks = sum(sum(counts.values()) for counts in unfinished.values())
    sets = [
        f"{rows.start}:{rows.stop} ({source:.24}) at {[*counts]}"
        for (source, rows), counts in unfinished.items()
    ]
    more = f" and those of {len(sets) - _MOST_SETS} more sets" if len(sets) > _MOST_SETS else ""
    of_samples = f"{n_blocks} blocks of the samples {', '.join(sets[:_MOST_SETS])}{more}"
    lacks = f", and lacks {of_samples}" if sets else ""
    whole = f" or of all {target.n_samples} samples in this order," if dim == CHECKPOINT else ""
    return (
        f"an append was not finished, to {target.n_samples} samples of the checkpoints "
        f"{target.checkpoints}{lacks}; call td.save(..., append_dim={dim!r}) with features of "
        f"these,{whole} to finish it, or td.verify(store, repair=True) to give it up"
    )


def write_record(folder: Folder, record: tuple[int, int], values: Mapping[str, np.ndarray]) -> None:
    """Store the numbers of a block, (rows,) each, in one piece and with checksums."""
    content, values = io.BytesIO(), dict(values)
    if ERROR in values:  # numpy has no format for texts of any length
        values[ERROR] = np.array(values[ERROR].tolist(), "U")
    np.savez(content, allow_pickle=False, **values)
    folder.write(path_of(record), content.getvalue(), durable=False)


def decoded(content: bytes, folder: Folder, record: tuple[int, int]) -> dict[str, np.ndarray]:
    """Return the numbers of a block; remove a damaged record, as after a power failure.

    Raises
    ------
    IncompleteFeaturesError
        If it cannot be read.
    """
    path = path_of(record)
    try:
        with np.load(io.BytesIO(content)) as values:
            return dict(values)
    except (ValueError, EOFError, zipfile.BadZipFile) as err:
        folder.remove(path)
        raise IncompleteFeaturesError(
            f"expected {path!r} in {folder.url!r} as it was written, got other bytes ({err}), "
            "which were removed; try the same td.save(...) again, which computes this block"
        ) from err


def path_of(record: tuple[int, int]) -> str:
    """Return the path of a record in a store."""
    return f"{RECORDS}/{record[0]}.{record[1]}.npz"


def numbers_of(
    before: Group, rows: range, index: int, records: Collection[tuple[int, int]]
) -> dict[str, np.ndarray]:
    """Return the numbers of rows at a checkpoint, from the store or from records; else NaN.

    Parameters
    ----------
    before
        The store as it counts.
    rows
        Consecutive rows. A record lies within them or outside.
    index
        Number of the checkpoint.
    records
        What :func:`stored_records` returns.
    """
    n_counts = before.n_samples if index < len(before.checkpoints) else 0
    # Rows that count come first, in large chunks; records have all others.
    counts, values = len(range(rows.start, min(rows.stop, n_counts))), {}
    for name in before.numbers:
        array = before.array(name, read_only=True)
        values[name] = np.full(len(rows), array.fill_value, array.dtype)
        if counts:
            values[name][:counts] = array[rows.start : rows.start + counts, index]
    here = [record for record in records if record[0] in rows and record[1] == index]
    with ThreadPoolExecutor() as pool:
        contents = pool.map(lambda record: before.folder.read(path_of(record)), here)
        # Decoded by this thread: numpy parses headers as Python, and until 3.11.8 Python's parser
        # fails now and then where several threads are in it.
        for record, content in zip(here, contents, strict=True):
            start = record[0]
            for name, rows_of_record in decoded(content, before.folder, record).items():
                values[name][start - rows.start :][: len(rows_of_record)] = rows_of_record
    return values


def pack(before: Group, group: Group, erased: np.ndarray | None = None) -> None:
    """Write the numbers in large chunks, beside those that count so far.

    Parameters
    ----------
    before
        The store as it counts.
    group
        As it is to be, with its blocks stored; gets the metadata of the new arrays.
    erased
        Which samples (sample,) are to have no values.
    """
    records, size = stored_records(before), packed_rows(group)
    sizes = {SAMPLE: group.n_samples, CHECKPOINT: len(group.checkpoints)}
    for name in group.numbers:
        if before.n_samples and name in before.before and name != ERROR:
            before.require_chunks(name)  # else what was lost would be NaN for good
        # Metadata of arrays whose chunks have other names than those so far.
        group.add(name, sizes, before.array(name).dtype, block=size)
    arrays = {name: group.array(name) for name in group.numbers}
    firsts = range(0, sizes[SAMPLE], size)
    for index, start in itertools.product(range(sizes[CHECKPOINT]), firsts):
        rows = range(start, min(start + size, sizes[SAMPLE]))
        for name, values in numbers_of(before, rows, index, records).items():
            if erased is not None:
                values[erased[rows.start : rows.stop]] = arrays[name].fill_value
            arrays[name][rows.start : rows.stop, index] = values


def packed_rows(group: Group) -> int:
    """Return how many rows of numbers are in a chunk: the rows of whole blocks, or all."""
    rows = min(max(_BLOCKS * group.block, _LEAST_ROWS), _MOST_ROWS)
    return min(group.n_samples, max(1, rows // group.block) * group.block)
