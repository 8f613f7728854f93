"""Read checkpoints safely, identify them by a hash of their tensors, and cache them."""

from __future__ import annotations

import copy
import hashlib
import os
import re
import socket
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import fsspec
import safetensors.torch
import torch
from torch import Tensor, nn

from trakdask.checks import require_integer
from trakdask.errors import CheckpointError
from trakdask.files import UNCACHED, Folder, location
from trakdask.models.loading import State, digest_state
from trakdask.models.pretrained import base_names, without_adapters
from trakdask.models.state_dicts import fitted, require_whole, states_in

CheckpointLike = str | Path | Mapping[str, Tensor]

_FEWEST_STATES = 2

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
_ADAPTER_CONFIG = "adapter_config.json"
# Ways of PEFT to begin an adapter that change the weights of its base model.
_START_FROM_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_STEP = re.compile(r"checkpoint-(\d+)")

# What torch and safetensors say of files that end too early.
_CUT = ("central directory", "EOF", "Ran out", "not fully covered", "header length", "too small")


class States:
    """A cache of state dicts by the digest of their content; the least recently used go first.

    The last two stay however large they are, because an adapter needs its base model, too.
    """

    def __init__(self) -> None:
        self.most_bytes = 0
        """How large all state dicts together may be, beyond the last two."""
        self.by_digest: OrderedDict[str, State] = OrderedDict()
        self._lock = Lock()

    def get(self, digest: str, read: Callable[[], State]) -> State:
        """Return a state dict; one thread reads it, and the others wait for the same tensors."""
        with self._lock:
            if digest not in self.by_digest:
                self.by_digest[digest] = read()
            self.by_digest.move_to_end(digest)
            sizes = {d: sum(t.nbytes for t in s.values()) for d, s in self.by_digest.items()}
            # A task that still uses tensors keeps them alive.
            while len(sizes) > _FEWEST_STATES and sum(sizes.values()) > self.most_bytes:
                del sizes[self.by_digest.popitem(last=False)[0]]
            return self.by_digest[digest]


_states = States()


@dataclass(frozen=True)
class Checkpoint:
    """One set of weights: where it is stored, and a hash of its content.

    Parameters
    ----------
    name
        Label on the ``checkpoint`` dimension.
    source
        The tensors, or a function of the model on the meta device that reads them.
    digest
        SHA-256 of the names, dtypes, shapes and bytes of all tensors. The digest of an adapter
        contains the digest of its base model.
    id
        The number in [0, 2³²) that selects the projection matrix.
    base
        The base model, if the tensors belong to an adapter alone.
    """

    name: str
    source: State | Callable[[nn.Module], State] = field(repr=False, compare=False)
    digest: str
    id: int
    base: Checkpoint | None = None


