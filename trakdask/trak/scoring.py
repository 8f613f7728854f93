"""The methods of :class:`TRAKer` that compute scores of targets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from trakdask.trak.batches import require_within, row_positions
from trakdask.trak.savers import ModelIDException
from trakdask.trak.settings import explained
from trakdask.trak.steps import Steps

__all__ = ["Scoring"]

_START_SCORING = (
    "start_scoring_checkpoint(exp_name='test', checkpoint=model.state_dict(), model_id=0, "
    "num_targets=100)"
)


class Scoring(Steps):
    """Scores of targets, from the features of training samples."""

    train_set_size: int
    scores: np.ndarray | None
    _last_ind_target: int
    _scoring: tuple[str, int, int] | None

    @explained(_START_SCORING)
    def start_scoring_checkpoint(
        self,
        exp_name: str,
        checkpoint: Mapping[str, Any],
        model_id: int,
        num_targets: int,
    ) -> None:
        """Load the weights of a checkpoint to score targets with, and open or create their files.

        Parameters
        ----------
        exp_name
            Name of the set of targets, and of the file of its scores.
        checkpoint
            State dict that the model id was featurized with.
        model_id
            A featurized model id.
        num_targets
            Number of targets, the same for all checkpoints of an experiment.

        Raises
        ------
        TypeError
            If the arguments differ from these; the original's README has them in another order.
        ModelIDException, StoreMismatchError
            If the model id has no files, or the experiment has another number of targets.
        """
        if not isinstance(exp_name, str):
            raise TypeError(
                f"expected exp_name as a str, got {type(exp_name).__name__}; try {_START_SCORING}"
            )
        self._scoring = None
        self.saver.init_experiment(exp_name, num_targets, model_id)
        self._load_weights(checkpoint, model_id)
        self._last_ind_target = 0
        self._scoring = exp_name, model_id, num_targets

    def score(
        self,
        batch: Any,
        inds: Iterable[int] | None = None,
        num_samples: int | None = None,
    ) -> None:
        """Compute and store the projected gradients of a batch of targets.

        Parameters
        ----------
        batch, inds, num_samples
            As in :meth:`featurize`, of the targets.

        Raises
        ------
        AssertionError
            If :meth:`start_scoring_checkpoint` was not called, or the weights of another model id
            were loaded after it; or as in :meth:`featurize`.

        Notes
        -----
        Targets that were scored before are computed again. The model id need not be finalized yet,
        whereas the original would log an error and do nothing.
        """
        rows = row_positions(inds, num_samples, self._last_ind_target)
        if self._scoring is None or self._weights_of != self._scoring[1]:
            raise AssertionError(
                "expected the weights that start_scoring_checkpoint loads, got those of model id "
                f"{self._weights_of}; try {_START_SCORING}"
            )
        exp_name, model_id, num_targets = self._scoring
        if self.saver.current_model_id != model_id:  # finalize_features was called in between
            self.saver.load_current_store(model_id, exp_name, num_targets)
        if inds is None:
            self._last_ind_target += len(rows)
        require_within(rows, num_targets, "num_targets")
        grads, _ = self._projected(batch, model_id, rows)
        self.saver.current_store[f"{exp_name}_grads"][rows] = grads
        self._flush(f"{exp_name}_grads")

    @explained("finalize_scores(exp_name='test')")
    def finalize_scores(
        self,
        exp_name: str,
        model_ids: Iterable[int] | None = None,
        allow_skip: bool = False,
    ) -> np.ndarray:
        """Compute the scores of all training samples for the targets of an experiment.

        Parameters
        ----------
        exp_name
            The experiment.
        model_ids
            Checkpoints to average over; by default all in ``save_dir``. Those that are not
            finalized are left out, with a warning.
        allow_skip
            Whether to leave out checkpoints without target gradients, too.

        Returns
        -------
        Memory-mapped array of shape (train_set_size, num_targets), also in ``scores``: the mean
        over checkpoints of features times target gradients, times the mean of Q. Columns of targets
        that were never scored are NaN.

        Raises
        ------
        ValueError
            If there is no such experiment.
        FileNotFoundError
            If a checkpoint has no target gradients, unless ``allow_skip``.
        ModelIDException
            If a model id is unknown, or no checkpoint can be used.
        """
        self._last_ind_target = 0
        if self.saver.experiments.get(exp_name) is None:
            raise ValueError(
                f"expected one of the experiments {sorted(self.saver.experiments)}, got "
                f"{exp_name!r}; try {_START_SCORING} first"
            )
        num_targets = self.saver.experiments[exp_name]["num_targets"]
        ids = list(self.saver.model_ids if model_ids is None else model_ids)
        total = torch.zeros(self.train_set_size, num_targets)
        q: list[np.ndarray] = []
        used: list[int] = []
        done: list[int] = []
        with self._progress("Finalizing scores", ids, done):
            for model_id in ids:
                if self._open_for_scores(exp_name, num_targets, model_id, allow_skip):
                    q.append(self._add_scores(exp_name, total))
                    used.append(model_id)
                done.append(model_id)
        if not used:
            raise ModelIDException(
                f"expected finalized model ids with targets of {exp_name!r}, got none among {ids}; "
                "try finalize_features and score first"
            )
        scores = self.saver.current_store[f"{exp_name}_scores"]
        weigh = getattr(self.score_computer, "loss_weights", np.asarray)
        mean = weigh(np.hstack(q)).mean(axis=1, keepdims=True, dtype=np.float32)
        scores[:] = (total.numpy() / len(used)) * mean
        self.saver.save_scores(exp_name)
        self.scores = scores
        return scores  # type: ignore[no-any-return]
