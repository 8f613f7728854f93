"""The model as a value: how to build it, its checkpoints, its task, the parameters that count."""

from __future__ import annotations

import copy
import inspect
import pkgutil
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from trakdask.errors import CheckpointError
from trakdask.execution.fingerprints import fingerprint
from trakdask.execution.handles import Spooled
from trakdask.models.checkpoints import (
    Checkpoint,
    CheckpointLike,
    State,
    cached_state,
    make_checkpoints,
)
from trakdask.models.folders import base_folder, complete_adapter, is_adapter
from trakdask.models.parameters import Selection, select_parameters
from trakdask.models.tasks import Forward, Task, resolve_task, task_spec

__all__ = ["Model"]

Build = torch.nn.Module | Callable[[], torch.nn.Module] | str

_SKELETONS_KEPT = 2
_local = threading.local()


class Model:
    """A model whose outputs are attributed: architecture, checkpoints, task, parameters.

    Parameters
    ----------
    build
        A zero-argument callable that returns the ``nn.Module``, the same as
        ``"package.module:callable"``, or a module itself. It is called once per worker thread,
        since threads that share a module corrupt each other's results silently.
    checkpoints
        List of, or mapping from name to, paths (``.pt`` read with ``weights_only=True``,
        ``.safetensors``, folders that ``save_pretrained`` or ``Trainer`` wrote) or state dicts.
        One path of a run's folder stands for all ``checkpoint-<step>`` in it. May be left out if
        ``build`` is a module: then its own weights are the one checkpoint. The file of a PEFT
        adapter is completed by the weights of its base model: of the local folder that the
        adapter's configuration names, or else those with which ``build`` returns the model.
    task
        A name (``"image_classification"``, ``"text_classification"``, ``"binary_classification"``,
        ``"multi_label"``, ``"regression"``, ``"causal_lm"``, ``"clip"``), a :class:`Task`, or an
        object with TRAK's ``get_output`` and ``get_out_to_loss_grad``.
    parameters
        Which parameters gradients are taken of: ``None`` for all, a name, a glob (``"head.*"``),
        several of them, a class of modules (``nn.Linear``), or a predicate ``(name, parameter) ->
        bool``. Others are never differentiated. ``"*lora_*"`` takes a model's adapters.
    checkpoint_ids
        Integers that select the projection matrices; by default the first 32 bits of each
        checkpoint's content hash, so that features made apart can be joined.

    Raises
    ------
    FileNotFoundError, CheckpointError
        If a checkpoint is missing, damaged, holds code, or has other tensors than the model (the
        first one is named).
    TypeError, ValueError
        If another argument does not make sense.

    Notes
    -----
    Cost: builds the module once and reads every checkpoint once, to hash it. Nothing of torch
    reaches a Dask graph: tasks carry paths and hashes, and load each checkpoint once per process.

    Examples
    --------
    >>> import torch, trakdask as td
    >>> model = td.Model(torch.nn.Linear(4, 2), task="image_classification", parameters="weight")
    >>> model
    <trakdask.Model: 1 checkpoint, ImageClassification, 8 of 10 parameters>
    """

    build: str | Callable[[], torch.nn.Module] | Spooled
    checkpoints: tuple[Checkpoint, ...]
    task: Task
    shapes: dict[str, tuple[int, ...]]
    token: str
    """Names the architecture: what ``build`` is, not the weights."""

    def __init__(
        self,
        build: Build,
        checkpoints: Iterable[CheckpointLike] | Mapping[str, CheckpointLike] | None = None,
        task: str | Task | object = "image_classification",
        parameters: Selection = None,
        *,
        checkpoint_ids: Iterable[int] | None = None,
    ) -> None:
        if isinstance(build, torch.nn.Module):
            _require_plain(build)
        elif not callable(build) and not isinstance(build, str):
            raise TypeError(
                "expected an nn.Module, a callable without arguments that returns one, or "
                f"'package.module:callable' as build, got {_shown(build)}; try td.Model(module, "
                "...)."
            )
        if checkpoints is None:
            checkpoints = [_own_state(build)]
        self.task = resolve_task(task)
        self.build = Spooled(build) if isinstance(build, torch.nn.Module) else build
        self.token = _build_token(self.build)
        module = self.skeleton()
        own = dict(module.named_parameters())
        names = select_parameters(module, parameters)
        self.shapes = {name: tuple(own[name].shape) for name in names}
        self._n_parameters = sum(tensor.numel() for tensor in own.values())
        self.checkpoints = make_checkpoints(
            checkpoints,
            checkpoint_ids,
            check=lambda name, state, base: _require_fit(
                module, _completed(module, state, base, name), name
            ),
            find_base=_BaseFinder(self.build, module),
        )

    def forward(self, checkpoint: Checkpoint) -> Forward:
        """Return the model at one checkpoint, on this thread's own skeleton."""
        module = self.skeleton()
        state = _completed(module, cached_state(checkpoint), checkpoint.base, checkpoint.name)
        aliases = _aliases(module)
        parameters = {n: _find(state, aliases[n]) for n, _ in module.named_parameters()}
        buffers = {n: state[n] for n, _ in module.named_buffers() if n in state}
        return Forward(module, parameters, buffers, checkpoint.name)

    def spec(self) -> dict[str, Any]:
        """Describe what determines the gradients, as plain JSON values."""
        return {
            "task": task_spec(self.task),
            "checkpoints": {c.name: c.digest for c in self.checkpoints},
            "checkpoint_ids": {c.name: c.id for c in self.checkpoints},
            "parameters": {name: list(shape) for name, shape in self.shapes.items()},
        }

    def skeleton(self) -> torch.nn.Module:
        """Return the architecture without weights, this thread's own."""
        kept: dict[str, torch.nn.Module] = _local.__dict__.setdefault("skeletons", {})
        if self.token not in kept:
            while len(kept) >= _SKELETONS_KEPT:
                kept.pop(next(iter(kept)))
            kept[self.token] = _build_skeleton(self.build)
        return kept[self.token]

    def __repr__(self) -> str:
        n = len(self.checkpoints)
        chosen = sum(torch.Size(shape).numel() for shape in self.shapes.values())
        return (
            f"<trakdask.Model: {n} checkpoint{'s' * (n != 1)}, "
            f"{task_spec(self.task).split('(')[0]}, "
            f"{chosen} of {self._n_parameters} parameters>"
        )


