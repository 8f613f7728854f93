"""Savers of the TRAK package: gradients, features and scores in a folder of memory-mapped files.

Files and their content are those of the original; each package can read the files of the other.
Unlike in the original, they survive interruptions: a process that is killed at any point and
started again leaves the same files as one that was never killed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap

from trakdask.errors import StoreMismatchError
from trakdask.files import Folder
from trakdask.trak.saver_base import EXTRA, AbstractSaver, ModelIDException

__all__ = ["EXTRA", "AbstractSaver", "MmapSaver", "ModelIDException"]

_SCAN = 2**12


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
        super().__init__(
            save_dir=save_dir,
            metadata=metadata,
            load_from_save_dir=load_from_save_dir,
            logging_level=logging_level,
            use_half_precision=use_half_precision,
        )
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
        AssertionError
            If ``metadata.json`` has other settings.
        """
        if model_id in self.model_ids and not _allow_featurizing_already_registered:
            raise ModelIDException(
                f"expected a new model id, got {model_id}, which is already registered in "
                f"{str(self.save_dir)!r}; try load_current_store({model_id})"
            )
        self.check_metadata()
        file = self._id_file(model_id)
        if file.exists():
            self.model_ids[model_id] = self._read(file)[str(model_id)]
            self.load_current_store(model_id)
            return
        self.current_model_id = model_id
        self.model_ids[model_id] = {"is_featurized": 0, "is_finalized": 0}
        self.init_store(model_id)
        self.serialize_current_model_id_metadata(already_exists=False)

    def serialize_current_model_id_metadata(self, already_exists: bool = True) -> None:
        """Write ``id_<n>.json`` if all rows are featurized, or in any case for a new id."""
        model_id, recorded = self.current_model_id, self.model_ids[self._current_id()]
        recorded["is_featurized"] = int(self._is_complete())
        if recorded["is_featurized"] or not already_exists:
            with self._locked():
                self._write(self._id_file(self._current_id()), {str(model_id): recorded})

    def init_store(self, model_id: int) -> None:
        """Create all files of a model id, with no row featurized."""
        prefix = self.save_dir.joinpath(str(model_id))
        if prefix.exists():
            self.logger.info("Model ID folder %s already exists", prefix)
        prefix.mkdir(exist_ok=True)
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
        prefix = self.save_dir.joinpath(str(model_id))
        if not prefix.exists():
            raise ModelIDException(
                f"expected a featurized model id, got {model_id}, which has no folder in "
                f"{str(self.save_dir)!r}; try load_checkpoint and featurize first"
            )
        with self._locked():
            known = self._known_experiments()
            started_with = known.get(exp_name, {}).get("num_targets", num_targets)
            if started_with != num_targets:
                raise StoreMismatchError(
                    f"expected num_targets={started_with}, which experiment {exp_name!r} in "
                    f"{str(self.save_dir)!r} was started with, got {num_targets}; try another "
                    "exp_name"
                )
            scores = self.save_dir.joinpath(f"scores/{exp_name}.mmap")
            known[exp_name] = {
                "num_targets": num_targets,
                "scores_path": str(scores),
                "scores_finalized": 0,
            }
            if not scores.exists():
                self._create(scores, (self.train_set_size, num_targets))
            self._write(self.experiments_file, known)
        self.experiments.update(known)
        grads = prefix.joinpath(f"{exp_name}_grads.mmap")
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
            Number of its targets; -1 for any number.
        mode
            ``"r+"`` to open existing files (an array is None if its file does not exist), ``"w+"``
            to create them.

        Raises
        ------
        StoreMismatchError
            If a file has another shape or dtype than this run writes.
        """
        self.current_model_id = model_id
        prefix, n, p = self.save_dir.joinpath(str(model_id)), self.train_set_size, self.proj_dim
        to_load: dict[str, tuple[Path, tuple[int, int], Any]]
        if exp_name is None:
            to_load = {
                "grads": (prefix.joinpath("grads.mmap"), (n, p), None),
                "out_to_loss": (prefix.joinpath("out_to_loss.mmap"), (n, 1), None),
                "features": (prefix.joinpath("features.mmap"), (n, p), None),
                "is_featurized": (prefix.joinpath("_is_featurized.mmap"), (n, 1), np.int32),
            }
            self._n_leading = 0
        else:
            self.current_experiment_name = exp_name
            m = -1 if exp_num_targets is None else exp_num_targets
            scores = self.save_dir.joinpath(f"scores/{exp_name}.mmap")
            to_load = {
                f"{exp_name}_grads": (prefix.joinpath(f"{exp_name}_grads.mmap"), (m, p), None),
                f"{exp_name}_scores": (scores, (n, m), None),
            }
        for name, (path, shape, dtype) in to_load.items():
            self.current_store[name] = self._load(path, shape, mode, dtype)

    def flush(self, *names: str) -> None:
        """Write arrays of ``current_store`` to disk, and return when that is done."""
        for name in names:
            self.current_store[name].flush()

    def save_scores(self, exp_name: str) -> None:
        """Write the scores of the current experiment to disk, and record that they are final."""
        if self.current_experiment_name != exp_name:
            raise AssertionError(
                f"expected the current experiment {self.current_experiment_name!r}, got "
                f"{exp_name!r}; try load_current_store(model_id, {exp_name!r}) first"
            )
        self.flush(f"{exp_name}_scores")
        with self._locked():
            known = self._known_experiments()
            known[exp_name]["scores_finalized"] = 1
            self._write(self.experiments_file, known)
        self.experiments.update(known)
        self.logger.info("Saved scores in %s", self.save_dir.joinpath(f"scores/{exp_name}.mmap"))

    def del_grads(self, model_id: int) -> None:  # type: ignore[override]
        """Delete ``grads.mmap`` of a model id, if it exists.

        Its features can still be used for scores, but they can no longer be computed again or be
        read by :func:`trakdask.open_traker`.
        """
        self.save_dir.joinpath(str(model_id), "grads.mmap").unlink(missing_ok=True)

    def _load(
        self, fname: Path, shape: tuple[int, int], mode: str | None, dtype: Any = None
    ) -> np.memmap | None:
        dtype = np.dtype(dtype or (np.float16 if self.use_half_precision else np.float32))
        if mode == "w+":
            self._create(fname, shape, dtype)
        try:
            array = open_memmap(fname, mode="r+")
        except FileNotFoundError:
            self.logger.info("%s does not exist, skipping.", fname)
            return None
        except ValueError as err:
            raise ValueError(
                f"expected an array in {str(fname)!r}, got a truncated file ({err}); try "
                "deleting the folder and the id file of this model id, and featurizing it again"
            ) from err
        fits = all(n in (-1, size) for n, size in zip(shape, array.shape, strict=False))
        if len(array.shape) != len(shape) or not fits or array.dtype != dtype:
            raise StoreMismatchError(
                f"expected {dtype} {shape} in {str(fname)!r}, got {array.dtype} {array.shape}; try "
                f"use_half_precision={array.dtype == np.float16} and the sizes of the run that "
                "wrote it, or another save_dir"
            )
        return array

    def _create(
        self, path: Path, shape: tuple[int, int], dtype: Any = None, fill: float = 0
    ) -> None:
        """Create a file that gets its name only when it is complete."""
        dtype = np.dtype(dtype or (np.float16 if self.use_half_precision else np.float32))
        folder = Folder(str(path.parent.absolute()))
        folder.sweep(path.name)  # what a killed run left of it
        with folder.writing(path.name) as file:
            array = open_memmap(file.name, mode="w+", dtype=dtype, shape=shape)
            if fill != 0:
                array[...] = fill
            array.flush()
            del array

    def _is_complete(self) -> bool:
        """Return whether all rows are featurized; each row is read about once in a run."""
        flags = self.current_store["is_featurized"].reshape(-1)
        while self._n_leading < len(flags):
            open_rows = np.flatnonzero(flags[self._n_leading : self._n_leading + _SCAN] != 1)
            if len(open_rows):
                self._n_leading += int(open_rows[0])
                return False
            self._n_leading += _SCAN
        return True

    def _current_id(self) -> int:
        if self.current_model_id is None:
            raise ModelIDException("expected a current model id, got none; try load_checkpoint")
        return self.current_model_id

    def _known_experiments(self) -> dict[str, dict[str, Any]]:
        return dict(self._read(self.experiments_file)) if self.experiments_file.exists() else {}

    def _id_file(self, model_id: int) -> Path:
        return self.save_dir.joinpath(f"id_{model_id}.json")
