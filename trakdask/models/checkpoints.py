"""Read checkpoints safely, identify them by a hash of their tensors, and cache them."""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any

import fsspec
import safetensors.torch
import torch
from torch import Tensor

from trakdask.checks import require_integer
from trakdask.errors import CheckpointError
from trakdask.files import Folder, location
from trakdask.models.loading import as_state, is_extra_state

State = dict[str, Tensor]
CheckpointLike = str | Path | Mapping[str, Tensor]
Accept = Callable[[str, State, "Folder | None"], "Checkpoint | None"]

_SUFFIXES = (".pt", ".pth", ".bin", ".safetensors")
_FEWEST_STATES = 2

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
_STEP = re.compile(r"checkpoint-(\d+)")


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
            while len(self.by_digest) > _FEWEST_STATES and self._n_bytes() > self.most_bytes:
                self.by_digest.popitem(last=False)
            return self.by_digest[digest]

    def _n_bytes(self) -> int:
        states = self.by_digest.values()
        return sum(tensor.nbytes for state in states for tensor in state.values())


_states = States()


@dataclass(frozen=True)
class Checkpoint:
    """One set of weights: where it is stored, and a hash of its content.

    Parameters
    ----------
    name
        Label on the ``checkpoint`` dimension.
    source
        Paths or URLs of the files with the tensors, the tensors, or a function that returns them.
    digest
        SHA-256 of the names, dtypes, shapes and bytes of all tensors. The digest of an adapter
        contains the digest of its base model.
    id
        The number in [0, 2³²) that selects the projection matrix.
    base
        The base model, if the tensors belong to an adapter alone.
    key
        Key of the state dict in a file that holds more than that.
    """

    name: str
    source: tuple[str, ...] | State | Callable[[], Mapping[str, Tensor]] = field(
        repr=False, compare=False
    )
    digest: str
    id: int
    base: Checkpoint | None = None
    key: str | None = None


def make_checkpoints(
    checkpoints: Iterable[CheckpointLike] | Mapping[str, CheckpointLike],
    ids: Iterable[int] | None = None,
    *,
    key: str | None = None,
    accept: Accept = lambda name, state, folder: None,
) -> tuple[Checkpoint, ...]:
    """Read and hash checkpoints given as a list or as a mapping from name to checkpoint.

    Parameters
    ----------
    checkpoints
        Paths or URLs (``.pt``, ``.safetensors``, folders of ``save_pretrained``) or state dicts. In
        a list, a file is named by its stem, a folder by its name and a state dict by its position.
        One path of a folder with ``checkpoint-<step>`` folders stands for these.
    ids
        Projection ids; by default the first 32 bits of each content hash.
    key
        Key of the state dict in files and mappings that hold more than that.
    accept
        Called with the name, the tensors and the folder (or None) of each checkpoint while it is in
        memory. Raises an error if they are wrong, and returns the base model if they belong to an
        adapter alone.

    Raises
    ------
    FileNotFoundError, CheckpointError
        If a file is missing or cannot be read.
    ValueError
        If there is no checkpoint, one is given twice, or ids are invalid.
    """
    named = _named(checkpoints)
    if not named:
        raise ValueError("expected at least one checkpoint, got none; try checkpoints=['model.pt']")
    opened = [_open(name, value, key, accept) for name, value in named.items()]
    digests = [checkpoint.digest for checkpoint in opened]
    if len(set(digests)) < len(digests):
        twice = [checkpoint.name for checkpoint in opened if digests.count(checkpoint.digest) > 1]
        raise ValueError(
            f"expected checkpoints with different weights, got the same in {twice}; try leaving "
            "the copies out"
        )
    numbers = _ids(digests, ids)
    return tuple(replace(checkpoint, id=id) for checkpoint, id in zip(opened, numbers, strict=True))


