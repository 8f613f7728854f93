"""What is read of a module, once and before anybody calls it, and calls that leave it as it was.

A call with the weights of a checkpoint puts tensors into the module, and the module's own code may
put others there: a cache, a counter, a flag. So what a call may change is noted before each call,
and restored afterwards. Ties, modes and state are thus the same for every call.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from itertools import chain
from operator import is_, itemgetter
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trakdask.models.loading import State, digest_state
from trakdask.models.modules import is_library, names_read
from trakdask.torch_internals import Watching, storage_of, tree_leaves, version_of

_OF_TORCH = frozenset(vars(nn.Module()))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, deque, set)
_NAMESPACES = (SimpleNamespace, argparse.Namespace)
# A handle's number differs between builds, and a logger knows all other loggers.
_NO_STATE = (type, ModuleType, logging.Logger, RemovableHandle)
_DEFAULTS = ("__defaults__", "__kwdefaults__")
_NUMBERS = (bool, int, float, complex, np.generic)


class Reading:
    """The tensors of a module by all of their names, and everything that a call may change.

    Parameters
    ----------
    module
        A module that nobody has called yet, or that is as it was before.
    """

    def __init__(self, module: nn.Module) -> None:
        self.names: dict[str, str] = {}
        """All names of each parameter and buffer, with the first name of the same tensor."""
        self.places: dict[str, str] = {}
        """The same, for tensors in other attributes, too."""
        self.tensors: dict[str, Tensor] = {}
        """By their first names: parameters, then buffers, then tensors in other attributes."""
        self.outside: dict[str, list[tuple[str, Any]]] = {}
        """Tensors, arrays and numbers elsewhere, with their names, by the attribute they are in."""
        self.stuck: dict[str, str] = {}
        """Places where a tensor cannot be replaced, with its first name."""
        self._first: dict[int, str] = {}
        self._slots: dict[str, list[tuple[Any, Any]]] = {}
        self._containers: dict[int, Any] = {}
        self._parts: dict[nn.Module, Reading] = {}
        self.copied: set[str] | None = None
        """Tensors that are copied for each call; the first call copies more, and shows which."""
        self._kept = ExitStack()
        self._is_keeping = False
        # 1. Parameters, then buffers, under all names that they have, also where one module is in
        # the model twice. Parameters come first, so that a tensor which is both is a parameter.
        for kind in ("_parameters", "_buffers"):
            for path, part in module.named_modules(remove_duplicate=False):
                for key, tensor in vars(part)[kind].items():
                    if tensor is not None:
                        name = _joined(path, key)
                        self.names[name] = self._put(name, vars(part)[kind], key, tensor)
            if kind == "_parameters":
                self.parameters = dict(self.tensors)
        self.overwritten = {
            self._first[id(part.weight)]
            for part in module.modules()
            if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None
        }
        """Parameters that every call changes in place: weights of embeddings with max_norm."""
        # 2. Everything else that a call may change. Modules inside of attributes have their own
        # turn.
        modules = {id(part) for part in module.modules()}
        for path, part in module.named_modules():
            own = (vars(part)[name] for name in ("_parameters", "_buffers", "_modules", *_HOOKS))
            self._containers |= {id(container): container for container in (vars(part), *own)}
            for key, value in _attributes(part):
                self._read(_joined(path, key), part, key, value, modules)

    def _put(self, name: str, container: Any, key: Any, tensor: Tensor) -> str:
        """Note one of the places of a tensor, and return its first name."""
        first = self._first.setdefault(id(tensor), name)
        self.places[name], self.tensors[first] = first, tensor
        if container is None:
            self.stuck[name] = first
        else:
            self._slots.setdefault(first, []).append((container, key))
        return first

    def _read(self, name: str, part: nn.Module, key: str, value: Any, modules: set[int]) -> None:
        """Note the state in an attribute that is neither a parameter nor a buffer."""
        found: list[tuple[str, Any]] = []
        # Numbers of torch's own layers are their options, which ``digests`` takes from extra_repr.
        has_numbers = not is_library(type(part).__module__)
        for place, container, at, inside, is_own in _inside(name, vars(part), key, value, modules):
            if isinstance(inside, Tensor):
                # A parameter that is also in a list, say, belongs to the state dict.
                if self._put(place, container, at, inside) not in self.names:
                    found.append((place, inside))
            elif isinstance(inside, np.ndarray) or (
                is_own and has_numbers and isinstance(inside, _NUMBERS)
            ):
                found.append((place, inside))
            elif is_own and type(inside) in _CONTAINERS:
                self._containers[id(inside)] = inside
            elif is_own and type(getattr(inside, "__dict__", None)) is dict:
                self._containers[id(vars(inside))] = vars(inside)
        if found:
            self.outside[name] = found

    def of(self, part: nn.Module) -> Reading:
        """Return what is read of a module inside of this one, in which names are shorter."""
        if part not in self._parts:
            self._parts[part] = Reading(part)
        return self._parts[part]

    def with_state(self, state: Mapping[str, Tensor]) -> tuple[State, State, State]:
        """Return parameters, buffers, and tensors in other attributes, by their first names.

        Parameters
        ----------
        state
            The tensors of a checkpoint, under any of their names. Others are the module's own.
        """
        given = {self.names[name]: tensor for name, tensor in state.items() if name in self.names}
        values = {name: given.get(name, t).detach() for name, t in self.tensors.items()}
        parameters = {name: values.pop(name) for name in self.parameters}
        others = {n: values.pop(n) for n in self.tensors.keys() - self.names.keys()}
        return parameters, values, others

    def digests(self, module: nn.Module, *, numbers: bool = True) -> dict[str, str]:
        """Return digests of the state that is not in a state dict, by attribute.

        Parameters
        ----------
        module
            The module.
        numbers
            Whether attributes count that have numbers alone, layers, and the names of all tensors.
        """
        saved = module.state_dict()
        values = self.outside | {
            name: [(name, self.tensors[first])]
            for name, first in self.names.items()
            if name not in saved and first not in self.parameters
        }
        if not numbers:
            arrays = (Tensor, np.ndarray)
            values = {n: v for n, v in values.items() if any(isinstance(x, arrays) for _, x in v)}
        else:
            shapes = {n: (first, self.tensors[first].shape) for n, first in self.names.items()}
            layers = [
                (name, type(part).__name__, part.extra_repr() * is_library(type(part).__module__))
                for name, part in module.named_modules(remove_duplicate=False)
            ]
            values = {
                "the names and shapes of tensors": [("", repr(shapes))],
                "the layers and their options": [("", repr(layers))],
                **values,
            }
        return {name: _digest(entries) for name, entries in values.items()}

    def labels(self, module: nn.Module) -> set[str]:
        """Return the attributes with numbers that no call reads, such as a number of each layer."""
        items = [(part, *item) for part in module.modules() for item in _attributes(part)]
        inside = (_inside("", None, "", value, set()) for _, _, value in items)
        functions = {e[3] for entries in inside for e in entries if isinstance(e[3], FunctionType)}
        names, texts = names_read(module, functions)
        return {
            name
            for name, found in self.outside.items()
            if all(type(value) in (int, float) for _, value in found)
            and (key := name.rpartition(".")[2]) not in names
            # A text may be the beginning of a name that getattr gets, as in getattr(self,
            # f"ke{x}").
            and not key.startswith(tuple(texts))
        }

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Put tensors, by any of their names, in all places of the module's own."""
        for name, tensor in tensors.items():
            for container, key in self._slots.get(self.places[name], ()):
                container[key] = tensor

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Restore the module after the last call only when the ``with`` body ends.

        Autograd calls parts of it again where the model uses activation checkpointing.
        """
        self._is_keeping = True
        try:
            yield
        finally:
            self._is_keeping = False
            self._kept.close()

    @contextmanager
    def holding(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Put tensors in the module while the ``with`` body runs; then all of it is as before."""
        # After an earlier call inside of ``keeping``: each call starts from the same state.
        self._kept.close()
        # Most containers, those of hooks, are empty.
        before = [(each, each.copy() if each else ()) for each in self._containers.values()]
        # Registered before anything is put, so that an error halfway is undone, too.
        self._kept.callback(_restore, before)
        try:
            self.put(tensors)
            yield
        finally:
            if not self._is_keeping:
                self._kept.close()

    def call(self, module: nn.Module, tensors: Mapping[str, Tensor], args: Any, kwargs: Any) -> Any:
        """Call the module with other tensors, which other threads may use, too.

        A buffer that the module changes in place is copied for each call.

        Raises
        ------
        RuntimeError
            If the module changes another tensor in place.
        """
        # 1. Copies of what a call changes: all but parameters, until the first call has shown it.
        is_first = self.copied is None
        copied = tensors.keys() - self.parameters if self.copied is None else self.copied
        tensors = {n: tensor.clone() if n in copied else tensor for n, tensor in tensors.items()}
        # 2. The call. In the first one, a write to any other tensor is stopped before it happens,
        # since threads share these; later calls only compare versions, which is cheap.
        versions = {name: version_of(tensor) for name, tensor in tensors.items()}
        fixed = tensors.keys() - copied - self.overwritten
        storages = {storage_of(tensors[name]): name for name in fixed} if is_first else {}
        watch = Watching(partial(_keep, storages)) if is_first else nullcontext()
        with self.holding(tensors), watch:
            result = module(*args, **kwargs)
        # 3. What was changed in place: copies may be, all others are an error.
        changed = {name for name, tensor in tensors.items() if version_of(tensor) != versions[name]}
        for name in changed & fixed:
            raise _changed_in_place(name)
        self.copied = changed if is_first else self.copied
        return result