def make_checkpoints(
    checkpoints: Iterable[CheckpointLike] | Mapping[str, CheckpointLike],
    module: nn.Module,
    ids: Iterable[int] | None = None,
    *,
    key: str | None = None,
    prefix: str | None = None,
    base_of: Callable[[Folder | None], Checkpoint | None] = lambda folder: None,
) -> tuple[Checkpoint, ...]:
    """Read and hash checkpoints given as a list or as a mapping from name to checkpoint.

    Parameters
    ----------
    checkpoints
        Paths or URLs of files, or of folders of ``save_pretrained``, or state dicts. In a list, a
        file is named by its stem, a folder by its name and a state dict by its position. One path
        of a folder with ``checkpoint-<step>`` folders stands for these.
    module
        The model on the meta device, which the tensors must fit.
    ids
        Projection ids; by default the first 32 bits of each content hash.
    key, prefix
        As of :func:`~trakdask.models.state_dicts.fitted`.
    base_of
        Called with the folder, or None, of an adapter without its base model, which it returns.

    Raises
    ------
    FileNotFoundError, CheckpointError
        If a file is missing or cannot be read.
    ValueError
        If there is no checkpoint, one is given twice, or ids are invalid.
    """
    # 1. Names, and the tensors by the names of the model.
    named = _named(checkpoints)
    if not named:
        raise ValueError("expected at least one checkpoint, got none; try checkpoints=['model.pt']")
    fit = partial(fitted, key=key, prefix=prefix)
    opened = [_open(name, value, module, fit, base_of) for name, value in named.items()]
    # 2. Equal weights would get equal random matrices, and count twice in each mean of checkpoints.
    digests = [checkpoint.digest for checkpoint in opened]
    if len(set(digests)) < len(digests):
        twice = [checkpoint.name for checkpoint in opened if digests.count(checkpoint.digest) > 1]
        raise ValueError(
            f"expected checkpoints with different weights, got the same in {twice}; try leaving "
            "the copies out"
        )
    # 3. A number for each, which selects its random matrix.
    numbers = [int(digest[:8], 16) for digest in digests]
    if ids is not None:
        what, remedy = "each of checkpoint_ids", "try checkpoint_ids=None, for ids from the content"
        numbers = [require_integer(what, n, 0, 2**32, remedy=remedy) for n in ids]
        if not len(numbers) == len(digests) == len(set(numbers)):
            raise ValueError(
                f"expected {len(digests)} different checkpoint_ids, one per checkpoint, got "
                f"{numbers}; {remedy}"
            )
    return tuple(replace(checkpoint, id=id) for checkpoint, id in zip(opened, numbers, strict=True))


def _digest(state: Mapping[str, Tensor], base: Checkpoint | None) -> str:
    digest = digest_state(state)
    if versions := getattr(state, "_metadata", None):  # with others, it is loaded otherwise
        digest = hashlib.sha256(f"{sorted(versions.items())}|{digest}".encode()).hexdigest()
    if base is None:
        return digest
    return hashlib.sha256(f"{base.digest}|{digest}".encode()).hexdigest()


def cached_state(checkpoint: Checkpoint, module: nn.Module) -> State:
    """Return the tensors of a checkpoint; each process caches the last two, and others that fit.

    The hash is verified at each read, because a file that has changed since the model was created
    would give features of other weights under the old name.
    """

    def read() -> State:
        source = checkpoint.source
        state = source(module) if callable(source) else source
        if (digest := _digest(state, checkpoint.base)) != checkpoint.digest:
            raise CheckpointError(
                f"expected checkpoint {checkpoint.name!r} as td.Model has read it (content hash "
                f"{checkpoint.digest[:12]}), got {digest[:12]} on host {socket.gethostname()!r}; "
                "try creating the td.Model again"
            )
        return state

    state = _states.get(checkpoint.digest, read)
    if checkpoint.base is None:
        return state
    return cached_state(checkpoint.base, module) | state


def cache_states(most_bytes: int) -> None:
    """Let this process cache the tensors of as many checkpoints as fit in these bytes."""
    _states.most_bytes = most_bytes


def read_state(value: CheckpointLike) -> State:
    """Read the tensors in a file, or take those that are given, by the names that they have."""
    content = read_content(location(value)) if isinstance(value, (str, Path)) else value
    state = states_in(content, f"{value!s:.60}").get(None, {})
    return {name: tensor.detach().cpu() for name, tensor in state.items()}


def read_content(place: str) -> Any:
    """Read a ``.safetensors`` file, or a ``torch.save`` file that needs no code to be read.

    The file, at a path or URL, is read into memory and not memory-mapped, because training may
    overwrite it later, and its tensors would then no longer match their hash.

    Raises
    ------
    OSError
        If the file cannot be opened.
    CheckpointError
        If the file is damaged, or contains pickled code.
    """
    with fsspec.open(place, "rb") if "://" in place else open(place, "rb") as file:
        try:
            if place.endswith(".safetensors"):
                return safetensors.torch.load(file.read())
            return torch.load(file, map_location="cpu", weights_only=True)
        # These say enough by themselves, and the file may be whole.
        except (OSError, MemoryError):
            raise
        except Exception as err:  # on other bytes the unpickler fails in many ways
            file.seek(0)
            raise CheckpointError(
                f"checkpoint {place!r} cannot be read: {_reason(str(err), file.read(20))}"
            ) from err


