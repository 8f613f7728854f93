"""The model as a value: architecture, checkpoints, task, and parameters to differentiate."""

from __future__ import annotations

import copy
import functools
import pickle
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from uuid import uuid4

import cloudpickle
import torch

from trakdask.checks import import_callable, shown
from trakdask.files import Folder
from trakdask.html_tables import html_table
from trakdask.models.checkpoints import (
    Checkpoint,
    CheckpointLike,
    base_files,
    cached,
    cached_state,
    make_checkpoints,
    read_base,
)
from trakdask.models.loading import State, load, loads_itself
from trakdask.models.modules import code_digests, require_plain, select_parameters
from trakdask.models.pretrained import building, keep_what_is_saved, without_adapters
from trakdask.models.reading import Reading, require_replaceable, without_weights
from trakdask.models.tasks import Forward, Task, TrakTask, resolve_task, task_spec
from trakdask.models.tasks.protocol import task_fields
from trakdask.torch_internals import uncompiled

__all__ = ["Model"]

EMBEDDINGS = torch.nn.Embedding, torch.nn.EmbeddingBag
"""Modules that look up vectors of tokens."""

# Modules that a thread keeps: it can alternate between two models without building them anew.
# Nothing tells it that a model is gone, so more would only hold memory.
_MOST_MODULES = 2
_local = threading.local()


