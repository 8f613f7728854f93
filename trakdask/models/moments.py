"""Scale gradients by Adam's second moments, as the training has scaled them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from trakdask.checks import shown
from trakdask.errors import CheckpointError
from trakdask.files import Folder
from trakdask.models.checkpoints import (
    Checkpoint,
    CheckpointLike,
    cached_state,
    folder_at,
    make_checkpoints,
    place_of,
)
from trakdask.models.folders import checkpoint_folders

__all__ = ["EPSILON", "MOMENTS_FILE", "MomentsLike", "open_moments", "scaled", "scales"]

MomentsLike = Iterable[CheckpointLike] | Mapping[str, CheckpointLike]
Sink = Callable[..., None]

MOMENTS_FILE = "second_moments.safetensors"
EPSILON = 1e-8
"""What Adam adds to the roots of second moments, by default."""

_REMEDY = "try td.keep_checkpoints(folder, second_moments=True) while you train"


def open_moments(
    given: MomentsLike | None, names: Iterable[str], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Checkpoint]:
    """Read and hash the second moments of each checkpoint.

    Parameters
    ----------
    given
        One for each checkpoint, in their order or by their names: paths or URLs of files, or of
        folders of :func:`keep_checkpoints`, or mappings from names of parameters to tensors. One
        path of a run's folder stands for all ``checkpoint-<step>`` in it. None for no moments.
    names
        Names of the checkpoints.
    shapes
        The selected parameters.

    Raises
    ------
    TypeError, ValueError
        If there is not one for each checkpoint.
    FileNotFoundError, CheckpointError
        If a file is missing or cannot be read, or moments are missing, negative or not finite.
    """
    if given is None:
        return {}
    names = list(names)

    def check(name: str, state: Mapping[str, Tensor], folder: object) -> None:
        for parameter, shape in shapes.items():
            _require_moments(name, parameter, state.get(parameter), shape)

    return {
        name: make_checkpoints({name: _file(value)}, accept=check)[0]
        for name, value in _by_name(given, names).items()
    }


def _by_name(given: MomentsLike, names: list[str]) -> dict[str, CheckpointLike]:
    if isinstance(given, str | Path):
        given = checkpoint_folders(Folder(place_of(given))) or [given]
    elif not isinstance(given, Iterable) or isinstance(given, Tensor):
        raise TypeError(
            "expected a list with the second moments of each checkpoint, or a mapping from their "
            f"names, as second_moments, got {shown(given)}; {_REMEDY}"
        )
    values = given if isinstance(given, Mapping) else list(given)
    matches = (
        set(values) == set(names) if isinstance(values, Mapping) else len(values) == len(names)
    )
    if not matches:
        raise ValueError(
            f"expected second_moments of each of the checkpoints {names}, got {shown(list(values))}"
            f" ({len(values)}); try second_moments={{{names[0]!r}: ..., ...}}"
        )
    return dict(values) if isinstance(values, Mapping) else dict(zip(names, values, strict=True))


def _file(value: CheckpointLike) -> CheckpointLike:
    """Return the file of a folder, and anything else as it is."""
    if not isinstance(value, str | Path):
        return value
    place = place_of(value)
    if place.endswith("optimizer.pt"):
        raise CheckpointError(
            f"expected second moments by the names of parameters, got {place!r}, where Trainer "
            f"numbers them in the order of the optimizer, which the file does not say; {_REMEDY}"
        )
    return f"{place}/{MOMENTS_FILE}" if folder_at(place) else place


def _require_moments(
    checkpoint: str, parameter: str, value: Tensor | None, shape: tuple[int, ...]
) -> None:
    actual = "none"
    if value is not None:
        actual = f"shape {tuple(value.shape)}"
        if tuple(value.shape) == shape:
            if bool((value.isfinite() & (value >= 0)).all()):
                return
            actual = "negative numbers or some that are not finite"
    raise CheckpointError(
        f"expected second moments >= 0 of {parameter!r}, of shape {shape}, for checkpoint "
        f"{checkpoint!r}, got {actual}; {_REMEDY}"
    )


def scales(moments: Checkpoint, names: Iterable[str], device: torch.device) -> dict[str, Tensor]:
    """Return (√v + ε)^-1/2 of each parameter, (numel,), in float32 or float64."""
    state = cached_state(moments)
    roots = {name: state[name].to(device).flatten().sqrt() for name in names}
    return {
        name: ((root if root.dtype == torch.float64 else root.float()) + EPSILON).rsqrt()
        for name, root in roots.items()
    }


def scaled(sink: Sink, factors: Mapping[str, Tensor]) -> Sink:
    """Return a sink of gradients that multiplies them by the factors of their parameters first."""

    def add(name: str, gradient: Tensor, first: int | None = None) -> None:
        start = first or 0
        factor = factors[name][start : start + gradient.shape[1]].to(gradient.dtype)
        sink(name, gradient * factor, first)

    return add
