"""What a configuration describes: samples, model, cluster, stores, scores."""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, chdir, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import fsspec
import numpy as np
import pandas as pd
import xarray as xr
from distributed import Client

import trakdask as td
from trakdask import projection
from trakdask.attribution import estimators
from trakdask.checks import import_callable, require_choice
from trakdask.command_line.configuration import (
    Configuration,
    ConfigurationError,
    about,
    keep,
    kept,
    require_ending,
    require_not_kept_by_others,
    section,
)
from trakdask.export import require_replaceable
from trakdask.fits.components import sketch_for
from trakdask.projection.fitted import Components, Fitted
from trakdask.provenance import as_text
from trakdask.variables import CHECKPOINT, SAMPLE, TRAINED_ON

_PROJECTORS = {
    kind: getattr(projection, kind)
    for kind in ("SJLT", "Rademacher", "Mask", "Kronecker", "FastJL", "Identity")
}
_FIT = "fit"
"""The kind of a projector that is fitted to the training samples."""
_OF_FITS = ("gradients", "batch_size", "dtype", "device")
"""Options of ``featurize`` that a fit has, too."""
_DEFAULTS = {name: p.default for name, p in inspect.signature(td.fit).parameters.items()}

_STORES = {"data": "train", "targets": "targets"}
"""The sections of samples, and the names of their stores."""

_OF_FILES = ("table", "csv", "arrays")
"""Kinds of samples that come from files, which are read without running anything."""

_CLUSTER = (
    *("n_workers", "threads_per_worker", "memory_limit"),
    *("local_directory", "dashboard_address"),
)
"""Options of a cluster on this machine; the client of another knows its own."""

_OF_ESTIMATORS = ("power", "damping", "learning_rates")
"""Keys beside ``estimator`` that are options of its value."""

_SUMS: Mapping[str, Callable[..., Any]] = {"groups": td.group_score, "credit": td.credit}
"""The commands that add up scores by groups of samples, and their functions."""

_OF_SUBSETS = ("n_subsets", "fraction", "seed")
"""Keys of the section ``evaluate`` that say on which samples models are trained."""

_WRITERS: Mapping[str, Callable[..., None]] = {".zarr": td.to_zarr, ".parquet": td.to_parquet}
_IN_MEMORY = 2**30


@contextmanager
def running(configuration: Configuration) -> Iterator[None]:
    """Run the body in the folder of the configuration, on its cluster."""
    folder, options = configuration["folder"], section(configuration, "cluster")
    with ExitStack() as stack:
        stack.callback(sys.path.__setitem__, slice(None), list(sys.path))
        sys.path[:0] = [str(folder), os.getcwd()]
        with about("folder"):
            stack.enter_context(chdir(folder))
        with about("cluster"):  # without options, the threads of this process
            if options:
                stack.enter_context(_client(options))
        yield


def _client(options: dict[str, Any]) -> Client:
    if "address" in options:
        return Client(**{"timeout": 30, **options})
    for name in options:  # Dask would wait for workers that never start
        require_choice("a key", name, _CLUSTER, remedy="try n_workers: 2")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Port .* is already in use")
        # The only logs would be of connections that end with the workers.
        return Client(processes=True, silence_logs=logging.CRITICAL, **options)


def features(
    configuration: Configuration, name: str, like: xr.Dataset | None = None, *, fits: bool = True
) -> xr.Dataset:
    """Return the lazy features of the samples that a section describes.

    Parameters
    ----------
    configuration, name
        The sections.
    like
        Features of training samples; the targets get the same projector.
    fits
        Whether a projector that is fitted may be: else, to plan, it is only described.
    """
    with about(name):
        samples = _samples(section(configuration, name))
    with about("model"):
        model = _model(section(configuration, "model"))
    with about("projector"):
        projector: Any = None
        if like is None:
            projector = _projector(configuration, samples, model, fits)
    with about("featurize"):
        options = section(configuration, "featurize")
        lazy = td.featurize(samples, model, projector, like=like, **options)
    described = section(configuration, "projector")
    has_components = described.get("components", True)
    if described.get("kind") == _FIT and has_components and not fits:  # its columns
        asked = [described.get(name, _DEFAULTS[name]) for name in ("proj_dim", "n_samples")]
        steps = projector, Components(min(*asked, lazy.sizes["sample"]))
        lazy.attrs |= as_text({"projector": Fitted(steps).spec()})
    return lazy


