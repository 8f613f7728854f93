"""The explorer of stores that a command line names."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import xarray as xr
from distributed import Client

import trakdask as td
from trakdask.command_line.configuration import ConfigurationError
from trakdask.command_line.sources import called, from_zarr
from trakdask.explorer import Explorer, View

__all__ = ["client", "explorer", "view"]


def explorer(store: str, targets: str, samples: str | None, marks: Path | None) -> Explorer:
    """Return the explorer of two stores of features.

    Parameters
    ----------
    store, targets
        Folders or URLs of the features of training samples and of targets.
    samples
        What the features are of: see :func:`_samples`.
    marks
        The file of the marks; by default beside the store, where that is on this machine.

    Raises
    ------
    ConfigurationError
        If the samples cannot be understood.
    """
    features, target_features = td.open(store), td.open(targets)
    shown, shown_targets = _samples(samples)
    kept = None
    if marks is not None:
        kept = td.Marks(marks, store=store)
    elif "://" not in store:
        kept = td.Marks.beside(store)
    return td.explore(
        features, target_features, samples=shown, target_samples=shown_targets, marks=kept
    )


def view(query: str) -> View:
    """Return the view that the part of an address after ``?`` stands for.

    Raises
    ------
    ConfigurationError
        If it stands for none.
    """
    parsed = View.from_query(query)
    if parsed.messages:
        raise ConfigurationError(f"in --view {query!r}: {'; '.join(parsed.messages)}")
    return parsed


def client(address: str | None) -> AbstractContextManager[object]:
    """Return the client of the scheduler at an address; without one, of nothing."""
    return nullcontext() if address is None else Client(address, timeout=30)


def _samples(text: str | None) -> tuple[xr.Dataset | None, xr.Dataset | None]:
    """Return the samples that a text names, and those of the targets where it names both.

    It is the path of a zarr store, or ``"package.module:function"``: the function returns a Dataset
    or, as :func:`trakdask.examples.digits` does, a pair of them.
    """
    if text is None:
        return None, None
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    is_function = ":" in text and "://" not in text and not Path(text).exists()
    try:
        made = called(text) if is_function else from_zarr(text)
    except (TypeError, ValueError, ImportError, OSError) as err:
        raise ConfigurationError(f"in --samples {text!r}: {err}") from err
    pair = made if isinstance(made, tuple) else (made, None)
    if len(pair) != 2 or not all(isinstance(each, xr.Dataset | None) for each in pair):
        raise ConfigurationError(
            f"expected a Dataset of samples from --samples {text!r}, or a pair of them, got "
            f"{type(made).__name__}; try trakdask.examples:digits"
        )
    return pair[0], pair[1]
