"""The parts of a job that a configuration describes: model, projector, cluster, stores."""

from __future__ import annotations

import inspect
import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, chdir, contextmanager
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any

import xarray as xr

import trakdask as td
from trakdask.attribution import estimators
from trakdask.checks import import_callable, require_choice, require_integer
from trakdask.command_line.configuration import (
    about,
    keep,
    kept,
    require_form,
    require_keys,
    section,
)
from trakdask.command_line.samples import called, expanded, named, of_kind
from trakdask.command_line.samples import described as samples_of
from trakdask.files import Folder
from trakdask.provenance import as_text
from trakdask.saving import checked_options
from trakdask.storage.writing import existing

if TYPE_CHECKING:  # functions import what needs torch or distributed: `explore` may need neither
    from distributed import Client

_PROJECTORS = ("SJLT", "Rademacher", "Mask", "FastJL", "Identity")
_FIT = "fit"
"""The kind of a projector that is fitted to the training samples."""
_OF_FITS = ("gradients", "batch_size", "dtype", "device")
"""Options of ``featurize`` that a fit has, too."""

STORES = {"data": "train", "targets": "targets"}
"""The sections of samples, and the names of their stores."""

_CLUSTER = (
    *("n_workers", "threads_per_worker", "memory_limit"),
    *("local_directory", "dashboard_address"),
)
"""Options of a cluster on this machine; the client of another knows its own."""

OF_ESTIMATORS = ("power", "damping", "wrong_classes", "learning_rates")
"""Keys beside ``estimator`` that are options of its value."""


@contextmanager
def running(configuration: Mapping[str, Any]) -> Iterator[None]:
    """Run the body in the folder of the configuration, on its cluster."""
    folder, options = configuration["folder"], section(configuration, "cluster")
    with ExitStack() as stack:
        # The list itself, since other modules may hold it. Modules beside the file come first, then
        # those of the folder in which the command was typed.
        stack.callback(sys.path.__setitem__, slice(None), list(sys.path))
        sys.path[:0] = [str(folder), os.getcwd()]
        with about("folder", "try an existing folder; by default it is that of the file"):
            stack.enter_context(chdir(folder))
        # Without options, the threads of this process compute.
        with about("cluster", "try n_workers: 2, or the address of a scheduler that runs"):
            if options:
                stack.enter_context(_client(options))
        try:
            yield
        except KeyboardInterrupt:
            logging.disable(logging.CRITICAL)  # of connections that end with the process
            raise


