"""The class :class:`TRAKer`: features and scores batch by batch, with the interface of TRAK."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trakdask._version import __version__
from trakdask.checks import require_choice
from trakdask.projection import Projector
from trakdask.trak.gradient_computers import (
    AbstractGradientComputer,
    FunctionalGradientComputer,
    selected_parameters,
)
from trakdask.trak.modelout_functions import TASK_TO_MODELOUT, AbstractModelOutput
from trakdask.trak.projectors import AbstractProjector, StreamProjector, default_projector
from trakdask.trak.savers import EXTRA, AbstractSaver, MmapSaver, ModelIDException
from trakdask.trak.score_computers import AbstractScoreComputer, BasicScoreComputer

_NO_CHECKPOINT = "no ckpt loaded"


class TRAKer:
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

        # 1. What is projected: gradients of the selected parameters, in the order of the model.
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
        # 2. What computes gradients and scores.
        if isinstance(task, str):
            remedy = "try task='image_classification', or an object of AbstractModelOutput"
            require_choice("task", task, list(TASK_TO_MODELOUT), remedy=remedy)
            task = TASK_TO_MODELOUT[task]()
        self.task = task() if isinstance(task, type) else task
        self.gradient_computer: Any = gradient_computer(  # type: ignore[call-arg]
            model=self.model,
            task=self.task,
            grad_dim=self.num_params_for_grad,
            dtype=self.dtype,
            device=self.device,
            grad_wrt=self.grad_wrt,
        )
        self.score_computer: Any = (score_computer or BasicScoreComputer)(  # type: ignore[call-arg]
            dtype=self.dtype, device=self.device, logging_level=logging_level, lambda_reg=lambda_reg
        )
        # 3. The folder, last: it records what the projector turned out to be, and an error above
        # leaves no folder behind.
        self.saver: Any = (saver or MmapSaver)(  # type: ignore[call-arg]
            save_dir=self.save_dir,
            metadata=self._metadata(),
            train_set_size=train_set_size,
            proj_dim=self.proj_dim,
            load_from_save_dir=load_from_save_dir,
            logging_level=logging_level,
            use_half_precision=use_half_precision,
        )
        self.ckpt_loaded: int | str = _NO_CHECKPOINT
        self.scores: np.ndarray | None = None
        # The model id whose weights are in the model, whatever the saver has opened since. The
        # experiment, model id and number of targets that `score` works on.
        self._weights_of: int | None = None
        self._scoring: tuple[str, int, int] | None = None
        self._last_ind = self._last_ind_target = 0

    def init_projector(
        self,
        projector: AbstractProjector | Projector | None,
        proj_dim: int,
        proj_max_batch_size: int,
    ) -> None:
        """Set ``projector`` and ``proj_dim``; the class documents the default."""
        if isinstance(projector, Projector):
            projector = StreamProjector(projector, self._shapes, self.device)
        self.projector: Any = projector
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
        # 1. Where the rows are. Another call may have opened another model id, or loaded other
        # weights.
        rows = _rows_of(inds, num_samples, self._last_ind)
        if self.ckpt_loaded != self.saver.current_model_id or self.ckpt_loaded != self._weights_of:
            raise AssertionError(
                f"expected the weights of the current model id ({self.saver.current_model_id}) to "
                f"be loaded, got {self.ckpt_loaded!r}. Load a checkpoint using "
                "traker.load_checkpoint before featurizing"
            )
        self._last_ind += num_samples or 0
        # 2. Only rows that are not done are written, but the whole batch is computed: what the
        # model returns for a sample may depend on its batch, if only in the last digits.
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
        # 3. The state of the model id. Also where no row was left: an earlier process may have been
        # killed before it wrote it.
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
        # Gram matrix and inverse need the memory that the matrix of the projector takes.
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
        if self._scoring is None or self._weights_of != self._scoring[1]:
            raise AssertionError(
                "expected the weights that start_scoring_checkpoint loads, got weights of model id "
                f"{self._weights_of}; try start_scoring_checkpoint(exp_name, checkpoint, model_id, "
                "num_targets)"
            )
        exp_name, model_id, num_targets = self._scoring
        rows = _rows_of(inds, num_samples, self._last_ind_target)
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
        # 1. Σ_c features_c targets_cᵀ, (n, m), in float32, and Q of each checkpoint, (n, 1).
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
        # 2. The mean over checkpoints times the mean of Q, as in the original: a product of means,
        # and not the mean of products.
        self.scores = scores = self.saver.current_store[f"{exp_name}_scores"]
        mean_q = np.hstack(q).mean(axis=1, keepdims=True, dtype=np.float32)
        scores[:] = (total.numpy() / len(q)) * mean_q
        self.saver.save_scores(exp_name)
        return scores

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
        # A saver for the original, which inherits from another class, cannot record λ.
        if isinstance(self.saver, AbstractSaver):
            self.saver.settle_lambda(self.lambda_reg)
        self.saver.load_current_store(model_id)
        store, computer = self.saver.current_store, self.score_computer
        # On a CPU these share the memory of the file: nothing is read before the computer asks for
        # it.
        grads = torch.as_tensor(store["grads"], device=self.device)
        features = computer.get_x_xtx_inv(grads, computer.get_xtx(grads))
        store["features"][:] = features.to(self.dtype).cpu()
        self._flush("features")
        self.saver.model_ids[model_id]["is_finalized"] = 1
        self.saver.serialize_current_model_id_metadata()

    def _load_weights(self, checkpoint: Mapping[str, Any], model_id: int) -> None:
        # Until all has worked, the model may have some of the new weights.
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
        # Not in place: a projector of your own may return something that it keeps.
        stored = self._as_stored(features / self.normalize_factor)
        is_finite = stored.isfinite().all(dim=1).numpy()
        if not is_finite.all():
            self.logger.warning("gradients of samples %s are not finite", rows[~is_finite].tolist())
        return stored

    def _why_not_scored(self, exp_name: str, model_id: int) -> Exception | None:
        """Return an error if the open checkpoint lacks target gradients, or is not finalized."""
        grads = self.saver.current_store[f"{exp_name}_grads"]
        # New files are NaN everywhere; one column says which rows were written.
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


def _rows_of(inds: Any, num_samples: int | None, cursor: int) -> np.ndarray:
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
