"""The class :class:`TRAKer`: features and scores batch by batch, as scripts of TRAK expect them."""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from trakdask._version import __version__
from trakdask.estimators import Weights, estimator_weights
from trakdask.progress import polled_bar
from trakdask.projection import Projector, Rademacher
from trakdask.trak.gradient_computers import AbstractGradientComputer, FunctionalGradientComputer
from trakdask.trak.modelout_functions import TASK_TO_MODELOUT, AbstractModelOutput
from trakdask.trak.projectors import (
    AbstractProjector,
    BasicProjector,
    ChunkedCudaProjector,
    CudaProjector,
    ProjectionType,
    StreamProjector,
)
from trakdask.trak.savers import EXTRA, AbstractSaver, MmapSaver, ModelIDException
from trakdask.trak.score_computers import (
    AbstractScoreComputer,
    BasicScoreComputer,
    DampedScoreComputer,
)
from trakdask.trak.utils import chunk_sizes, get_num_params

__all__ = ["TRAKer"]

Mode = Literal["traker", "trakdask"]
_Method = TypeVar("_Method", bound=Callable[..., Any])

_POWER = 0.5
_NO_CHECKPOINT = "no ckpt loaded"
_NO_CUDA_PROJECTOR = (ImportError, RuntimeError, AttributeError, ValueError)
_START_SCORING = (
    "start_scoring_checkpoint(exp_name='test', checkpoint=model.state_dict(), model_id=0, "
    "num_targets=100)"
)


