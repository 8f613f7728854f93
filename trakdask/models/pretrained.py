"""Load weights as the classes of transformers and PEFT load them.

Files of ``save_pretrained`` have other names, and sometimes other tensors, than ``state_dict()``.
The class of a model knows the way from one to the other. Nothing of a hub is contacted, and no code
of a folder runs: trakdask reads the files, and the class is the one that the user has built.
"""

from __future__ import annotations

import copy
import functools
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trakdask.errors import CheckpointError

# ``from_pretrained`` changes global state, so only one thread of a process builds or loads at a
# time.
building = threading.RLock()

_PEFT = ("peft.peft_model", "PeftModel")
_TRANSFORMERS = ("transformers.modeling_utils", "PreTrainedModel")

# The modules of the base model inside of PEFT's wrappers.
_WRAPPED = ("base_layer", "original_module", "token_adapter", "model")


def by_class(module: nn.Module, saved: Mapping[str, Tensor], name: str) -> dict[str, Tensor] | None:
    """Return the tensors of a file as the class of the model loads them.

    Parameters
    ----------
    module
        The model as it was built, on the meta device.
    saved
        The tensors by the names that the file has for them.
    name
        Name of the checkpoint, for messages.

    Returns
    -------
    The tensors by their names in the model; of a PEFT model, those of its adapter alone. Tensors
    that have no place in the model are among them, so that they are noticed. None if the model
    neither is nor contains a model of transformers or PEFT.

    Raises
    ------
    CheckpointError
        If the class cannot load them, or the model has several adapters.
    """
    adapted, pretrained = _adapted(module), _parts(module, *_TRANSFORMERS)
    if not adapted and not pretrained:
        return None
    load, (path, part) = (_adapter, adapted[0]) if adapted else (_pretrained, pretrained[0])
    prefix = f"{path}." if path else ""
    plain = {key.removeprefix("module."): tensor for key, tensor in saved.items()}
    try:
        with building, _quiet():
            return {prefix + key: tensor for key, tensor in load(part, plain).items()}
    except CheckpointError:
        raise
    except Exception as err:  # these libraries have no class of errors for it
        raise CheckpointError(
            f"expected weights that {type(part).__name__} can load in checkpoint {name!r}, got "
            f"{type(err).__name__}: {str(err).strip().partition(chr(10))[0]}; try the build "
            "function that this checkpoint was trained with"
        ) from err


def without_adapters(module: nn.Module) -> tuple[nn.Module, dict[str, str]]:
    """Take the adapters of PEFT out of a model, which is changed.

    Returns
    -------
    The base model, and the names of its tensors in the whole model.
    """
    full_names = first_names(module)
    _, adapted = _adapted(module)[0]
    base: nn.Module = adapted.get_base_model() if _parts(adapted, *_PEFT) else adapted
    for path, part in reversed(list(base.named_modules())):  # inner wrappers before outer ones
        inner = [child for name, child in part.named_children() if name in _WRAPPED]
        if inner and type(part).__module__.startswith("peft."):
            base.set_submodule(path, inner[0])
    vars(base).pop("peft_config", None)  # it is a model without adapters now
    state = base.state_dict(keep_vars=True)
    return base, {name: full_names[id(tensor)] for name, tensor in state.items()}


def base_names(module: nn.Module) -> set[str]:
    """Return the names of the tensors of a model that belong to the base model of an adapter."""
    return set(without_adapters(copy.deepcopy(module))[1].values()) if _adapted(module) else set()


def keep_what_is_saved(module: nn.Module) -> None:
    """Leave in a model of PEFT what it saves, since ``build`` draws the rest anew.

    It saves prompts, and not the layers that made them. Copies of embeddings that it needs to undo
    a merge are not read otherwise.
    """
    for _, part in _parts(module, *_PEFT):
        for name, encoder in dict(part.named_children()).get("prompt_encoder", {}).items():
            if len(list(encoder.children())) > 1:
                part.peft_config[name].inference_mode = True
                part.prompt_encoder[name] = type(encoder)(part.peft_config[name])
        for path, copies in part.named_modules():
            if path.endswith(".trainable_tokens_original"):
                copies.clear()


def _parts(module: nn.Module, package: str, name: str) -> list[tuple[str, Any]]:
    """Return the modules of a class, which is there if somebody has imported its package."""
    kind = getattr(sys.modules.get(package), name, ())
    return [(path, part) for path, part in module.named_modules() if isinstance(part, kind)]


