"""A folder of the TRAK package, or of ``trakdask.trak``, opened as lazy Datasets."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import overload

import dask.array as da
import numpy as np
import xarray as xr
from numpy.lib.format import open_memmap

from trakdask._version import __version__
from trakdask.provenance import as_text, digest
from trakdask.samples.fingerprints import mapped
from trakdask.trak.savers import EXTRA, read_json
from trakdask.variables import CHECKPOINT, VARIABLES

_BLOCK_BYTES = 2**25
# What may differ between runs whose gradients met the same matrix: λ comes after it.
_NOT_OF_THE_MATRIX = ("lambda_reg", "version")
_GRADS, _OUT_TO_LOSS, _FLAGS = "grads.mmap", "out_to_loss.mmap", "_is_featurized.mmap"


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
        If there is no such folder or experiment, or a file is missing.
    ValueError
        If an array is truncated, if there is no such model id, or if the checkpoints of the
        experiment differ in the number of targets, or were scored before their features were
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

    ``score(features, targets, td.Trak(td.Absolute(lambda_reg)))`` is what
    ``finalize_scores`` returns up to one factor per checkpoint, the mean absolute entry of the
    inverse gram matrix, by which the package divides.

    ``attrs`` identify these features: the projector by the metadata, and checkpoints by the sizes
    and times of their files. ``attrs["source"]`` is a digest of the path;
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
    if not folder.joinpath("metadata.json").is_file():
        raise FileNotFoundError(
            f"expected the save_dir of a TRAKer, which has a metadata.json, got {str(folder)!r}; "
            "try one of the folders in it"
        )
    # The model ids registered in this folder, but not in subfolders.
    registered = sorted(int(path.stem.removeprefix("id_")) for path in folder.glob("id_*.json"))
    ids = registered if model_ids is None else list(model_ids)
    if not ids or len(set(ids)) < len(ids) or not set(ids) <= set(registered):
        raise ValueError(
            f"expected different model ids out of the {registered} of {folder}, got {ids}; try "
            f"model_ids={registered[:1]}"
        )
    features = _features(folder, ids)
    if exp_name is None:
        return features
    states = {id: read_json(folder / f"id_{id}.json")[str(id)] for id in ids}
    if unfinished := [id for id, state in states.items() if state["is_finalized"] != 1]:
        raise ValueError(
            f"expected finalized features of every checkpoint of {exp_name!r}, because others are "
            f"not scored, got none of model ids {unfinished} in {folder}; try "
            "traker.finalize_features() and scoring the targets again, or no exp_name"
        )
    return features, _features(folder, ids, exp_name)


def _features(folder: Path, ids: Sequence[int], exp_name: str = "") -> xr.Dataset:
    """Return the lazy features of training samples, or of the targets of an experiment."""
    names = [str(id) for id in ids]
    grads = f"{exp_name}_{_GRADS}" if exp_name else _GRADS
    first = open_memmap(folder / names[0] / grads, mode="r")
    n, p = first.shape
    rows = max(1, _BLOCK_BYTES // (4 * p))

    def lazy(file: str) -> da.Array:
        """Return an array (rows, columns, checkpoint), whose tasks map the files where they lie."""
        arrays = [open_memmap(folder / name / file, mode="r") for name in names]
        # `mapped` is a path and a place in the file, which is sent with each task, inline. An array
        # of numpy would be sent itself.
        columns = [
            da.from_array(mapped(a) or a, chunks=(rows, -1), inline_array=True) for a in arrays
        ]
        return da.stack(columns, axis=-1)

    data = {"feature": lazy(grads)}
    if not exp_name:
        # Rows that were never written are zeros in the files, and would count as gradients.
        is_written = lazy(_FLAGS) == 1
        data["feature"] = da.where(is_written, data["feature"], np.nan)
        data["out_to_loss"] = da.where(is_written, lazy(_OUT_TO_LOSS), np.nan)[:, 0]
    data["output"] = da.full((n, len(ids)), np.nan, chunks=(rows, 1))
    metadata = read_json(folder / "metadata.json")
    # Runs with other numbers of samples may have the same projector.
    del metadata["train set size"]
    for key in _NOT_OF_THE_MATRIX:
        metadata.get(EXTRA, {}).pop(key, None)
    # The path identifies the samples, so that a checkpoint may be added later.
    source = digest({"path": str(folder), "of": exp_name})
    attrs = {
        "projector": {"kind": "traker", "proj_dim": p, "metadata": metadata},
        "checkpoints": {name: _state(folder / name) for name in names},
        "checkpoint_ids": dict(zip(names, ids, strict=True)),
        "parameters": {},
        "task": "unknown",  # as are the parameters
        "formula": "feature = p^-1/2 P^T grad f",
        "trakdask_version": __version__,
        "source": f"traker-{source[:32]}",
        "stored_dtype": first.dtype.name,
        **({"experiment": exp_name} if exp_name else {}),
    }
    variables = {
        name: (VARIABLES[name].dims, array.astype(np.float32), VARIABLES[name].attrs)
        for name, array in data.items()
    }
    return xr.Dataset(variables, {CHECKPOINT: np.array(names, object)}, as_text(attrs))


def _state(folder: Path) -> str:
    """Return a digest of sizes and times of the files that identify the weights of a checkpoint."""
    stats = [folder.joinpath(file).stat() for file in (_GRADS, _OUT_TO_LOSS, _FLAGS)]
    return digest({"files": [[stat.st_size, stat.st_mtime_ns] for stat in stats]})[:32]
