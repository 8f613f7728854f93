"""Questions to lazy scores: the best and worst training samples, of each target or of all."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal, Self
from uuid import uuid4

import dask
import dask.array as da
import numpy as np
import xarray as xr

from trakdask import arrays
from trakdask.arrays.blocks import Read
from trakdask.arrays.graphs import plain, reader
from trakdask.arrays.topk import TileMask
from trakdask.attribution.conditions import columns_along, mask_of
from trakdask.attribution.groups import group_codes, require_group_coord
from trakdask.checks import nearest, require_choice, require_flags, require_integer, require_number
from trakdask.execution import require_memory
from trakdask.variables import N_SAMPLES, RANK, SAMPLE, TARGET, VARIABLES, coords_along, require_new

_MISSING = {"f": np.nan, "M": "NaT", "m": "NaT", "i": -1, "b": False}
"""The value of coords where there is no sample, by the kind of their dtype; text has ``""``."""


class Ranking(xr.Dataset):
    """Ranked samples, whose coords are looked up here if they are in memory here.

    The graphs of these coords hold the values of all samples, which a client would send to its
    workers with every query. They are for selections from a lazy ranking.
    """

    __slots__ = ("_columns",)

    _columns: Mapping[Hashable, tuple[da.Array, np.ndarray]]
    """Each coord by its name: its lazy array, and its values for all samples. A Dataset that is
    made from this one has none."""

    def load(self, **options: Any) -> Self:
        """Compute scores and positions together, and then look up the coords."""
        # Not of coords that were replaced, or selected from, since.
        columns = {
            name: column
            for name, (lazy, column) in getattr(self, "_columns", {}).items()
            if name in self.variables and self.variables[name].data is lazy
        }
        # This has the same variables, and not copies of them.
        super(Ranking, self.drop_vars(columns)).load(**options)
        for name, column in columns.items():
            self.variables[name].data = _gather(self["position"].values, column)
        return self

    def compute(self, **options: Any) -> Self:
        """Return a loaded copy."""
        copy = self.copy(deep=False)
        copy._columns = getattr(self, "_columns", {})
        return copy.load(**options)


Ranking.__name__ = "Dataset"  # xarray shows it; pickles go by the qualified name, which stays


def top_k(
    scores: xr.DataArray | xr.Dataset,
    k: int | None = None,
    *,
    fraction: float | None = None,
    where: str | xr.DataArray | np.ndarray | Callable[[xr.Dataset], xr.DataArray] | None = None,
    largest: bool = True,
    over_targets: Literal["max", "mean"] | None = None,
    by: str | None = None,
    rank_by: str = "score",
) -> xr.Dataset:
    """Rank the training samples and keep the first k, with their metadata.

    Each target has its own ranking. With ``over_targets`` there is one for all targets together,
    which says which training data to take for them.

    Parameters
    ----------
    scores
        Scores (sample, target) of :func:`score`, or one number per sample (sample), as
        :func:`self_influence` returns; or a Dataset of either with intervals (``level=``).
    k
        How many samples per target.
    fraction
        Instead of k: the share of the samples that count, in (0, 1], or of all samples where
        ``where`` depends on the target. The number is rounded up.
    where
        Which samples count: a boolean mask (sample), such as ``scores.source == "web"``; a
        condition on coords as text, such as ``'label == 3 and day >= "2024-02-01"'``; a mask over
        (sample, target), in memory; or a function from the coords of a tile to a mask,
        evaluated tile by tile, such as ``lambda tile: tile.label == tile.target_label``. Blocks in
        which a mask over samples selects nothing are never read. A DataArray is aligned with the
        scores by its labels, if both have an index; else its coords must equal theirs. The tile
        that a function gets has ``sample`` and ``target``, positions where there are no labels.
    largest
        ``True``: the most helpful first; ``False``: the most harmful first.
    over_targets
        Rank by one number per sample: its ``"max"``, the score of the target that it helps most, or
        its ``"mean"`` over targets. ``where`` is then a mask over samples.
    by
        With ``over_targets``: take k, or this fraction, of each group, the name of a coord of the
        samples. Samples whose value is missing belong to no group, and are not taken.
    rank_by
        The variable of a Dataset to rank by. ``"lower"`` puts first what helps for certain, and
        with ``largest=False``, ``"upper"`` what harms for certain. The largest scores agree better
        with other checkpoints (``tests/benchmarks/results/2026-11-24-intervals.txt``).

    Returns
    -------
    Lazy Dataset (target, rank), or (rank) for one number per sample, with ``score`` float32,
    ``position`` int64 of the training sample, and the samples' coords at those positions. Equal
    scores rank by position; NaN never ranks. Where ``where`` depends on the target and leaves fewer
    than k samples, or where scores of a target are NaN, the rest is position -1 and score NaN;
    coords keep their dtype, and are NaN, NaT, -1 (of unsigned integers the largest number), False
    or "" there. The other variables of a Dataset are there for the ranked samples, too, float32.

    With ``over_targets`` a lazy Dataset (sample) with the samples' coords: ``score``, float32, that
    maximum or mean, and ``selected``, bool, so that ``train.isel(sample=top.selected)`` is the
    selected data. A sample whose score is NaN for some target is never selected.

    Raises
    ------
    TypeError, ValueError
        If k is not in 1..n, or fraction not in (0, 1], a mask has another length or dtype, or
        selects fewer than k samples, or cannot be aligned, or there is no such coord. When
        computed: if the function raises, or returns no mask of its tile.
    MemoryError
        If ranking a block of scores takes more memory than any worker has.

    Notes
    -----
    Compute all variables together, as in ``top.compute().to_dataframe()``: xarray would compute
    the variables of a lazy Dataset one after the other, and each would repeat the query.
    ``top.compute()`` also looks up coords that are in memory in this process, so that a cluster
    gets only the coords that ``where`` needs: the ones that a text names, or all for a function.
    ``client.compute(top)``, and a selection from a lazy ``top``, send the workers the coords of all
    samples.

    Local ranking is fused with the score tiles and merged by a tree: n × m scores never exist.
    Exact and independent of chunks. Means over targets are computed in float64 and rounded once.
    Targets of tasks with different numbers of examples are best averaged first,
    ``td.combine(targets, by="task")``, so that the maximum is over tasks, as LESS has it.

    References
    ----------
    Xia et al. 2024, "LESS: Selecting Influential Data for Targeted Instruction Tuning", section
    4.2, for ``over_targets``.

    Examples
    --------
    >>> import trakdask as td
    >>> features, targets = td.examples.iris_features()
    >>> scores = td.score(features, targets)
    >>> top = td.top_k(scores, 3, where="species != target_species").compute()
    >>> str(top.target_species.values[0]), top.species[0].values.tolist()
    ('versicolor', ['setosa', 'setosa', 'setosa'])

    The tenth of each species that helps some target most:

    >>> selection = td.top_k(scores, fraction=0.1, over_targets="max", by="species").compute()
    >>> selection.selected.groupby("species").sum().values.tolist()
    [5, 4, 4]
    """
    require_flags(largest=largest)
    # 1. What is ranked, and the other variables with as many numbers, which come along.
    others: dict[Hashable, xr.DataArray] = {}
    if isinstance(scores, xr.DataArray) and rank_by != "score":
        raise ValueError(
            f"expected a Dataset of scores for rank_by={rank_by!r}, got one array; try "
            "td.score(features, targets, level=0.9), which has bounds"
        )
    if isinstance(scores, xr.Dataset):
        if rank_by not in scores:
            near = nearest(rank_by, scores)
            raise ValueError(
                f"expected scores with the variable rank_by={rank_by!r}, got "
                f"{list(map(str, scores))}; try {f'rank_by={near!r}' if near else 'another one'}, "
                "or what td.score returns"
            )
        others = {
            name: array
            for name, array in scores.items()
            if name != rank_by and array.dims == scores[rank_by].dims
        }
        scores = scores[rank_by].assign_attrs(scores.attrs)
    of_samples = getattr(scores, "dims", None) == (SAMPLE,) and over_targets is None
    if of_samples:
        scores = scores.expand_dims(TARGET, axis=1)
    if (dims := getattr(scores, "dims", None)) != (SAMPLE, TARGET):
        raise ValueError(
            f"expected scores (sample, target), got {dims or type(scores).__name__}; try what "
            "td.score returns, scores.transpose('sample', 'target'), scores.isel(target=[0]) with "
            "a list, scores.mean('checkpoint'), or scores.sum('token')"
        )
    # 2. No name of a coord is one of those in the result.
    require_new(coords_along(scores, SAMPLE), [TARGET])
    taken = ("position", RANK) if over_targets is None else ("selected",)
    require_new(coords_along(scores, SAMPLE, TARGET), [*taken, "score", rank_by, *others])
    if not isinstance(scores.data, da.Array):
        scores = scores.copy(data=plain(scores.variable.chunk().data))
    # 3. Which samples count, and how many are kept of them.
    mask = mask_of(scores, where)
    if over_targets is not None:
        return _top_over_targets(scores, mask, k, fraction, over_targets, by, largest=largest)
    if by is not None:
        raise ValueError(
            f"expected over_targets with by, which ranks all targets together, got by={by!r} "
            "alone; try over_targets='max'"
        )
    n = int(mask.sum()) if isinstance(mask, np.ndarray) else scores.sizes[SAMPLE]
    (k,) = _counts([n], k, fraction)
    rows, n_targets = map(max, scores.data.chunks)
    require_memory(
        arrays.memory.top_k(
            rows, n_targets, k, itemsize=scores.dtype.itemsize, n_others=len(others)
        ),
        f"ranking {k} of a block of {rows} samples for {n_targets} targets",
        "try fewer, or scores.chunk(target=...)",
    )
    # 4. The ranking, in which other variables have the axis of targets and the blocks of the
    # scores.
    tiles = [da.asarray(array.data).reshape(scores.shape) for array in others.values()]
    of_others = [tile.rechunk(scores.chunks) for tile in tiles]
    value, position, *rest = ranked = arrays.topk.top_k(
        scores.data, k, largest=largest, mask=mask, others=of_others
    )
    shape: tuple[str, ...] = (TARGET, RANK)
    if of_samples:
        value, position, *rest = (array[0] for array in ranked)
        shape = (RANK,)
    # A copy, as dask.compute (2026.8) misses an array of a Dataset that only one other is made of.
    shown = da.map_blocks(np.copy, position)
    attrs = {**scores.attrs, "order": "descending" if largest else "ascending"}
    attrs[N_SAMPLES] = scores.sizes[SAMPLE]
    # 5. Coords: of samples by their positions, which are not known yet; of targets as they are.
    coords: dict[Hashable, Any] = {}
    columns: dict[Hashable, Any] = {}
    for name, values in columns_along(scores, SAMPLE).items():
        gathered = _gathered(name, values, position)
        coords[name] = shape, gathered
        if isinstance(values, np.ndarray):
            columns[name] = gathered, values
    coords |= {name: (TARGET, c) for name, c in columns_along(scores, TARGET).items()}
    top = Ranking(
        {
            rank_by: (shape, value, VARIABLES["score"].attrs),
            **{
                name: (shape, ranked, array.attrs)
                for (name, array), ranked in zip(others.items(), rest, strict=True)
            },
            "position": (shape, shown, VARIABLES["position"].attrs),
        },
        coords={**coords, RANK: np.arange(k)},
        attrs=attrs,
    )
    top._columns = columns
    return top


def _top_over_targets(
    scores: xr.DataArray,
    mask: np.ndarray | TileMask | None,
    k: int | None,
    fraction: float | None,
    over_targets: str,
    by: str | None,
    *,
    largest: bool,
) -> xr.Dataset:
    require_choice("over_targets", over_targets, ["max", "mean"], remedy="try over_targets='max'")
    if not scores.sizes[TARGET]:
        raise ValueError("expected scores of one or more targets, got none; try another selection")
    if isinstance(mask, TileMask):
        raise ValueError(
            "expected where as a mask over samples with over_targets, got one that depends on "
            "targets; try where=(scores.label == 3), or scores.where(...)"
        )
    # Not nanmax: a target without a score would count as one that the sample does not help.
    wide = scores.variable.astype(np.float64)  # so that the order of a sum does not matter
    best = (wide.max if over_targets == "max" else wide.mean)(TARGET, skipna=False).data
    best = best.astype(np.float32)
    # Without groups all are in one. What must not be taken is in none, -1.
    codes = np.zeros(scores.sizes[SAMPLE], np.int64)
    if by is not None:
        require_group_coord(by, coords_along(scores, SAMPLE))
        codes, _ = group_codes(scores[by].values)
    if mask is not None:
        codes = np.where(mask, codes, -1)
    sizes = np.bincount(codes[codes >= 0])
    counts = np.array(_counts(sizes.tolist(), k, fraction), np.int64)
    selected = arrays.topk.among_best(best if largest else -best, codes, counts)
    attrs = {"over_targets": over_targets, "by": by or ""}
    attrs["order"] = "descending" if largest else "ascending"
    return xr.Dataset(
        {"score": (SAMPLE, best, VARIABLES["score"].attrs), "selected": (SAMPLE, selected)},
        coords=coords_along(scores, SAMPLE),
        attrs={**scores.attrs, **attrs},
    )


def _counts(sizes: Sequence[int], k: int | None, fraction: float | None) -> list[int]:
    """Return how many samples to take of groups of these sizes."""
    n = sum(sizes)
    if (k is None) == (fraction is None):
        raise ValueError(
            f"expected either k or fraction, got k={k!r} and fraction={fraction!r}; try k=10"
        )
    if fraction is not None:
        asked = require_number("fraction", fraction, remedy="try fraction=0.05")
        # 0.07 * 100 is 7.000000000000001, where nobody expects 8.
        counts = [math.ceil(round(asked * size, 9)) for size in sizes]
    else:
        asked = require_integer("k", k, 1, remedy="try k=10")
        counts = [min(asked, size) for size in sizes]
    if n == 0:
        raise ValueError(
            "expected samples that where= and by= leave, got none; try a condition "
            "that some samples meet"
        )
    if asked > (n if fraction is None else 1):
        raise ValueError(
            f"expected k from 1 to the {n} samples that where= and by= leave, or a fraction in "
            f"(0, 1] of them, got {asked}; try fewer, or a mask that selects more"
        )
    return counts


def _gathered(name: Hashable, values: Any, position: da.Array) -> da.Array:
    """Return the metadata of the ranked samples, looked up once their positions are known."""
    # One task; others take the rows that they need, from it or from the store.
    column = reader(values) or values
    if not hasattr(position, "expr"):  # Dask loses it with array.query-planning
        column = dask.delayed(column, name=f"column-{uuid4().hex}", traverse=False)
    return da.map_blocks(
        _gather, position, column=column,
        dtype=values.dtype, meta=np.empty((0,) * position.ndim, values.dtype),
        name=f"{name}-{uuid4().hex}",
    )  # fmt: skip


def _gather(position: np.ndarray, column: np.ndarray | Read) -> np.ndarray:
    missing = position < 0
    # Never row -1: that is the last sample.
    rows = np.where(missing, 0, position)
    if isinstance(column, np.ndarray):
        gathered = column[rows]
    else:
        to_read, inverse = np.unique(rows, return_inverse=True)
        gathered = column((to_read,))[inverse].reshape(rows.shape)
    if missing.any():
        kind = gathered.dtype.kind
        # Unsigned integers have no -1. Text, which is not in the table, has "".
        none = np.iinfo(gathered.dtype).max if kind == "u" else _MISSING.get(kind, "")
        gathered[missing] = none
    return gathered
