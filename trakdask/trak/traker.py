"""The class :class:`TRAKer`: features and scores batch by batch, with the interface of TRAK."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trakdask._version import __version__
from trakdask.checks import require_choice
from trakdask.projection import Projector
from trakdask.trak.basic_projectors import AbstractProjector
from trakdask.trak.gradient_computers import (
    AbstractGradientComputer,
    FunctionalGradientComputer,
    selected_parameters,
)
from trakdask.trak.metadata import EXTRA
from trakdask.trak.modelout_functions import TASK_TO_MODELOUT, AbstractModelOutput
from trakdask.trak.projectors import StreamProjector, default_projector
from trakdask.trak.savers import AbstractSaver, MmapSaver, ModelIDException
from trakdask.trak.score_computers import AbstractScoreComputer, BasicScoreComputer
from trakdask.trak.scoring import Scoring, rows_of

_NO_CHECKPOINT = "no ckpt loaded"


class TRAKer(Scoring):
    """Compute TRAK features of training samples and scores of targets, batch by batch.

    Parameters
    ----------
    model
        The model, which has the architecture of all checkpoints. Each call of
        :meth:`load_checkpoint` and :meth:`start_scoring_checkpoint` changes its weights.
    task
        ``"image_classification"``, ``"text_classification"``, ``"clip"`` or
        ``"iterative_image_classification"``, or an instance of a subclass of
        ``AbstractModelOutput``. (A class is instantiated; the original fails later.)
    train_set_size
        Number of training samples.
    save_dir
        Folder of all results. A run that was interrupted continues there.
    load_from_save_dir
        Whether to look for model ids and experiments of other runs there. Several jobs may do so at
        the same time. False, as in the original's SLURM example, works as well, and does not
        discard rows that an earlier job featurized.
    device
        Device of the model and the batches: ``"cpu"``, ``"cuda"`` or any other torch device.
    gradient_computer
        A class, subclass of ``AbstractGradientComputer``.
    projector
        An instance of an ``AbstractProjector``, or a projector of trakdask, such as
        ``td.SJLT()``. By default, as in the original: ``BasicProjector`` with normal entries on a
        CPU, ``CudaProjector`` with ±1 on a GPU that has ``fast_jl``, else ``BasicProjector``.
    saver
        A class, subclass of ``AbstractSaver``; :class:`MmapSaver` by default.
    score_computer
        A class, subclass of ``AbstractScoreComputer``; :class:`BasicScoreComputer` by default.
    proj_dim
        Number of feature columns, if ``projector`` is None.
    logging_level
        Level of the loggers ``TRAK``, ``STORE`` and ``ScoreComputer``.
    use_half_precision
        Whether features are stored, and the matrix drawn, in float16. The model runs in its own
        precision in any case.
    proj_max_batch_size
        Most samples per kernel launch of ``CudaProjector``: 8, 16 or 32; other numbers are rounded
        down to one of these.
    projector_seed
        Seed of the matrix.
    grad_wrt
        Names of parameters to differentiate with respect to; all by default.
    lambda_reg
        λ that is added to the diagonal of the Gram matrix of the projected gradients.

    Raises
    ------
    ValueError
        If ``task`` is an unknown name.
    AssertionError
        If ``save_dir`` contains a run with other settings: sizes, projector, seed, dtype,
        or ``grad_wrt``; or a run of the original, which does not record the last three.
    RuntimeError
        If a matrix must be drawn on a CUDA device and there is none.

    Notes
    -----
    Matrices, normalisation, formula, dtypes and files are as in the original, so that scores agree
    with it. Differences from traker 0.3.2: Gram matrices are summed in float32, a part
    of a batch may already be featurized, targets that were never scored are NaN, with a warning,
    and settings that contradict an earlier run raise an error. float16 results differ by rounding
    errors.

    References
    ----------
    Park et al. 2023, "TRAK: Attributing Model Behavior at Scale", and its package ``traker``.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        task: AbstractModelOutput | str,
        train_set_size: int,
        save_dir: str | Path = "./trak_results",
        load_from_save_dir: bool = True,
        device: str | torch.device = "cuda",
        gradient_computer: type[AbstractGradientComputer] = FunctionalGradientComputer,
        projector: AbstractProjector | None = None,
        saver: type[AbstractSaver] | None = None,
        score_computer: type[AbstractScoreComputer] | None = None,
        proj_dim: int = 2048,
        logging_level: int = logging.INFO,
        use_half_precision: bool = True,
        proj_max_batch_size: int = 32,
        projector_seed: int = 0,
        grad_wrt: Iterable[str] | None = None,
        lambda_reg: float = 0.0,
    ) -> None:
        self.model = model
        self.train_set_size = train_set_size
        self.device = device
        self.dtype = torch.float16 if use_half_precision else torch.float32
        self.grad_wrt = None if grad_wrt is None else list(grad_wrt)
        self.lambda_reg = lambda_reg
        logging.basicConfig()
        self.logger = logging.getLogger("TRAK")
        self.logger.setLevel(logging_level)

        selected = selected_parameters(dict(self.model.named_parameters()), self.grad_wrt)
        self._shapes = {name: tuple(parameter.shape) for name, parameter in selected.items()}
        self.num_params = sum(parameter.numel() for parameter in self.model.parameters())
        self.num_params_for_grad = sum(parameter.numel() for parameter in selected.values())
        self.proj_seed = projector_seed
        self.init_projector(projector, proj_dim, proj_max_batch_size)
        # Matrices of trakdask are already scaled.
        is_scaled = isinstance(self.projector, StreamProjector)
        n_parameters = 1.0 if is_scaled else float(self.num_params_for_grad)
        self.normalize_factor = torch.tensor(n_parameters).sqrt()

        self.save_dir = Path(save_dir).resolve()
        self.load_from_save_dir = load_from_save_dir
        if isinstance(task, str):
            remedy = "try task='image_classification', or an object of AbstractModelOutput"
            require_choice("task", task, list(TASK_TO_MODELOUT), remedy=remedy)
            task = TASK_TO_MODELOUT[task]()
        self.task = task() if isinstance(task, type) else task
        self.gradient_computer = gradient_computer(  # type: ignore[call-arg]
            model=self.model,
            task=self.task,
            grad_dim=self.num_params_for_grad,
            dtype=self.dtype,
            device=self.device,
            grad_wrt=self.grad_wrt,
        )
        self.score_computer = (score_computer or BasicScoreComputer)(  # type: ignore[call-arg]
            dtype=self.dtype, device=self.device, logging_level=logging_level, lambda_reg=lambda_reg
        )
        self.saver = (saver or MmapSaver)(  # type: ignore[call-arg]
            save_dir=self.save_dir,
            metadata=self._metadata(),
            train_set_size=train_set_size,
            proj_dim=self.proj_dim,
            load_from_save_dir=load_from_save_dir,
            logging_level=logging_level,
            use_half_precision=use_half_precision,
        )
        self.ckpt_loaded: int | str = _NO_CHECKPOINT
        self._last_ind = 0

    def init_projector(
        self,
        projector: AbstractProjector | Projector | None,
        proj_dim: int,
        proj_max_batch_size: int,
    ) -> None:
        """Set ``projector`` and ``proj_dim``; the class documents the default."""
        if isinstance(projector, Projector):
            projector = StreamProjector(projector, self._shapes, self.device)
        self.projector = projector
        if projector is None:
            sizes = [math.prod(shape) for shape in self._shapes.values()]
            options = (self.dtype, torch.device(self.device), proj_max_batch_size)
            self.projector = default_projector(sizes, proj_dim, self.proj_seed, *options)
        self.proj_dim = self.projector.proj_dim or self.num_params_for_grad

    def load_checkpoint(
        self,
        checkpoint: Mapping[str, Any],
        model_id: int,
        _allow_featurizing_already_registered: bool = False,
    ) -> None:
        """Load the weights of a checkpoint to featurize with, and open or create its files.

        Parameters
        ----------
        checkpoint
            State dict.
        model_id
            Non-negative number of the checkpoint, which also determines its projection matrix.
        _allow_featurizing_already_registered
            Has no effect, as in the original: a known id always continues where it stopped, and
            completed rows are skipped.
        """
        self.ckpt_loaded = _NO_CHECKPOINT  # until all of this has worked
        if model_id in self.saver.model_ids:
            self.saver.load_current_store(model_id)
        else:
            self.saver.register_model_id(model_id, _allow_featurizing_already_registered)
        self._load_weights(checkpoint, model_id)
        self._last_ind = 0
        self.ckpt_loaded = model_id

    def featurize(
        self, batch: Any, inds: Iterable[int] | None = None, num_samples: int | None = None
    ) -> None:
        """Compute and store the projected gradients and Q of a batch of training samples.

        Parameters
        ----------
        batch
            Input of the task, usually tensors with samples along the first axis.
        inds
            Positions of the batch's samples in the training set: array, tensor or list.
        num_samples
            Number of samples in the batch, if they follow the samples of the previous call.

        Raises
        ------
        AssertionError
            If no checkpoint is loaded, or unless exactly one of ``inds`` and ``num_samples`` is
            given.
        IndexError
            If a position is outside the training set.
        ValueError
            If the batch has another number of samples than the arguments say.

        Notes
        -----
        Rows that this or an earlier run has completed are not written again. A batch with some
        completed rows is computed as a whole, so that results do not depend on where a run was
        interrupted. When this method returns, the rows are on disk.
        """
        rows = rows_of(inds, num_samples, self._last_ind)
        if self.ckpt_loaded != self.saver.current_model_id or self.ckpt_loaded != self._weights_of:
            raise AssertionError(
                f"expected the weights of the current model id ({self.saver.current_model_id}) to "
                f"be loaded, got {self.ckpt_loaded!r}. Load a checkpoint using "
                "traker.load_checkpoint before featurizing"
            )
        self._last_ind += num_samples or 0
        store = self.saver.current_store
        todo = np.asarray(store["is_featurized"][rows]).reshape(-1) != 1
        if todo.any():
            grads = self._projected(batch, self.ckpt_loaded, rows)
            out_to_loss = self._as_stored(self.gradient_computer.compute_loss_grad(batch))
            chosen = torch.from_numpy(todo)
            store["grads"][rows[todo]] = grads[chosen]
            store["out_to_loss"][rows[todo]] = out_to_loss.reshape(-1, 1)[chosen]
            self._flush("grads", "out_to_loss")  # before the flags: a kill may come in between
            store["is_featurized"][rows[todo]] = 1
            self._flush("is_featurized")
        if self.saver.model_ids[self.ckpt_loaded]["is_featurized"] == 0:
            self.saver.serialize_current_model_id_metadata()

    def finalize_features(
        self, model_ids: Iterable[int] | None = None, del_grads: bool = False
    ) -> None:
        """Turn the projected gradients G of checkpoints into features G (GᵀG + λI)⁻¹.

        Parameters
        ----------
        model_ids
            The checkpoints; by default all in ``save_dir``. Finalized ones are skipped.
        del_grads
            Whether to delete the projected gradients once the features are written.

        Raises
        ------
        ModelIDException
            If a model id is unknown, or not all training samples are featurized.
        AssertionError
            If other model ids were finalized with another ``lambda_reg``.
        """
        torch.cuda.empty_cache()
        self.projector.free_memory()
        self._last_ind = 0
        ids = list(self.saver.model_ids if model_ids is None else model_ids)
        if not ids:
            raise ModelIDException(
                f"expected featurized model ids in {str(self.save_dir)!r}, got none; try "
                "load_checkpoint and featurize first"
            )
        for model_id in ids:
            state = self.saver.model_ids.get(model_id)
            if state is None or state["is_featurized"] == 0:
                how = "not registered" if state is None else "not fully featurized"
                raise ModelIDException(
                    f"expected a featurized model id, got {model_id}, which is {how}, in "
                    f"{str(self.save_dir)!r}; try load_checkpoint and featurize first"
                )
            if state["is_finalized"] == 1:
                self.logger.warning("Model ID %s already finalized, skipping it.", model_id)
            else:
                self.logger.info("Finalizing features of model ID %s", model_id)
                self._finalize(model_id)
            if del_grads:
                self.saver.del_grads(model_id)

    def _metadata(self) -> dict[str, Any]:
        """Return the content of ``metadata.json``: the original's keys, and one key for our own."""
        extra: dict[str, Any] = {
            "mode": "traker",  # runs of earlier versions may have another
            "version": __version__,
            "dtype": str(self.dtype).removeprefix("torch."),
            "projector_seed": int(getattr(self.projector, "seed", self.proj_seed)),
            "grad_wrt": None if self.grad_wrt is None else sorted(self.grad_wrt),
        }
        if isinstance(self.projector, StreamProjector):
            extra["projector"] = self.projector.projector.spec()
        return {
            "JL dimension": self.proj_dim,
            "JL matrix type": self.projector.proj_type,
            "train set size": self.train_set_size,
            EXTRA: extra,
        }

    def _finalize(self, model_id: int) -> None:
        if isinstance(self.saver, AbstractSaver):
            self.saver.settle_lambda(self.lambda_reg)
        self.saver.load_current_store(model_id)
        store, computer = self.saver.current_store, self.score_computer
        grads = torch.as_tensor(store["grads"], device=self.device)
        features = computer.get_x_xtx_inv(grads, computer.get_xtx(grads))
        store["features"][:] = features.to(self.dtype).cpu()
        self._flush("features")
        self.saver.model_ids[model_id]["is_finalized"] = 1
        self.saver.serialize_current_model_id_metadata()
