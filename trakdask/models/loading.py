"""State dicts, and modules that load or save theirs in a way of their own.

Such a module knows more than the names of its tensors: it has hooks that rename or change them, or
extra state, which may be any object. So it gets a checkpoint by its own ``load_state_dict``.
"""

from __future__ import annotations

import hashlib
import io
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from trakdask.errors import CheckpointError
from trakdask.models.modules import is_library

State = dict[str, Tensor]

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
    for part in module.modules():
        methods = [getattr(type(part), name) for name in _METHODS]
        hooks = [hook for name in _HOOKS for hook in vars(part)[name].values()]
        # By the module that defines each: a class without methods of its own has those of torch.
        is_torchs = all(is_library(getattr(c, "__module__", None)) for c in methods + hooks)
        if not is_torchs and part.state_dict():
            return True
    return False


def is_extra_state(name: str) -> bool:
    """Return whether an entry of a state dict is what ``get_extra_state`` returned."""
    return name.rpartition(".")[2] == "_extra_state"


def digest_state(state: Mapping[str, Tensor]) -> str:
    """Hash the names, dtypes, shapes and bytes of all tensors, in one pass over the bytes."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        # Bytes, because numpy has no bfloat16, along one axis, without which torch views no bytes.
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def as_state(content: Mapping[Any, Any]) -> State:
    """Return a state dict of tensors: extra state is one, the bytes of a file.

    The versions of modules, by which their code knows how to read a file, stay an attribute of it.
    """
    state: Any = OrderedDict()
    for name, value in content.items():
        if is_extra_state(str(name)):
            file = io.BytesIO()
            torch.save(value, file)
            value = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
        state[str(name)] = value
    state._metadata = getattr(content, "_metadata", None)
    return cast(State, state)


def load(
    module: nn.Module, state: Mapping[str, Tensor], names: Mapping[str, str], checkpoint: str
) -> None:
    """Load a checkpoint into a module by the module's own code.

    Parameters
    ----------
    module
        The module, with its own weights.
    state
        The tensors of the checkpoint, with one name of tied tensors at least.
    names
        All names of the module's tensors, with the first name of the same tensor.
    checkpoint
        Name of the checkpoint, for messages.

    Raises
    ------
    CheckpointError
        If the module does not take the checkpoint, or extra state has objects of own classes.
    """
    # load_state_dict wants all names of a tied tensor. safetensors keeps only one of them.
    given = {names[name]: tensor for name, tensor in state.items() if name in names}
    tied = {n: given[names[n]] for n in module.state_dict() if names.get(n) in given}
    entries: Any = OrderedDict(tied | dict(state))
    entries._metadata = getattr(state, "_metadata", None)
    try:
        for name in filter(is_extra_state, entries):
            file = io.BytesIO(entries[name].numpy().tobytes())
            entries[name] = torch.load(file, weights_only=True)
        module.load_state_dict(entries)
    except Exception as err:
        text = " ".join(str(err).partition("\n\n")[0].split())
        raise CheckpointError(
            f"expected a checkpoint that the model's own load_state_dict takes, got "
            f"{type(err).__name__} for checkpoint {checkpoint!r}: {text}; try the state_dict() of "
            "a model that build made, with plain values and tensors as extra state"
        ) from err
