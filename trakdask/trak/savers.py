"""The folder of a run: gradients, features and scores in memory-mapped files.

The readers of the original can open the files, because names and content are the same. Unlike
there, a process that is killed at any point and started again leaves the same files as one that was
never killed. Folders of the original itself are not continued; :func:`open_traker` reads them.
"""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.lib.format import open_memmap

from trakdask.errors import StoreMismatchError
from trakdask.files import replacing

EXTRA = "trakdask"
"""Key of ``metadata.json`` that contains everything that the original does not write."""


class ModelIDException(Exception):
    """A model id is not registered, is registered twice, or is not featurized or finalized yet."""


class AbstractSaver(ABC):
    """Base class of savers; ``TRAKer(saver=...)`` takes a subclass, not an instance.

    As in the original, ``TRAKer`` also passes it ``train_set_size`` and ``proj_dim``.

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
        self.metadata: dict[str, Any] = json.loads(json.dumps(metadata))  # as it is read again
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
        # Jobs that start at the same time in an empty folder: one writes the settings, the others
        # compare theirs.
        with self._locked():
            if self.metadata_file.exists():
                require_same(read_json(self.metadata_file), self.metadata, self.save_dir)
            else:
                write_json(self.metadata_file, self.metadata)
            # Also where nothing is loaded: the original would lack the file when it scores.
            if not self.experiments_file.exists():
                write_json(self.experiments_file, {})
        if load_from_save_dir:
            # Unlike in the original, files in subfolders stay, because they belong to other runs.
            for file in sorted(self.save_dir.glob("id_*.json")):
                self.model_ids.update({int(i): state for i, state in read_json(file).items()})
            self.experiments.update(read_json(self.experiments_file))
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
            # Read again, because another job may have settled it since this one started.
            metadata = read_json(self.metadata_file)
            extra = metadata.setdefault(EXTRA, {})
            if "lambda_reg" not in extra:
                extra["lambda_reg"] = lambda_reg
                write_json(self.metadata_file, metadata)
        if extra["lambda_reg"] != lambda_reg:
            raise AssertionError(
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

    def register_model_id(  # type: ignore[override]
        self, model_id: int, _allow_featurizing_already_registered: bool
    ) -> None:
        """Create the files of a model id, or open the files of an earlier run.

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
        # The file is written last, once there are all arrays. Without it, arrays are of a killed
        # process and are made again.
        file = self._id_file(model_id)
        if file.exists():
            self.model_ids[model_id] = read_json(file)[str(model_id)]
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
        # Flags are 0 and 1, so that the smallest says whether all rows are done.
        state["is_featurized"] = int(self.current_store["is_featurized"].min())
        if state["is_featurized"] or not already_exists:
            write_json(self._id_file(self.current_model_id), {str(self.current_model_id): state})

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
        # The path is for readers of the original, and never read here: folders may have been moved.
        state = {"num_targets": num_targets, "scores_path": str(scores), "scores_finalized": 0}
        with self._locked():
            experiments = read_json(self.experiments_file)
            # Compared before a file is opened: numpy would open one of another shape without an
            # error.
            before = experiments.get(exp_name, state)["num_targets"]
            if before != num_targets:
                raise StoreMismatchError(
                    f"expected num_targets={before}, which experiment {exp_name!r} in "
                    f"{str(self.save_dir)!r} was started with, got {num_targets}; try another "
                    "exp_name"
                )
            if not scores.exists():
                self._create(scores, (self.train_set_size, num_targets))
            write_json(self.experiments_file, experiments | {exp_name: state})
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
        """Open the files of a model id, or of one of its experiments, in ``current_store``.

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
            to create the files of the training samples.
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
        # As in the original, flags are int32 and (n, 1), and their file begins with an underscore.
        shapes = {"grads": (n, p), "out_to_loss": (n, 1), "features": (n, p), "is_featurized": None}
        for name, shape in shapes.items():
            path = folder.joinpath(f"{name if shape else '_is_featurized'}.mmap")
            if mode == "w+":
                self._create(path, shape or (n, 1), None if shape else np.int32)
            self.current_store[name] = _opened(path)

    def save_scores(self, exp_name: str) -> None:
        """Write the scores of the current experiment to disk, and record that they are final."""
        assert self.current_experiment_name == exp_name
        self.current_store[f"{exp_name}_scores"].flush()
        with self._locked():
            experiments = read_json(self.experiments_file)
            experiments[exp_name]["scores_finalized"] = 1
            write_json(self.experiments_file, experiments)
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
        with replacing(path, partial=f"{path}.partial") as partial:
            array = open_memmap(partial, mode="w+", dtype=dtype, shape=shape)
            # Zeros are not written, so that a new file takes no space on the disk before rows come.
            if fill != 0:
                array[...] = fill
            array.flush()

    def _id_file(self, model_id: int) -> Path:
        return self.save_dir.joinpath(f"id_{model_id}.json")


def _opened(path: Path) -> np.memmap | None:
    return open_memmap(path, mode="r+") if path.exists() else None


def read_json(path: Path) -> Any:
    """Return the content of a JSON file."""
    return json.loads(path.read_bytes())


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file as a whole or not at all."""
    with replacing(path, partial=f"{path}.partial", durable=True) as partial:
        partial.write_text(json.dumps(content))


def require_same(before: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    """Reject settings that contradict the settings of the run that began in a folder.

    The error is an AssertionError, as in the original.
    """
    if EXTRA in now and EXTRA not in before:
        raise AssertionError(
            f"expected a folder of trakdask.trak, got {str(folder)!r}, which the original wrote; "
            "try another save_dir, or open_traker to read its features"
        )
    # Compared are keys that both have: λ is added later, and versions may record more than others.
    old, new = ({**metadata, **metadata.get(EXTRA, {})} for metadata in (before, now))
    for key in set(old) & set(new) - {EXTRA, "version"}:
        if old[key] != new[key]:
            raise AssertionError(
                f"expected {key} {old[key]!r}, which the run in {str(folder)!r} was started with, "
                f"got {new[key]!r}; try the same setting, or another save_dir"
            )
