"""The ``save_dir`` of a TRAKer as it is on disk: checked, and only read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap

from trakdask._version import __version__
from trakdask.provenance import digest
from trakdask.trak.saver_base import EXTRA

__all__ = [
    "FLAGS",
    "GRADS",
    "OUT_TO_LOSS",
    "Run",
    "checked",
    "find_run",
    "mapped",
    "require_experiment",
    "require_finalized",
    "state",
]

GRADS = "grads.mmap"
OUT_TO_LOSS = "out_to_loss.mmap"
FLAGS = "_is_featurized.mmap"
_PROJ_DIM, _TRAIN_SIZE = "JL dimension", "train set size"
_NOT_OF_THE_MATRIX = ("lambda_reg", "version")


@dataclass(frozen=True)
class Run:
    """A directory, its metadata, and the model ids that are opened."""

    folder: Path
    metadata: Mapping[str, Any]
    ids: tuple[int, ...]

    @property
    def n_samples(self) -> int:
        """Size of the training set."""
        return int(self.metadata[_TRAIN_SIZE])

    @property
    def proj_dim(self) -> int:
        """Columns of the projected gradients."""
        return int(self.metadata[_PROJ_DIM])

    def paths(self, file: str) -> tuple[Path, ...]:
        """Return the file of this name of every checkpoint."""
        return tuple(self.folder / str(id) / file for id in self.ids)

    def attrs(self) -> dict[str, Any]:
        """Return what features and targets of this directory share and no other features have."""
        files = zip(*(self.paths(name) for name in (GRADS, OUT_TO_LOSS, FLAGS)), strict=True)
        return {
            "projector": {"kind": "traker", "proj_dim": self.proj_dim, "metadata": self._matrix()},
            "checkpoints": {str(id): state(each) for id, each in zip(self.ids, files, strict=True)},
            "checkpoint_ids": {str(id): id for id in self.ids},
            "parameters": {},
            "task": "unknown",  # as are the parameters
            "formula": "feature = p^-1/2 P^T grad f",
            "trakdask_version": __version__,
        }

    def _matrix(self) -> dict[str, Any]:
        """Return what the metadata say of the projection; runs of ``trakdask.trak`` say more."""
        about = {key: value for key, value in self.metadata.items() if key != _TRAIN_SIZE}
        if isinstance(extra := about.get(EXTRA), Mapping):
            about[EXTRA] = {k: value for k, value in extra.items() if k not in _NOT_OF_THE_MATRIX}
        return about

    def source(self, of: str = "") -> str:
        """Name the samples: by the path, so that a checkpoint may be added later."""
        about = {"path": str(self.folder), "samples": self.n_samples, "of": of}
        return f"traker-{digest(about)[:32]}"


def find_run(save_dir: str | os.PathLike[str], model_ids: Iterable[int] | None) -> Run:
    """Return the run that is in a folder, with all of its checkpoints or the chosen ones."""
    folder = _existing(save_dir)
    return Run(folder, _metadata(folder), _chosen(folder, model_ids))


def _existing(save_dir: str | os.PathLike[str]) -> Path:
    folder = Path(save_dir).expanduser().resolve()
    if not folder.is_dir():
        raise FileNotFoundError(
            f"expected the save_dir of a TRAKer, got {str(save_dir)!r}, which is no folder; try "
            f"the absolute path (this process runs in {os.getcwd()})"
        )
    return folder


def _metadata(folder: Path) -> dict[str, Any]:
    path = folder / "metadata.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"expected metadata.json in {folder}, got {_listed(folder)}; try {_instead(folder)}"
        )
    found = _json(path)
    sizes = [found.get(_PROJ_DIM), found.get(_TRAIN_SIZE)]
    if not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError(
            f"expected positive whole numbers for {_PROJ_DIM!r} and {_TRAIN_SIZE!r} in {path}, got "
            f"{sizes}; try to restore the file from the arguments of the TRAKer"
        )
    return found


def _instead(folder: Path) -> str:
    """Return what may have been meant by a folder without metadata."""
    nested = sorted(path.parent.name for path in folder.glob("*/metadata.json"))
    if nested:
        return f"one of the runs inside it: {nested}"
    return (
        "to make a TRAKer there with the arguments of the run and load_from_save_dir=True, which "
        "writes the file"
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as err:
        raise ValueError(
            f"expected JSON in {path}, got {err}; try to restore the file, which a job that was "
            "killed may have cut short"
        ) from err
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object in {path}, got {found!r:.60}; try to restore it")
    return found


def _chosen(folder: Path, model_ids: Iterable[int] | None) -> tuple[int, ...]:
    """Return the model ids to open: registered in this folder, not in those inside it."""
    stems = (path.stem.removeprefix("id_") for path in folder.glob("id_*.json"))
    known = sorted(int(stem) for stem in stems if stem.removeprefix("-").isdecimal())
    if not known:
        raise FileNotFoundError(
            f"expected a file id_<model_id>.json for each checkpoint in {folder}, got "
            f"{_listed(folder)}; try again once load_checkpoint has registered a model id"
        )
    if model_ids is None:
        return tuple(known)
    if isinstance(model_ids, (str, bytes)) or not isinstance(model_ids, Iterable):
        raise TypeError(
            f"expected a list of model ids as model_ids, got {model_ids!r}; try "
            f"model_ids={known[:1]}"
        )
    chosen = tuple(model_ids)
    if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(known):
        raise ValueError(
            f"expected different model ids out of the {known} of {folder}, got {list(chosen)}; try "
            f"model_ids={known[:1]}"
        )
    return chosen


def require_experiment(run: Run, exp_name: str, paths: Sequence[Path]) -> None:
    """Refuse the name of an experiment that is not there, or not at every checkpoint."""
    having = [id for id, path in zip(run.ids, paths, strict=True) if path.is_file()]
    if len(having) == len(run.ids):
        return
    if having:
        raise ValueError(
            f"expected target gradients of {exp_name!r} at the checkpoints {list(run.ids)} of "
            f"{run.folder}, got them at {having} only; try td.open_traker(save_dir, {exp_name!r}, "
            f"model_ids={having}), or score the others"
        )
    suffix = f"_{GRADS}"
    files = (path for id in run.ids for path in (run.folder / str(id)).glob(f"*{suffix}"))
    names = sorted({path.name.removesuffix(suffix) for path in files})
    instead = f"exp_name={names[0]!r}" if names else "td.open_traker(save_dir), without exp_name"
    raise ValueError(
        f"expected one of the experiments {names} of {run.folder}, got {exp_name!r}; try {instead}"
    )


def require_finalized(run: Run, exp_name: str) -> None:
    """Refuse target gradients of checkpoints that could not be scored: the files hold zeros."""
    states = {id: _json(run.folder / f"id_{id}.json").get(str(id), {}) for id in run.ids}
    missing = [id for id, state in states.items() if state.get("is_finalized") != 1]
    if missing:
        raise ValueError(
            f"expected finalized features of every checkpoint of {exp_name!r}, since others are "
            f"not scored, got none of model ids {missing} in {run.folder}; try "
            "traker.finalize_features() and score the targets again, or td.open_traker(save_dir) "
            "without exp_name"
        )


def checked(path: Path, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str]) -> str:
    """Check header and size of the file of an array, without reading rows; return its dtype."""
    array = mapped(path)
    if array.shape not in shapes or array.dtype.name not in dtypes:
        raise ValueError(
            f"expected an array {shapes[0]} of {' or '.join(dtypes)} in {path}, as metadata.json "
            f"says, got {array.shape} of {array.dtype.name}; try the directory that this file came "
            "from, or restore metadata.json"
        )
    return array.dtype.name


def mapped(path: Path) -> np.ndarray:
    """Map a file read-only. The ending is .mmap, the format is that of .npy."""
    try:
        return open_memmap(path, mode="r")
    except FileNotFoundError as err:
        raise FileNotFoundError(
            f"expected the array {path.name} in {path.parent}, got {_listed(path.parent)}; try "
            "model_ids= without this checkpoint, or featurize it again (finalize_features with "
            "del_grads=True removes grads.mmap)"
        ) from err
    except (ValueError, EOFError, OSError) as err:
        raise ValueError(
            f"expected a whole array in {path}, got {path.stat().st_size:,} bytes ({err}); try to "
            "copy the file again, or model_ids= without this checkpoint"
        ) from err


def state(paths: Iterable[Path]) -> str:
    """Digest sizes and times of files, which change when a run goes on."""
    stats = [path.stat() for path in paths]
    return digest({"files": [[stat.st_size, stat.st_mtime_ns] for stat in stats]})[:32]


def _listed(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return f"{names[:5]}{' and others' if len(names) > 5 else ''}" if names else "an empty folder"
