"""Results of a job: rankings, how good the scores are, and tables of them on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import xarray as xr
from rich import box
from rich.table import Table

import trakdask as td
from trakdask.checks import import_callable, require_choice, shown
from trakdask.command_line import jobs
from trakdask.command_line.configuration import about, keep, require_form, require_keys, section
from trakdask.export import require_replaceable
from trakdask.variables import PROJ_DIM, RANK, SAMPLE, TARGET, TRAINED_ON, checkpoint_names

_OF_SUBSETS = ("n_subsets", "fraction", "seed")
"""Keys of the section ``evaluate`` that say on which samples models are trained."""

_WRITERS: Mapping[str, Callable[..., None]] = {".zarr": td.to_zarr, ".parquet": td.to_parquet}
_IN_MEMORY = 2**30
_MOST_TARGETS = 5


def ranking(configuration: Mapping[str, Any]) -> tuple[xr.Dataset, str | None]:
    """Rank the training samples, and write the ranking where the section ``outputs`` says.

    Returns
    -------
    The ranking, lazy where it may not fit in memory, and its path, if it was written.
    """
    # 1. Where to write it, after a check that this is possible.
    path = section(configuration, "outputs").get("top_k")
    if path is not None:
        with about("outputs"):
            require_form("top_k", path, str, remedy="top_k: top.parquet")
            ending = f"the ending of {path!r}"
            require_choice(ending, Path(path).suffix, [*_WRITERS], remedy="try top.parquet")
            require_replaceable(path)
    # 2. The ranking, from stores.
    both = jobs.described_or_stored(configuration)
    _ranking(configuration, **both)  # raises errors before anything is computed
    ranking = _ranking(configuration, **jobs.saved(configuration, both))
    # Lazy, it is computed twice: to be written, and the first targets to be printed.
    if ranking.nbytes < _IN_MEMORY:
        ranking = ranking.compute()
    if path is not None:
        _WRITERS[Path(path).suffix](ranking, path, overwrite=True)
        keep(configuration, path)
    return ranking, path


def _ranking(configuration: Mapping[str, Any], data: xr.Dataset, targets: xr.Dataset) -> xr.Dataset:
    _, scores = _scored(configuration, data, targets)
    with about("top_k"):
        require_keys(section(configuration, "top_k"), td.top_k, 1)
        return td.top_k(scores, **section(configuration, "top_k"))


def _scored(
    configuration: Mapping[str, Any], data: xr.Dataset, targets: xr.Dataset
) -> tuple[Any, xr.DataArray]:
    """Return the estimator that the section ``score`` describes, and the scores."""
    options = section(configuration, "score")
    with about("score"):
        require_keys(options, td.score, 2, *jobs.OF_ESTIMATORS, "calibrate")
        at = section(configuration, "save").get("storage_options")
        options = jobs.with_estimator(options, data, at)
        return options["estimator"], td.score(data, targets, **options)


def evaluated(configuration: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences on the quality of the scores, the cheapest first.

    Raises
    ------
    ConfigurationError
        If there is no way to know it; then nothing was computed.
    """
    both, options = jobs.described_or_stored(configuration), section(configuration, "evaluate")
    with about("evaluate"):
        train_fn: Any = options.pop("train_fn", None)
        drawn = {"n_subsets": 40} | {n: options.pop(n) for n in _OF_SUBSETS if n in options}
        require_keys(options, td.evaluate.retrain, 3, "train_fn", *_OF_SUBSETS)
        if train_fn is not None:
            train_fn = import_callable(train_fn, "train_fn")
            masks = td.evaluate.subsets(both["data"], **drawn)
            # Without a store this is lazy, so that only the arguments are checked.
            td.evaluate.retrain(train_fn, masks, 1, **{**options, "store": None})
            require_form("store", options.get("store") or "", str, remedy="store: models")
        elif TRAINED_ON not in both["data"].variables:
            raise ValueError(
                "expected checkpoints that were trained on known samples, or the name of a "
                "function that trains, as train_fn, got neither; try td.evaluate.train_on_halves"
            )
    _scored(configuration, **both)  # raises errors before anything is computed
    both = jobs.saved(configuration, both)
    train, targets = both["data"], both["targets"]
    estimator, _ = _scored(configuration, **both)
    if TRAINED_ON in train.variables:
        yield td.evaluate.cross_validate(train, targets, estimator).summary
    if train_fn is not None:
        scores = td.score(train, targets, estimator)
        masks = td.evaluate.subsets(train, **drawn)
        outputs = td.evaluate.retrain(train_fn, masks, scores, **options)
        result = td.evaluate.lds(scores, masks, outputs).compute()
        low, high = result.interval.values
        yield (
            f"these scores predict {len(masks)} retrained subsets at {float(result.lds_mean):.2f}, "
            f"95 % interval {low:.2f} to {high:.2f}"
        )


# -------------------------------------------------------------------------------------- as tables


def table(frame: pd.DataFrame, title: str) -> Table:
    """Return a table with the columns of a frame, and long texts folded."""
    # As narrow as can be: a terminal may have 80 columns.
    printed = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
        show_edge=False, pad_edge=False,
    )  # fmt: skip
    for column in frame:
        printed.add_column(str(column), overflow="fold")
    for row in frame.itertuples(index=False):
        printed.add_row(*map(_brief, row))
    return printed


def brief(features: xr.Dataset, store: str) -> str:
    """Return a line on what a store of features has."""
    n, p = features.sizes[SAMPLE], features.sizes[PROJ_DIM]
    names = shown(checkpoint_names(features))
    return f"{store}: {n:,} samples, {p:,} columns; checkpoints {names}"


def first_targets(ranking: xr.Dataset) -> Table:
    """Return the table that ``top-k`` prints: the first targets, with their metadata."""
    n = ranking.sizes[TARGET]
    first = ranking.isel({TARGET: slice(_MOST_TARGETS)}).compute()
    title = f"{n} targets" if n <= _MOST_TARGETS else f"the first {_MOST_TARGETS} of {n} targets"
    return table(first.to_dataframe(dim_order=[TARGET, RANK]).reset_index(), title)


def _brief(value: object) -> str:
    if isinstance(value, Mapping | list | tuple):
        return shown(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
