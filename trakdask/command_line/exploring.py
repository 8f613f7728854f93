"""The explorer of stores that a command line names."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import xarray as xr
from distributed import Client

import trakdask as td
from trakdask.checks import import_callable
from trakdask.command_line.configuration import ConfigurationError
from trakdask.command_line.sources import called, from_zarr
from trakdask.explorer import Explorer, View

__all__ = ["client", "explorer", "view"]


def explorer(
    store: str,
    targets: str,
    samples: str | None,
    marks: str | None,
    model: str | None = None,
    tokenizer: str | None = None,
    preprocess: str | None = None,
) -> Explorer:
    """Return the explorer of two stores of features.

    Parameters
    ----------
    store, targets
        Folders or URLs of the features of training samples and of targets.
    samples
        What the features are of: see :func:`_samples`.
    marks
        The file of the marks; by default beside the store.
    model
        ``"package.module:function"``, which returns the :class:`trakdask.Model`.
    tokenizer, preprocess
        ``"package.module:callable"``, which :func:`trakdask.explore` is given.

    Raises
    ------
    ConfigurationError
        If the samples, or one of the names, cannot be understood.
    """
    features, target_features = td.open(store), td.open(targets)
    shown, shown_targets = _samples(samples)
    kept = td.Marks.beside(store) if marks is None else td.Marks(marks, store=store)
    made = _named("model", model)
    return td.explore(
        features,
        target_features,
        samples=shown,
        target_samples=shown_targets,
        marks=kept,
        model=None if made is None else made(),
        tokenizer=_named("tokenizer", tokenizer),
        preprocess=_named("preprocess", preprocess),
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


def _named(option: str, text: str | None) -> Callable[..., Any] | None:
    """Return the callable that an option names, if it is given."""
    if text is None:
        return None
    _find_modules_here()
    try:
        return import_callable(text, f"--{option}")
    except (TypeError, ImportError) as err:
        raise ConfigurationError(str(err)) from err


def _find_modules_here() -> None:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _samples(text: str | None) -> tuple[xr.Dataset | None, xr.Dataset | None]:
    """Return the samples that a text names, and those of the targets where it names both.

    It is the path of a zarr store, or ``"package.module:function"``: the function returns a Dataset
    or, as :func:`trakdask.examples.digits` does, a pair of them.
    """
    if text is None:
        return None, None
    _find_modules_here()
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
