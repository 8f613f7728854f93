"""What ``trakdask explore`` shows: features, and the samples that they are of."""

from __future__ import annotations

from contextlib import chdir, suppress
from typing import Any

import xarray as xr

import trakdask as td
from trakdask.command_line import jobs, samples
from trakdask.command_line.configuration import (
    Configuration,
    ConfigurationError,
    about,
    kept,
    section,
)

_OF_FILES = ("table", "csv", "arrays")
"""Kinds of samples that come from files, which are read without running anything."""


def explored(
    configuration: Configuration, text: str | None = None
) -> tuple[str, xr.Dataset, xr.Dataset, dict[str, Any]]:
    """Return the store of training samples, both features, and what :func:`explore` shows of them.

    Computes the features that are missing. A text may name the samples, see :func:`samples.named`.
    Otherwise they come from the configuration or, for a store, from the job that wrote it.
    """
    stored = jobs.saved(configuration, jobs.described_or_stored(configuration))
    stores = section(configuration, "stores")
    storage_options = section(configuration, "save").get("storage_options")
    contents: tuple[xr.Dataset | None, ...]
    if text is not None:
        with about(f"--samples {text}"):
            contents = samples.named(text)
    else:
        contents = tuple(_samples_of(configuration, name, stored[name]) for name in jobs.STORES)
    options: dict[str, Any] = {}
    for (name, store), content in zip(jobs.STORES.items(), contents, strict=True):
        if content is not None and content.sizes.get("sample") != stored[name].sizes["sample"]:
            whole = td.open(
                stores[store], dropped=True, load_coords=False, storage_options=storage_options
            )
            if content.sizes.get("sample") == whole.sizes["sample"]:
                content = content.isel(sample=~whole["dropped"].values)
            elif text is None and name not in configuration:
                content = None  # the files have other rows by now
        options["samples" if name == "data" else "target_samples"] = content
    if "model" in configuration and options["target_samples"] is not None:
        model = jobs.described_model(section(configuration, "model"))
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
        return samples.described(section(configuration, name))
    with suppress(ConfigurationError), about(name):
        job = kept(features.encoding["source"])
        options = section(job, name)
        features.encoding["job"] = f"{features.encoding['source']}.yaml" if job else None
        is_local = not any(sign in str(options) for sign in ("://", "::"))
        if options.get("kind") in _OF_FILES and is_local:
            with chdir(job["folder"]):
                return samples.described(options)
    return None