class _BaseFinder:
    """Finds the base model of checkpoints that are adapters alone, reading each base once."""

    def __init__(
        self, build: str | Callable[[], torch.nn.Module] | Spooled, module: torch.nn.Module
    ) -> None:
        self.build = build
        self.names = module.state_dict().keys()
        self.bases: dict[Path | None, Checkpoint] = {}

    def __call__(self, state: Mapping[str, Tensor], path: Path | None) -> Checkpoint | None:
        if not is_adapter(state, self.names):
            return None
        folder = base_folder(path) if path is not None and path.is_dir() else None
        if folder not in self.bases:
            weights = _base_state(self.build) if folder is None else folder
            (self.bases[folder],) = make_checkpoints({"base model": weights})
        return self.bases[folder]


def _base_state(build: str | Callable[[], torch.nn.Module] | Spooled) -> Mapping[str, Tensor]:
    """Return the weights of the base model in a PEFT model, as the model was built."""
    module = _built(build)
    unload = getattr(module, "unload", None) or getattr(module, "get_base_model", None)
    base = module if unload is None else unload()
    return cast(Mapping[str, Tensor], base.state_dict())


def _completed(module: torch.nn.Module, state: State, base: Checkpoint | None, name: str) -> State:
    if base is None:
        return state
    return complete_adapter(state, cached_state(base), module.state_dict(), name)


def _own_state(build: Build) -> Mapping[str, Tensor]:
    if isinstance(build, torch.nn.Module):
        return cast(Mapping[str, Tensor], build.state_dict())
    raise ValueError(
        "expected checkpoints, unless build is a trained nn.Module, got none with build = "
        f"{_named(build)}; try td.Model(build, checkpoints=['model.pt'], ...)."
    )


def _build_token(build: str | Callable[[], torch.nn.Module] | Spooled) -> str:
    if isinstance(build, Spooled):
        return build.token
    if isinstance(build, str):
        return build
    return fingerprint(build)


def _build_skeleton(build: str | Callable[[], torch.nn.Module] | Spooled) -> torch.nn.Module:
    return _without_weights(_built(build).eval())


def _built(build: str | Callable[[], torch.nn.Module] | Spooled) -> torch.nn.Module:
    module = copy.deepcopy(build.get()) if isinstance(build, Spooled) else _called(build)
    if not isinstance(module, torch.nn.Module):
        raise TypeError(
            f"expected an nn.Module from build = {_named(build)}, got {type(module).__name__}; try "
            "returning the module from the function."
        )
    _require_plain(module)
    return module


