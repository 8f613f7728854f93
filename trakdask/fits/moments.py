"""Adam's second moments, which scale gradients as the training has scaled them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from torch import Tensor

from trakdask.bars import polled_bar
from trakdask.checks import shown
from trakdask.errors import CheckpointError
from trakdask.featurization.preparation import model_of, require_model
from trakdask.files import Folder, location
from trakdask.fits.curvatures import rounding_of
from trakdask.models.checkpoints import CheckpointLike, checkpoint_folders, folder_at, read_state
from trakdask.models.kept_checkpoints import MOMENTS_FILE, REMEDY
from trakdask.models.model import Model
from trakdask.projection.fitted import Fitted, SecondMoments
from trakdask.tensors import places_of

MomentsLike = Iterable[CheckpointLike] | Mapping[str, CheckpointLike]

EPSILON = 1e-8
"""The number that Adam adds to the roots of second moments, by default."""


def second_moments(model: Model, moments: MomentsLike, *, progress: bool = True) -> Fitted:
    """Scale gradients by Adam's second moments: the first step of a projector.

    A step of Adam moves parameters by g/(√v + ε), so the influence of a training sample on a target
    is the product of their gradients with 1/(√v + ε) in between. LESS scales training gradients
    only; here both sides get the root of the scale. Products are the same, but all features are of
    one kind, so that their gram matrix is symmetric.

    Parameters
    ----------
    model
        The model, at all checkpoints that features are to be computed for.
    moments
        Adam's v at each checkpoint, in their order or by their names: files (tensors by the names
        of parameters) or folders of :func:`trakdask.keep_checkpoints`, or mappings from names of
        parameters to tensors. One path of a run's folder stands for all ``checkpoint-<step>`` in
        it.
    progress
        Show a bar of checkpoints that have been read.

    Returns
    -------
    The first step of a projector, in memory; ``.then(td.SJLT(2048))`` makes a projector of it. It
    holds, and features of it have as a variable, ``moment_scale`` (coordinate, checkpoint) float32:
    (√v + 10⁻⁸)^-1/2; 0 for what was never updated (v = 0), and for v that is nothing but rounding
    beside that of other parameters.

    Raises
    ------
    TypeError, ValueError
        If there is not one for each checkpoint.
    FileNotFoundError, CheckpointError
        If a file is missing or cannot be read, or moments are missing, negative or not finite.

    References
    ----------
    Xia et al. 2024, "LESS: Selecting Influential Data for Targeted Instruction Tuning", section 3.

    Examples
    --------
    >>> import torch, trakdask as td
    >>> model = td.Model(torch.nn.Linear(2, 1, bias=False), task="regression")
    >>> v = {"weight": torch.tensor([[4.0, 1.0]])}
    >>> td.fits.second_moments(model, [v], progress=False).then(td.Identity())
    Fitted(SecondMoments(), Identity())
    """
    require_model(model)
    names = [checkpoint.name for checkpoint in model.checkpoints]
    scales: list[np.ndarray] = []
    files = _files(moments, names)
    with polled_bar("second moments", len(names), lambda: len(scales), show=progress):
        for name in names:
            # 1. There is one of each parameter.
            state = read_state(files[name])
            for parameter, shape in model.shapes.items():
                value = state.get(parameter)
                got = None if value is None else tuple(value.shape)
                if value is None or got != shape or not (value.isfinite() & (value >= 0)).all():
                    raise CheckpointError(
                        f"expected finite second moments >= 0 of {parameter!r}, of shape {shape}, "
                        f"for checkpoint {name!r}, got "
                        f"{f'shape {got}' if got != shape else 'others'}; {REMEDY}"
                    )
            # 2. Their scale.
            flat = np.concatenate([state[n].double().flatten().numpy() for n in model.shapes])
            scale, least = (np.sqrt(flat) + EPSILON) ** -0.5, rounding_of(flat, model.shapes)
            for parameter, place in places_of(model.shapes).items():
                scale[place][flat[place] <= least[parameter]] = 0
            scales.append(scale.astype(np.float32))
    arrays = {"moment_scale": np.stack(scales, 1)}
    return Fitted(()).with_arrays(SecondMoments(), arrays, model_of(model.spec()))


def _files(moments: MomentsLike, names: list[str]) -> dict[str, CheckpointLike]:
    """Return the file of each checkpoint, or its tensors as they are."""
    if isinstance(moments, str | Path):
        moments = checkpoint_folders(Folder(location(moments))) or [moments]
    elif not isinstance(moments, Iterable) or isinstance(moments, Tensor):
        raise TypeError(
            "expected a list with the second moments of each checkpoint, or a mapping from their "
            f"names, got {shown(moments)}; {REMEDY}"
        )
    values = list(moments)
    is_named = isinstance(moments, Mapping)
    if set(values) != set(names) if is_named else len(values) != len(names):
        raise ValueError(
            f"expected second moments of each of the checkpoints {names}, got {shown(values)} "
            f"({len(values)}); try {{{names[0]!r}: ..., ...}}"
        )
    files = dict(moments) if isinstance(moments, Mapping) else dict(zip(names, values, strict=True))
    for name, value in files.items():
        if not isinstance(value, str | Path):
            continue
        place = location(value)
        if place.endswith("optimizer.pt"):
            raise CheckpointError(
                f"expected second moments by the names of parameters, got {place!r}, where Trainer "
                f"numbers them in the order of the optimizer, which the file does not say; {REMEDY}"
            )
        files[name] = f"{place}/{MOMENTS_FILE}" if folder_at(place) else place
    return files
