"""Load checkpoints into modules that load or save themselves in a way of their own.

Such a module knows more than the names of its tensors: it has hooks that rename or change them, or
extra state, which may be any object. So it gets a checkpoint by its own ``load_state_dict``.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trakdask.errors import CheckpointError
from trakdask.models.modules import is_library

_METHODS = (
    *("load_state_dict", "_load_from_state_dict", "state_dict", "_save_to_state_dict"),
    "get_extra_state",
)
_HOOKS = (
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
    *("_state_dict_pre_hooks", "_state_dict_hooks"),
)


def loads_itself(module: nn.Module) -> bool:
    """Return whether code that is not torch's has a part in loading or saving a module."""
    return any(_has_own_code(part) and part.state_dict() for part in module.modules())


def _has_own_code(part: nn.Module) -> bool:
    methods = [getattr(type(part), name) for name in _METHODS]
    hooks = [hook for name in _HOOKS for hook in vars(part)[name].values()]
    return not all(is_library(getattr(code, "__module__", None)) for code in methods + hooks)


def is_extra_state(name: str) -> bool:
    """Return whether an entry of a state dict is what ``get_extra_state`` returned."""
    return name.rpartition(".")[2] == "_extra_state"


def as_tensor(name: str, value: Any) -> Tensor:
    """Return an entry of a state dict as a tensor: extra state as the bytes of a file."""
    if not is_extra_state(name):
        tensor: Tensor = value
        return tensor
    file = io.BytesIO()
    torch.save(value, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def load(module: nn.Module, state: Mapping[str, Tensor], checkpoint: str) -> None:
    """Load a checkpoint into a module by the module's own code.

    Raises
    ------
    CheckpointError
        If the module does not take it, or extra state is an object that no file may have.
    """
    try:
        entries = {
            name: torch.load(io.BytesIO(tensor.numpy().tobytes()), weights_only=True)
            if is_extra_state(name)
            else tensor
            for name, tensor in state.items()
        }
        module.load_state_dict(entries)
    except Exception as err:
        raise CheckpointError(
            "expected a checkpoint that the model's own load_state_dict takes, got "
            f"{type(err).__name__} for checkpoint {checkpoint!r}: {' '.join(str(err).split())}; "
            "try the state_dict() of a model that build made, with plain values as extra state"
        ) from err
