"""Train models on subsets of the samples, one Dask task each, and optionally store them."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import dask
import dask.array as da
import numpy as np
import xarray as xr
from dask.base import tokenize
from numpy.typing import ArrayLike, NDArray

from trakdask.bars import polled_bar
from trakdask.checks import require_flags, require_integer, shown
from trakdask.errors import BlockError
from trakdask.evaluate.results import checked_masks, lazy_data
from trakdask.files import Folder, location
from trakdask.provenance import require_same
from trakdask.variables import TARGET, coords_along

_SPEC = "spec.json"
_one_at_a_time = threading.Lock()


def retrain(
    train_fn: Callable[[NDArray[np.int64], int], ArrayLike],
    masks: xr.DataArray,
    targets: int | xr.DataArray,
    *,
    seeds: int | Sequence[int] = 1,
    store: str | os.PathLike[str] | None = None,
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
    FileExistsError
        If the store is a folder of something else.
    ValueError
        If masks have other dimensions or are not bool, seeds are not different integers, or a file
        of the store is damaged.

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
    masks = checked_masks(masks)
    coords: dict[Any, Any] = {**coords_along(masks, "subset"), "seed": _seed_numbers(seeds)}
    if isinstance(targets, xr.DataArray):
        coords |= coords_along(targets, TARGET)
        targets = targets.sizes[TARGET]
    targets = require_integer("targets", targets, 1, remedy="try scores, or their number")
    data = train_models(
        train_fn, lazy_data(masks), targets,
        seeds=seeds, store=store, tag=tag, progress=progress,
    )  # fmt: skip
    attrs = {"description": "output of a model trained on the subset"}
    return xr.DataArray(
        data, dims=("subset", "seed", TARGET), coords=coords, name="output", attrs=attrs
    )


def _seed_numbers(seeds: int | Sequence[int]) -> NDArray[np.int64]:
    """Return the seed numbers: 0, 1, ... if only their count is given."""
    if np.ndim(seeds) == 0:
        return np.arange(require_integer("seeds", seeds, 1, 2**20, remedy="try seeds=3"))
    numbers = np.asarray(seeds)
    # The same seed twice is the same model twice, which would look like training without noise.
    if numbers.dtype.kind not in "iu" or len(np.unique(numbers)) < len(numbers):
        raise ValueError(f"expected different integers for seeds, got {shown(seeds)}; try seeds=3")
    return numbers.astype(np.int64)


def train_models(
    train_fn: Callable[..., ArrayLike],
    masks: da.Array,
    n_targets: int,
    *,
    seeds: int | Sequence[int],
    store: str | os.PathLike[str] | None,
    tag: str | None,
    progress: bool,
) -> da.Array | np.ndarray:
    """Return outputs (subset, seed, target) of masks (subset, sample): lazy without a store."""
    require_flags(progress=progress)
    if not callable(train_fn):
        raise TypeError(
            f"expected train_fn as a function of positions and a seed, got {shown(train_fn)}; try "
            "the function, not its result"
        )
    numbers, models = _seed_numbers(seeds), None
    # 1. The store, if there is one, is of these models. A file is named after the mask and the seed
    #    of its model, so that calls with more subsets or seeds, and other experiments with the same
    #    train_fn, share a store and train no model twice.
    if store is not None:
        name = tag or getattr(train_fn, "__qualname__", None)
        if name is None or (not tag and "<lambda>" in name):
            raise ValueError(
                f"expected train_fn with a name that identifies it in the store, got "
                f"{shown(train_fn)}; try tag='resnet, 20 epochs'"
            )
        spec = {"tag": name, "samples": masks.shape[1], "targets": n_targets}
        folder = Folder(location(store))
        if stored_spec(folder, _SPEC, spec) is None:
            # A new spec in a folder with other files would make these a store of models.
            if folder.names():
                raise FileExistsError(
                    f"expected a new path, or a store of retrained models, got {folder.url!r}, "
                    "which contains something else; try another path"
                )
            folder.write(_SPEC, json.dumps(spec).encode())
        models = folder / "models"
    # 2. One task for each mask and seed; each worker receives the function once.
    token = tokenize(train_fn, masks.name, numbers, n_targets, models)
    data = da.blockwise(
        functools.partial(_train_block, n_targets, models), "mst",
        masks.rechunk((1, -1)), "mn", da.arange(len(masks), chunks=1), "m",
        da.from_array(numbers, chunks=1, name=f"seed-{token}"), "s",
        new_axes={"t": n_targets}, name=f"train-{token}", concatenate=True, align_arrays=False,
        dtype=np.float64, meta=np.empty((0, 0, 0)),
        train_fn=dask.delayed(train_fn, name=f"train-fn-{token}", traverse=False),
    )  # fmt: skip
    if models is None:
        return data
    # 3. With a store they are trained now. All masks are made twice, as names of files and for
    #    training: kept, they may fill the memory.
    rows = masks.rechunk({1: -1}).to_delayed().ravel()
    (keys,) = dask.compute([dask.delayed(_files)(block, numbers) for block in rows])
    with bar_of(models, folder.name, set().union(*keys), progress):
        (outputs,) = dask.compute(data)
    return np.asarray(outputs)


def stored_spec(folder: Folder, file: str, spec: dict[str, Any]) -> dict[str, Any] | None:
    """Return what a folder of models says of them; None if it says nothing.

    Raises
    ------
    StoreMismatchError
        If that differs from this description of the models to train.
    """
    if file not in folder.names():
        return None
    stored = folder.read_json(file)
    require_same(spec, stored, what=f"these models and those in {folder.url!r}", names=tuple(spec))
    return stored


def bar_of(
    models: Folder, name: str, files: set[str], show: bool
) -> AbstractContextManager[object]:
    """Show a bar of the files that are in a folder of models, while the block runs."""
    return polled_bar(
        f"train {name}", len(files), lambda: len(files.intersection(models.names())), show=show
    )


def trained_alone(
    train_fn: Callable[[NDArray[np.int64], int], Any],
    positions: NDArray[np.int64],
    seed: int,
    what: str,
) -> Any:
    """Train one model, with no other in this process, and return what the function returns.

    Raises
    ------
    BlockError
        If the function raises an error; it names what was trained on.
    """
    try:
        # Lazy samples that train_fn reads are computed here: by the cluster, they might wait for
        # the threads that wait for them.
        with _one_at_a_time, dask.config.set(scheduler="synchronous"):
            return train_fn(positions, seed)
    except Exception as err:
        raise BlockError(f"training on {what} failed: {type(err).__name__}: {err}") from err


def model_key(mask: np.ndarray, seed: int) -> str:
    """Return the name of a model: a hash of its mask and seed.

    Examples
    --------
    >>> model_key(np.array([True, False]), 0) == model_key(np.array([True, False]), 1)
    False
    """
    what = f"{len(mask)} samples, seed {seed}:".encode() + np.packbits(mask).tobytes()
    return hashlib.sha256(what).hexdigest()[:32]


def _files(masks: NDArray[np.bool_], seeds: NDArray[np.int64]) -> set[str]:
    return {f"{model_key(mask, seed)}.npy" for mask in masks for seed in seeds.tolist()}


def _train_block(
    n_targets: int,
    models: Folder | None,
    masks: NDArray[np.bool_],
    subsets: NDArray[np.int64],
    seeds: NDArray[np.int64],
    *,
    train_fn: Callable[..., ArrayLike],
) -> NDArray[np.float64]:
    """Read the outputs of one model, or train it and store them."""
    # Chunks of one mask and one seed: a task trains one model.
    (mask,), seed = masks, int(seeds[0])
    key = model_key(mask, seed)
    name = f"{key}.npy"
    if models is not None:
        try:
            return np.load(io.BytesIO(models.read(name)))[None, None]
        except FileNotFoundError:
            pass  # it has not been trained
        except (ValueError, EOFError) as err:
            raise ValueError(f"{models.url}/{name} is damaged ({err}); try deleting it") from err

    def checked(positions: NDArray[np.int64], seed: int) -> NDArray[np.float64]:
        returned = train_fn(positions, seed)
        if np.iscomplexobj(returned):
            raise ValueError(
                "expected train_fn to return real numbers, got complex ones; try .real"
            )
        outputs = np.asarray(returned, np.float64)
        if outputs.shape != (n_targets,):
            raise ValueError(
                f"expected train_fn to return one output per target, ({n_targets},), got an array "
                f"of shape {outputs.shape}; try returning the outputs of all targets"
            )
        if (unknown := np.flatnonzero(np.isnan(outputs))).size:
            raise ValueError(
                f"expected train_fn to return numbers, got NaN for {unknown.size} of {n_targets} "
                f"targets, the first at target {unknown[0]}; try a lower learning rate if training "
                "diverged"
            )
        return outputs

    what = f"subset {subsets[0]} ({mask.sum()} of {len(mask)} samples) with seed {seed}"
    # The seed follows from the mask, too: with the same numbers for all, models would share the
    # luck of an initialisation.
    outputs = trained_alone(checked, np.flatnonzero(mask), int(key[:8], 16) >> 1, what)
    if models is not None:
        with models.writing(name) as file:
            np.save(file, outputs)
    return outputs[None, None]