def _explained(example: str) -> Callable[[_Method], _Method]:
    """Say, where a call does not fit the signature, what a call looks like."""

    def decorate(method: _Method) -> _Method:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                inspect.signature(method).bind(*args, **kwargs)
            except TypeError as err:
                raise TypeError(
                    f"expected the arguments of {method.__name__}, got {str(err)!r}; try {example}"
                ) from None
            return method(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


class TRAKer:
    """Compute TRAK features of training samples and scores of targets, batch by batch.

    Parameters
    ----------
    model
        The model, in the architecture of all checkpoints; its weights change with each call of
        :meth:`load_checkpoint` and :meth:`start_scoring_checkpoint`.
    task
        ``"image_classification"``, ``"text_classification"``, ``"clip"`` or
        ``"iterative_image_classification"``, or an instance of a subclass of
        ``AbstractModelOutput``. (A class is instantiated; the original fails later.)
    train_set_size
        Number of training samples.
    save_dir
        Folder of all results. A run that was interrupted continues there.
    load_from_save_dir
        Whether to look there for other runs' settings, model ids and experiments. Several jobs may
        do so at the same time; False, as in the original's SLURM example, works too, and does not
        discard what an earlier job featurized.
    device
        ``"cpu"``, ``"cuda"`` or any torch device, where the model and the batches are.
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
        Of the loggers ``TRAK``, ``STORE`` and ``ScoreComputer``. Progress is shown at INFO.
    use_half_precision
        Whether features are stored, and the matrix drawn, in float16. The model runs in its own
        precision in any case. Ignored in mode ``"trakdask"``.
    proj_max_batch_size
        Samples per kernel of ``CudaProjector``: 8, 16 or 32; another number means the next smaller.
    projector_seed
        Seed of the matrix.
    grad_wrt
        Names of parameters to differentiate with respect to; all by default.
    lambda_reg
        λ that is added to the diagonal of the Gram matrix of the projected gradients.
    mode
        ``"traker"``: matrices, normalisation, formula, dtypes and files of the original, with which
        scores agree. ``"trakdask"``: features of :func:`trakdask.featurize`, in float32, by
        ``td.Rademacher(proj_dim, projector_seed)`` unless ``projector`` is given, and scores of
        :func:`trakdask.score` with its estimator and ``damping="closed_form"``, or
        ``td.Absolute(lambda_reg)`` if that is not 0. A folder has one mode.

    Raises
    ------
    AssertionError
        If ``save_dir`` has a run with other settings: sizes, projector, seed, dtype, ``grad_wrt``
        or mode. What the original wrote says nothing of the last four.
    RuntimeError
        If the device is CUDA, there is none, and a matrix is to be made there.

    Notes
    -----
    Differences from traker 0.3.2 in mode ``"traker"``: Gram matrices are summed in float32, half a
    batch may be featurized already, targets that were never scored are NaN, with a warning, and
    settings that do not fit are refused. float16 results differ by rounding.

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
        *,
        mode: Mode = "traker",
    ) -> None:
        if mode not in ("traker", "trakdask"):
            raise ValueError(
                f"expected mode 'traker' or 'trakdask', got {mode!r}; try mode='traker'"
            )
        self.model = model
        self.mode = mode
        self.train_set_size = train_set_size
        self.device = device
        half = use_half_precision and mode == "traker"
        self.dtype = torch.float16 if half else torch.float32
        self.grad_wrt = None if grad_wrt is None else list(grad_wrt)
        self.lambda_reg = lambda_reg
        logging.basicConfig()
        self.logger = logging.getLogger("TRAK")
        self.logger.setLevel(logging_level)

        self.num_params = get_num_params(self.model)
        self.num_params_for_grad = sum(map(math.prod, self._shapes().values()))
        self.proj_seed = projector_seed
        self.init_projector(projector, proj_dim, proj_max_batch_size)
        # Matrices of trakdask are scaled by themselves.
        scaled = isinstance(self.projector, StreamProjector)
        n_parameters = torch.tensor(1 if scaled else self.num_params_for_grad, dtype=torch.float32)
        self.normalize_factor = torch.sqrt(n_parameters)

        self.save_dir = Path(save_dir).resolve()
        self.load_from_save_dir = load_from_save_dir
        self.task = _task(task)
        self.gradient_computer = _instance(
            gradient_computer,
            {"grad_wrt"} if self.grad_wrt is None else set(),
            model=self.model,
            task=self.task,
            grad_dim=self.num_params_for_grad,
            dtype=self.dtype,
            device=self.device,
            grad_wrt=self.grad_wrt,
        )
        self.score_computer = self._score_computer(score_computer, logging_level)
        self.saver = _instance(
            saver or MmapSaver,
            {"train_set_size", "proj_dim"},
            save_dir=self.save_dir,
            metadata=self._metadata(),
            train_set_size=self.train_set_size,
            proj_dim=self.proj_dim,
            load_from_save_dir=self.load_from_save_dir,
            logging_level=logging_level,
            use_half_precision=half,
        )
        self.ckpt_loaded: int | str = _NO_CHECKPOINT
        self._weights_of: int | None = None
        self._scoring: tuple[str, int, int] | None = None
        self._last_ind = 0
        self._last_ind_target = 0
        self.scores: np.ndarray | None = None

    def init_projector(
        self,
        projector: AbstractProjector | Projector | None,
        proj_dim: int,
        proj_max_batch_size: int,
    ) -> None:
        """Set ``projector`` and ``proj_dim``; see the class for what the default is."""
        if projector is None and self.mode == "trakdask":
            projector = Rademacher(proj_dim, self.proj_seed)
        if isinstance(projector, Projector):
            projector = StreamProjector(projector, self._shapes(), self.device)
        if projector is not None:
            self.projector: Any = projector
            self.proj_dim = self.projector.proj_dim or self.num_params_for_grad
            return
        self.proj_dim = proj_dim
        if torch.device(self.device).type == "cpu":
            self.logger.info("Using BasicProjector with a normal matrix, since the device is a CPU")
            self.projector = self._basic_projector(ProjectionType.normal)
            return
        try:
            self.projector = self._cuda_projector(proj_max_batch_size)
        except _NO_CUDA_PROJECTOR as err:
            if torch.device(self.device).type == "cuda" and not torch.cuda.is_available():
                raise RuntimeError(
                    f"expected a CUDA device for device={str(self.device)!r}, got none on this "
                    "machine; try device='cpu'"
                ) from err
            self.logger.error("Could not use CudaProjector.\nReason: %s", err)
            self.logger.error("Defaulting to BasicProjector.")
            self.projector = self._basic_projector(ProjectionType.rademacher)

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
            Non-negative number of the checkpoint, which also decides on its projection matrix.
        _allow_featurizing_already_registered
            Has no effect, as in the original: a known id always continues where it was, and rows
            that are done are skipped.
        """
        self.ckpt_loaded = _NO_CHECKPOINT  # until all of this has worked
        if self.saver.model_ids.get(model_id) is None:
            self.saver.register_model_id(model_id, _allow_featurizing_already_registered)
        else:
            self.saver.load_current_store(model_id)
        self._load_weights(checkpoint, model_id)
        self._last_ind = 0
        self.ckpt_loaded = model_id

    def featurize(
        self,
        batch: Any,
        inds: Iterable[int] | None = None,
        num_samples: int | None = None,
    ) -> None:
        """Compute and store the projected gradients and Q of a batch of training samples.

        Parameters
        ----------
        batch
            Input of the task: usually tensors whose first axis is the sample.
        inds
            Positions of the batch's samples in the training set: array, tensor or list.
        num_samples
            Number of samples in the batch, which then follow those of the call before.

        Raises
        ------
        AssertionError
            If no checkpoint is loaded, or not exactly one of ``inds`` and ``num_samples`` is given.
        IndexError
            If a position is outside the training set.
        ValueError
            If the batch does not have as many samples as were announced.

        Notes
        -----
        Rows that are done, by this or an earlier run, are not written again; a batch of which only
        some are done is computed as a whole, so that results do not depend on where a run was
        interrupted. When this returns, the rows are on the disk.
        """
        rows = self._rows(inds, num_samples)
        if self.ckpt_loaded != self.saver.current_model_id or self.ckpt_loaded != self._weights_of:
            raise AssertionError(
                f"expected the checkpoint of model id {self.saver.current_model_id}, got "
                f"{self.ckpt_loaded!r}. Load a checkpoint using traker.load_checkpoint before "
                "featurizing"
            )
        if inds is None:
            rows += self._last_ind
            self._last_ind += len(rows)
        self._require_within(rows, self.train_set_size, "train_set_size")
        store = self.saver.current_store
        todo = np.asarray(store["is_featurized"][rows]).reshape(-1) != 1
        if not todo.any():
            self.logger.debug("All samples in batch already featurized.")
            if self.saver.model_ids[self.ckpt_loaded]["is_featurized"] == 0:
                self.saver.serialize_current_model_id_metadata()
            return
        grads = self._projected(batch, self.ckpt_loaded, len(rows))
        out_to_loss = self.gradient_computer.compute_loss_grad(batch)
        chosen = torch.from_numpy(todo)
        store["grads"][rows[todo]] = grads[chosen]
        store["out_to_loss"][rows[todo]] = self._as_stored(out_to_loss.reshape(-1, 1))[chosen]
        self._flush("grads", "out_to_loss")
        store["is_featurized"][rows[todo]] = 1
        self._flush("is_featurized")
        self.saver.serialize_current_model_id_metadata()

    def finalize_features(
        self, model_ids: Iterable[int] | None = None, del_grads: bool = False
    ) -> None:
        """Turn the projected gradients G of checkpoints into features G (GᵀG + λI)⁻¹.

        Parameters
        ----------
        model_ids
            The checkpoints; all of ``save_dir`` by default. Those that are done are skipped.
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
        done: list[int] = []
        with self._progress("Finalizing features", ids, done):
            for model_id in ids:
                recorded = self.saver.model_ids.get(model_id)
                if recorded is None or recorded["is_featurized"] == 0:
                    how = "not registered" if recorded is None else "not fully featurized"
                    raise ModelIDException(
                        f"expected a featurized model id, got {model_id}, which is {how}, in "
                        f"{str(self.save_dir)!r}; try load_checkpoint and featurize first"
                    )
                if recorded["is_finalized"] == 1:
                    self.logger.warning("Model ID %s already finalized, skipping it.", model_id)
                else:
                    self._finalize(model_id)
                if del_grads:
                    self.saver.del_grads(model_id)
                done.append(model_id)

    @_explained(_START_SCORING)
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
            State dict: that with which the model id was featurized.
        model_id
            A featurized model id.
        num_targets
            Number of targets, the same for all checkpoints of an experiment.

        Raises
        ------
        TypeError
            If the arguments are not those; the original's README has them in another order.
        ModelIDException, StoreMismatchError
            If the model id has no files; if the experiment has another number of targets.
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
        Targets that were scored before are computed again. The model id need not be finalized yet;
        the original logs an error then, and does nothing.
        """
        rows = self._rows(inds, num_samples)
        if self._scoring is None or self._weights_of != self._scoring[1]:
            raise AssertionError(
                f"expected a call of start_scoring_checkpoint just before, got weights of model id "
                f"{self._weights_of}; try {_START_SCORING}"
            )
        exp_name, model_id, num_targets = self._scoring
        if self.saver.current_model_id != model_id:  # finalize_features was called in between
            self.saver.load_current_store(model_id, exp_name, num_targets)
        if inds is None:
            rows += self._last_ind_target
            self._last_ind_target += len(rows)
        self._require_within(rows, num_targets, "num_targets")
        grads = self._projected(batch, model_id, len(rows))
        self.saver.current_store[f"{exp_name}_grads"][rows] = grads
        self._flush(f"{exp_name}_grads")

    @_explained("finalize_scores(exp_name='test')")
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
            Checkpoints to average over; all of ``save_dir`` by default. Those that are not
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
        q_sum = np.zeros((self.train_set_size, 1), np.float32)
        used: list[int] = []
        done: list[int] = []
        with self._progress("Finalizing scores", ids, done):
            for model_id in ids:
                if self._open_for_scores(exp_name, num_targets, model_id, allow_skip):
                    q_sum += self._add_scores(exp_name, total)
                    used.append(model_id)
                done.append(model_id)
        if not used:
            raise ModelIDException(
                f"expected finalized model ids with targets of {exp_name!r}, got none among {ids}; "
                "try finalize_features and score first"
            )
        scores = self.saver.current_store[f"{exp_name}_scores"]
        scores[:] = (total.numpy() / len(used)) * (q_sum / len(used))
        self.saver.save_scores(exp_name)
        self.scores = scores
        return scores  # type: ignore[no-any-return]

    def _finalize(self, model_id: int) -> None:
        if isinstance(self.saver, AbstractSaver):
            self.saver.settle_lambda(self.lambda_reg)
        self.saver.load_current_store(model_id)
        store, computer = self.saver.current_store, self.score_computer
        if store["grads"] is None:
            raise ModelIDException(
                f"expected gradients of model id {model_id}, got none in {str(self.save_dir)!r}, "
                "where they were deleted; try to featurize it in another save_dir"
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
        """Add the products of the current checkpoint; return its factors, (n, 1)."""
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
        q = np.asarray(store["out_to_loss"])
        weigh = getattr(self.score_computer, "loss_weights", None)
        return np.asarray(weigh(q) if weigh else q)

    def _load_weights(self, checkpoint: Mapping[str, Any], model_id: int) -> None:
        self._weights_of = None
        self.model.load_state_dict(checkpoint)
        self.model.eval()
        self.gradient_computer.load_model_params(self.model)
        self._weights_of = model_id

    def _rows(self, inds: Iterable[int] | None, num_samples: int | None) -> np.ndarray:
        """Return the rows of a batch, from 0 on where they follow those of the batch before."""
        if (inds is None) == (num_samples is None):
            given = "neither" if inds is None else "both"
            raise AssertionError(
                "Exactly one of num_samples and inds should be specified: expected one, got "
                f"{given}; try num_samples=len(batch[0])"
            )
        if inds is None:
            return np.arange(num_samples)
        rows = inds.numpy(force=True) if isinstance(inds, Tensor) else np.asarray(inds)
        if rows.dtype.kind not in "iu":
            raise TypeError(f"expected integer inds, got {rows.dtype}; try inds=np.arange(0, 32)")
        return rows.reshape(-1)

    def _require_within(self, rows: np.ndarray, size: int, name: str) -> None:
        if len(rows) and not 0 <= rows.min() <= rows.max() < size:
            raise IndexError(
                f"expected positions below {name}={size}, got {rows.min()} to {rows.max()}; try "
                "num_samples=len(batch[0]), since the last batch may be smaller"
            )

    def _projected(self, batch: Any, model_id: int | str, n_rows: int) -> Tensor:
        """Return what is stored of the gradients of a batch, in host memory."""
        grads = self.gradient_computer.compute_per_sample_grad(batch=batch)
        projected = self.projector.project(grads, model_id=model_id)
        if len(projected) != n_rows:
            raise ValueError(
                f"expected gradients of {n_rows} samples, got {len(projected)}; try "
                "num_samples=len(batch[0]), since the last batch may be smaller"
            )
        stored = self._as_stored(projected / self.normalize_factor)
        if not bool(stored.isfinite().all()):
            rows = (~stored.isfinite().all(dim=1)).nonzero()[:, 0].tolist()
            self.logger.warning("gradients of samples %s of the batch are not finite", rows)
        return stored

    def _as_stored(self, values: Tensor) -> Tensor:
        return values.detach().to(self.dtype).cpu()

    def _flush(self, *names: str) -> None:
        if isinstance(self.saver, MmapSaver):
            self.saver.flush(*names)

    def _progress(self, title: str, ids: list[int], done: list[int]) -> Any:
        show = self.logger.isEnabledFor(logging.INFO)
        return polled_bar(f"{title} of model IDs", len(ids), lambda: len(done), show=show)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters that are differentiated."""
        shapes = {name: tuple(each.shape) for name, each in self.model.named_parameters()}
        if self.grad_wrt is None:
            return shapes
        if unknown := [name for name in self.grad_wrt if name not in shapes]:
            raise KeyError(
                f"expected names of parameters in grad_wrt, got {unknown[0]!r}; try one of "
                f"{list(shapes)[:4]}"
            )
        return {name: shape for name, shape in shapes.items() if name in self.grad_wrt}

    def _basic_projector(self, proj_type: ProjectionType) -> BasicProjector:
        return BasicProjector(
            grad_dim=self.num_params_for_grad,
            proj_dim=self.proj_dim,
            seed=self.proj_seed,
            proj_type=proj_type,
            dtype=self.dtype,
            device=self.device,  # type: ignore[arg-type]
        )

    def _cuda_projector(self, max_batch_size: int) -> CudaProjector | ChunkedCudaProjector:
        sizes = [math.prod(shape) for shape in self._shapes().values()]
        most, chunks = chunk_sizes(sizes, max_batch_size)
        seeds = [self.proj_seed] if len(chunks) == 1 else _chunk_seeds(self.proj_seed, len(chunks))
        parts = [
            CudaProjector(
                grad_dim=size,
                proj_dim=self.proj_dim,
                seed=seed,
                proj_type=ProjectionType.rademacher,
                device=self.device,
                max_batch_size=max_batch_size,
            )
            for size, seed in zip(chunks, seeds, strict=True)
        ]
        if len(parts) == 1:
            return parts[0]
        self.logger.info("Using ChunkedCudaProjector with chunks of sizes %s", chunks)
        device, dtype = torch.device(self.device), self.dtype
        return ChunkedCudaProjector(list(parts), most, chunks, max_batch_size, device, dtype)

    def _score_computer(
        self, given: type[AbstractScoreComputer] | None, logging_level: int
    ) -> AbstractScoreComputer:
        arguments: dict[str, Any] = {
            "dtype": self.dtype,
            "device": self.device,
            "logging_level": logging_level,
            "lambda_reg": self.lambda_reg,
        }
        if given is None and self.mode == "trakdask":
            return DampedScoreComputer(**arguments, weights=self._weights())
        droppable = {"logging_level", *([] if self.lambda_reg else ["lambda_reg"])}
        return _instance(given or BasicScoreComputer, droppable, **arguments)  # type: ignore[no-any-return]

    def _weights(self) -> Weights:
        """Return the weights of the estimator that trakdask takes for this task and model."""
        is_own = type(self.task) in TASK_TO_MODELOUT.values()
        name = type(self.task).__name__.removeprefix("Iterative") if is_own else "unknown"
        norms = (torch.nn.modules.batchnorm._BatchNorm,)
        has_norm = any(isinstance(module, norms) for module in self.model.modules())
        attrs = {"task": name.removesuffix("ModelOutput"), "batch_norm": has_norm}
        return estimator_weights(xr.Dataset(attrs=attrs), "auto", _POWER)

    def _metadata(self) -> dict[str, Any]:
        """Return what ``metadata.json`` holds: the original's keys, and under one key our own."""
        seed = getattr(self.projector, "seed", self.proj_seed)
        extra: dict[str, Any] = {
            "mode": self.mode,
            "version": __version__,
            "dtype": str(self.dtype).removeprefix("torch."),
            "projector_seed": int(seed) if isinstance(seed, int | np.integer) else None,
            "grad_wrt": None if self.grad_wrt is None else sorted(self.grad_wrt),
            "seeds": _seeds(self.projector),
            "lambda_reg": float(self.lambda_reg),
        }
        if isinstance(self.projector, StreamProjector):
            extra["projector"] = self.projector.projector.spec()
        return {
            "JL dimension": self.proj_dim,
            "JL matrix type": self.projector.proj_type,
            "train set size": self.train_set_size,
            EXTRA: extra,
        }


def _task(task: Any) -> Any:
    if isinstance(task, str):
        if task not in TASK_TO_MODELOUT:
            raise KeyError(
                f"expected a task among {sorted(TASK_TO_MODELOUT)}, got {task!r}; try "
                "task='image_classification', or an instance of an AbstractModelOutput"
            )
        task = TASK_TO_MODELOUT[task]
    return task() if isinstance(task, type) else task


def _instance(kind: Any, droppable: set[str], **arguments: Any) -> Any:
    """Make an instance, without droppable arguments that the class does not take.

    The abstract classes take fewer arguments than the original passes to their subclasses.
    """
    parameters = inspect.signature(kind).parameters
    if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        droppable = droppable - set(parameters)
        arguments = {name: v for name, v in arguments.items() if name not in droppable}
    return kind(**arguments)


def _chunk_seeds(seed: int, n_chunks: int) -> list[int]:
    """Return the original's seed of each chunk, but never one twice."""
    seeds: list[int] = []
    for drawn in np.random.default_rng(seed).integers(0, 500, size=n_chunks).tolist():
        seeds.append(next(each for each in range(drawn, 10_000, 500) if each not in seeds))
    return seeds


def _seeds(projector: Any) -> str:
    """Say whether the seeds of all parts of a matrix are those of the original."""
    parts = getattr(projector, "projector_per_chunk", ())
    beyond = getattr(projector, "num_blocks", 1) > 100
    repaired = any(getattr(part, "seed", 0) >= 500 for part in parts)
    return "distinct" if beyond or repaired else "as in traker"
