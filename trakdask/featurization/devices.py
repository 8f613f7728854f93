"""Choose the device of a task: the GPU of its worker if it has one, else the CPU."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch

from trakdask.models.tasks import Forward
from trakdask.projection.cuda import launched, missing

__all__ = ["check_device", "described", "device_of_task", "on_device"]

_log = logging.getLogger(__name__)


def check_device(device: object) -> str:
    """Check that a value names a device that tasks can run on."""
    if device == "auto":
        return "auto"
    try:
        if isinstance(device, str) and torch.device(device).type in ("cpu", "cuda"):
            return device
    except RuntimeError:
        pass
    raise ValueError(
        "expected 'auto', 'cpu', 'cuda', or one GPU of each worker, such as 'cuda:1', as device, "
        f"got {device!r}; try device='auto'"
    )


def device_of_task(asked: str) -> torch.device:
    """Return the device of tasks of this process; ``"auto"`` is the GPU if kernels can run on it.

    Raises
    ------
    RuntimeError
        If a GPU is requested and this process has none.
    """
    if asked == "auto":
        return _automatic()
    device = torch.device(asked)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(
            f"expected a GPU on every worker for device={asked!r}, got a process without one "
            f"({missing()}); try device='auto', which uses a GPU only where there is one"
        )
    return device


@cache
def _automatic() -> torch.device:
    why = missing()
    _log.info("tasks run on the %s", f"CPU: {why}" if why else "GPU")
    return torch.device("cpu" if why else "cuda")


def on_device(forward: Forward, device: torch.device) -> Forward:
    """Return the model on a device; for the CPU the same object, since its tensors are there."""
    if device.type == "cpu":
        return forward
    # Non-persistent buffers are not in checkpoints; the module has them on the CPU.
    own = {name: b for name, b in forward.module.named_buffers() if not b.is_meta}
    parameters, buffers = (
        {name: tensor.to(device) for name, tensor in tensors.items()}
        for tensors in (forward.parameters, {**own, **forward.buffers})
    )
    return Forward(forward.module, parameters, buffers, forward.checkpoint, forward.dtype)


def described(device: torch.device) -> dict[str, Any]:
    """Return the metadata of a device for records: its name, and the kernels launched so far."""
    if device.type == "cpu":
        return {"device": "cpu"}
    return {"device": torch.cuda.get_device_name(device), "kernels": sorted(launched.copy())}