def digest_state(state: Mapping[str, Tensor]) -> str:
    """Hash the names, dtypes, shapes and bytes of all tensors, in one pass over the bytes."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _digest(state: Mapping[str, Tensor], base: Checkpoint | None) -> str:
    digest = digest_state(state)
    if base is None:
        return digest
    return hashlib.sha256(f"{base.digest}|{digest}".encode()).hexdigest()


def cached_state(checkpoint: Checkpoint) -> State:
    """Return the tensors of a checkpoint; each process caches the last two, and others that fit.

    An adapter has only its own tensors here; its base model is a checkpoint of its own.

    The hash is verified at each read, because a file that has changed since the model was created
    would give features of other weights under the old name.
    """
    return _states.get(checkpoint.digest, lambda: _read_verified(checkpoint))


def cache_states(most_bytes: int) -> None:
    """Let this process cache the tensors of as many checkpoints as fit in these bytes."""
    _states.most_bytes = most_bytes


def _read_verified(checkpoint: Checkpoint) -> State:
    source = checkpoint.source
    if isinstance(source, tuple):
        state = _read_files(source, checkpoint.key)
    else:
        state = as_state(source()) if callable(source) else source
    if (digest := _digest(state, checkpoint.base)) != checkpoint.digest:
        raise CheckpointError(
            f"expected checkpoint {checkpoint.name!r} as td.Model has read it (content hash "
            f"{checkpoint.digest[:12]}), got {digest[:12]} on host {socket.gethostname()!r}; try "
            "creating the td.Model again"
        )
    return state


def read_state(place: str, key: str | None = None) -> State:
    """Read a state dict from a ``.safetensors`` file or a ``torch.save`` file of plain tensors.

    The file, at a path or URL, is read into memory and not memory-mapped, because training may
    overwrite it later, and its tensors would then no longer match their hash.

    Raises
    ------
    OSError
        If the file cannot be opened.
    CheckpointError
        If the file is damaged, or contains pickled code or anything but tensors by name.
    """
    try:
        with fsspec.open(place, "rb") if "://" in place else open(place, "rb") as file:
            if place.endswith(".safetensors"):
                content = safetensors.torch.load(file.read())
            else:
                content = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, MemoryError):
        raise
    except Exception as err:  # on other bytes the unpickler fails in many ways
        raise CheckpointError(
            f"checkpoint {place!r} cannot be read ({type(err).__name__}: {_first_sentence(err)}); "
            "try saving model.state_dict(), or copying the file again"
        ) from err
    return _state(content, place, key)


def _first_sentence(err: Exception) -> str:
    """Return the fact of an error of torch, whose advice follows, in bold."""
    return str(err).partition("\n")[0].partition(". ")[0]


def _state(content: Any, where: str, key: str | None) -> State:
    """Return the state dict in the content of a file or of a mapping in memory."""
    if key is not None and isinstance(content, Mapping) and key in content:
        content = content[key]
    if _is_state(content):
        return as_state(content)
    names = list(content) if isinstance(content, Mapping) else []
    inside = [name for name in names if _is_state(content[name])]
    advice = f"td.Model(..., key={inside[0]!r})" if inside else "model.state_dict()"
    raise CheckpointError(
        f"expected a state dict (tensors by parameter name) in checkpoint {where!r}, got "
        f"{type(content).__name__} with the keys {names[:5]}; try {advice}"
    )


def _is_state(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and any(isinstance(entry, Tensor) for entry in value.values())
        and all(isinstance(v, Tensor) or is_extra_state(str(n)) for n, v in value.items())
    )


def _named(
    checkpoints: Iterable[CheckpointLike] | Mapping[str, CheckpointLike],
) -> dict[str, CheckpointLike]:
    if isinstance(checkpoints, (str, Path)):
        folder = folder_at(location(checkpoints))
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
    if not len(names) == len(values) == len(set(names)):
        names = [str(position) for position in range(len(values))]
    return dict(zip(names, values, strict=True))


def _open(name: str, value: CheckpointLike, key: str | None, accept: Accept) -> Checkpoint:
    folder, source = None, tuple[str, ...]()
    if isinstance(value, (str, Path)):
        place = location(value)
        folder = folder_at(place)
        source = tuple(require_weight_files(folder)) if folder else (place,)
        state = _read_files(source, key)
    else:  # copied, because the caller may continue to train the module
        state = _state(value, name, key)
        state.update({n: tensor.detach().cpu().clone() for n, tensor in state.items()})
    base = accept(name, state, folder)
    digest = _digest(state, base)
    _states.get(digest, lambda: state)
    return Checkpoint(name, source or state, digest, 0, base, key)


def _read_files(places: Iterable[str], key: str | None) -> State:
    whole, *others = (read_state(place, key) for place in places)
    for state in others:
        whole |= state
    return whole


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
    """Return the folder at a path or URL; a URL that does not end like weights is a folder."""
    is_url = "://" in place
    is_folder = Path(place).suffix not in _SUFFIXES if is_url else os.path.isdir(place)
    return Folder(place) if is_folder else None


def _ids(digests: list[str], ids: Iterable[int] | None) -> list[int]:
    if ids is None:
        return [int(digest[:8], 16) for digest in digests]
    remedy = "try checkpoint_ids=None, for ids from the content"
    numbers = [require_integer("each of checkpoint_ids", n, 0, 2**32, remedy=remedy) for n in ids]
    if not len(numbers) == len(digests) == len(set(numbers)):
        raise ValueError(
            f"expected {len(digests)} different checkpoint_ids, one per checkpoint, got {numbers}; "
            f"{remedy}"
        )
    return numbers
