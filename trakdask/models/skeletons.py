"""Prepare modules for models: reject the unsuitable, and remove weights and compiled code."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["aliases", "overwritten", "require_plain", "uncompiled", "without_weights"]


def require_plain(module: torch.nn.Module) -> None:
    """Reject modules whose parameters have no shapes yet or cannot be replaced in a call."""
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            f"expected an nn.Module from Python code, got {type(module).__name__}; try the module "
            "that was compiled"
        )
    for path, part in module.named_modules():
        if isinstance(part, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
            raise TypeError(
                f"expected a model that runs in one process on one device, got {_at(path)} of "
                f"class {type(part).__name__}; try the module inside it, its attribute module"
            )
        if type(part).__module__.split(".")[0] == "bitsandbytes":
            raise TypeError(
                f"expected layers with plain tensors as weights, got layer {path!r} of class "
                f"{type(part).__module__}.{type(part).__name__}, whose quantised weights only "
                "bitsandbytes itself can load and multiply; try building the base model without "
                "quantization_config, in bfloat16 (the adapter's file is the same)"
            )
    for name, tensor in module.named_parameters():
        if torch.nn.parameter.is_lazy(tensor):
            raise ValueError(
                f"expected parameters with shapes, got {name!r} of a lazy module that was never "
                "run; try running the module once in build: module(example_input)"
            )


def _at(path: str) -> str:
    return f"layer {path!r}" if path else "a model"


def uncompiled(module: torch.nn.Module) -> torch.nn.Module:
    """Undo torch.compile: hooks are not called inside of compiled code."""
    for part in module.modules():
        part._compiled_call_impl = None
        original = getattr(part, "_orig_mod", None)
        if isinstance(original, torch.nn.Module):
            part.forward = original.__call__
    return module


def without_weights(module: torch.nn.Module) -> torch.nn.Module:
    """Move the tensors that checkpoints contain to the meta device; tied tensors stay tied."""
    saved = set(module.state_dict())
    empty: dict[int, Tensor] = {}
    for prefix, part in module.named_modules():
        own = {**dict(part.named_parameters("", recurse=False, remove_duplicate=False))}
        own |= dict(part.named_buffers("", recurse=False, remove_duplicate=False))
        for name, tensor in own.items():
            if (f"{prefix}.{name}" if prefix else name) not in saved:
                continue  # a non-persistent buffer, which no checkpoint contains
            if id(tensor) not in empty:
                meta = tensor.detach().to("meta")
                is_parameter = isinstance(tensor, torch.nn.Parameter)
                empty[id(tensor)] = (
                    torch.nn.Parameter(meta, tensor.requires_grad) if is_parameter else meta
                )
            setattr(part, name, empty[id(tensor)])
    return module


def overwritten(module: torch.nn.Module) -> list[str]:
    """Return the parameters that a model changes in its forward pass: embeddings by max_norm."""
    changed = {
        id(part.weight)
        for part in module.modules()
        if isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag))
        and part.max_norm is not None
    }
    return [name for name, tensor in module.named_parameters() if id(tensor) in changed]


def aliases(module: torch.nn.Module) -> dict[str, list[str]]:
    """Return all names of each parameter; a file may contain tied weights under any one of them."""
    names: dict[int, list[str]] = {}
    for name, tensor in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(name)
    return {group[0]: group for group in names.values()}