def _projector(
    configuration: Configuration, samples: xr.Dataset, model: td.Model, fits: bool
) -> Any:
    """Return the projector of a section, which is fitted unless the store of features has it."""
    described = section(configuration, "projector")
    if not described:
        return None
    if described.get("kind") != _FIT:
        return _of_kind(described, {_FIT: td.fit, **_PROJECTORS})
    del described["kind"]
    if isinstance(sketch := described.get("sketch"), dict):
        described["sketch"] = _of_kind(dict(sketch), _PROJECTORS)
    if not fits:
        return described.get("sketch", sketch_for(model))
    options: dict[str, Any] = {"store": section(configuration, "stores")["train"], **described}
    options["storage_options"] = section(configuration, "save").get("storage_options")
    of_features = section(configuration, "featurize")
    options |= {name: of_features[name] for name in _OF_FITS if name in of_features}
    return td.fit(samples, model, **options)


def _samples(options: dict[str, Any]) -> xr.Dataset:
    """Return the samples that a section describes."""
    masks = options.pop("trained_on", None)
    samples: xr.Dataset = _of_kind(options, _KINDS)
    if masks is None:
        return samples
    return samples.assign_coords({TRAINED_ON: ((CHECKPOINT, SAMPLE), np.load(masks))})


def _of_kind(options: dict[str, Any], kinds: Mapping[str, Callable[..., Any]]) -> Any:
    """Return what the function returns that ``kind`` names."""
    kind = options.pop("kind", None)
    require_choice("kind", kind, list(kinds), remedy=f"try kind: {next(iter(kinds))}")
    if isinstance(inner := options.get("then"), dict):  # of a mask
        options["then"] = _of_kind(dict(inner), kinds)
    return kinds[str(kind)](**options)


def _model(options: dict[str, Any]) -> td.Model:
    checkpoints, task = options.get("checkpoints"), options.get("task")
    if isinstance(checkpoints, dict) and "function" in checkpoints:
        options["checkpoints"] = _called(**checkpoints)
    elif isinstance(checkpoints, str):
        options["checkpoints"] = expanded(checkpoints)
    if isinstance(task, str) and ":" in task:
        options["task"] = import_callable(task, "task")()
    return td.Model(**options)


def described_or_stored(
    configuration: Configuration, names: Iterable[str] = _STORES
) -> dict[str, xr.Dataset]:
    """Return the lazy features of training samples and targets, before anything is computed.

    Where there is no section of samples, the store of that name is opened as it is.
    """
    options, stores = section(configuration, "save"), section(configuration, "stores")
    with about("save"):
        others = {name: v for name, v in options.items() if name not in _OF_ESTIMATORS}
        inspect.signature(td.save).bind("features", "store", **others)
    both: dict[str, xr.Dataset] = {}
    for name in names:
        store: Any = stores.get(_STORES[name])
        with about(f"stores.{_STORES[name]}"):
            if name in configuration:
                require_not_kept_by_others(store)
                both[name] = features(configuration, name, both.get("data"))
            else:
                both[name] = td.open(store, storage_options=options.get("storage_options"))
    return both


def saved(configuration: Configuration, both: Mapping[str, xr.Dataset]) -> dict[str, xr.Dataset]:
    """Store the features that sections describe, and return the contents of both stores."""
    options, stores = section(configuration, "save"), section(configuration, "stores")
    results = dict(both)
    for name, lazy in both.items():
        if name in configuration:
            of_store = with_estimator(options, lazy)
            if name == "targets":
                of_store["estimator"] = None
            results[name] = td.save(lazy, stores[_STORES[name]], **of_store)
            keep(configuration, stores[_STORES[name]])
    return results


def explored(
    configuration: Configuration, samples: str | None = None
) -> tuple[str, xr.Dataset, xr.Dataset, dict[str, Any]]:
    """Return the store of training samples, both features, and what :func:`explore` shows of them.

    Computes the features that are missing. A text may name the samples, see :func:`named`.
    Otherwise they come from the configuration or, for a store, from the job that wrote it.
    """
    stored = saved(configuration, described_or_stored(configuration))
    stores = section(configuration, "stores")
    storage_options = section(configuration, "save").get("storage_options")
    contents: tuple[xr.Dataset | None, ...]
    if samples is not None:
        with about(f"--samples {samples}"):
            contents = named(samples)
    else:
        contents = tuple(_samples_of(configuration, name, stored[name]) for name in _STORES)
    options: dict[str, Any] = {}
    for (name, store), content in zip(_STORES.items(), contents, strict=True):
        if content is not None and content.sizes.get("sample") != stored[name].sizes["sample"]:
            whole = td.open(
                stores[store], dropped=True, load_coords=False, storage_options=storage_options
            )
            if content.sizes.get("sample") == whole.sizes["sample"]:
                content = content.isel(sample=~whole["dropped"].values)
            elif samples is None and name not in configuration:
                content = None  # the files have other rows by now
        options["samples" if name == "data" else "target_samples"] = content
    if "model" in configuration and options["target_samples"] is not None:
        model = _model(section(configuration, "model"))
        if isinstance(model.task, td.tasks.Classification):  # whose predictions are shown
            options["model"] = model
    return str(stores["train"]), stored["data"], stored["targets"], options