class Model:
    """A model whose outputs are attributed: architecture, checkpoints, task, parameters.

    Parameters
    ----------
    build
        A callable without arguments that returns the ``nn.Module``, its name as
        ``"package.module:callable"``, or a module itself (of ``DataParallel`` and
        ``DistributedDataParallel`` the one inside). It is called once per worker thread, since
        threads that share a module silently corrupt each other's results, and by one thread
        at a time. Whatever it gives a module that checkpoints do not have (tensors, arrays and
        numbers in attributes, non-persistent buffers) must be the same each time.
    checkpoints
        List of paths or URLs (files of ``torch.save``, such as ``.pt`` or ``.ckpt``, which are read
        with ``weights_only=True``; ``.safetensors``; folders that ``save_pretrained``, ``Trainer``
        or PEFT wrote, which are loaded as ``from_pretrained`` of the model's class does) or of
        state dicts, or a mapping from names to these. One path of a run's folder stands for all
        ``checkpoint-<step>`` in it. An adapter is completed by the weights of its base model: from
        the folder that the adapter's configuration names, if it exists, or else from ``build``.
        Workers read files themselves. If ``build`` is a module, checkpoints may be omitted; the
        only one then consists of the module's own weights.
    task
        A name (``"classification"``, ``"image_classification"``, ``"text_classification"``,
        ``"binary_classification"``, ``"multi_label"``, ``"regression"``, ``"multi_regression"``,
        ``"segmentation"``, ``"causal_lm"``, ``"token_classification"``, ``"question_answering"``,
        ``"seq2seq"``, ``"clip"``, ``"preference"``, ``"reward"``), a
        :class:`~trakdask.models.tasks.Task`, or an object with TRAK's ``get_output`` and
        ``get_out_to_loss_grad``.
    parameters
        The parameters to differentiate: ``None`` for all, a name, a glob (``"head.*"``), a list of
        these, a class of modules (``nn.Linear``), or a predicate ``(name, parameter) -> bool``. No
        gradients of other parameters are computed. ``"*lora_*"`` selects a model's adapters, and
        ``lambda name, parameter: parameter.requires_grad`` what ``build`` has not frozen.
    key
        Key of the state dict in checkpoints that hold more than that. By default, it is the only
        one whose tensors fit the model. Name it where there are several, as with averaged weights.
    prefix
        Beginning of the names of the model's tensors, such as ``"net."`` where Lightning's module
        keeps the model as ``self.net``. It is removed, and tensors with other names are left out.
        By default, a prefix that all names have in common is removed if all tensors fit then, and
        so is what DDP, FSDP and ``torch.compile`` add.
    checkpoint_ids
        Integers that select the projection matrices; by default the first 32 bits of each
        checkpoint's content hash, so that features computed separately can be joined.

    Raises
    ------
    FileNotFoundError, CheckpointError
        If a checkpoint is missing or damaged, contains code, or has other tensors than the model
        (the message names the first of them), or different ones where the model has one.
    TypeError, ValueError
        If another argument is invalid, a module is TorchScript, quantised or cannot be copied, or
        two calls of ``build`` give modules with different attributes.

    Notes
    -----
    Each call of the module starts from what was read of it here: what a call leaves in attributes,
    buffers and modes is undone, so that no sample depends on those before it. Modules that load or
    save themselves in a way of their own (extra state, hooks that rename) get their checkpoints by
    ``load_state_dict``, and each thread then has weights of its own.

    Cost: builds the module twice, to compare, and reads every checkpoint once, to hash it. A path
    is read by each process that needs it, once. A state dict, or the weights of a module, is one
    task of a graph, which is sent once: for weights of more than a few hundred megabytes, pass a
    path or URL that the workers of a cluster can read.

    Examples
    --------
    >>> import torch, trakdask as td
    >>> model = td.Model(torch.nn.Linear(4, 2), task="image_classification", parameters="weight")
    >>> model
    <trakdask.Model: 1 checkpoint, ImageClassification, 8 of 10 parameters>
    """

    build: torch.nn.Module | Callable[[], torch.nn.Module] | str
    """A module has no weights here; a checkpoint has them."""
    checkpoints: tuple[Checkpoint, ...]
    task: Task
    shapes: dict[str, tuple[int, ...]]
    token: str
    """Identifies this model in all processes."""

    @torch.inference_mode(False)
    def __init__(
        self,
        build: torch.nn.Module | Callable[[], torch.nn.Module] | str,
        checkpoints: Iterable[CheckpointLike] | Mapping[str, CheckpointLike] | None = None,
        task: str | Task | object = "image_classification",
        parameters: str
        | Sequence[str]
        | type[torch.nn.Module]
        | Callable[[str, torch.Tensor], bool]
        | None = None,
        *,
        key: str | None = None,
        prefix: str | None = None,
        checkpoint_ids: Iterable[int] | None = None,
    ) -> None:
        if not callable(build) and not isinstance(build, str):
            raise TypeError(
                "expected an nn.Module, a callable that returns one, or 'package.module:callable' "
                f"as build, got {shown(build)} ({type(build).__name__}); try td.Model(module, ...)"
            )
        if isinstance(build, torch.nn.DataParallel | torch.nn.parallel.DistributedDataParallel):
            build = build.module  # they only divide batches among devices and processes
        if checkpoints is None:
            if not isinstance(build, torch.nn.Module):
                raise ValueError(
                    f"expected checkpoints beside build = {_named(build)}, got none; try "
                    "td.Model(build, checkpoints=['model.pt'], ...), or a trained module as build"
                )
            checkpoints = [build.state_dict()]
        # 1. The architecture without weights: a module of its own, so that training may go on.
        self.task = resolve_task(task)
        self.build = _meta_module(build) if isinstance(build, torch.nn.Module) else build
        self.token = uuid4().hex
        self._state: dict[str, dict[str, str]] = {}
        module = self.meta_module()
        # 2. What is differentiated.
        tensors = dict(module.named_parameters())
        selected = {name: tensors[name] for name in select_parameters(module, parameters)}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in selected.items()}
        self._n_parameters = sum(tensor.numel() for tensor in tensors.values())
        self._loads_itself = loads_itself(module)
        self._n_frozen = sum(t.numel() for t in selected.values() if not t.requires_grad)
        # 3. The weights, by the names that this architecture has for them.
        self.checkpoints = make_checkpoints(
            checkpoints,
            module,
            checkpoint_ids,
            key=key,
            prefix=prefix,
            base_of=functools.partial(_base_model, build, module, {}),
        )
        # 4. A second build: each thread makes one, and what no checkpoint has must be the same.
        # What a module that loads itself has in its attributes may depend on the checkpoint.
        for checkpoint in self.checkpoints if self._loads_itself else (None,):
            self._read(checkpoint)
            if build is self.build:
                with torch.random.fork_rng([]):  # as if it were built once
                    self._made(checkpoint)

    @functools.cached_property
    def reads_tokens(self) -> bool:
        """Whether the model reads texts, as its task says, or looks up embeddings.

        A token is in few samples, so that gradients of its embedding are zero in most.
        """
        of_task = getattr(self.task, "token_variables", ())
        return bool(of_task) or any(isinstance(x, EMBEDDINGS) for x in self.meta_module().modules())

    def forward(self, checkpoint: Checkpoint) -> Forward:
        """Return the model at one checkpoint, on this thread's own copy of the architecture."""
        # Threads share the tensors of a checkpoint, and put them into modules of their own. A
        # module that loads itself has copies of them.
        module, read = self._read(checkpoint if self._loads_itself else None)
        state = {} if self._loads_itself else cached_state(checkpoint, module)
        parameters, buffers, others = read.with_state(state)
        for name in read.overwritten:  # the state is cached, and others read it, too
            parameters[name] = parameters[name].clone()
        return Forward(module, parameters, buffers, checkpoint.name, None, others, read)

    def for_variables(self, n_dims: Mapping[str, int]) -> Model:
        """Return the model whose task reads samples with some variables.

        Parameters
        ----------
        n_dims
            Number of dimensions of each variable and coord.
        """
        bind = getattr(self.task, "for_variables", None)
        if bind is None:
            return self
        return self._with(task=bind(n_dims))

    def at_checkpoints(self, names: Sequence[str]) -> Model:
        """Return the model at some of its checkpoints, in their order; itself if it lacks one.

        Without checkpoints it is what all blocks share: architecture, task and parameters.
        """
        by_name = {checkpoint.name: checkpoint for checkpoint in self.checkpoints}
        if not set(names) <= set(by_name):
            return self
        return self._with(checkpoints=tuple(by_name[name] for name in names))

    def differentiating(self, names: Sequence[str]) -> Model:
        """Return the model of which only some of the selected parameters are differentiated."""
        return self._with(shapes={name: self.shapes[name] for name in names})

    def spec(self) -> dict[str, Any]:
        """Return everything that determines the gradients, as plain JSON values."""
        task = self.task.modelout if isinstance(self.task, TrakTask) else self.task
        build = import_callable(self.build, "build") if isinstance(self.build, str) else self.build
        module, read = self._read(None)
        digests = {} if self._loads_itself else read.digests(module, numbers=False)
        return {
            "task": task_spec(self.task),
            "task_fields": task_fields(self.task),
            "code": {**code_digests(module, task, build), **digests},
            "checkpoints": {c.name: c.digest for c in self.checkpoints},
            "checkpoint_ids": {c.name: c.id for c in self.checkpoints},
            "parameters": {name: list(shape) for name, shape in self.shapes.items()},
        }

    def meta_module(self) -> torch.nn.Module:
        """Return this thread's own copy of the architecture, without weights."""
        return self._read(None)[0]

    def _read(self, checkpoint: Checkpoint | None) -> tuple[torch.nn.Module, Reading]:
        """Return this thread's own module, which has weights only if it loads them itself."""
        # Of this thread alone: a call puts tensors into the module, where calls of other threads
        # would find them.
        modules: dict[str, tuple[torch.nn.Module, Reading]]
        modules = _local.__dict__.setdefault("modules", {})
        key = self.token + (checkpoint.digest if checkpoint else "")
        if key not in modules:
            while len(modules) >= _MOST_MODULES:
                modules.pop(next(iter(modules)))
            modules[key] = self._made(checkpoint)
        return modules[key]

    def _made(self, checkpoint: Checkpoint | None) -> tuple[torch.nn.Module, Reading]:
        """Build the module, and check that it is the same one as ever."""
        module = _meta_module(self.build)
        if checkpoint is not None:
            load(module, cached_state(checkpoint, module), Reading(module).names, checkpoint.name)
        read = Reading(module)
        if checkpoint is not None or not loads_itself(module):  # which may change all of it
            found = read.digests(module)
            first = self._state.setdefault(checkpoint.name if checkpoint else "", found)
            # Numbers that no call reads may differ, such as a number that build counts up.
            labels = read.labels(module) if found != first else set()
            for name in {**first, **found}:
                if first.get(name) != found.get(name) and name not in labels:
                    raise ValueError(
                        f"expected the same model whenever build = {_named(self.build)} is called, "
                        f"as each thread does, got a difference in {name!r}, which is not in "
                        "checkpoints; try register_buffer (and checkpoints that have it), or "
                        "torch.manual_seed(0) inside build, or the module itself: "
                        "td.Model(module, ...)"
                    )
        return module, read

    def _with(self, **changes: Any) -> Model:
        other = object.__new__(type(self))
        vars(other).update(vars(self) | changes)
        return other

    __copy__ = _with

    def __reduce__(self) -> tuple[Any, ...]:
        # distributed has a way of its own with tensors, which does not know those without values;
        # it takes it where pickle fails, as with classes that are defined in a function.
        return _unpickled, (cloudpickle.dumps(vars(self)),)

    def _repr_html_(self) -> str:
        names = [checkpoint.name for checkpoint in self.checkpoints]
        rows = {
            "network": self.build if isinstance(self.build, str) else _named(self.build),
            "task": task_fields(self.task)["class"],
            "checkpoints": f"{len(names)}: {', '.join(names[:5])}{' …' * (len(names) > 5)}",
            "differentiated": f"{self._differentiated()}: {shown(list(self.shapes))}",
        }
        return html_table("trakdask.Model", rows)

    def __repr__(self) -> str:
        n, kind = len(self.checkpoints), task_fields(self.task)["class"]
        return f"<trakdask.Model: {n} checkpoint{'s' * (n != 1)}, {kind}, {self._differentiated()}>"

    def _differentiated(self) -> str:
        """Return how many parameters are differentiated, of how many."""
        chosen = sum(torch.Size(shape).numel() for shape in self.shapes.values())
        frozen = f" ({self._n_frozen:,} of them frozen)" if self._n_frozen else ""
        return f"{chosen:,} of {self._n_parameters:,} parameters{frozen}"