def _adapted(module: nn.Module) -> list[tuple[str, Any]]:
    """Return the models with adapters: of PEFT, or of transformers after ``add_adapter``."""
    parts = [*_parts(module, *_PEFT), *_parts(module, *_TRANSFORMERS)]
    return [(path, part) for path, part in parts if getattr(part, "peft_config", None)]


def first_names(module: nn.Module) -> dict[int, str]:
    """Return the first name of each tensor, which may have several, by its ``id``."""
    tensors = reversed(module.state_dict(keep_vars=True).items())
    return {id(tensor): name for name, tensor in tensors}


def _adapter(part: Any, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of an adapter by their names in the model, as PEFT sets them."""
    import peft  # the model is of one of its classes

    if len(part.peft_config) > 1:
        raise CheckpointError(
            f"expected a model with one adapter, got {list(part.peft_config)}; try a build "
            "function that adds one adapter"
        )
    placed: dict[str, Tensor] = {}
    copied = copy.deepcopy(part)
    # Tensors of the copy are on the meta device, where they cannot be set.
    copied.load_state_dict = lambda tensors, **options: placed.update(tensors)
    prompts = dict(copied.named_children()).get("prompt_encoder", {})
    for encoder in prompts.values():  # PEFT sets these itself
        encoder.embedding.to_empty(device="cpu")
    if not _parts(part, *_PEFT):
        saved = {name.removeprefix("base_model.model."): tensor for name, tensor in saved.items()}
    (adapter,) = part.peft_config
    peft.set_peft_model_state_dict(copied, dict(saved), adapter)
    placed.pop("prompt_embeddings", None)
    needed = copied.state_dict()  # PEFT 0.18 leaves some names as in the file
    placed = {f"{n}.{adapter}" if f"{n}.{adapter}" in needed else n: placed[n] for n in placed}
    names = first_names(copied)
    weights = [encoder.embedding.weight for encoder in prompts.values()]
    return placed | {names[id(weight)]: weight.detach() for weight in weights}


def _pretrained(part: Any, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a model as ``from_pretrained`` of its class makes them."""
    dtypes = [tensor.dtype for tensor in saved.values() if tensor.is_floating_point()]
    built = copy.deepcopy(part)
    if dtypes:  # the stored precision
        built = built.to(functools.reduce(torch.promote_types, dtypes))
    kind: Any = type(part)
    # ``from_pretrained`` makes an instance of its class, with arguments that only ``build`` knows.
    # Of this class it gets the model as it was built.
    methods = {"__new__": lambda *_, **__: built, "__module__": kind.__module__}
    returning: Any = type(kind.__name__, (kind,), methods)
    loaded, report = returning.from_pretrained(
        None,
        config=part.config,
        state_dict=dict(saved),
        dtype=torch.get_default_dtype(),  # another one would become the default of all threads
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        local_files_only=True,
    )
    # Those that are missing have random values now.
    state = {n: t for n, t in loaded.state_dict().items() if n not in report["missing_keys"]}
    others = {name: shape for name, shape, _ in report["mismatched_keys"]}
    further = sorted(report["unexpected_keys"])
    others |= {name: (0,) for name in further if not _is_head(name, part, saved)}
    return state | {name: torch.empty(shape, device="meta") for name, shape in others.items()}


def _is_head(name: str, part: Any, saved: Mapping[str, Tensor]) -> bool:
    """Return whether a tensor is of a head that this class lacks, or of a part that was left out.

    Other tensors without a place mean that the architecture is another one.
    """
    prefix = f"{part.base_model_prefix}."
    is_outside = not name.startswith(prefix) and any(n.startswith(prefix) for n in saved)
    is_base = not hasattr(part, part.base_model_prefix)
    steps = (name.removeprefix(prefix) if is_base else name).split(".")
    for depth, step in enumerate(steps):
        if vars(part).get(step, ()) is None:  # as the pooler with ``add_pooling_layer=False``
            return True
        part = getattr(part, step, None)
        if not isinstance(part, nn.Module):
            return is_outside and (depth == 0 or depth < len(steps) - 1)
    return False


@contextmanager
def _quiet() -> Iterator[None]:
    """Let transformers report neither progress nor what is missing, which are errors here."""
    from transformers.utils import logging

    level, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if has_bars:
            logging.enable_progress_bar()