def _samples_of(configuration: Configuration, name: str, features: xr.Dataset) -> xr.Dataset | None:
    """Return the samples of a section or, without it, of the job that wrote the features.

    Nobody has asked for that job: what it names is neither imported nor fetched, and its samples
    are shown only if they are read from files of this machine. How to ask for it is noted in
    ``encoding["job"]``.
    """
    if name in configuration:
        return _samples(section(configuration, name))
    with suppress(ConfigurationError), about(name):
        job = kept(features.encoding["source"])
        options = section(job, name)
        features.encoding["job"] = f"{features.encoding['source']}.yaml" if job else None
        is_local = not any(sign in str(options) for sign in ("://", "::"))
        if options.get("kind") in _OF_FILES and is_local:
            with chdir(job["folder"]):
                return _samples(options)
    return None


def with_estimator(options: Mapping[str, Any], features: xr.Dataset) -> dict[str, Any]:
    """Return options with the estimator that its name and its own options describe, as a value."""
    others = dict(options)
    fields = {name: others.pop(name) for name in _OF_ESTIMATORS if name in others}
    if isinstance(damping := fields.get("damping"), dict):
        fields["damping"] = td.Absolute(**damping)
    name, store = others.pop("estimator", "auto"), others.pop("calibrate", None)
    if name is None:
        return {**others, "estimator": None}
    estimator = estimators.named(features, name, **fields)
    if store is not None:
        fields["damping"] = td.damping(features, estimator, calibrate=td.open(store))
        estimator = estimators.named(features, name, **fields)
    return {**others, "estimator": estimator}


def result(configuration: Configuration, name: str) -> tuple[Any, str | None]:
    """Compute the result of a command, and write it where the section ``outputs`` says.

    Returns
    -------
    The result, lazy where it may not fit in memory, and its path, if it was written.
    """
    path = _output(configuration, name)
    both = described_or_stored(configuration)
    _lazy_result(name, configuration, **both)  # raises errors before anything is computed
    result = _lazy_result(name, configuration, **saved(configuration, both))
    if name != "score" and result.nbytes < _IN_MEMORY:
        result = result.compute()
    if path is not None:
        _WRITERS[Path(path).suffix](result, path, overwrite=True)
        keep(configuration, path)
    return result, path


def _output(configuration: Configuration, name: str) -> str | None:
    """Return where to write a result, if anywhere, after a check that this is possible."""
    path = section(configuration, "outputs").get(name)
    if path is None:
        return None
    with about("outputs"):
        require_ending(path, [*_WRITERS])
        require_replaceable(path)
        require_not_kept_by_others(path)
    return str(path)


def _lazy_result(
    name: str, configuration: Configuration, data: xr.Dataset, targets: xr.Dataset
) -> Any:
    options = section(configuration, "score")
    if name in _SUMS:
        options.pop("average", None)
        with about(name):
            options |= section(configuration, name)
            return _SUMS[name](data, targets, **with_estimator(options, data))
    with about("score"):
        scores: Any = td.score(data, targets, **with_estimator(options, data))
    if name == "score":
        return scores
    if "intervals" in configuration:
        with about("intervals"):
            options |= section(configuration, "intervals")
            scores = td.intervals(data, targets, **with_estimator(options, data))
    with about("top_k"):
        return td.top_k(scores, **section(configuration, "top_k"))


def evaluated(configuration: Configuration) -> Iterator[str]:
    """Yield what is known of the quality of the scores, as sentences, the cheapest first.

    Raises
    ------
    ConfigurationError
        If nothing can be known: nothing was computed.
    """
    both, options = described_or_stored(configuration), section(configuration, "evaluate")
    with about("evaluate"):
        train_fn = options.pop("train_fn", None)
        drawn = {name: options.pop(name) for name in _OF_SUBSETS if name in options}
        inspect.signature(td.evaluate.retrain).bind("train_fn", "masks", "targets", **options)
        if train_fn is not None:
            train_fn = import_callable(train_fn, "train_fn")
        elif TRAINED_ON not in both["data"].variables:
            raise ValueError(
                "expected checkpoints that were trained on known samples, or the name of a "
                "function that trains, as train_fn, got neither; try td.train_on_halves"
            )
    both = saved(configuration, both)
    train, targets = both["data"], both["targets"]
    with about("score"):
        estimator = with_estimator(section(configuration, "score"), train)["estimator"]
    if TRAINED_ON in train.variables:
        yield td.evaluate.cross_validate(train, targets, estimator).summary
    if train_fn is not None:
        scores = td.score(train, targets, estimator)
        masks = td.evaluate.subsets(train, **{"n_subsets": 40, **drawn})
        outputs = td.evaluate.retrain(train_fn, masks, scores, **options)
        result = td.evaluate.lds(scores, masks, outputs).compute()
        low, high = result.interval.values
        yield (
            f"these scores predict {len(masks)} retrained subsets at {float(result.lds_mean):.2f}, "
            f"95 % interval {low:.2f} to {high:.2f}"
        )


