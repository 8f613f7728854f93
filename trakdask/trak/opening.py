"""Open a directory of the TRAK package as lazy trakdask features and targets."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import dask.array as da
import numpy as np
import xarray as xr

from trakdask.provenance import digest
from trakdask.trak.directory import (
    FLAGS,
    GRADS,
    OUT_TO_LOSS,
    Run,
    checked,
    find_run,
    mapped,
    require_experiment,
    require_finalized,
    state,
)
from trakdask.variables import CHECKPOINT, VARIABLES

__all__ = ["open_traker"]

_BLOCK_BYTES = 2**25


@overload
def open_traker(
    save_dir: str | os.PathLike[str],
    exp_name: None = None,
    *,
    model_ids: Iterable[int] | None = None,
) -> xr.Dataset: ...


@overload
def open_traker(
    save_dir: str | os.PathLike[str],
    exp_name: str,
    *,
    model_ids: Iterable[int] | None = None,
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
    TypeError
        If ``model_ids`` is not a list.
    ValueError
        If an array is truncated or contradicts the metadata, if there is no such experiment or
        model id, or if the checkpoints of the experiment differ in the number of targets, or were
        scored before their features were finalized (the package writes no scores then).

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
    estimator and damping are those of :func:`score`.)

    ``attrs`` identify these features: the projector by the metadata, and checkpoints by the sizes
    and times of their files. ``attrs["source"]`` is a digest of the path and the number of samples;
    set it yourself to continue a store of :func:`save` after the directory has been moved.

    Examples
    --------
    >>> import tempfile, torch, trakdask as td
    >>> from trakdask.trak import TRAKer
    >>> folder, model = tempfile.TemporaryDirectory(), torch.nn.Linear(4, 3)
    >>> batch = [torch.ones(8, 4), torch.arange(8) % 3]
    >>> options = {"save_dir": folder.name, "device": "cpu", "proj_dim": 5}
    >>> traker = TRAKer(model, "image_classification", train_set_size=8, **options)
    >>> traker.load_checkpoint(model.state_dict(), model_id=0)
    >>> traker.featurize(batch, num_samples=8)
    >>> features = td.open_traker(folder.name)
    >>> features = features.assign_coords(label=("sample", batch[1].numpy()))
    >>> td.group_score(features, features, by="label").dims
    ('label', 'target')
    >>> folder.cleanup()
    """
    run = find_run(save_dir, model_ids)
    features = _features(run)
    if exp_name is None:
        return features
    return features, _targets(run, exp_name)


@dataclass(frozen=True)
class _Rows:
    """The files of one array, one per checkpoint, and of the flags of rows that were written.

    Without flags, all rows count as written.
    """

    arrays: tuple[Path, ...]
    flags: tuple[Path, ...] | None
    bounds: tuple[int, ...]

    def read(self, block_id: tuple[int, ...]) -> np.ndarray:
        """Return one block as float32, with a last dimension for the checkpoint."""
        rows = slice(*self.bounds[block_id[0] : block_id[0] + 2])
        checkpoint = block_id[-1]
        values = np.array(mapped(self.arrays[checkpoint])[rows], dtype=np.float32)
        if self.flags is not None:
            is_written = mapped(self.flags[checkpoint])[rows].reshape(-1) == 1
            values[~is_written] = np.nan
        return values.reshape(*values.shape[: len(block_id) - 1], 1)


def _features(run: Run) -> xr.Dataset:
    n, p = run.n_samples, run.proj_dim
    dtypes = [checked(path, [(n, p)], ("float16", "float32")) for path in run.paths(GRADS)]
    for path in run.paths(OUT_TO_LOSS):
        checked(path, [(n, 1)], ("float16", "float32"))
    for path in run.paths(FLAGS):
        checked(path, [(n, 1), (n,)], ("int32",))
    flags = run.paths(FLAGS)
    attrs = run.attrs() | {
        "source": run.source(),
        "stored_dtype": dict(zip(map(str, run.ids), dtypes, strict=True)),
    }
    feature = _lazy(run, run.paths(GRADS), flags, n, width=p)
    q = _lazy(run, run.paths(OUT_TO_LOSS), flags, n)
    return _dataset(run, {"feature": feature, "output": _unknown(feature), "out_to_loss": q}, attrs)


def _targets(run: Run, exp_name: str) -> xr.Dataset:
    paths = run.paths(f"{exp_name}_{GRADS}")
    require_experiment(run, exp_name, paths)
    require_finalized(run, exp_name)
    counts = [len(mapped(path)) for path in paths]
    if len(set(counts)) > 1:
        by_id = dict(zip(run.ids, counts, strict=True))
        equal = [id for id, count in by_id.items() if count == max(counts)]
        raise ValueError(
            f"expected the same number of targets of {exp_name!r} at every checkpoint of "
            f"{run.folder}, got {by_id} by model id; try td.open_traker(save_dir, {exp_name!r}, "
            f"model_ids={equal}), or scoring the others again under another exp_name"
        )
    shape = (counts[0], run.proj_dim)
    dtypes = [checked(path, [shape], ("float16", "float32")) for path in paths]
    attrs = run.attrs() | {
        "source": run.source(exp_name),
        "experiment": exp_name,
        "stored_dtype": dict(zip(map(str, run.ids), dtypes, strict=True)),
    }
    feature = _lazy(run, paths, None, counts[0], width=run.proj_dim)
    return _dataset(run, {"feature": feature, "output": _unknown(feature)}, attrs)


def _unknown(feature: da.Array) -> da.Array:
    """Return outputs of NaN, (sample, checkpoint), since the files contain none."""
    shape, chunks = ((each[0], each[2]) for each in (feature.shape, feature.chunks))
    unknown: da.Array = da.full(shape, np.nan, np.float32, chunks=chunks)
    return unknown


def _dataset(run: Run, arrays: Mapping[str, da.Array], attrs: dict[str, Any]) -> xr.Dataset:
    data = {n: (VARIABLES[n].dims, array, VARIABLES[n].attrs) for n, array in arrays.items()}
    names = np.array([str(id) for id in run.ids], dtype=object)
    return xr.Dataset(data, coords={CHECKPOINT: (CHECKPOINT, names)}, attrs=attrs)


def _lazy(
    run: Run,
    paths: tuple[Path, ...],
    flags: tuple[Path, ...] | None,
    n: int,
    *,
    width: int | None = None,
) -> da.Array:
    """Build the lazy array (sample, proj_dim, checkpoint), or without a width (sample, checkpoint).

    Rows are chunked alike with and without a width, by the size of the features.
    """
    size = max(1, _BLOCK_BYTES // (4 * run.proj_dim))
    chunks = da.core.normalize_chunks((size,), shape=(n,))[0]
    bounds = tuple(np.concatenate([[0], np.cumsum(chunks)]).tolist())
    shape = (chunks, *(() if width is None else ((width,),)), (1,) * len(paths))
    files = [str(path) for path in paths]
    now = state((*paths, *(flags or ())))
    token = digest({"files": files, "state": now, "rows": size})
    array: da.Array = da.map_blocks(
        _Rows(paths, flags, bounds).read,
        chunks=shape,
        # By such a name td.save recognises an array that is complete, and not a selection.
        name=f"{'out_to_loss' if width is None else 'feature'}-{token[:32]}",
        dtype=np.float32,
        meta=np.empty((0,) * len(shape), np.float32),
    )
    return array
