"""Process the arguments of :class:`TRAKer`: create instances, find shapes, and record settings."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import xarray as xr

from trakdask._version import __version__
from trakdask.attribution.estimators import DEFAULT_POWER, Weights, resolve_estimator
from trakdask.trak.default_projectors import seeds_of
from trakdask.trak.modelout_functions import TASK_TO_MODELOUT
from trakdask.trak.stream_projector import StreamProjector

__all__ = ["Shapes", "explained", "instance", "parameter_shapes", "record", "task_of", "weights_of"]

Shapes = dict[str, tuple[int, ...]]

_Method = TypeVar("_Method", bound=Callable[..., Any])


def explained(example: str) -> Callable[[_Method], _Method]:
    """Add an example call to the error of a call that does not match a method's signature."""

    def decorate(method: _Method) -> _Method:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                inspect.signature(method).bind(*args, **kwargs)
            except TypeError as err:
                raise TypeError(
                    f"expected the arguments of {method.__name__}, got others ({err}); try "
                    f"{example}"
                ) from None
            return method(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def instance(kind: Any, droppable: set[str], **arguments: Any) -> Any:
    """Create an instance, omitting droppable arguments that the class does not accept.

    The abstract classes accept fewer arguments than the original passes to their subclasses.
    """
    parameters = inspect.signature(kind).parameters
    if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        dropped = droppable - set(parameters)
        arguments = {name: value for name, value in arguments.items() if name not in dropped}
    return kind(**arguments)


def task_of(task: Any) -> Any:
    """Return the model output for a name, a class or an instance."""
    if isinstance(task, str):
        if task not in TASK_TO_MODELOUT:
            raise KeyError(
                f"expected one of {sorted(TASK_TO_MODELOUT)} as task, got {task!r}; try "
                "task='image_classification', or an instance of an AbstractModelOutput"
            )
        task = TASK_TO_MODELOUT[task]
    return task() if isinstance(task, type) else task


def parameter_shapes(model: torch.nn.Module, grad_wrt: Sequence[str] | None) -> Shapes:
    """Return the shapes of the parameters that are differentiated, in the order of the model."""
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
    if grad_wrt is None:
        return shapes
    if unknown := [name for name in grad_wrt if name not in shapes]:
        raise KeyError(
            f"expected names of parameters in grad_wrt, got {unknown[0]!r}; try one of "
            f"{list(shapes)[:4]}"
        )
    return {name: shape for name, shape in shapes.items() if name in grad_wrt}


def weights_of(task: Any) -> Weights:
    """Return the weights of the estimator that trakdask chooses for a task."""
    is_own = type(task) in TASK_TO_MODELOUT.values()
    name = type(task).__name__.removeprefix("Iterative") if is_own else "unknown"
    attrs = {"task": name.removesuffix("ModelOutput")}
    return resolve_estimator("auto", DEFAULT_POWER, xr.Dataset(attrs=attrs)).weights


def record(
    *,
    mode: str,
    dtype: torch.dtype,
    projector: Any,
    seed: int,
    grad_wrt: Sequence[str] | None,
    lambda_reg: float,
) -> dict[str, Any]:
    """Return the JSON-able settings that ``metadata.json`` has in addition to the original's."""
    seed = getattr(projector, "seed", seed)
    settings: dict[str, Any] = {
        "mode": mode,
        "version": __version__,
        "dtype": str(dtype).removeprefix("torch."),
        "projector_seed": int(seed) if isinstance(seed, int | np.integer) else None,
        "grad_wrt": None if grad_wrt is None else sorted(grad_wrt),
        "seeds": seeds_of(projector),
        "lambda_reg": float(lambda_reg),
    }
    if isinstance(projector, StreamProjector):
        settings["projector"] = projector.projector.spec()
    return settings
