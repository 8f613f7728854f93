"""Train models on subsets of the samples, one Dask task each, and optionally store them."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any

import dask
import dask.array as da
import numpy as np
import xarray as xr
from dask.base import tokenize
from numpy.typing import ArrayLike, NDArray

from trakdask.checks import require_integer, shown
from trakdask.errors import BlockError
from trakdask.evaluate.labels import (
    SEED,
    SUBSET,
    as_array,
    lazy_data,
    require_bool,
    require_dims,
    require_positive,
)
from trakdask.evaluate.records import Records, model_key, open_records
from trakdask.execution.progress import polled_bar
from trakdask.variables import SAMPLE, TARGET, coords_along

__all__ = ["Seeds", "Store", "TrainFn", "retrain", "train_models"]

TrainFn = Callable[[NDArray[np.int64], int], ArrayLike]
Seeds = int | Sequence[int]
Store = str | os.PathLike[str]

_one_at_a_time = threading.Lock()


def retrain(
    train_fn: TrainFn,
    masks: xr.DataArray,
    targets: int | xr.DataArray,
    *,
    seeds: Seeds = 1,
    store: Store | None = None,
    tag: str | None = None,
    progress: bool = True,
) -> xr.DataArray:
    """Train a model on every subset, once per seed, and return its outputs for the targets.

    Parameters
    ----------
    train_fn
        A function of the positions of the training samples, ascending int64, and of a seed below
        2³¹. It trains a model and returns the outputs f of all targets, (target,), without NaN.
        Every model gets a seed of its own, which depends on its mask and its number in ``seeds``.
    masks
        Which samples to train on, bool (subset, sample), as from :func:`subsets` or
        :func:`leave_one_out`.
    targets
        Number of outputs that ``train_fn`` returns, or the scores (sample, target), whose target
        coords are copied to the outputs.
    seeds
        Number of models per subset, or a list of seed numbers. Two or more reveal how much of an
        output is noise; see ``ceiling`` of :func:`lds`.
    store
        Folder or fsspec URL that all workers can access. With a store, the models are trained
        immediately, on the active Dask client or on threads, and the outputs of each are stored
        when it is complete. Calling again, also with more subsets or seeds, trains only the models
        that are missing.
    tag
        Identifies ``train_fn`` in the store; its qualified name by default. The code of the
        function is not compared; change the tag when it trains differently.
    progress
        Show a bar of completed models while the store is filled.

    Returns
    -------
    DataArray ``output`` (subset, seed, target), float64. It is lazy, with one task per model, or in
    memory if there is a store.

    Raises
    ------
    StoreMismatchError
        If the store contains models of another tag, or for other numbers of samples or targets.
    BlockError
        When trained, if ``train_fn`` raises an error, or does not return one number per target that
        is not NaN. The message names the subset and the seed.
    TypeError
        If an argument has another type.
    ValueError
        If masks have other dimensions or are not bool, or an option is out of range.

    Notes
    -----
    A process trains one model at a time, so that ``train_fn`` may seed global generators, as
    ``torch.manual_seed`` does; parallel training needs a cluster of processes. Data that
    ``train_fn`` uses are sent with it, once to each worker, so let it read large data from files.

    Examples
    --------
    >>> import numpy as np
    >>> import trakdask as td
    >>> from sklearn.datasets import load_iris
    >>> from sklearn.linear_model import LogisticRegression
    >>> x, y = load_iris(return_X_y=True)
    >>> x, y = x[50:], y[50:] - 1
    >>> def train(positions, seed):
    ...     model = LogisticRegression(random_state=seed).fit(x[positions], y[positions])
    ...     return (2 * y[:20] - 1) * model.decision_function(x[:20])
    >>> outputs = td.evaluate.retrain(train, td.evaluate.subsets(100, 4), 20)
    >>> outputs.sizes
    Frozen({'subset': 4, 'seed': 1, 'target': 20})
    >>> outputs.compute().mean().item() > 0
    True
    """
    masks = require_dims(
        masks, (SUBSET, SAMPLE), name="masks", remedy="try td.evaluate.subsets(samples, 100)"
    )
    require_bool(masks, "masks")
    n_targets, coords = _targets(targets)
    coords |= coords_along(masks, SUBSET) | {SEED: _seed_numbers(seeds)}
    names = [f"subset {index}" for index in range(masks.sizes[SUBSET])]
    data = train_models(
        train_fn, lazy_data(masks), names, n_targets,
        seeds=seeds, store=store, tag=tag, progress=progress,
    )  # fmt: skip
    attrs = {"description": "output of a model trained on the subset"}
    return xr.DataArray(
        data, dims=(SUBSET, SEED, TARGET), coords=coords, name="output", attrs=attrs
    )


def _targets(targets: int | xr.DataArray) -> tuple[int, dict[Any, Any]]:
    if not isinstance(targets, xr.DataArray):
        return require_positive(targets, name="targets", example="targets=len(test_labels)"), {}
    if TARGET not in targets.dims:
        raise ValueError(
            f"expected targets with the dimension 'target', got {tuple(map(str, targets.dims))}; "
            "try the result of td.score, or the number of targets"
        )
    return targets.sizes[TARGET], coords_along(targets, TARGET)


def _seed_numbers(seeds: object) -> NDArray[np.int64]:
    """Return the seed numbers: 0, 1, ... if only their count is given."""
    if isinstance(seeds, str) or not isinstance(seeds, (Sequence, np.ndarray)):
        return np.arange(require_integer("seeds", seeds, 1, 2**20, remedy="try seeds=3"))
    numbers = as_array(seeds, name="seeds", remedy="try seeds=3")
    is_whole = numbers.ndim == 1 and numbers.dtype.kind in "iu" and len(numbers)
    if not is_whole or len(set(numbers.tolist())) < len(numbers):
        raise ValueError(
            f"expected seeds to be an integer >= 1, or different integers, got {shown(seeds)}; try "
            "seeds=3"
        )
    return numbers.astype(np.int64)


def train_models(
    train_fn: TrainFn,
    masks: da.Array,
    names: Sequence[str],
    n_targets: int,
    *,
    seeds: Seeds,
    store: Store | None,
    tag: str | None,
    progress: bool,
) -> da.Array | np.ndarray:
    """Return outputs (model, seed, target) of masks (model, sample): lazy without a store.

    ``names`` identify the models in messages.
    """
    _require_options(train_fn, store, tag)
    numbers = _seed_numbers(seeds)
    if store is None:
        return _lazy_outputs(train_fn, masks, names, numbers, n_targets, None)
    spec = {"tag": tag or _tag(train_fn), "samples": masks.shape[1], "targets": n_targets}
    records = open_records(store, spec)
    wanted = _keys(masks, numbers)
    data = _lazy_outputs(train_fn, masks, names, numbers, n_targets, records)
    title = f"train {records.store.name}"
    with polled_bar(title, len(wanted), lambda: len(records.done() & wanted), show=progress):
        (outputs,) = dask.compute(data)
    return np.asarray(outputs)


def _require_options(train_fn: object, store: object, tag: object) -> None:
    if not callable(train_fn):
        raise TypeError(
            f"expected train_fn to be a function of (positions, seed), got {shown(train_fn)}; try "
            "def train(positions, seed): ..., and pass train"
        )
    if not isinstance(store, (str, os.PathLike, NoneType)):
        raise TypeError(
            f"expected store to be a path or URL, got {shown(store)}; try store='models'"
        )
    if not isinstance(tag, (str, NoneType)):
        raise TypeError(
            f"expected tag to be a string, got {shown(tag)}; try tag='resnet, 20 epochs'"
        )


def _tag(train_fn: TrainFn) -> str:
    name: str | None = getattr(train_fn, "__qualname__", None)
    if name is None or "<lambda>" in name:
        raise ValueError(
            f"expected train_fn with a name that identifies it in the store, got "
            f"{shown(train_fn)}; try tag='resnet, 20 epochs'"
        )
    return name


def _keys(masks: da.Array, seeds: NDArray[np.int64]) -> set[str]:
    """Return the names of all models, without holding all masks in memory."""
    rows = masks.rechunk({1: -1})
    keys = da.map_blocks(
        functools.partial(_keys_of_rows, seeds=seeds), rows,
        chunks=(rows.chunks[0], (len(seeds),)), name="keys-" + tokenize(rows.name, seeds),
        dtype=object, meta=np.empty((0, 0), object),
    )  # fmt: skip
    return set(keys.compute().ravel().tolist())


def _keys_of_rows(masks: NDArray[np.bool_], seeds: NDArray[np.int64]) -> np.ndarray:
    keys = [[model_key(mask, seed) for seed in seeds.tolist()] for mask in masks]
    return np.array(keys, dtype=object)


def _lazy_outputs(
    train_fn: TrainFn,
    masks: da.Array,
    names: Sequence[str],
    seeds: NDArray[np.int64],
    n_targets: int,
    records: Records | None,
) -> da.Array:
    """Build the graph: one task per (mask, seed); each worker receives the function once."""
    token = tokenize(train_fn, masks.name, names, seeds, n_targets, records)
    function = dask.delayed(train_fn, name=f"train-fn-{token}", traverse=False)
    outputs: da.Array = da.blockwise(
        functools.partial(_train_block, n_targets, records), "mst",
        masks.rechunk((1, -1)), "mn",
        da.from_array(np.array(names, dtype=object), chunks=1, name=f"model-name-{token}"), "m",
        da.from_array(seeds, chunks=1, name=f"seed-{token}"), "s",
        new_axes={"t": n_targets}, name=f"train-{token}", concatenate=True, align_arrays=False,
        dtype=np.float64, meta=np.empty((0, 0, 0)), train_fn=function,
    )  # fmt: skip
    return outputs


def _train_block(
    n_targets: int,
    records: Records | None,
    masks: NDArray[np.bool_],
    names: np.ndarray,
    seeds: NDArray[np.int64],
    *,
    train_fn: TrainFn,
) -> NDArray[np.float64]:
    """Read the outputs of one model, or train it and store them."""
    (mask,), (name,), seed = masks, names, int(seeds[0])
    key = model_key(mask, seed)
    outputs = None if records is None else records.read(key, n_targets)
    if outputs is None:
        try:
            outputs = _train(train_fn, np.flatnonzero(mask), key, n_targets)
        except Exception as err:
            raise BlockError(
                f"training on {name} ({int(mask.sum())} samples), seed {seed}, failed: "
                f"{type(err).__name__}: {err}"
            ) from err
        if records is not None:
            records.write(key, outputs)
    return outputs[None, None]


def _train(
    train_fn: TrainFn, positions: NDArray[np.int64], key: str, n_targets: int
) -> NDArray[np.float64]:
    with _one_at_a_time:
        returned = train_fn(positions, int(key[:8], 16) >> 1)
    remedy = "try returning the outputs of all targets, as a NumPy array"
    try:
        outputs = np.asarray(returned, np.float64)
    except (TypeError, ValueError, RuntimeError) as err:
        raise TypeError(
            f"expected train_fn to return numbers, got {shown(returned)} ({err}); {remedy}"
        ) from err
    if outputs.shape != (n_targets,):
        raise ValueError(
            f"expected train_fn to return one output per target, ({n_targets},), got an array of "
            f"shape {outputs.shape}; {remedy}"
        )
    if (unknown := np.flatnonzero(np.isnan(outputs))).size:
        raise ValueError(
            f"expected train_fn to return numbers, got NaN for {unknown.size} of {n_targets} "
            f"targets, the first at target {unknown[0]}; try a lower learning rate if training "
            "diverged"
        )
    return outputs