def _unpickled(content: bytes) -> Model:
    model = object.__new__(Model)
    vars(model).update(pickle.loads(content))
    return model


def _base_model(
    build: Any,
    module: torch.nn.Module,
    bases: dict[tuple[str, ...], Checkpoint],
    adapter: Folder | None,
) -> Checkpoint:
    """Return the base model of an adapter, from the files that it names, or else from ``build``.

    Adapters share it.
    """
    places = base_files(adapter)
    if places not in bases:
        # Workers build it, too: it is too large to be sent with every adapter.
        source: Callable[[torch.nn.Module], State] = (
            functools.partial(read_base, places=places)
            if places
            else functools.partial(_built_base, build=build)
        )
        is_sent = not places and isinstance(build, torch.nn.Module)
        bases[places] = cached("base model", source(module), None if is_sent else source)
    return bases[places]


def _built_base(module: torch.nn.Module, build: Any) -> State:
    with building:
        base, names = without_adapters(_built(build))
    return {names[name]: tensor for name, tensor in base.state_dict().items()}


@torch.inference_mode(False)
def _meta_module(build: Any) -> torch.nn.Module:
    """Return a module in evaluation mode, such that every engine can differentiate it."""
    with building:
        module = _built(build)
        if not isinstance(build, torch.nn.Module):
            keep_what_is_saved(module)
        # On GPUs, cuDNN differentiates recurrent layers in training mode only. Without dropout they
        # compute the same in both modes. Sparse gradients of embeddings have the same values as
        # dense ones, which vmap needs.
        for part in module.eval().modules():
            if isinstance(part, torch.nn.RNNBase):
                part.training, part.dropout = True, 0.0
            elif isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag):
                part.sparse = False
        module = uncompiled(module)
        return module if loads_itself(module) else without_weights(module)


