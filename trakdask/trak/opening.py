"""Open a directory of the TRAK package as lazy trakdask features and targets."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import dask.array as da
import numpy as np
import xarray as xr
from numpy.lib.format import open_memmap

from trakdask._version import __version__
from trakdask.provenance import digest
from trakdask.trak.savers import EXTRA
from trakdask.variables import CHECKPOINT, VARIABLES

__all__ = ["open_traker"]

_BLOCK_BYTES = 2**25
_TRAIN_SIZE = "train set size"
_NOT_OF_THE_MATRIX = ("lambda_reg", "version")
_GRADS = "grads.mmap"
_OUT_TO_LOSS = "out_to_loss.mmap"
_FLAGS = "_is_featurized.mmap"


@overload
def open_traker(
    save_dir: str | os.PathLike[str],
    exp_name: None = None,
    *,
    model_ids: Iterable[int] | None = None,
) -> xr.Dataset: ...


@overload
def open_traker(
    save_dir: str | os.PathLike[str], exp_name: str, *, model_ids: Iterable[int] | None = None
) -> tuple[xr.Dataset, xr.Dataset]: ...


def open_traker(
    save_dir: str | os.PathLike[str],
    exp_name: str | None = None,
    *,
    model_ids: Iterable[int] | None = None,
) -> xr.Dataset | tuple[xr.Dataset, xr.Dataset]:
    """Open a ``save_dir`` of the TRAK package, or of ``trakdask.trak``, as features and targets.

    Parameters
    ----------
    save_dir
        A local folder that a ``TRAKer`` wrote. Nothing is written to it.
    exp_name
        Name of an experiment whose target gradients are opened, too.
    model_ids
        The checkpoints to open, in this order; by default all of them, in numerical order.

    Returns
    -------
    features
        Lazy Dataset with ``feature`` (sample, proj_dim, checkpoint), ``out_to_loss`` and ``output``
        (sample, checkpoint), float32 whether the files hold float16 or float32. Rows that were
        never featurized are NaN, and gram matrices leave them out. Checkpoints are named by their
        model ids, as text: ``features.sel(checkpoint="0")``. There are no labels; add them with
        ``features.assign_coords(label=("sample", labels))``.
    targets
        Only with ``exp_name``: lazy Dataset with ``feature`` and ``output`` of the targets. Targets
        that were never scored have the values in the file: NaN, or zeros in a run of the original.

    Raises
    ------
    FileNotFoundError
        If there is no such folder, or it lacks ``metadata.json`` or an array.
    ValueError
        If an array is truncated, if there is no such experiment or model id, or if the checkpoints
        of the experiment differ in the number of targets, or were scored before their features were
        finalized (the package writes no scores then).

    Notes
    -----
    Only headers and JSON files are read here, so a run of a million samples opens in milliseconds.
    Each task memory-maps the files read-only and copies one block of at most 32 MB; on a cluster,
    workers need the folder under the same path. The absolute paths in ``experiments.json`` are not
    used, so a directory may have been moved. Runs inside subfolders are not part of the run.

    Features are the projected gradients, ``grads.mmap``, divided by the square root of the number
    of parameters; ``finalize_features`` need not have been called for them. The directory does not
    contain model outputs: ``output`` is NaN, and ``damping="auto"`` is the closed form. For
    classification, the outputs follow from Q, so the damping can be chosen by them after
    ``features.assign(output=np.log(1 / features.out_to_loss - 1))``.

    ``score(features, targets, estimator="trak", damping=td.Absolute(lambda_reg))`` is what
    ``finalize_scores`` returns up to one factor per checkpoint, the mean absolute entry of the
    inverse gram matrix, by which the package divides. (Not so with ``mode="trakdask"``, whose
    estimator and damping are those of :func:`~trakdask.score`.)

    ``attrs`` identify these features: the projector by the metadata, and checkpoints by the sizes
    and times of their files. ``attrs["source"]`` is a digest of the path and the number of samples;
    set it yourself to continue a store of :func:`~trakdask.save` once the directory has been moved.

    Examples
    --------
    >>> import tempfile, torch, trakdask as td
    >>> from trakdask.trak import TRAKer, open_traker
    >>> folder, model = tempfile.TemporaryDirectory(), torch.nn.Linear(4, 3)
    >>> batch = [torch.ones(8, 4), torch.arange(8) % 3]
    >>> options = {"save_dir": folder.name, "device": "cpu", "proj_dim": 5}
    >>> traker = TRAKer(model, "image_classification", train_set_size=8, **options)
    >>> traker.load_checkpoint(model.state_dict(), model_id=0)
    >>> traker.featurize(batch, num_samples=8)
    >>> features = open_traker(folder.name)
    >>> features = features.assign_coords(label=("sample", batch[1].numpy()))
    >>> td.group_score(features, features, by="label").dims
    ('label', 'target')
    >>> folder.cleanup()
    """
    folder = Path(save_dir).expanduser().resolve()
    run = _Run(folder, _matrix(folder), _chosen(folder, model_ids))
    features = run.dataset(_GRADS, with_flags=True)
    if exp_name is None:
        return features
    _require_experiment(run, exp_name)
    return features, run.dataset(f"{exp_name}_{_GRADS}", of=exp_name)


@dataclass(frozen=True)
class _Run:
    """A directory, the metadata of its projection, and the model ids to open."""

    folder: Path
    matrix: dict[str, Any]
    ids: tuple[int, ...]

    def paths(self, file: str) -> tuple[Path, ...]:
        """Return the path of the file with this name for every checkpoint."""
        return tuple(self.folder / str(id) / file for id in self.ids)

    def dataset(self, file: str, *, of: str = "", with_flags: bool = False) -> xr.Dataset:
        """Return the lazy features in the files of this name, identified by ``attrs``."""
        grads, q, flags = (self.paths(name) for name in (file, _OUT_TO_LOSS, _FLAGS))
        n, p = _shape(self.ids, grads)
        chunks = da.core.normalize_chunks((max(1, _BLOCK_BYTES // (4 * p)),), shape=(n,))[0]
        ids = [str(id) for id in self.ids]
        ones, written = (1,) * len(ids), flags if with_flags else ()
        feature = _lazy("feature", grads, written, (chunks, (p,), ones))
        unknown = da.full((n, len(ids)), np.nan, np.float32, chunks=(chunks, ones))
        arrays = {"feature": feature, "output": unknown}
        if with_flags:
            arrays["out_to_loss"] = _lazy("out_to_loss", q, flags, (chunks, ones))
        states = [_state(files) for files in zip(*map(self.paths, _IDENTIFYING), strict=True)]
        dtypes = [open_memmap(path, mode="r").dtype.name for path in grads]
        # The path identifies the samples, so that a checkpoint may be added later.
        size = len(open_memmap(self.paths(_GRADS)[0], mode="r"))
        source = digest({"path": str(self.folder), "samples": size, "of": of})
        attrs = (
            {
                "projector": {"kind": "traker", "proj_dim": p, "metadata": self.matrix},
                "checkpoints": dict(zip(ids, states, strict=True)),
                "checkpoint_ids": dict(zip(ids, self.ids, strict=True)),
                "parameters": {},
                "task": "unknown",  # as are the parameters
                "formula": "feature = p^-1/2 P^T grad f",
                "trakdask_version": __version__,
                "source": f"traker-{source[:32]}",
                "stored_dtype": dict(zip(ids, dtypes, strict=True)),
            }
            | ({"experiment": of} if of else {})
        )
        data = {n: (VARIABLES[n].dims, each, VARIABLES[n].attrs) for n, each in arrays.items()}
        return xr.Dataset(data, {CHECKPOINT: (CHECKPOINT, np.array(ids, object))}, attrs)


# Files whose sizes and times identify the weights of a checkpoint.
_IDENTIFYING = (_GRADS, _OUT_TO_LOSS, _FLAGS)


def _matrix(folder: Path) -> dict[str, Any]:
    """Return the metadata of the projection, of which runs of ``trakdask.trak`` have more."""
    path = folder / "metadata.json"
    if not path.is_file():
        inside = sorted(path.parent.name for path in folder.glob("*/metadata.json"))
        instead = f"one of the runs inside it: {inside}" if inside else "the save_dir of a TRAKer"
        raise FileNotFoundError(
            f"expected a folder with metadata.json, got {str(folder)!r}; try {instead}"
        )
    metadata = json.loads(path.read_bytes())
    del metadata[_TRAIN_SIZE]
    if EXTRA in metadata:
        extra = metadata[EXTRA]
        metadata[EXTRA] = {k: v for k, v in extra.items() if k not in _NOT_OF_THE_MATRIX}
    return dict(metadata)


def _chosen(folder: Path, model_ids: Iterable[int] | None) -> tuple[int, ...]:
    """Return the model ids to open, of those registered in this folder but not in subfolders."""
    stems = (path.stem.removeprefix("id_") for path in folder.glob("id_*.json"))
    registered = sorted(int(stem) for stem in stems if stem.removeprefix("-").isdecimal())
    chosen = tuple(registered if model_ids is None else model_ids)
    if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(registered):
        raise ValueError(
            f"expected different model ids out of the {registered} of {folder}, got "
            f"{list(chosen)}; try model_ids={registered[:1]}"
        )
    return chosen


def _require_experiment(run: _Run, exp_name: str) -> None:
    """Reject an experiment that does not exist for every checkpoint, or whose files are zeros."""
    paths = run.paths(f"{exp_name}_{_GRADS}")
    having = [id for id, path in zip(run.ids, paths, strict=True) if path.is_file()]
    if len(having) < len(run.ids):
        files = (path.name for id in run.ids for path in run.folder.glob(f"{id}/*_{_GRADS}"))
        names = sorted({name.removesuffix(f"_{_GRADS}") for name in files})
        raise ValueError(
            f"expected an experiment of {names} with target gradients for the checkpoints "
            f"{list(run.ids)} of {run.folder}, got {exp_name!r}, which has those for {having}; try "
            f"model_ids={having}, or open_traker(save_dir) without exp_name"
        )
    states = {id: json.loads((run.folder / f"id_{id}.json").read_bytes()) for id in run.ids}
    zeros = [id for id, state in states.items() if state[str(id)]["is_finalized"] != 1]
    if zeros:
        raise ValueError(
            f"expected finalized features of every checkpoint of {exp_name!r}, since others are "
            f"not scored, got none for model ids {zeros} in {run.folder}; try "
            "traker.finalize_features() and scoring the targets again, or no exp_name"
        )


def _shape(ids: Sequence[int], paths: Sequence[Path]) -> tuple[int, int]:
    """Return the shape of the arrays of all checkpoints."""
    shapes = {id: open_memmap(path, mode="r").shape for id, path in zip(ids, paths, strict=True)}
    first = shapes[ids[0]]
    if set(shapes.values()) != {first}:
        equal = [id for id, shape in shapes.items() if shape == first]
        raise ValueError(
            f"expected arrays of one shape at every checkpoint in {paths[0].parents[1]}, got "
            f"{shapes} by model id for {paths[0].name}; try model_ids={equal}"
        )
    return first


def _state(paths: Iterable[Path]) -> str:
    """Return a digest of the sizes and times of files, which change as a run continues."""
    stats = [path.stat() for path in paths]
    return digest({"files": [[stat.st_size, stat.st_mtime_ns] for stat in stats]})[:32]


def _lazy(
    name: str, paths: tuple[Path, ...], flags: tuple[Path, ...], chunks: tuple[tuple[int, ...], ...]
) -> da.Array:
    """Build the lazy array of files, one per checkpoint; rows without their flag are NaN."""
    files = [str(path) for path in paths]
    token = digest({"files": files, "state": _state((*paths, *flags)), "chunks": chunks[0][:1]})
    array: da.Array = da.map_blocks(
        functools.partial(_read, paths, flags),
        chunks=chunks,
        # The state of the files is part of the name: a run that goes on is another array.
        name=f"{name}-{token[:32]}",
        dtype=np.float32,
        meta=np.empty((0,) * len(chunks), np.float32),
    )
    return array


def _read(
    paths: tuple[Path, ...], flags: tuple[Path, ...], block_info: dict[Any, Any]
) -> np.ndarray:
    """Return one block as float32, with a last dimension for the checkpoint."""
    (start, stop), *_, (checkpoint, _) = block_info[None]["array-location"]
    values = np.array(open_memmap(paths[checkpoint], mode="r")[start:stop], dtype=np.float32)
    if flags:
        is_written = open_memmap(flags[checkpoint], mode="r")[start:stop].reshape(-1) == 1
        values[~is_written] = np.nan
    return values.reshape(block_info[None]["chunk-shape"])