def _reason(error: str, begin: bytes) -> str:
    """Say what torch or safetensors found, and what to try."""
    trusted = (
        "try content = torch.load(file, weights_only=False), if you trust the file, and as the "
        "checkpoint content['state_dict'], or content.state_dict() of a module; or save "
        "model.state_dict() alone"
    )
    if "TorchScript" in error:
        return (
            "it is a program of torch.jit.save; try torch.jit.load(file).state_dict() as the "
            "checkpoint"
        )
    if ".tar format" in error:
        return f"it has the tar format of torch 0.1, which may run code; {trusted}"
    if " GLOBAL " in error:
        name = error.partition(" GLOBAL ")[2].split()[0]
        return f"it has {name} in it, which may run code; {trusted}"
    if not error or any(words in error for words in _CUT):
        return "it ends too early; try copying it again, or saving model.state_dict() again"
    return (
        f"it begins with {begin!r}, as no file of torch.save or safetensors does; try git lfs "
        "pull, downloading it again, or torch.save(model.state_dict(), file)"
    )


def _named(
    checkpoints: Iterable[CheckpointLike] | Mapping[str, CheckpointLike],
) -> dict[str, CheckpointLike]:
    if isinstance(checkpoints, (str, Path)):
        folder = folder_at(location(checkpoints))
        # A folder that has weights itself is one checkpoint, although there may be others in it:
        # Trainer saves the last model above the checkpoints of its run.
        of_run = checkpoint_folders(folder) if folder and not weight_files(folder) else []
        return _named(of_run or [checkpoints])
    if isinstance(checkpoints, Mapping):
        if checkpoints and all(isinstance(value, Tensor) for value in checkpoints.values()):
            raise ValueError(
                "expected a list of checkpoints, got one state dict (its first tensor is "
                f"{next(iter(checkpoints))!r}); try checkpoints=[state_dict]"
            )
        return {str(name): value for name, value in checkpoints.items()}
    values = list(checkpoints)
    places = [location(value) for value in values if isinstance(value, (str, Path))]
    names = [Path(place).name if folder_at(place) else Path(place).stem for place in places]
    # State dicts have no names, and files of several runs often have the same ones.
    if not len(names) == len(values) == len(set(names)):
        names = [str(position) for position in range(len(values))]
    return dict(zip(names, values, strict=True))


def _open(
    name: str,
    value: CheckpointLike,
    module: nn.Module,
    fit: Callable[[nn.Module, Any, str], State],
    base_of: Callable[[Folder | None], Checkpoint | None],
) -> Checkpoint:
    # 1. The tensors in the checkpoint, by their names in the model.
    folder, source = None, None
    if isinstance(value, (str, Path)):
        place = location(value)
        folder = folder_at(place)
        places = require_weight_files(folder) if folder else [place]
        source = partial(read_files, places=places, name=name, fit=fit)
        state = source(module)
    else:  # copied, because the caller may continue to train the module
        state = fit(module, value, name)
        # In place, because the versions of a module that loads itself are an attribute of its
        # state.
        state.update({n: tensor.detach().cpu().clone() for n, tensor in state.items()})
    # 2. The base model, where these are only the tensors of an adapter.
    base = base_of(folder) if base_names(module) - set(state) else None
    if base is not None:
        require_whole(module, cached_state(base, module) | state, name)
    return cached(name, state, source, base)


def cached(
    name: str,
    state: State,
    source: Callable[[nn.Module], State] | None,
    base: Checkpoint | None = None,
) -> Checkpoint:
    """Return the checkpoint of some tensors, or of a function that reads them; cache them."""
    digest = _digest(state, base)
    _states.get(digest, lambda: state)
    return Checkpoint(name, source or state, digest, 0, base)


