"""Steps that the methods of :class:`TRAKer` share: weights, batches, checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trakdask.execution.progress import polled_bar
from trakdask.trak.batches import projected
from trakdask.trak.savers import AbstractSaver, MmapSaver, ModelIDException
from trakdask.trak.score_computers import DampedScoreComputer

__all__ = ["Steps"]


class Steps:
    """Attributes and inner steps of :class:`TRAKer`."""

    model: torch.nn.Module
    task: Any
    device: str | torch.device
    dtype: torch.dtype
    lambda_reg: float
    save_dir: Path
    projector: Any
    proj_dim: int
    normalize_factor: Tensor
    gradient_computer: Any
    score_computer: Any
    saver: Any
    logger: logging.Logger
    ckpt_loaded: int | str
    _weights_of: int | None

    def _finalize(self, model_id: int) -> None:
        if isinstance(self.saver, AbstractSaver):
            self.saver.settle_lambda(self.lambda_reg)
        self.saver.load_current_store(model_id)
        store, computer = self.saver.current_store, self.score_computer
        if store["grads"] is None:
            raise ModelIDException(
                f"expected gradients of model id {model_id}, got none in {str(self.save_dir)!r}, "
                "since they were deleted; try featurizing it in another save_dir"
            )
        if isinstance(computer, DampedScoreComputer):
            computer.set_out_to_loss(store["out_to_loss"])
        grads = torch.as_tensor(store["grads"], device=self.device)
        features = computer.get_x_xtx_inv(grads, computer.get_xtx(grads))
        store["features"][:] = features.to(self.dtype).cpu()
        self._flush("features")
        self.saver.model_ids[model_id]["is_finalized"] = 1
        self.saver.serialize_current_model_id_metadata()

    def _open_for_scores(
        self, exp_name: str, num_targets: int, model_id: int, allow_skip: bool
    ) -> bool:
        """Open the files of a checkpoint; return whether it can be used."""
        if model_id not in self.saver.model_ids:
            raise ModelIDException(
                f"expected one of the model ids {sorted(self.saver.model_ids)}, got {model_id}; "
                "try one of those"
            )
        self.saver.load_current_store(model_id)
        self.saver.load_current_store(model_id, exp_name, num_targets)
        if self.saver.current_store[f"{exp_name}_grads"] is None:
            if not allow_skip:
                raise FileNotFoundError(
                    f"expected target gradients of model id {model_id} for experiment "
                    f"{exp_name!r}, got none; try start_scoring_checkpoint and score, or "
                    "allow_skip=True"
                )
            self.logger.warning("No target gradients of model ID %s. Skipping.", model_id)
            return False
        if self.saver.model_ids[model_id]["is_finalized"] == 0:
            self.logger.warning("Model ID %s not finalized, cannot score", model_id)
            return False
        return True

    def _add_scores(self, exp_name: str, total: Tensor) -> np.ndarray:
        """Add the products of the current checkpoint; return its Q, (n, 1)."""
        store = self.saver.current_store
        features = torch.as_tensor(store["features"], device=self.device)
        targets = torch.as_tensor(store[f"{exp_name}_grads"], device=self.device)
        if n_missing := int(targets.isnan().all(dim=1).sum()):
            self.logger.warning(
                "%d of %d targets of %r were never scored with model ID %s, or their gradients are "
                "not finite: their scores are NaN",
                *(n_missing, len(targets), exp_name, self.saver.current_model_id),
            )
        self.score_computer.get_scores(features, targets, accumulator=total)
        return np.asarray(store["out_to_loss"]).copy()

    def _load_weights(self, checkpoint: Mapping[str, Any], model_id: int) -> None:
        self._weights_of = None
        self.model.load_state_dict(checkpoint)
        self.model.eval()
        self.gradient_computer.load_model_params(self.model)
        self._weights_of = model_id

    def _projected(
        self, batch: Any, model_id: int, rows: np.ndarray
    ) -> tuple[Tensor, Tensor | None]:
        """Return a batch's projected gradients in the form to be stored, and Q if it is known."""
        features, out_to_loss = projected(
            self.gradient_computer, self.projector, batch, model_id, len(rows)
        )
        stored = self._as_stored(features / self.normalize_factor)
        if not bool(stored.isfinite().all()):
            bad = rows[(~stored.isfinite().all(dim=1)).numpy()]
            self.logger.warning("gradients of samples %s are not finite", bad.tolist())
        return stored, out_to_loss

    def _as_stored(self, values: Tensor) -> Tensor:
        return values.detach().to(self.dtype).cpu()

    def _flush(self, *names: str) -> None:
        if isinstance(self.saver, MmapSaver):
            self.saver.flush(*names)

    def _progress(self, title: str, ids: list[int], done: list[int]) -> Any:
        show = self.logger.isEnabledFor(logging.INFO)
        return polled_bar(f"{title} of model IDs", len(ids), lambda: len(done), show=show)
