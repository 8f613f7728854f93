"""Folders as ``save_pretrained`` and ``Trainer`` of transformers and PEFT write them.

Nothing of a hub is contacted: whatever is needed has to be in the folder, or, for an adapter, in
the folder of its base model or in the model as it was built.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from trakdask.errors import CheckpointError
from trakdask.files import Folder, location

State = dict[str, Tensor]

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
_ADAPTER_CONFIG = "adapter_config.json"
_STEP = re.compile(r"checkpoint-(\d+)")
_OF_BASE = ("base_layer", "original_module")


def checkpoint_folders(folder: Folder) -> list[str]:
    """Return the folders ``checkpoint-<step>`` that ``Trainer`` wrote, in the order of steps."""
    steps = [match for name in folder.names() if (match := _STEP.fullmatch(name))]
    return [f"{folder.url}/{match[0]}" for match in sorted(steps, key=lambda match: int(match[1]))]


def weight_files(folder: Folder) -> list[str]:
    """Return the names of the files with the weights in a folder: one, all shards, or none.

    An adapter comes before a whole model, which PEFT does not write beside it. safetensors comes
    before pickled files, as in transformers.

    Raises
    ------
    CheckpointError
        If the index of the shards cannot be read, or a shard that it names is missing.
    """
    names = folder.names()
    for name in (*_ADAPTERS, *_WEIGHTS):
        if name in names:
            return [name]
        if f"{name}.index.json" in names:
            return _shards(folder, f"{name}.index.json", names)
    return []


def _shards(folder: Folder, index: str, present: list[str]) -> list[str]:
    try:
        names = sorted(set(folder.read_json(index)["weight_map"].values()))
    except (ValueError, KeyError) as err:
        raise CheckpointError(
            f"expected the files of all tensors in {folder.url}/{index}, which cannot be read "
            f"({type(err).__name__}: {err}); try copying the folder again"
        ) from err
    if missing := [name for name in names if name not in present]:
        raise CheckpointError(
            f"expected the {len(names)} files with weights in {folder.url!r} that its index names, "
            f"got {missing[:3]} missing; try copying the folder again"
        )
    return names


def require_weight_files(folder: Folder) -> list[str]:
    """Return the places of the files with weights as :func:`weight_files`; there must be some."""
    if files := weight_files(folder):
        return [f"{folder.url}/{name}" for name in files]
    if steps := checkpoint_folders(folder):
        raise CheckpointError(
            f"expected a folder with weights as checkpoint, got {folder.url!r} with the folders "
            f"{[Path(step).name for step in steps[:3]]} of a run; try checkpoints={folder.url!r}, "
            f"which takes all of them, or [{steps[-1]!r}]"
        )
    inside = folder.names()
    weights = [name for name in inside if Path(name).suffix in (".pt", ".pth", ".safetensors")]
    advice = repr(f"{folder.url}/{weights[0]}") if weights else "the folder of save_pretrained"
    raise CheckpointError(
        "expected a file, or a folder with model.safetensors, its shards and their index, or "
        f"adapter_model.safetensors, as checkpoint, got the folder {folder.url!r} with "
        f"{weights[:5] or inside[:5] or 'nothing inside (or it does not exist)'}; try {advice}"
    )


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
    if _ADAPTER_CONFIG not in adapter.names():
        return None
    name = adapter.read_json(_ADAPTER_CONFIG).get("base_model_name_or_path")
    folder = Folder(location(name)) if name else None
    return folder.url if folder and weight_files(folder) else None


def complete_adapter(
    adapter: Mapping[str, Tensor], base: Mapping[str, Tensor], needed: Iterable[str], name: str
) -> State:
    """Return the weights of a PEFT model, from those of an adapter and those of its base model.

    Parameters
    ----------
    adapter
        Tensors as PEFT saves them, whose names do not say which adapter of the model they are, or
        as ``state_dict()`` names them.
    base
        Tensors of the base model. What is missing in both (the second name of tied weights) is
        missing in the result.
    needed
        Names in the ``state_dict`` of the PEFT model.
    name
        Name of the checkpoint, for messages.

    Raises
    ------
    CheckpointError
        If a tensor of the adapter belongs nowhere in the model, or to two adapters of the model.
    """
    owners: dict[str, str] = {}
    state: State = {}
    for own in needed:
        saved = _saved_name(own, adapter, base)
        if saved is None:
            if (known := _base_name(own)) in base:
                state[own] = base[known]
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
