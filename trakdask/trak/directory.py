"""Read and check the ``save_dir`` of a TRAKer."""

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
    """A directory, its metadata, and the model ids to open."""

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
        """Return the path of the file with this name for every checkpoint."""
        return tuple(self.folder / str(id) / file for id in self.ids)

    def attrs(self) -> dict[str, Any]:
        """Return the attrs that identify features and targets of this directory."""
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
        """Return the metadata of the projection, of which runs of ``trakdask.trak`` have more."""
        about = {key: value for key, value in self.metadata.items() if key != _TRAIN_SIZE}
        if isinstance(extra := about.get(EXTRA), Mapping):
            about[EXTRA] = {k: value for k, value in extra.items() if k not in _NOT_OF_THE_MATRIX}
        return about

    def source(self, of: str = "") -> str:
        """Identify the samples by the path, so that a checkpoint may be added later."""
        about = {"path": str(self.folder), "samples": self.n_samples, "of": of}
        return f"traker-{digest(about)[:32]}"


def find_run(save_dir: str | os.PathLike[str], model_ids: Iterable[int] | None) -> Run:
    """Return the run in a folder, with all of its checkpoints or the chosen ones."""
    folder = _existing(save_dir)
    return Run(folder, _metadata(folder), _chosen(folder, model_ids))


def _existing(save_dir: str | os.PathLike[str]) -> Path:
    folder = Path(save_dir).expanduser().resolve()
    if not folder.is_dir():
        raise FileNotFoundError(
            f"expected the save_dir of a TRAKer, got {str(save_dir)!r}, which is not a folder; try "
            f"the absolute path (this process runs in {os.getcwd()})"
        )
    return folder


def _metadata(folder: Path) -> dict[str, Any]:
    path = folder / "metadata.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"expected metadata.json in {folder}, got {_listed(folder)}; try {_instead(folder)}"
        )
    metadata = _json(path)
    sizes = [metadata.get(_PROJ_DIM), metadata.get(_TRAIN_SIZE)]
    if not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError(
            f"expected positive whole numbers for {_PROJ_DIM!r} and {_TRAIN_SIZE!r} in {path}, got "
            f"{sizes}; try restoring the file from the arguments of the TRAKer"
        )
    return metadata


def _instead(folder: Path) -> str:
    """Return a suggestion of what to do about a folder without metadata."""
    nested = sorted(path.parent.name for path in folder.glob("*/metadata.json"))
    if nested:
        return f"one of the runs inside it: {nested}"
    return (
        "creating a TRAKer there with the arguments of the run and load_from_save_dir=True, which "
        "writes the file"
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as err:
        raise ValueError(
            f"expected JSON in {path}, got a damaged file ({err}); try restoring it, since a job "
            "that was killed may have truncated it"
        ) from err
    if not isinstance(content, dict):
        raise ValueError(
            f"expected a JSON object in {path}, got {content!r:.60}; try restoring the file"
        )
    return content


def _chosen(folder: Path, model_ids: Iterable[int] | None) -> tuple[int, ...]:
    """Return the model ids to open, of those registered in this folder but not in subfolders."""
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
    """Reject the name of an experiment that does not exist, or not for every checkpoint."""
    having = [id for id, path in zip(run.ids, paths, strict=True) if path.is_file()]
    if len(having) == len(run.ids):
        return
    if having:
        raise ValueError(
            f"expected target gradients of {exp_name!r} for the checkpoints {list(run.ids)} of "
            f"{run.folder}, got those for {having} only; try td.open_traker(save_dir, "
            f"{exp_name!r}, model_ids={having}), or scoring with the others"
        )
    suffix = f"_{GRADS}"
    files = (path for id in run.ids for path in (run.folder / str(id)).glob(f"*{suffix}"))
    names = sorted({path.name.removesuffix(suffix) for path in files})
    instead = f"exp_name={names[0]!r}" if names else "td.open_traker(save_dir), without exp_name"
    raise ValueError(
        f"expected one of the experiments {names} of {run.folder}, got {exp_name!r}; try {instead}"
    )


def require_finalized(run: Run, exp_name: str) -> None:
    """Reject target gradients of checkpoints that are not finalized: the files contain zeros."""
    states = {id: _json(run.folder / f"id_{id}.json").get(str(id), {}) for id in run.ids}
    missing = [id for id, state in states.items() if state.get("is_finalized") != 1]
    if missing:
        raise ValueError(
            f"expected finalized features of every checkpoint of {exp_name!r}, since others are "
            f"not scored, got none for model ids {missing} in {run.folder}; try "
            "traker.finalize_features() and scoring the targets again, or td.open_traker(save_dir) "
            "without exp_name"
        )


def checked(path: Path, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str]) -> str:
    """Check the header and size of an array's file, without reading rows; return its dtype."""
    array = mapped(path)
    if array.shape not in shapes or array.dtype.name not in dtypes:
        raise ValueError(
            f"expected an array {shapes[0]} of {' or '.join(dtypes)} in {path}, as metadata.json "
            f"says, got {array.shape} of {array.dtype.name}; try the directory that this file came "
            "from, or restore metadata.json"
        )
    return array.dtype.name


def mapped(path: Path) -> np.ndarray:
    """Memory-map a file read-only; files ending in .mmap have the format of .npy."""
    try:
        return open_memmap(path, mode="r")
    except FileNotFoundError as err:
        raise FileNotFoundError(
            f"expected the array {path.name} in {path.parent}, got {_listed(path.parent)}; try "
            "model_ids= without this checkpoint, or featurizing it again (finalize_features with "
            "del_grads=True removes grads.mmap)"
        ) from err
    except (ValueError, EOFError, OSError) as err:
        raise ValueError(
            f"expected a complete array in {path}, got {path.stat().st_size:,} bytes ({err}); try "
            "copying the file again, or model_ids= without this checkpoint"
        ) from err


def state(paths: Iterable[Path]) -> str:
    """Return a digest of the sizes and times of files, which change as a run continues."""
    stats = [path.stat() for path in paths]
    return digest({"files": [[stat.st_size, stat.st_mtime_ns] for stat in stats]})[:32]


def _listed(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return f"{names[:5]}{' and others' if len(names) > 5 else ''}" if names else "an empty folder"
