"""Scores of targets, batch by batch: the second half of the interface of TRAK."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trakdask.trak.savers import ModelIDException


class Scoring:
    """The part of :class:`~trakdask.trak.TRAKer` for targets, and for batches of any samples.

    Its subclass sets the attributes, and featurizes the training samples.
    """

    model: torch.nn.Module
    gradient_computer: Any
    projector: Any
    normalize_factor: Tensor
    saver: Any
    score_computer: Any
    task: Any
    save_dir: Path
    train_set_size: int
    device: str | torch.device
    dtype: torch.dtype
    lambda_reg: float
    logger: logging.Logger
    scores: np.ndarray | None = None
    _weights_of: int | None = None
    _scoring: tuple[str, int, int] | None = None
    _last_ind_target = 0

    def start_scoring_checkpoint(
        self, exp_name: str, checkpoint: Mapping[str, Any], model_id: int, num_targets: int
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
        ModelIDException, StoreMismatchError
            If the model id has no files, or the experiment has another number of targets.

        Notes
        -----
        A warning is logged if the features of the model id are not finalized yet.
        """
        self._scoring = None
        self.saver.init_experiment(exp_name, num_targets, model_id)
        if not self.saver.model_ids[model_id]["is_finalized"]:
            self.logger.warning(
                "expected finalized features of model ID %s, got targets before them; call "
                "finalize_features before finalize_scores",
                model_id,
            )
        self._load_weights(checkpoint, model_id)
        self._last_ind_target = 0
        self._scoring = exp_name, model_id, num_targets

    def score(
        self, batch: Any, inds: Iterable[int] | None = None, num_samples: int | None = None
    ) -> None:
        """Compute and store the projected gradients of a batch of targets.

        Parameters
        ----------
        batch, inds, num_samples
            As in :meth:`TRAKer.featurize`, of the targets.

        Raises
        ------
        AssertionError
            If :meth:`start_scoring_checkpoint` was not called, or the weights of another model id
            were loaded after it; or as in :meth:`TRAKer.featurize`.

        Notes
        -----
        Targets that were scored before are computed again. The model id need not be finalized yet,
        whereas the original would log an error and do nothing.
        """
        if self._scoring is None or self._weights_of != self._scoring[1]:
            raise AssertionError(
                "expected the weights that start_scoring_checkpoint loads, got weights of model id "
                f"{self._weights_of}; try start_scoring_checkpoint(exp_name, checkpoint, model_id, "
                "num_targets)"
            )
        exp_name, model_id, num_targets = self._scoring
        rows = rows_of(inds, num_samples, self._last_ind_target)
        if self.saver.current_model_id != model_id:  # finalize_features was called in between
            self.saver.load_current_store(model_id, exp_name, num_targets)
        self._last_ind_target += num_samples or 0
        grads = self._projected(batch, model_id, rows)
        self.saver.current_store[f"{exp_name}_grads"][rows] = grads
        self._flush(f"{exp_name}_grads")

    def finalize_scores(
        self, exp_name: str, model_ids: Iterable[int] | None = None, allow_skip: bool = False
    ) -> np.ndarray:
        """Compute the scores of all training samples for the targets of an experiment.

        Parameters
        ----------
        exp_name
            The experiment.
        model_ids
            Checkpoints to average over; by default all in ``save_dir``.
        allow_skip
            Whether to leave out checkpoints that are not finalized, or have no target gradients,
            with a warning. (The original always leaves out checkpoints that are not finalized.)

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
            If a model id is unknown, if a checkpoint is not finalized, unless ``allow_skip``, or if
            no checkpoint can be used.
        """
        self._last_ind_target = 0
        if exp_name not in self.saver.experiments:
            raise ValueError(
                f"expected one of the experiments {sorted(self.saver.experiments)}, got "
                f"{exp_name!r}; try start_scoring_checkpoint first"
            )
        num_targets = self.saver.experiments[exp_name]["num_targets"]
        ids = list(self.saver.model_ids if model_ids is None else model_ids)
        total = torch.zeros(self.train_set_size, num_targets)
        q: list[np.ndarray] = []
        for model_id in ids:
            self.saver.load_current_store(model_id)
            self.saver.load_current_store(model_id, exp_name, num_targets)
            why_not = self._why_not_scored(exp_name, model_id)
            if why_not is None:
                q.append(self._add_scores(exp_name, total))
            elif allow_skip:
                self.logger.warning("Skipping model ID %s: %s", model_id, why_not)
            else:
                raise why_not
        if not q:
            raise ModelIDException(
                f"expected finalized model ids with targets of {exp_name!r}, got none among {ids}; "
                "try finalize_features and score first"
            )
        self.scores = scores = self.saver.current_store[f"{exp_name}_scores"]
        mean_q = np.hstack(q).mean(axis=1, keepdims=True, dtype=np.float32)
        scores[:] = (total.numpy() / len(q)) * mean_q
        self.saver.save_scores(exp_name)
        return scores

    def _load_weights(self, checkpoint: Mapping[str, Any], model_id: int) -> None:
        self._weights_of = None
        self.model.load_state_dict(checkpoint)
        self.model.eval()
        self.gradient_computer.load_model_params(self.model)
        self._weights_of = model_id

    def _projected(self, batch: Any, model_id: int, rows: np.ndarray) -> Tensor:
        """Return a batch's projected gradients in the form to be stored."""
        gradients = self.gradient_computer.compute_per_sample_grad(batch)
        features = self.projector.project(gradients, model_id=model_id)
        if len(features) != len(rows):
            raise ValueError(
                f"expected gradients of {len(rows)} samples, got {len(features)}; try "
                "num_samples=len(batch[0]), since the last batch may be smaller"
            )
        stored = self._as_stored(features / self.normalize_factor)
        is_finite = stored.isfinite().all(dim=1).numpy()
        if not is_finite.all():
            self.logger.warning("gradients of samples %s are not finite", rows[~is_finite].tolist())
        return stored

    def _why_not_scored(self, exp_name: str, model_id: int) -> Exception | None:
        """Return an error if the open checkpoint lacks target gradients, or is not finalized."""
        grads = self.saver.current_store[f"{exp_name}_grads"]
        if grads is None or np.isnan(np.asarray(grads)[:, 0]).all():
            return FileNotFoundError(
                f"expected target gradients of model id {model_id} for experiment {exp_name!r}, "
                "got none; try start_scoring_checkpoint and score, or allow_skip=True"
            )
        if self.saver.model_ids[model_id]["is_finalized"] == 0:
            return ModelIDException(
                f"expected finalized model ids, got {model_id}, which is not; try "
                "finalize_features, or allow_skip=True"
            )
        return None

    def _add_scores(self, exp_name: str, total: Tensor) -> np.ndarray:
        """Add the products of the current checkpoint; return its Q, (n, 1)."""
        store, model_id = self.saver.current_store, self.saver.current_model_id
        self.logger.info("Scores of %r with model ID %s", exp_name, model_id)
        targets = torch.as_tensor(store[f"{exp_name}_grads"], device=self.device)
        if n_missing := int(targets.isnan().all(dim=1).sum()):
            self.logger.warning(
                "%d of %d targets of %r were never scored with model ID %s, or their gradients are "
                "not finite: their scores are NaN",
                *(n_missing, len(targets), exp_name, model_id),
            )
        features = torch.as_tensor(store["features"], device=self.device)
        self.score_computer.get_scores(features, targets, accumulator=total)
        return np.asarray(store["out_to_loss"]).copy()

    def _as_stored(self, values: Tensor) -> Tensor:
        return values.detach().to(self.dtype).cpu()

    def _flush(self, *names: str) -> None:
        for name in names:
            if isinstance(array := self.saver.current_store[name], np.memmap):
                array.flush()


def rows_of(inds: Any, num_samples: int | None, cursor: int) -> np.ndarray:
    """Return the rows of a batch: ``inds``, or the next ones from the cursor on."""
    if (inds is None) == (num_samples is None):
        raise AssertionError(
            "Exactly one of num_samples and inds should be specified; try num_samples=len(batch[0])"
        )
    if num_samples is not None:
        return np.arange(cursor, cursor + num_samples)
    rows = np.asarray(inds.cpu() if isinstance(inds, Tensor) else inds).reshape(-1)
    if rows.dtype.kind not in "iu" or (rows < 0).any():
        raise IndexError(f"expected positions of samples as inds, got {rows}; try np.arange(0, 32)")
    return rows
