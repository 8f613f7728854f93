"""The folder of a run: gradients, features and scores in memory-mapped files, written and opened.

Files and their content are those of the original, whose readers can open them. Unlike there, a
process that is killed at any point and started again leaves the same files as one that was never
killed. Folders of the original itself are not continued; :func:`open_traker` reads them.
"""

from __future__ import annotations

import json
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, overload

import dask.array as da
import numpy as np
import xarray as xr
from filelock import FileLock
from numpy.lib.format import open_memmap

from trakdask._version import __version__
from trakdask.errors import StoreMismatchError
from trakdask.provenance import as_text, digest
from trakdask.samples.fingerprints import mapped
from trakdask.variables import CHECKPOINT, VARIABLES

EXTRA = "trakdask"
"""Key of ``metadata.json`` that contains everything that the original does not write."""

_SCAN = 2**12
_BLOCK_BYTES = 2**25
_NOT_OF_THE_MATRIX = ("lambda_reg", "version")
_GRADS, _OUT_TO_LOSS, _FLAGS = "grads.mmap", "out_to_loss.mmap", "_is_featurized.mmap"


class ModelIDException(Exception):
    """A model id is not registered, is registered twice, or is not featurized or finalized yet."""


class SettingsMismatchError(StoreMismatchError, AssertionError):
    """A folder was written with other settings; the original raises an AssertionError."""


class AbstractSaver(ABC):
    """Base class of savers; ``TRAKer(saver=...)`` takes a subclass, not an instance.

    It creates the folder, compares ``metadata.json`` with the settings of this run or writes it,
    and finds existing model ids and experiments. ``current_store`` contains the arrays of the
    current model id: ``grads``, ``out_to_loss``, ``features`` and ``is_featurized``, and
    ``<exp>_grads`` and ``<exp>_scores`` of an experiment.

    Parameters
    ----------
    save_dir
        The folder.
    metadata
        Settings that all runs of one folder must share, JSON-able.
    load_from_save_dir
        Whether to look for model ids and experiments of other runs. Jobs that run at the same time
        may all do so; the original advises against it.
    logging_level
        Level of the logger ``STORE``.
    use_half_precision
        Whether arrays are float16 rather than float32.

    Raises
    ------
    AssertionError
        If ``metadata.json`` has other settings; also a :class:`StoreMismatchError`.
    """

    @abstractmethod
    def __init__(
        self,
        save_dir: Path | str,
        metadata: Mapping[str, Any],
        load_from_save_dir: bool,
        logging_level: int,
        use_half_precision: bool,
    ) -> None:
        self.metadata = dict(metadata)
        self.save_dir = Path(save_dir).resolve()
        self.load_from_save_dir = load_from_save_dir
        self.use_half_precision = use_half_precision
        self.logger = logging.getLogger("STORE")
        self.logger.setLevel(logging_level)
        self.save_dir.joinpath("scores").mkdir(parents=True, exist_ok=True)
        self.metadata_file = self.save_dir.joinpath("metadata.json")
        self.experiments_file = self.save_dir.joinpath("experiments.json")
        self.model_ids: dict[int, dict[str, int]] = {}
        self.experiments: dict[str, dict[str, Any]] = {}
        self.current_model_id: int | None = None
        self.current_store: dict[str, Any] = dict.fromkeys(("grads", "out_to_loss", "features"))
        with self._locked():
            if self.metadata_file.exists():
                _require_same(_read(self.metadata_file), self.metadata, self.save_dir)
            else:
                _write(self.metadata_file, self.metadata)
            if not self.experiments_file.exists():
                _write(self.experiments_file, {})
        if load_from_save_dir:
            # Unlike in the original, not those in subfolders, which belong to other runs.
            for file in sorted(self.save_dir.glob("id_*.json")):
                self.model_ids.update({int(i): state for i, state in _read(file).items()})
            self.experiments.update(_read(self.experiments_file))
        self.logger.info("Existing model IDs in %s: %s", self.save_dir, sorted(self.model_ids))
        self.logger.info("Existing experiments: %s", sorted(self.experiments))

    @abstractmethod
    def register_model_id(self, model_id: int) -> None:
        """Create metadata and arrays of a new model id."""

    @abstractmethod
    def serialize_current_model_id_metadata(self) -> None:
        """Record whether the current model id is featurized and finalized."""

    @abstractmethod
    def init_store(self, model_id: int) -> None:
        """Create the arrays of a model id."""

    @abstractmethod
    def init_experiment(self, model_id: int) -> None:
        """Create or open the arrays of an experiment for a model id."""

    @abstractmethod
    def load_current_store(self, model_id: int) -> None:
        """Open the arrays of a model id in ``current_store``."""

    @abstractmethod
    def save_scores(self, exp_name: str) -> None:
        """Record that the scores of an experiment are complete."""

    @abstractmethod
    def del_grads(self, model_id: int, target: bool) -> None:
        """Delete the projected gradients of a model id."""

    def settle_lambda(self, lambda_reg: float) -> None:
        """Record λ when the first features are computed; all model ids have the same λ.

        Raises
        ------
        AssertionError
            If features of another model id were computed with another λ.
        """
        with self._locked():
            metadata = _read(self.metadata_file)
            extra = metadata.setdefault(EXTRA, {})
            if "lambda_reg" not in extra:
                extra["lambda_reg"] = lambda_reg
                _write(self.metadata_file, metadata)
        if extra["lambda_reg"] != lambda_reg:
            raise SettingsMismatchError(
                f"expected lambda_reg={extra['lambda_reg']}, which other features in "
                f"{str(self.save_dir)!r} were computed with, got {lambda_reg}; try the same value, "
                "or another save_dir"
            )

    def _locked(self) -> FileLock:
        """Lock the folder against other processes that change its JSON files."""
        return FileLock(self.save_dir.joinpath(".lock"))