def _called(build: str | Callable[[], Any]) -> Any:
    function = _resolved(build) if isinstance(build, str) else build
    try:
        missing = _required_arguments(function)
    except (TypeError, ValueError):  # some callables in C have no signature
        missing = []
    if missing:
        raise TypeError(
            f"expected a callable without arguments as build, got {_named(function)}, which needs "
            f"{missing}; try build=lambda: {_named(function)}({', '.join(missing)})."
        )
    return function()


def _required_arguments(function: Callable[..., Any]) -> list[str]:
    return [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


def _resolved(name: str) -> Callable[[], Any]:
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as err:
        raise ImportError(
            f"expected build = 'package.module:callable' that can be imported, got {name!r} "
            f"({type(err).__name__}: {err}); try the callable itself, or an installed module that "
            "every worker can import."
        ) from err
    if not callable(found):
        raise TypeError(
            f"expected a callable at build = {name!r}, got {type(found).__name__}; try the name "
            "of a function that returns the module."
        )
    return cast(Callable[[], Any], found)


def _shown(value: object) -> str:
    kind, text = type(value).__name__, repr(value)
    return f"{text} ({kind})" if len(text) <= 80 and "\n" not in text else kind


def _named(build: object) -> str:
    return getattr(build, "__name__", None) or repr(build)


def _require_plain(module: torch.nn.Module) -> None:
    """Refuse modules whose parameters have no shape yet, or that cannot be called with others."""
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            f"expected an nn.Module from Python code, got {type(module).__name__}; try the module "
            "that was compiled."
        )
    for name, tensor in module.named_parameters():
        if torch.nn.parameter.is_lazy(tensor):
            raise ValueError(
                f"expected parameters with shapes, got {name!r} of a lazy module that was never "
                "run; try running the module once in build: module(example_input)."
            )


def _without_weights(module: torch.nn.Module) -> torch.nn.Module:
    """Move what checkpoints bring to the meta device; tied tensors stay tied."""
    saved = set(module.state_dict())
    empty: dict[int, Tensor] = {}
    for prefix, part in module.named_modules():
        own = {**dict(part.named_parameters("", recurse=False, remove_duplicate=False))}
        own |= dict(part.named_buffers("", recurse=False, remove_duplicate=False))
        for name, tensor in own.items():
            if (f"{prefix}.{name}" if prefix else name) not in saved:
                continue  # a non-persistent buffer: no checkpoint holds it
            if id(tensor) not in empty:
                meta = tensor.detach().to("meta")
                is_parameter = isinstance(tensor, torch.nn.Parameter)
                empty[id(tensor)] = (
                    torch.nn.Parameter(meta, requires_grad=False) if is_parameter else meta
                )
            setattr(part, name, empty[id(tensor)])
    return module


def _aliases(module: torch.nn.Module) -> dict[str, list[str]]:
    """All names of each parameter: files of tied weights may hold only one of them."""
    names: dict[int, list[str]] = {}
    for name, tensor in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(name)
    return {group[0]: group for group in names.values()}


def _find(state: Mapping[str, Tensor], names: list[str]) -> Tensor:
    return next(state[name] for name in names if name in state)


def _require_fit(module: torch.nn.Module, state: Mapping[str, Tensor], checkpoint: str) -> None:
    needed = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    optional = {n for group in _aliases(module).values() if set(group) & set(state) for n in group}
    for name, shape in needed.items():
        if name not in state:
            if name in optional:
                continue
            found = f"no tensor {name!r} (but {list(state)[:3]}...)"
        elif tuple(state[name].shape) != shape:
            found = f"{name!r} of shape {tuple(state[name].shape)}"
        else:
            continue
        raise CheckpointError(
            f"expected {name!r} of shape {shape} in checkpoint {checkpoint!r}, as the model has, "
            f"got {found}; try {_advice(state)}"
        )
    if extra := [name for name in state if name not in needed]:
        raise CheckpointError(
            f"expected the tensors of the model in checkpoint {checkpoint!r}, got {len(extra)} "
            f"that the model lacks, the first is {extra[0]!r}; try {_advice(state)}"
        )


def _advice(state: Mapping[str, Tensor]) -> str:
    prefix = next((p for p in ("module.", "_orig_mod.") if all(n.startswith(p) for n in state)), "")
    if prefix:
        return (
            f"{{name.removeprefix({prefix!r}): t for name, t in state.items()}}, since all names "
            f"begin with {prefix!r} (of a wrapped model)."
        )
    if all(name.startswith("base_model.") for name in state):
        return (
            "a build function that returns the model with its adapter: "
            "lambda: peft.get_peft_model(base, config)."
        )
    return "the build function that this checkpoint was trained with."
