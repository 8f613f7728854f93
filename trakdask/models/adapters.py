"""Complete the weights of PEFT adapters by the weights of their base model.

The file of an adapter has only the adapter's own tensors. Nothing of a hub is contacted: the base
model is in the folder that the adapter's configuration names, or in the model as it was built.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from trakdask.errors import CheckpointError
from trakdask.files import Folder, location
from trakdask.models.checkpoints import Checkpoint, State, cached_state, weight_files

_CONFIG = "adapter_config.json"
_WRAPPERS = ("base_layer", "original_module")
"""Names that PEFT adds to the names of the base model's tensors."""


def is_adapter(state: Iterable[str], needed: Iterable[str]) -> bool:
    """Return whether a state dict has a PEFT adapter alone, without the weights of its base model.

    Parameters
    ----------
    state
        Names of the tensors.
    needed
        Names in the ``state_dict`` of the model.
    """
    names, all_names = set(state), set(needed)
    of_peft = bool(names) and all(name.startswith("base_model.") for name in names)
    return of_peft and any(name.startswith("base_model.") for name in all_names - names)


def base_folder(adapter: Folder) -> str | None:
    """Return the folder of the base model that an adapter names, if it has weights."""
    if _CONFIG not in adapter.names():
        return None
    name = adapter.read_json(_CONFIG).get("base_model_name_or_path")
    folder = Folder(location(name)) if name else None
    return folder.url if folder and weight_files(folder) else None


def completed(module: nn.Module, adapter: State, base: Checkpoint | None, name: str) -> State:
    """Return the weights of a PEFT model, from its adapter and its base model.

    Parameters
    ----------
    module
        The PEFT model. A tensor that is missing in both (the second name of tied weights) is
        missing in the result.
    adapter
        Tensors as PEFT saves them, whose names do not say which adapter of the model they are, or
        as ``state_dict()`` names them.
    base
        The base model; None for weights that are complete.
    name
        Name of the checkpoint, for messages.

    Raises
    ------
    CheckpointError
        If a tensor of the adapter belongs nowhere in the model, or to two adapters of the model.
    """
    if base is None:
        return adapter
    weights = cached_state(base)
    full_names: dict[str, str] = {}
    state: State = {}
    for full_name in module.state_dict():
        saved = _saved_name(full_name, adapter, weights)
        if saved is None:
            if (in_base := _base_name(full_name)) in weights:
                state[full_name] = weights[in_base]
        elif saved in full_names:
            raise CheckpointError(
                f"expected a model with one adapter, got two places for {saved!r} of checkpoint "
                f"{name!r}: {full_names[saved]!r} and {full_name!r}; try a build function that "
                "adds one adapter"
            )
        else:
            full_names[saved], state[full_name] = full_name, adapter[saved]
    if unused := [saved for saved in adapter if saved not in full_names]:
        raise CheckpointError(
            f"expected the adapter of the model in checkpoint {name!r}, got {len(unused)} tensors "
            f"that the model does not have, such as {unused[0]!r}; try a build function with the "
            "configuration of the training (same target modules)"
        )
    return state


def _saved_name(
    full_name: str, adapter: Mapping[str, Tensor], base: Mapping[str, Tensor]
) -> str | None:
    """Return the name that a tensor of a PEFT model has in the file of an adapter, if it is there.

    The file leaves out the adapter's name (``lora_A.default.weight`` is ``lora_A.weight`` there),
    and the name of the wrapper around a module that was trained as a whole.
    """
    parts = full_name.split(".")
    names = [full_name]
    if "modules_to_save" in parts:
        at = parts.index("modules_to_save")
        names.append(".".join(parts[:at] + parts[at + 2 :]))
    elif _base_name(full_name) not in base and not any(part in _WRAPPERS for part in parts):
        for at in range(len(parts) - 1, 1, -1):  # DoRA adds "….default.weight"
            names += [".".join(parts[:at] + parts[at + n :]) for n in (1, 2)]
    return next((name for name in names if name in adapter), None)


def _base_name(full_name: str) -> str:
    parts = full_name.removeprefix("base_model.").removeprefix("model.").split(".")
    return ".".join(part for part in parts if part not in _WRAPPERS)