def _restore(before: list[tuple[Any, Any]]) -> None:
    """Restore the containers that do not have the objects of a copy, under the same keys."""
    for container, copy in before:
        is_same = len(container) == len(copy) and all(map(is_, container, copy))
        if is_same and container and isinstance(container, dict):
            is_same = all(map(is_, container.values(), copy.values()))
        if not is_same:
            container.clear()
            (getattr(container, "extend", None) or container.update)(copy)


def _keep(names: Mapping[int, str], func: Any, args: Any, kwargs: Any) -> None:
    """Raise an error before an operation writes to a tensor, named by its place in memory."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written = args[i] if i < len(args) else kwargs.get(argument.name)
            for storage in filter(None, map(storage_of, tree_leaves(written))):
                if storage in names:
                    raise _changed_in_place(names[storage])


def _changed_in_place(name: str) -> RuntimeError:
    return RuntimeError(
        f"expected a call of the model to leave its weights as they are, got {name!r} changed in "
        "place; try a new tensor in the forward pass (w = self.w.clamp(0) for self.w.clamp_(0)), "
        "or the change before td.Model"
    )


def require_replaceable(module: nn.Module) -> None:
    """Reject modules that have a tensor of the state dict where no other one can be put.

    Raises
    ------
    ValueError
        If so. The message names the tensor and the place.
    """
    read = Reading(module)
    saved = _saved(read, module)
    # By place in memory: a view of a parameter is a tensor of its own, with the same values.
    storages = {storage_of(read.tensors[name]): name for name in saved}
    hidden = {place: name for place, name in read.stuck.items() if name in saved}
    for place, value in chain(*read.outside.values()):
        if (storage := storage_of(value)) and storage in storages:
            hidden[place] = storages[storage]
    for place, name in hidden.items():
        raise ValueError(
            f"expected the tensors of a checkpoint in parameters and buffers only, got {name!r} "
            f"also in {place!r}, which would keep other weights; try to take it from the parameter "
            "in the forward pass"
        )


def without_weights(module: nn.Module) -> nn.Module:
    """Move the tensors that checkpoints contain to the meta device; tied tensors stay tied.

    All others travel with the module, on the CPU.
    """
    read = Reading(module)
    saved, moved = _saved(read, module), {}
    for name, tensor in read.tensors.items():
        alone = tensor.detach().to("meta" if name in saved else "cpu")
        is_parameter = isinstance(tensor, nn.Parameter)
        moved[name] = nn.Parameter(alone, tensor.requires_grad) if is_parameter else alone
    read.put(moved)
    return module


def _saved(read: Reading, module: nn.Module) -> set[str]:
    """Return the first names of the tensors in the state dict."""
    return {read.names[name] for name in module.state_dict() if name in read.names}


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _attributes(part: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module that are its own, and hooks, whose functions hold state."""
    # Hooks of torch compute these from parameters before each call: weight_norm, spectral_norm and
    # pruning in their older form.
    hooks = [h for h in part._forward_pre_hooks.values() if type(h).__module__.startswith("torch.")]
    computed = {getattr(hook, name, None) for hook in hooks for name in ("name", "_tensor_name")}
    for name, value in vars(part).items():
        if name in _HOOKS or name not in _OF_TORCH | computed:
            yield name, value