class MmapSaver(AbstractSaver):
    """Store arrays in memory-mapped files, so that a batch can be written at any position.

    Parameters
    ----------
    save_dir, metadata, load_from_save_dir, logging_level, use_half_precision
        As in :class:`AbstractSaver`.
    train_set_size
        Rows of the arrays.
    proj_dim
        Columns of gradients and features.

    Notes
    -----
    Files are created under another name and renamed when they are complete. A model id exists as
    soon as its ``id_<n>.json`` does. JSON files are replaced under a lock and never changed in
    place, so that jobs with different model ids can share a folder.
    """

    def __init__(
        self,
        save_dir: Path | str,
        metadata: Mapping[str, Any],
        train_set_size: int,
        proj_dim: int,
        load_from_save_dir: bool,
        logging_level: int,
        use_half_precision: bool,
    ) -> None:
        super().__init__(save_dir, metadata, load_from_save_dir, logging_level, use_half_precision)
        self.train_set_size = train_set_size
        self.proj_dim = proj_dim
        self._n_leading = 0

    def register_model_id(  # type: ignore[override]
        self, model_id: int, _allow_featurizing_already_registered: bool
    ) -> None:
        """Create the files of a model id, or open those of an earlier run in the same folder.

        Existing rows are never discarded. (The original clears them if it was started with
        ``load_from_save_dir=False``, or with ``_allow_featurizing_already_registered=True``.)

        Raises
        ------
        ModelIDException
            If this saver already knows the id, unless ``_allow_featurizing_already_registered``.
        """
        if model_id in self.model_ids and not _allow_featurizing_already_registered:
            raise ModelIDException(
                f"expected a new model id, got {model_id}, which is already registered in "
                f"{str(self.save_dir)!r}; try load_current_store({model_id})"
            )
        file = self._id_file(model_id)
        if file.exists():
            self.model_ids[model_id] = _read(file)[str(model_id)]
            self.load_current_store(model_id)
            return
        self.current_model_id = model_id
        self.model_ids[model_id] = {"is_featurized": 0, "is_finalized": 0}
        self.init_store(model_id)
        self.serialize_current_model_id_metadata(already_exists=False)

    def serialize_current_model_id_metadata(self, already_exists: bool = True) -> None:
        """Write ``id_<n>.json`` if all rows are featurized, or in any case for a new id."""
        assert self.current_model_id is not None
        state = self.model_ids[self.current_model_id]
        state["is_featurized"] = int(self._is_complete())
        if state["is_featurized"] or not already_exists:
            _write(self._id_file(self.current_model_id), {str(self.current_model_id): state})

    def init_store(self, model_id: int) -> None:
        """Create all files of a model id, with no row featurized."""
        self.save_dir.joinpath(str(model_id)).mkdir(exist_ok=True)
        self.load_current_store(model_id, mode="w+")

    def init_experiment(  # type: ignore[override]
        self, exp_name: str, num_targets: int, model_id: int
    ) -> None:
        """Create or open the files of an experiment for a model id.

        Existing scores and target gradients stay until they are overwritten. New target gradients
        are NaN, so that :meth:`TRAKer.finalize_scores` recognises targets that were never scored.

        Raises
        ------
        ModelIDException
            If the folder of the model id does not exist.
        StoreMismatchError
            If the experiment exists with another number of targets.
        """
        folder = self.save_dir.joinpath(str(model_id))
        if not folder.exists():
            raise ModelIDException(
                f"expected a featurized model id, got {model_id}, which has no folder in "
                f"{str(self.save_dir)!r}; try load_checkpoint and featurize first"
            )
        scores = self.save_dir.joinpath(f"scores/{exp_name}.mmap")
        state = {"num_targets": num_targets, "scores_path": str(scores), "scores_finalized": 0}
        with self._locked():
            experiments = _read(self.experiments_file)
            before = experiments.get(exp_name, state)["num_targets"]
            if before != num_targets:
                raise StoreMismatchError(
                    f"expected num_targets={before}, which experiment {exp_name!r} in "
                    f"{str(self.save_dir)!r} was started with, got {num_targets}; try another "
                    "exp_name"
                )
            if not scores.exists():
                self._create(scores, (self.train_set_size, num_targets))
            _write(self.experiments_file, experiments | {exp_name: state})
        self.experiments.update(experiments | {exp_name: state})
        grads = folder.joinpath(f"{exp_name}_grads.mmap")
        if not grads.exists():
            self._create(grads, (num_targets, self.proj_dim), fill=np.nan)
        self.load_current_store(model_id, exp_name, num_targets)

    def load_current_store(
        self,
        model_id: int,
        exp_name: str | None = None,
        exp_num_targets: int | None = -1,
        mode: str | None = "r+",
    ) -> None:
        """Open the files of a model id, or those of one of its experiments, in ``current_store``.

        Parameters
        ----------
        model_id
            The model id that becomes the current one.
        exp_name
            The experiment; None for gradients and features of the training samples.
        exp_num_targets
            Not used; the files know their number of targets.
        mode
            ``"r+"`` to open existing files (an array is None if its file does not exist), ``"w+"``
            to create those of the training samples.
        """
        self.current_model_id = model_id
        folder, n, p = self.save_dir.joinpath(str(model_id)), self.train_set_size, self.proj_dim
        if exp_name is not None:
            self.current_experiment_name = exp_name
            name = f"{exp_name}_grads"
            self.current_store[name] = _opened(folder.joinpath(f"{name}.mmap"))
            scores = self.save_dir.joinpath(f"scores/{exp_name}.mmap")
            self.current_store[f"{exp_name}_scores"] = _opened(scores)
            return
        self._n_leading = 0
        shapes = {"grads": (n, p), "out_to_loss": (n, 1), "features": (n, p), "is_featurized": None}
        for name, shape in shapes.items():
            path = folder.joinpath(f"{name if shape else '_is_featurized'}.mmap")
            if mode == "w+":
                self._create(path, shape or (n, 1), None if shape else np.int32)
            self.current_store[name] = _opened(path)

    def flush(self, *names: str) -> None:
        """Write arrays of ``current_store`` to disk, and return when that is done."""
        for name in names:
            self.current_store[name].flush()

    def save_scores(self, exp_name: str) -> None:
        """Write the scores of the current experiment to disk, and record that they are final."""
        assert self.current_experiment_name == exp_name
        self.flush(f"{exp_name}_scores")
        with self._locked():
            experiments = _read(self.experiments_file)
            experiments[exp_name]["scores_finalized"] = 1
            _write(self.experiments_file, experiments)
        self.experiments.update(experiments)
        self.logger.info("Saved scores in %s", self.save_dir.joinpath(f"scores/{exp_name}.mmap"))

    def del_grads(self, model_id: int) -> None:  # type: ignore[override]
        """Delete ``grads.mmap`` of a model id, if it exists.

        Its features can still be used for scores, but they can no longer be computed again or be
        read by :func:`trakdask.trak.open_traker`.
        """
        self.save_dir.joinpath(str(model_id), "grads.mmap").unlink(missing_ok=True)

    def _create(
        self, path: Path, shape: tuple[int, int], dtype: Any = None, fill: float = 0
    ) -> None:
        """Create a file that gets its name only when it is complete."""
        dtype = dtype or (np.float16 if self.use_half_precision else np.float32)
        with _replaced(path) as partial:
            array = open_memmap(partial, mode="w+", dtype=dtype, shape=shape)
            if fill != 0:
                array[...] = fill
            array.flush()

    def _is_complete(self) -> bool:
        """Return whether all rows are featurized; each row is read about once in a run."""
        flags = self.current_store["is_featurized"].reshape(-1)
        while self._n_leading < len(flags):
            if not flags[self._n_leading : self._n_leading + _SCAN].all():
                return False
            self._n_leading += _SCAN
        return True

    def _id_file(self, model_id: int) -> Path:
        return self.save_dir.joinpath(f"id_{model_id}.json")


