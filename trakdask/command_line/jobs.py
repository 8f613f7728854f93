"""What a configuration describes: samples, model, cluster, stores, scores."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import xarray as xr
from distributed import Client, LocalCluster

import trakdask as td
from trakdask.attribution.conditions import selection
from trakdask.checks import import_callable, require_integer, shown
from trakdask.command_line.configuration import (
    FOLDER,
    Configuration,
    ConfigurationError,
    keep,
    require_key,
    require_known_options,
    require_not_kept_by_others,
    section,
)
from trakdask.command_line.sources import called, expanded
from trakdask.export import require_replaceable

__all__ = ["KINDS", "export", "features", "result", "running", "saved"]

T = TypeVar("T")

_SOURCES = "trakdask.command_line.sources"
_PROJECTORS = ("Rademacher", "SJLT", "Mask", "Kronecker", "FastJL", "Identity")
_SAMPLES = {
    "arrays": f"{_SOURCES}:from_npy",
    "table": "trakdask:from_dataframe",
    "torch": f"{_SOURCES}:from_torch",
    "zarr": f"{_SOURCES}:from_zarr",
    "function": f"{_SOURCES}:from_function",
}
KINDS: Mapping[str, Mapping[str, str]] = {
    "data": _SAMPLES,
    "targets": _SAMPLES,
    "projector": {name: f"trakdask:{name}" for name in _PROJECTORS},
}
"""The functions that make what a section describes, by the section and its ``kind``."""

_STORES = {"data": "train", "targets": "targets"}
"""The sections of samples, and the names of their stores."""

_REMOTE = ("address", "timeout")
_COUNTS = ("n_workers", "threads_per_worker")
_LOCAL = (*_COUNTS, "memory_limit", "local_directory", "dashboard_address")
"""Options of a cluster at an address, and of one on this machine."""

_OF_TRAINING = ("gram", "estimator", "power", "calibrate")
"""Options of ``save`` that targets do not need."""


@contextmanager
def running(configuration: Configuration) -> Iterator[None]:
    """Run the body in the folder of the configuration, on its cluster."""
    folder = str(configuration[FOLDER])
    before, here = list(sys.path), os.getcwd()
    with _of(FOLDER):
        os.chdir(folder)
    sys.path[:0] = [folder, here]
    try:
        with _cluster(section(configuration, "cluster")):
            yield
    finally:
        sys.path[:] = before
        os.chdir(here)


def features(configuration: Configuration, name: str) -> xr.Dataset:
    """Return the lazy features of the samples that a section describes."""
    samples = _made(name, section(configuration, name))
    projector = section(configuration, "projector")
    return _called(
        "featurize",
        td.featurize,
        section(configuration, "featurize"),
        samples=samples,
        model=_model(section(configuration, "model")),
        projector=_made("projector", projector) if projector else None,
    )


def saved(
    configuration: Configuration, check: Callable[..., object] | None = None
) -> dict[str, xr.Dataset]:
    """Return the stored features of training samples and targets, after computing what is missing.

    Parameters
    ----------
    configuration
        Where it has no section of samples, the store of that name is opened as it is.
    check
        Called with the lazy features of both, before anything is computed.
    """
    options = section(configuration, "save")
    require_known_options(td.save, options, "the section 'save'", "features", "store")
    stores, found = {}, {}
    described = [name for name in _STORES if name in configuration]
    for name in _STORES if check else described:
        stores[name] = _store(configuration, name)
        if name in described:
            require_not_kept_by_others(stores[name])
            found[name] = features(configuration, name)
        else:
            found[name] = td.open(stores[name], storage_options=options.get("storage_options"))
    if check is not None:
        check(**found)
    for name in described:
        found[name] = td.save(found[name], stores[name], **_options_of_save(options, name))
        keep(configuration, stores[name])
    return found


def _options_of_save(options: dict[str, Any], name: str) -> dict[str, Any]:
    if name == "targets":
        options = {k: v for k, v in options.items() if k not in _OF_TRAINING} | {"gram": False}
    return _with_stores_opened(options)


def result(configuration: Configuration, name: str) -> tuple[Any, str | None]:
    """Compute the result of a command, and write it where the section ``outputs`` says.

    Returns
    -------
    The result, lazy where it may not fit in memory, and its path, if it was written.
    """
    path = _output(configuration, name)

    made = partial(_RESULTS[name], configuration)
    stored = saved(configuration, check=made)
    try:
        found = made(**stored)
    except ConfigurationError as err:  # whose exit code would say that nothing was computed
        raise ValueError(str(err)) from err
    if name != "score" and found.nbytes < _IN_MEMORY:
        found = found.compute()
    if path is not None:
        _WRITERS[Path(path).suffix](found, path, overwrite=True)
        keep(configuration, path)
    return found, path


def _scores(configuration: Configuration, data: xr.Dataset, targets: xr.Dataset) -> xr.DataArray:
    options = _with_stores_opened(section(configuration, "score"))
    return _called("score", td.score, options, features=data, targets=targets)


def _ranking(configuration: Configuration, data: xr.Dataset, targets: xr.Dataset) -> xr.Dataset:
    options = section(configuration, "top_k")
    scores = _scores(configuration, data, targets)
    if (text := options.get("where")) is not None:
        with _of("top_k.where"):
            options["where"] = selection(scores, text)
    return _called("top_k", td.top_k, options, scores=scores)


def _group_scores(
    configuration: Configuration, data: xr.Dataset, targets: xr.Dataset
) -> xr.DataArray:
    options = section(configuration, "score") | section(configuration, "groups")
    options.pop("average", None)
    options = _with_stores_opened(options)
    return _called("groups", td.group_score, options, features=data, targets=targets)


_RESULTS: Mapping[str, Callable[..., Any]] = {
    "score": _scores,
    "top_k": _ranking,
    "groups": _group_scores,
}
_WRITERS: Mapping[str, Callable[..., None]] = {".zarr": td.to_zarr, ".parquet": td.to_parquet}
_IN_MEMORY = 2**30


def _output(configuration: Configuration, name: str) -> str | None:
    """Return where to write a result, if anywhere, after a check that this is possible."""
    outputs = section(configuration, "outputs")
    for key in outputs:
        require_key(key, _RESULTS, "the section 'outputs'")
    if (path := outputs.get(name)) is None:
        return None
    with _of(f"outputs.{name}"):
        require_key(Path(str(path)).suffix, _WRITERS, f"the ending of {shown(path)}")
        require_replaceable(path)
    require_not_kept_by_others(path)
    return str(path)


def export(result: str, path: str) -> None:
    """Copy a result that :func:`result` wrote as zarr to parquet or netCDF.

    Raises
    ------
    ConfigurationError
        If this is no such result, or the path exists or has another ending.
    """
    with _of("result"):
        ds = xr.open_zarr(result)
    data = ds["score"] if list(ds.data_vars) == ["score"] else ds
    require_key(Path(path).suffix, (".parquet", ".nc"), f"the ending of {path!r}")
    if path.endswith(".parquet"):
        return td.to_parquet(data.assign_attrs(ds.attrs), path)
    if os.path.exists(path):
        raise ConfigurationError(f"expected a new file, got {path!r}, which exists; try another")
    data.to_netcdf(f"{path}.unfinished")
    os.rename(f"{path}.unfinished", path)


@contextmanager
def _cluster(options: dict[str, Any]) -> Iterator[None]:
    """Make a cluster the active one; no options stand for the threads of this process."""
    is_remote = "address" in options
    with ExitStack() as stack:
        with _of("cluster"):
            for name, value in options.items():
                require_key(name, _REMOTE if is_remote else _LOCAL, "the section 'cluster'")
                if name in _COUNTS and value is not None:
                    require_integer(name, value, 1, remedy=f"try {name}: 2")
            if is_remote:
                stack.enter_context(Client(**{"timeout": 30, **options}))
            elif options:
                stack.enter_context(Client(stack.enter_context(_local_cluster(options))))
        yield


def _local_cluster(options: dict[str, Any]) -> LocalCluster:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Port .* is already in use")
        # Logs are those of connections that end with the workers.
        return LocalCluster(processes=True, silence_logs=logging.CRITICAL, **options)


def _store(configuration: Configuration, name: str) -> str:
    stores = section(configuration, "stores")
    for key in stores:
        require_key(key, _STORES.values(), "the section 'stores'")
    if not isinstance(store := stores.get(_STORES[name]), str):
        raise ConfigurationError(
            f"expected the path of a store as stores.{_STORES[name]}, got {shown(store)}; try "
            f"--set stores.{_STORES[name]}={_STORES[name]}.zarr"
        )
    return store


def _model(options: dict[str, Any]) -> td.Model:
    checkpoints = options.get("checkpoints")
    with _of("model"):
        if isinstance(checkpoints, dict) and "function" in checkpoints:
            require_known_options(called, checkpoints, "model.checkpoints")
            options["checkpoints"] = called(**checkpoints)
        elif isinstance(checkpoints, str):
            options["checkpoints"] = expanded(checkpoints)
        if isinstance(task := options.get("task"), str) and ":" in task:
            options["task"] = import_callable(task, "task")()
    return _called("model", td.Model, options)


def _made(name: str, options: dict[str, Any]) -> Any:
    """Return what the function returns that the ``kind`` of a section names."""
    kinds = KINDS[name]
    kind = options.pop("kind", None)
    require_key(kind, kinds, f"the key 'kind' of the section {name!r}")
    inner = {k: _made(name, v) for k, v in options.items() if isinstance(v, dict) and "kind" in v}
    return _called(name, import_callable(kinds[str(kind)], "kind"), options | inner)


def _called(name: str, function: Callable[..., T], options: dict[str, Any], **given: Any) -> T:
    """Call a function of the library with the options of a section."""
    with _of(name):
        require_known_options(function, options, f"the section {name!r}", *given)
        return function(**options, **given)


def _with_stores_opened(options: dict[str, Any]) -> dict[str, Any]:
    """Return options with the features that a path stands for, and a λ that is absolute."""
    options = dict(options)
    if isinstance(store := options.get("calibrate"), str):
        with _of("calibrate"):
            options["calibrate"] = td.open(store)
    if isinstance(damping := options.get("damping"), dict):
        options["damping"] = _called("damping", td.Absolute, damping)
    return options


@contextmanager
def _of(name: str) -> Iterator[None]:
    """Say which section an error is about."""
    try:
        yield
    except ConfigurationError:
        raise
    except (TypeError, ValueError, ImportError, OSError) as err:
        raise ConfigurationError(f"in the section {name!r}: {err}") from err
