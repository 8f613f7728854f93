"""Adapters of PEFT: their tensors are completed by those of their base model.

Nothing of a hub is contacted: the base model is in the folder that the adapter's configuration
names, or in the model as it was built.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from trakdask.errors import CheckpointError
from trakdask.files import Folder, location
from trakdask.models.checkpoints import Checkpoint, State, cached_state, weight_files

_CONFIG = "adapter_config.json"
_OF_BASE = ("base_layer", "original_module")


def is_adapter(state: Iterable[str], needed: Iterable[str]) -> bool:
    """Tell whether tensors are those of a PEFT adapter alone, without the weights of its base.

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
    """Return where the base model is that an adapter names, if that is a folder with weights."""
    if _CONFIG not in adapter.names():
        return None
    name = adapter.read_json(_CONFIG).get("base_model_name_or_path")
    folder = Folder(location(name)) if name else None
    return folder.url if folder and weight_files(folder) else None


def completed(module: nn.Module, adapter: State, base: Checkpoint | None, name: str) -> State:
    """Return the weights of a PEFT model, from those of an adapter and those of its base model.

    Parameters
    ----------
    module
        The PEFT model. What is missing in both (the second name of tied weights) is missing in the
        result.
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
    owners: dict[str, str] = {}
    state: State = {}
    for own in module.state_dict():
        saved = _saved_name(own, adapter, weights)
        if saved is None:
            if (of_base := _base_name(own)) in weights:
                state[own] = weights[of_base]
        elif saved in owners:
            raise CheckpointError(
                f"expected a model with one adapter, got two that {saved!r} of checkpoint {name!r} "
                f"may belong to: {owners[saved]!r} and {own!r}; try a build function that adds one "
                "adapter, or the model's whole state_dict()."
            )
        else:
            owners[saved], state[own] = own, adapter[saved]
    if strange := [each for each in adapter if each not in owners]:
        raise CheckpointError(
            f"expected the adapter of the model in checkpoint {name!r}, got {len(strange)} tensors "
            f"that belong to none of its modules, the first is {strange[0]!r}; try a build "
            "function with the configuration that the adapter was trained with (same target "
            "modules)."
        )
    return state


def _saved_name(own: str, adapter: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> str | None:
    """Return the name that a tensor of a PEFT model has in the file of an adapter, if it is there.

    The file leaves out the adapter's name (``lora_A.default.weight`` is ``lora_A.weight`` there),
    and the name of the wrapper around a module that was trained as a whole.
    """
    parts = own.split(".")
    names = [own]
    if "modules_to_save" in parts:
        at = parts.index("modules_to_save")
        names.append(".".join(parts[:at] + parts[at + 2 :]))
    elif _base_name(own) not in base and not any(part in _OF_BASE for part in parts):
        for at in range(len(parts) - 1, 1, -1):  # of DoRA also "….default.weight"
            names += [".".join(parts[:at] + parts[at + n :]) for n in (1, 2)]
    return next((each for each in names if each in adapter), None)


def _base_name(own: str) -> str:
    parts = own.removeprefix("base_model.").removeprefix("model.").split(".")
    return ".".join(part for part in parts if part not in _OF_BASE)