def _opened(path: Path) -> np.memmap | None:
    return open_memmap(path, mode="r+") if path.exists() else None


@contextmanager
def _replaced(path: Path) -> Iterator[Path]:
    """Give a name to write to, and rename the file when it is complete."""
    # There is one writer at a time, so what a killed one left is simply overwritten.
    partial = path.with_name(f"{path.name}.partial")
    yield partial
    os.replace(partial, path)


def _read(path: Path) -> Any:
    return json.loads(path.read_bytes())


def _write(path: Path, content: Any) -> None:
    with _replaced(path) as partial, partial.open("w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())


def _require_same(before: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    if EXTRA in now and EXTRA not in before:
        raise SettingsMismatchError(
            f"expected a folder of trakdask.trak, got {str(folder)!r}, which the original wrote; "
            "try another save_dir, or open_traker to read its features"
        )
    old, new = ({**each, **each.get(EXTRA, {})} for each in (before, json.loads(json.dumps(now))))
    for key in new:
        if key in old and old[key] != new[key] and key not in (EXTRA, "version"):
            raise SettingsMismatchError(
                f"expected {key} {old[key]!r}, which the run in {str(folder)!r} was started with, "
                f"got {new[key]!r}; try the same setting, or another save_dir"
            )


# ------------------------------------------------------------------ opened, by whomever written


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

    ``score(features, targets, td.Trak(td.Absolute(lambda_reg)))`` is what
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
    matrix = _matrix(folder)
    ids = _chosen(folder, model_ids)
    features = _features(folder, matrix, ids)
    if exp_name is None:
        return features
    _require_experiment(folder, ids, exp_name)
    return features, _features(folder, matrix, ids, exp_name)


def _features(
    folder: Path, matrix: dict[str, Any], ids: tuple[int, ...], exp_name: str = ""
) -> xr.Dataset:
    """Return the lazy features of training samples, or of the targets of an experiment."""
    file, names = f"{exp_name}_{_GRADS}" if exp_name else _GRADS, [str(id) for id in ids]
    opened = [open_memmap(folder / name / file, mode="r") for name in names]
    shapes = {id: array.shape for id, array in zip(ids, opened, strict=True)}
    n, p = opened[0].shape
    if set(shapes.values()) != {(n, p)}:
        equal = [id for id, shape in shapes.items() if shape == (n, p)]
        raise ValueError(
            f"expected arrays of one shape at every checkpoint in {folder}, got {shapes} by model "
            f"id for {file}; try model_ids={equal}"
        )
    size = max(1, _BLOCK_BYTES // (4 * p))

    def lazy(array: np.memmap) -> da.Array:
        file = mapped(array) or array
        rows: da.Array = da.from_array(file, chunks=(size, -1), inline_array=True)
        return rows

    def of_written(file: str) -> list[da.Array]:
        """Read a file of every checkpoint; rows without their flag are NaN."""
        found = []
        for name in names:
            flags, values = (open_memmap(folder / name / f, mode="r") for f in (_FLAGS, file))
            found.append(da.where(lazy(flags) == 1, lazy(values), np.nan))
        return found

    by_id = [lazy(array) for array in opened] if exp_name else of_written(_GRADS)
    arrays = {"feature": da.stack(by_id, axis=-1).astype(np.float32)}
    arrays["output"] = da.full((n, len(ids)), np.nan, np.float32, chunks=(size, 1))
    if not exp_name:
        arrays["out_to_loss"] = da.concatenate(of_written(_OUT_TO_LOSS), 1).astype(np.float32)
    # The path identifies the samples, so that a checkpoint may be added later.
    n_samples = len(open_memmap(folder / names[0] / _GRADS, mode="r"))
    source = digest({"path": str(folder), "samples": n_samples, "of": exp_name})
    attrs = {
        "projector": {"kind": "traker", "proj_dim": p, "metadata": matrix},
        "checkpoints": {name: _state(folder / name) for name in names},
        "checkpoint_ids": dict(zip(names, ids, strict=True)),
        "parameters": {},
        "task": "unknown",  # as are the parameters
        "formula": "feature = p^-1/2 P^T grad f",
        "trakdask_version": __version__,
        "source": f"traker-{source[:32]}",
        "stored_dtype": {name: a.dtype.name for name, a in zip(names, opened, strict=True)},
        **({"experiment": exp_name} if exp_name else {}),
    }
    data = {name: (VARIABLES[name].dims, a, VARIABLES[name].attrs) for name, a in arrays.items()}
    names_of = {CHECKPOINT: (CHECKPOINT, np.array(names, object))}
    return xr.Dataset(data, names_of, as_text(attrs))


def _state(folder: Path) -> str:
    """Return a digest of sizes and times of the files that identify the weights of a checkpoint."""
    stats = [folder.joinpath(file).stat() for file in (_GRADS, _OUT_TO_LOSS, _FLAGS)]
    return digest({"files": [[stat.st_size, stat.st_mtime_ns] for stat in stats]})[:32]


def _matrix(folder: Path) -> dict[str, Any]:
    """Return the metadata of the projection, of which runs of ``trakdask.trak`` have more."""
    path = folder / "metadata.json"
    if not path.is_file():
        inside = sorted(path.parent.name for path in folder.glob("*/metadata.json"))
        instead = f"one of the runs inside it: {inside}" if inside else "the save_dir of a TRAKer"
        raise FileNotFoundError(
            f"expected a folder with metadata.json, got {str(folder)!r}; try {instead}"
        )
    metadata: dict[str, Any] = _read(path)
    del metadata["train set size"]
    for key in _NOT_OF_THE_MATRIX:
        metadata.get(EXTRA, {}).pop(key, None)
    return metadata


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


def _require_experiment(folder: Path, ids: tuple[int, ...], exp_name: str) -> None:
    """Reject an experiment that does not exist for every checkpoint, or whose files are zeros."""
    having = [id for id in ids if folder.joinpath(f"{id}/{exp_name}_{_GRADS}").is_file()]
    if len(having) < len(ids):
        files = (path.name for id in ids for path in folder.glob(f"{id}/*_{_GRADS}"))
        names = sorted({name.removesuffix(f"_{_GRADS}") for name in files})
        raise ValueError(
            f"expected an experiment of {names} with target gradients for the checkpoints "
            f"{list(ids)} of {folder}, got {exp_name!r}, which has those for {having}; try "
            f"model_ids={having}, or open_traker(save_dir) without exp_name"
        )
    states = {id: _read(folder / f"id_{id}.json")[str(id)] for id in ids}
    if zeros := [id for id, state in states.items() if state["is_finalized"] != 1]:
        raise ValueError(
            f"expected finalized features of every checkpoint of {exp_name!r}, since others are "
            f"not scored, got none for model ids {zeros} in {folder}; try "
            "traker.finalize_features() and scoring the targets again, or no exp_name"
        )
