"""The base class of savers of the TRAK package: a folder, its JSON files, and their lock."""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock

from trakdask.errors import StoreMismatchError
from trakdask.files import Folder, is_partial

__all__ = ["EXTRA", "AbstractSaver", "ModelIDException"]

EXTRA = "trakdask"
"""Key of ``metadata.json`` that contains everything that the original does not write."""

_KEYS = ("JL dimension", "JL matrix type", "train set size")
_OF_THE_ORIGINAL = {"mode": "traker", "seeds": "as in traker"}
_LOCK = ".lock"


class ModelIDException(Exception):
    """A model id is not registered, is registered twice, or is not featurized or finalized yet."""


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
        Whether to read and write ``metadata.json`` and look for model ids of other runs. Jobs that
        run at the same time may all do so; the original advises against it.
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
        if load_from_save_dir:
            self._load_metadata()
        self._log_what_exists()

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

    def check_metadata(self) -> None:
        """Compare ``metadata.json``, if there is one, with the settings of this run."""
        if self.metadata_file.exists():
            _require_same(self._read(self.metadata_file), self.metadata, self.save_dir)

    def settle_lambda(self, lambda_reg: float) -> None:
        """Record the λ of features before they are computed; all model ids have the same λ.

        Raises
        ------
        AssertionError
            If features of another model id were computed with another λ.
        """
        with self._locked():
            content = self._read(self.metadata_file) if self.metadata_file.exists() else {}
            before = content.get(EXTRA, {}).get("lambda_reg", lambda_reg)
            if before == lambda_reg:
                return
            ids = self._recorded_ids()
            if final := sorted(i for i, each in ids.items() if each["is_finalized"] == 1):
                raise SettingsMismatchError(
                    f"expected lambda_reg={before}, which the features of model ids {final} in "
                    f"{str(self.save_dir)!r} were computed with, got {lambda_reg}; try the same "
                    "value, or another save_dir"
                )
            content[EXTRA]["lambda_reg"] = lambda_reg
            self._write(self.metadata_file, content)

    def _recorded_ids(self) -> dict[int, dict[str, int]]:
        # Unlike in the original, not those in subfolders, which belong to other runs.
        files = sorted(self.save_dir.glob("id_*.json"))
        return {int(i): each for file in files for i, each in self._read(file).items()}

    def _load_metadata(self) -> None:
        with self._locked():
            if self.metadata_file.exists():
                self.check_metadata()
            else:
                self._write(self.metadata_file, self.metadata)
            if not self.experiments_file.exists():
                self._write(self.experiments_file, {})
        self.model_ids.update(self._recorded_ids())
        self.experiments.update(self._read(self.experiments_file))

    def _log_what_exists(self) -> None:
        final = sorted(i for i, each in self.model_ids.items() if each["is_finalized"] == 1)
        ids, here = sorted(self.model_ids), self.save_dir
        self.logger.info("Existing model IDs in %s: %s; finalized: %s", here, ids, final)
        for exp_name in self.experiments:
            self.logger.info("Existing TRAK scores: %s", exp_name)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the folder against other processes that change its JSON files."""
        path = self.save_dir.joinpath(_LOCK)
        with FileLock(path):
            for file in self.save_dir.glob("*.json.*"):
                if is_partial(file.name):  # its writer was killed
                    file.unlink()
            try:
                yield
            finally:
                with suppress(OSError):  # while it is held: waiting processes notice
                    path.unlink()

    def _read(self, path: Path) -> Any:
        try:
            return json.loads(path.read_bytes())
        except ValueError as err:
            raise ValueError(
                f"expected JSON in {str(path)!r}, got {path.read_bytes()[:40]!r}; try restoring "
                "the file, which an interrupted run of the original may have damaged"
            ) from err

    def _write(self, path: Path, content: Any) -> None:
        Folder(str(path.parent.absolute())).write(path.name, json.dumps(content).encode())


class SettingsMismatchError(StoreMismatchError, AssertionError):
    """A folder was written with other settings; the original raises an AssertionError."""


def _require_same(stored: Mapping[str, Any], wanted: Mapping[str, Any], folder: Path) -> None:
    mine = wanted.get(EXTRA, {})
    theirs = stored.get(EXTRA, _OF_THE_ORIGINAL)
    pairs = [(key, stored[key], wanted[key]) for key in _KEYS if key in stored and key in wanted]
    pairs += [(key, theirs[key], mine[key]) for key in mine if key in theirs]
    for key, before, now in pairs:
        if json.loads(json.dumps(now)) != before and key not in ("version", "lambda_reg"):
            raise SettingsMismatchError(
                f"expected {key} {before!r}, which the run in {str(folder)!r} was started with, "
                f"got {now!r}; try the same setting, or another save_dir"
            )
