"""Check the options of featurize before anything is built."""

from __future__ import annotations

from typing import get_args

from torch.nn.modules.batchnorm import _BatchNorm

from trakdask.featurization.failures import OnError
from trakdask.featurization.precision import DType
from trakdask.models.gradients import ENGINES
from trakdask.models.model import Model
from trakdask.projection import SJLT, Projector

__all__ = ["chosen_projector", "require_options", "require_running_statistics"]


def require_options(model: object, gradients: object, dtype: object, on_error: object) -> None:
    """Reject values that are none of those allowed."""
    if gradients not in ("auto", *ENGINES):
        raise ValueError(
            f"expected one of {['auto', *ENGINES]} as gradients, got {gradients!r}; try "
            "gradients='auto'"
        )
    if dtype not in (None, *get_args(DType)):
        raise ValueError(
            f"expected None or one of {get_args(DType)} as dtype, got {dtype!r}; try "
            "dtype='float32'"
        )
    if on_error not in get_args(OnError):
        raise ValueError(
            f"expected 'raise' or 'record' as on_error, got {on_error!r}; try on_error='record'"
        )
    if not isinstance(model, Model):
        raise TypeError(
            f"expected a td.Model as model, got {type(model).__name__}; try td.Model(build, "
            "checkpoints=[...], task=...)"
        )


def chosen_projector(projector: Projector | None) -> Projector:
    """Return the projector, or the default."""
    if projector is None:
        return SJLT(proj_dim=2048, seed=0)
    if isinstance(projector, type) or not isinstance(projector, Projector):
        given = projector.__name__ if isinstance(projector, type) else type(projector).__name__
        raise TypeError(f"expected a projector, got {given}; try projector=td.SJLT(proj_dim=2048)")
    return projector


def require_running_statistics(model: Model) -> None:
    """Reject batch normalization by statistics of the batch, which mixes samples."""
    for path, module in model.meta_module().named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            raise ValueError(
                "expected batch normalization with running statistics, got layer "
                f"{path or type(module).__name__!r} with track_running_stats=False, which "
                "normalizes by the other samples of a batch; try training the model with "
                "track_running_stats=True, or nn.GroupNorm"
            )