def _built(build: Any) -> torch.nn.Module:
    is_module = isinstance(build, torch.nn.Module)
    function = import_callable(build, "build") if isinstance(build, str) else build
    module = build if is_module else function()
    if not isinstance(module, torch.nn.Module):
        raise TypeError(
            f"expected an nn.Module from build = {_named(build)}, got {type(module).__name__}; try "
            "returning the module from the function"
        )
    # Before it is copied, which modules of other code cannot be, and copies do not share memory.
    require_plain(module)
    require_replaceable(module)
    try:
        return copy.deepcopy(module) if is_module else module
    except Exception as err:
        raise TypeError(
            f"expected a module that can be copied, since each thread has its own, got an "
            f"error for {_not_copied(build)!r} ({type(err).__name__}: {err}); try td.Model("
            "build, [module.state_dict()], ...) with a function build that returns the module"
        ) from err


def _not_copied(module: torch.nn.Module) -> str:
    """Return the name of an attribute that cannot be copied."""
    for path, part in module.named_modules():
        for name, value in {**vars(part), "_modules": None}.items():
            try:
                copy.deepcopy(value)
            except Exception:
                return f"{path}.{name}" if path else name
    return type(module).__name__


def _named(build: object) -> str:
    if isinstance(build, torch.nn.Module):
        return type(build).__name__
    return getattr(build, "__name__", None) or repr(build)