def _client(options: dict[str, Any]) -> Client:
    from distributed import Client

    if "address" in options:
        require_form("address", options["address"], str, remedy="address: tcp://10.0.0.1:8786")
        return Client(**{"timeout": 30, **options})
    for name in options:  # Dask would wait for workers that never start
        require_choice("a key", name, _CLUSTER, remedy="see `trakdask init`")
    for name in ("n_workers", "threads_per_worker"):
        require_integer(name, options.get(name) or 1, 1, remedy=f"try {name}: 2")
    # Workers, and the threads that start them again, inherit which signals they do not get: Ctrl-C
    # reaches every process of a terminal, but this one alone is to close the cluster.
    resource_tracker.ensure_running()  # whose start would let the thread get them again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Port .* is already in use")
            # The only logs would be of connections that end with the workers.
            return Client(processes=True, silence_logs=logging.CRITICAL, **options)
    except RuntimeError as err:  # nothing was computed, so that it is about an option
        raise ValueError(f"it does not start: {getattr(err.__cause__, 'strerror', err)}") from err
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def features(
    configuration: Mapping[str, Any],
    name: str,
    like: xr.Dataset | None = None,
    *,
    fits: bool = True,
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
        samples = samples_of(section(configuration, name))
    with about("model"):
        model = described_model(section(configuration, "model"))
    with about("projector"):
        projector: Any = _projector(configuration, samples, model, fits) if like is None else None
    with about("featurize"):
        options = section(configuration, "featurize")
        require_keys(options, td.featurize, 3)
        lazy = td.featurize(samples, model, projector, like=like, **options)
    described = section(configuration, "projector")
    # The components of a fit that has not run: their number is that of the columns, and is all that
    # a plan needs.
    has_components = described.get("components", True)
    if described.get("kind") == _FIT and has_components and not fits:  # its columns
        from trakdask.projection.fitted import Components, Fitted

        fit = inspect.signature(td.fit).parameters
        asked = [described.get(name, fit[name].default) for name in ("proj_dim", "n_samples")]
        with about("projector"):
            asked = [require_integer("proj_dim", n, 1, remedy="try proj_dim: 512") for n in asked]
        steps = projector, Components(min(*asked, lazy.sizes["sample"]))
        lazy.attrs |= as_text({"projector": Fitted(steps).spec()})
    return lazy


def _projector(
    configuration: Mapping[str, Any], samples: xr.Dataset, model: td.Model, fits: bool
) -> Any:
    """Return the projector of a section, which is fitted unless the store of features has it."""
    from trakdask import projection
    from trakdask.planning.fits import sketch_of

    described = section(configuration, "projector")
    if not described:
        return None
    # Among the kinds in the message of an unknown one is "fit", which is handled below.
    kinds = {kind: getattr(projection, kind) for kind in _PROJECTORS}
    if described.get("kind") != _FIT:
        return of_kind(described, {_FIT: td.fit, **kinds})
    del described["kind"]
    if isinstance(sketch := described.get("sketch"), dict):
        described["sketch"] = of_kind(dict(sketch), kinds)
    if not fits:
        return described.get("sketch", sketch_of(model.shapes))
    # The store, so that a job that goes on takes the fit from there.
    options: dict[str, Any] = {"store": section(configuration, "stores")["train"], **described}
    options["storage_options"] = section(configuration, "save").get("storage_options")
    of_features = section(configuration, "featurize")
    options |= {name: of_features[name] for name in _OF_FITS if name in of_features}
    require_keys(options, td.fit, 2, *_OF_FITS)
    return td.fit(samples, model, **options)


def described_model(options: dict[str, Any]) -> td.Model:
    """Return the model that a section describes."""
    checkpoints, task = options.get("checkpoints") or [], options.get("task")
    remedy = "checkpoints: checkpoints/*.pt"
    require_form("checkpoints", checkpoints, str, list, dict, remedy=remedy)
    # Else a mapping of names to files, which `td.Model` takes as it is.
    if isinstance(checkpoints, dict) and "function" in checkpoints:
        require_keys(checkpoints, called)
        options["checkpoints"] = called(**checkpoints)
    elif isinstance(checkpoints, str):
        options["checkpoints"] = expanded(checkpoints)
    if isinstance(task, str) and ":" in task:
        options["task"] = import_callable(task, "task")()
    require_keys(options, td.Model)
    return td.Model(**options)


def described_or_stored(
    configuration: Mapping[str, Any], names: Iterable[str] = STORES
) -> dict[str, xr.Dataset]:
    """Return the lazy features of training samples and targets, before anything is computed.

    Where there is no section of samples, the store of that name is opened as it is.
    """
    options, stores = section(configuration, "save"), section(configuration, "stores")
    with about("save"):
        # Options of the estimator have their own check, with the features.
        others = {name: v for name, v in options.items() if name not in OF_ESTIMATORS}
        require_keys(others, td.save, 2)
    both: dict[str, xr.Dataset] = {}
    for name in names:
        store: Any = stores.get(STORES[name])
        with about(f"stores.{STORES[name]}"):
            if name in configuration:
                # Raises an error if something else is there, before hours of gradients.
                existing(Folder.at(store, options.get("storage_options")))
                both[name] = features(configuration, name, both.get("data"))
                with about("save"):
                    at = options.get("storage_options")
                    checked_options(both[name], with_estimator(options, both[name], at))
            else:
                both[name] = td.open(store, storage_options=options.get("storage_options"))
    return both


def saved(
    configuration: Mapping[str, Any], both: Mapping[str, xr.Dataset]
) -> dict[str, xr.Dataset]:
    """Store the features that sections describe, and return the contents of both stores."""
    options, stores = section(configuration, "save"), section(configuration, "stores")
    results = dict(both)
    for name, lazy in both.items():
        if name in configuration:
            of_store = with_estimator(options, lazy, options.get("storage_options"))
            if name == "targets":
                # No score asks for sums over targets.
                of_store["estimator"] = None
            results[name] = td.save(lazy, stores[STORES[name]], **of_store)
            keep(configuration, stores[STORES[name]])
    return results


def explored(
    configuration: Mapping[str, Any], text: str | None = None
) -> tuple[str, xr.Dataset, xr.Dataset, dict[str, Any]]:
    """Return the store of training samples, both features, and what :func:`explore` shows of them.

    Computes the features that are missing. A text names the samples, see
    :func:`named`, or that the configuration describes. A store alone says which job wrote it, in
    ``encoding["job"]``, but nothing that it names is imported or read.
    """
    stored = saved(configuration, described_or_stored(configuration))
    stores = section(configuration, "stores")
    storage_options = section(configuration, "save").get("storage_options")
    contents = dict.fromkeys(STORES)
    with about(f"--samples {text}" if text else "data and targets"):
        if text is not None:
            contents = dict(zip(STORES, named(text), strict=True))
        for name in STORES:
            if text is None and name in configuration:
                contents[name] = samples_of(section(configuration, name))
    for name, content in contents.items():
        # Stores from which samples were dropped have fewer than their sections describe.
        if content is not None and content.sizes.get("sample") != stored[name].sizes["sample"]:
            whole = td.open(
                stores[STORES[name]], dropped=True, load_coords=False,
                storage_options=storage_options,
            )  # fmt: skip
            if content.sizes.get("sample") == whole.sizes["sample"]:
                contents[name] = content.isel(sample=~whole["dropped"].values)
    if "data" not in configuration:
        # Not in attrs, which `to_zarr` and others would write.
        stored["data"].encoding["job"] = kept(stored["data"].encoding["source"])
    options: dict[str, Any] = {"samples": contents["data"], "target_samples": contents["targets"]}
    if "model" in configuration and contents["targets"] is not None:
        model = described_model(section(configuration, "model"))
        if isinstance(model.task, td.tasks.Classification):  # whose predictions are shown
            options["model"] = model
    return str(stores["train"]), stored["data"], stored["targets"], options


def with_estimator(
    options: Mapping[str, Any], features: xr.Dataset, storage_options: Any
) -> dict[str, Any]:
    """Return options with the estimator that its name and its own options describe, as a value."""
    others = dict(options)
    fields = {name: others.pop(name) for name in OF_ESTIMATORS if name in others}
    if isinstance(damping := fields.get("damping"), dict):
        require_keys(damping, td.Absolute)
        fields["damping"] = td.Absolute(**damping)
    name, store = others.pop("estimator", "auto"), others.pop("calibrate", None)
    if name is None:
        return {**others, "estimator": None}
    kind = estimators.kind_of(features, name)
    require_keys(fields, kind)
    estimator = kind(**fields)
    # Held-out samples choose λ for the estimator that the other options make.
    if store is not None:
        held_out = td.open(store, storage_options=storage_options)
        fields["damping"] = td.damping(features, estimator, calibrate=held_out)
        estimator = kind(**fields)
    return {**others, "estimator": estimator}