# --------------------------------------------------------------------------------------- samples


def _called(
    function: str, arguments: Mapping[str, Any] | None = None, item: int | None = None
) -> Any:
    """Return what the function ``"package.module:callable"`` returns, or an item of it."""
    returned = import_callable(function, "function")(**(arguments or {}))
    return returned if item is None else returned[item]


def named(text: str) -> tuple[xr.Dataset, xr.Dataset | None]:
    """Return the training samples that a text names, and the targets where it names both.

    Parameters
    ----------
    text
        The path of a zarr store, or ``"package.module:function"``: the function returns a Dataset
        or, as :func:`trakdask.examples.digits` does, a pair of them.
    """
    is_function = ":" in text and "://" not in text and not Path(text).exists()
    samples = _called(text) if is_function else xr.open_zarr(text, consolidated=False)
    training, targets = samples if isinstance(samples, tuple) else (samples, None)
    return training, targets


def expanded(pattern: str) -> list[str]:
    """Return the files of a pattern such as ``checkpoints/*.pt``, sorted; one path is itself.

    Raises
    ------
    FileNotFoundError
        If there are none.

    Examples
    --------
    >>> expanded("model.pt")
    ['model.pt']
    """
    if not any(sign in pattern for sign in "*?["):
        return [pattern]
    system, _, paths = fsspec.get_fs_token_paths(pattern)
    if not paths:
        raise FileNotFoundError(f"expected files {pattern!r}, got none; try another pattern")
    is_url = "://" in pattern
    return sorted(system.unstrip_protocol(path) if is_url else path for path in paths)


def _from_csv(
    source: str, *, variables: Mapping[str, str | list[str]], **options: Any
) -> xr.Dataset:
    """Return samples of the rows of one or several files, which are read into memory."""
    inputs = [[names] if isinstance(names, str) else names for names in variables.values()]
    read = functools.partial(_read_csv, numbers=[*itertools.chain(*inputs)])
    rows = pd.concat(map(read, expanded(source)), ignore_index=True)
    for names in inputs:
        if np.result_type(*rows[names].dtypes) == np.float64:
            # Text has no dtype; models have this one, also for the integers beside decimals.
            rows = rows.astype(dict.fromkeys(names, "float32"))
    return td.from_dataframe(rows, variables=variables, **options)


def _read_csv(path: str, numbers: Iterable[str] = ()) -> pd.DataFrame:
    """Return the rows of a file, in which some columns must have a number in every row."""
    try:
        rows = pd.read_csv(path)
        for name in numbers:
            if name not in rows:
                raise ValueError(f"expected a column {name!r}, got {list(rows)}; try one of them")
            values = pd.to_numeric(rows[name], errors="coerce")
            if values.isna().any():
                row = int(values.isna().argmax())
                raise ValueError(
                    f"expected a number in every row of column {name!r}, got "
                    f"{rows[name][row]!s:.40} in row {row + 1}; try to leave such rows out"
                )
            rows[name] = values
    except ValueError as err:
        raise ValueError(f"{path}: {err}") from err
    return rows


def _from_npy(
    arrays: Mapping[str, str], *, coords: str | None = None, chunks: int | Literal["auto"] = "auto"
) -> xr.Dataset:
    """Return samples of ``.npy`` files by name of the variable, and a table of metadata."""
    loaded = {name: np.load(path, mmap_mode="r") for name, path in arrays.items()}
    return td.from_arrays(loaded, coords=_table(coords), chunks=chunks)


def _from_torch(
    dataset: str, *, names: str | Sequence[str | None], coords: str | None = None, **options: Any
) -> xr.Dataset:
    """Return samples of the torch Dataset that a function returns, and a table of metadata."""
    if "collate_fn" in options:
        options["collate_fn"] = import_callable(options["collate_fn"], "collate_fn")
    return td.from_torch(dataset, names=names, coords=_table(coords), **options)


def _table(path: str | None) -> pd.DataFrame | None:
    if path is None:
        return None
    return _read_csv(path) if path.endswith(".csv") else pd.read_parquet(path)


_KINDS: Mapping[str, Callable[..., xr.Dataset]] = {
    "table": td.from_dataframe,
    "csv": _from_csv,
    "arrays": _from_npy,
    "torch": _from_torch,
    "zarr": functools.partial(xr.open_zarr, consolidated=False),
    "function": _called,
}
"""The functions that make samples, by the ``kind`` of a section."""