def _inside(
    name: str, container: Any, key: Any, value: Any, modules: set[int]
) -> Iterator[tuple[str, Any, Any, Any, bool]]:
    """Yield the values in an attribute: name, container and key, value, whether it is the module's.

    Where a tensor cannot be replaced, as in a tuple, there is no container. What an object of a
    library has inside is not the module's own.
    """
    todo, seen = [(name, container, key, value, True)], set[int]()
    while todo:
        name, container, key, value, is_own = entry = todo.pop()
        if value is None or isinstance(value, (str, bytes, *_NO_STATE)) or id(value) in modules:
            continue
        if isinstance(value, (Tensor, np.ndarray, *_NUMBERS)):
            yield entry
        elif id(value) not in seen:
            seen.add(id(value))
            yield entry
            is_library_object = is_library(type(value).__module__) and not isinstance(
                value, (*_CONTAINERS, tuple, set, frozenset, *_NAMESPACES)
            )
            is_own = is_own and not is_library_object
            todo += [(name + suffix, *place, is_own) for suffix, *place in _items(value)]


def _items(value: Any) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield the items of a value: suffix of the name, container and key, item."""
    if isinstance(value, dict):
        for i, (key, item) in enumerate(value.items()):
            yield f"[{key!r}]" if isinstance(key, str) else f"[{i}]", value, key, item
    elif isinstance(value, (list, deque)):
        for i, item in enumerate(value):
            yield f"[{i}]", value, i, item
    elif isinstance(value, (tuple, set, frozenset)):
        for i, item in enumerate(value if isinstance(value, tuple) else sorted(value, key=repr)):
            yield f"[{i}]", None, None, item
    elif isinstance(value, partial):
        yield from ((f".{n}", None, None, getattr(value, n)) for n in ("func", "args", "keywords"))
    elif isinstance(value, MethodType):
        yield ".__self__", None, None, value.__self__
    elif isinstance(value, FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with suppress(ValueError):  # a cell that has no value yet
                yield f".{name}", None, None, cell.cell_contents
        yield from ((f".{n}", None, None, getattr(value, n)) for n in _DEFAULTS)
    else:
        for key, item in getattr(value, "__dict__", {}).items():
            yield f".{key}", value.__dict__, key, item
        for kind in type(value).__mro__:
            for key in vars(kind).get("__slots__", ()):
                if key != "__dict__":
                    yield f".{key}", None, None, getattr(value, key, None)


def _digest(values: list[tuple[str, Any]]) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(values, key=itemgetter(0)):  # sets have another order elsewhere
        if isinstance(value, Tensor):
            dense = value.dequantize() if value.is_quantized else value.detach().to_dense()
            dense = dense.new_empty(0, device="cpu") if dense.is_meta else dense
            content = digest_state({name: dense})
        elif isinstance(value, np.ndarray):  # pointers to objects tell nothing
            data = b"" if value.dtype.hasobject else value.tobytes()
            content = f"{value.dtype}{value.shape}{hashlib.sha256(data).hexdigest()}"
        else:
            content = repr(value)
        digest.update(f"{name}|{content}|".encode())
    return digest.hexdigest()[:16]