def read_files(
    module: nn.Module,
    places: Iterable[str],
    name: str,
    fit: Callable[[nn.Module, Any, str], State],
) -> State:
    """Read a checkpoint from its only file, or from its shards."""
    content, *shards = (read_content(place) for place in places)
    for shard in shards:
        content |= shard
    return fit(module, content, name)


def read_base(module: nn.Module, places: Iterable[str]) -> State:
    """Read the base model below an adapter, by the names of its tensors in the whole model.

    Tensors that do not fit are left out, because the adapter may have brought its own: embeddings
    of more words.
    """
    # A copy, out of which the adapters are taken; the caller's module keeps its own.
    base, names = without_adapters(copy.deepcopy(module))
    needed = base.state_dict()
    state = read_files(base, places, "base model", partial(fitted, strict=False))
    fits = {n: t for n, t in state.items() if n in needed and t.shape == needed[n].shape}
    return {names[name]: tensor for name, tensor in fits.items()}


def base_files(adapter: Folder | None) -> tuple[str, ...]:
    """Return the files of the base model that an adapter names, or nothing without any."""
    if adapter is None or _ADAPTER_CONFIG not in adapter.names():
        return ()
    config = adapter.read_json(_ADAPTER_CONFIG)
    name = config.get("base_model_name_or_path")
    folder = Folder(location(name)) if name else None
    if not folder or not weight_files(folder):
        return ()
    start = str(config.get("init_lora_weights")).lower()
    if start.startswith(_START_FROM_BASE):
        raise CheckpointError(
            "expected an adapter beside the weights of its base model, got one with "
            f"init_lora_weights={start!r} in {adapter.url!r}, which PEFT takes out of the base "
            "model first; try model.state_dict() of the PeftModel that "
            "PeftModel.from_pretrained returns as the checkpoint"
        )
    return tuple(require_weight_files(folder))


def checkpoint_folders(folder: Folder) -> list[str]:
    """Return the folders ``checkpoint-<step>`` that ``Trainer`` wrote, in the order of steps."""
    steps = [match for name in folder.names() if (match := _STEP.fullmatch(name))]
    return [f"{folder.url}/{match[0]}" for match in sorted(steps, key=lambda match: int(match[1]))]


def weight_files(folder: Folder) -> list[str]:
    """Return the names of the files with the weights in a folder: one, all shards, or none.

    An adapter comes before a whole model, which PEFT does not write beside it. safetensors comes
    before pickled files, as in transformers.
    """
    names = folder.names()
    for name in (*_ADAPTERS, *_WEIGHTS):
        if name in names:
            return [name]
        if f"{name}.index.json" in names:
            return sorted(set(folder.read_json(f"{name}.index.json")["weight_map"].values()))
    return []


def require_weight_files(folder: Folder) -> list[str]:
    """Return the places of the files with weights as :func:`weight_files`; there must be some."""
    if files := weight_files(folder):
        return [f"{folder.url}/{name}" for name in files]
    raise CheckpointError(
        "expected a folder with model.safetensors, its shards and their index, or "
        f"adapter_model.safetensors, as checkpoint, got the folder {folder.url!r} with "
        f"{folder.names()[:5] or 'nothing inside (or it does not exist)'}; try the path of one of "
        f"its files, or checkpoints={folder.url!r} for all checkpoints of a run"
    )


def folder_at(place: str) -> Folder | None:
    """Return the folder at a path or URL, or None for a file."""
    if "://" in place:
        fs, path = fsspec.core.url_to_fs(place, **UNCACHED)
        # Object stores have no empty folders. So what is no file may be a folder, and if it is
        # none, require_weight_files finds no weights in it.
        return None if fs.isfile(path) else Folder(place)
    return Folder(place) if os.path.isdir(place) else None
