"""traker's and dattri's scores for the quality benchmark: same checkpoints, samples and targets."""

from __future__ import annotations

import itertools
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _peer_engines import dattri_functions
from _quality_tasks import Subject
from numpy.typing import NDArray
from torch import Tensor

Scores = NDArray[np.float32]
BATCH = 512


@dataclass(frozen=True)
class PeerJob:
    """What to score, from which checkpoint files."""

    subject: Subject
    checkpoints: list[Path]
    proj_dim: int

    def loader(self, part: int) -> Any:
        """Batches of the training samples (0) or of the targets (1)."""
        tensors = (torch.from_numpy(array) for array in self.subject.data()[part])
        pairs = torch.utils.data.TensorDataset(*tensors)
        return torch.utils.data.DataLoader(pairs, batch_size=BATCH)

    def states(self) -> list[dict[str, Tensor]]:
        return [dict(torch.load(path, weights_only=True)) for path in self.checkpoints]


def traker(job: PeerJob, factors: Iterable[float]) -> Iterator[Scores]:
    """Yield scores at λ = factor · tr(K²)/tr(K): features are made once, finalized for each λ."""
    from trak import TRAKer

    n_train, n_target = (len(part[0]) for part in job.subject.data())
    with tempfile.TemporaryDirectory() as folder:
        engine = TRAKer(
            model=job.subject.build(), task="image_classification", train_set_size=n_train,
            save_dir=folder, device="cpu", proj_dim=job.proj_dim, use_half_precision=False,
            logging_level=logging.ERROR,
        )  # fmt: skip
        _featurize(engine, job)
        for index, state in enumerate(job.states()):
            engine.start_scoring_checkpoint("targets", state, index, n_target)
            for batch in job.loader(1):
                engine.score(batch, num_samples=len(batch[0]))
        scale = _mean_eigenvalue(_gradients(engine, job))
        for factor in factors:
            engine.score_computer.lambda_reg = factor * scale
            yield _finalized(engine, job)


def _featurize(engine: Any, job: PeerJob) -> None:
    for index, state in enumerate(job.states()):
        engine.load_checkpoint(state, model_id=index)
        for batch in job.loader(0):
            engine.featurize(batch, num_samples=len(batch[0]))
    engine.finalize_features()


def _gradients(engine: Any, job: PeerJob) -> Iterator[Tensor]:
    for index in range(len(job.checkpoints)):
        engine.saver.load_current_store(index)
        yield torch.as_tensor(np.array(engine.saver.current_store["grads"]))


def _finalized(engine: Any, job: PeerJob) -> Scores:
    for index in range(len(job.checkpoints)):
        engine.saver.model_ids[index]["is_finalized"] = 0
    engine.projector.proj_matrix = None  # finalizing deletes it, and must find it again
    engine.finalize_features()
    return np.array(engine.finalize_scores("targets"), np.float32)


def dattri(job: PeerJob, factors: Iterable[float]) -> Iterator[Scores]:
    """Yield scores at λ = factor · tr(K²)/tr(K); gradients are projected once for all λ."""
    from dattri.algorithm import trak
    from dattri.task import AttributionTask

    model = job.subject.build().eval()
    margin, probability = dattri_functions(model)
    attributor = trak.TRAKAttributor(
        # Both gradients are those of the margin: dattri takes the training side's from the "loss".
        AttributionTask(margin, model, job.states()),
        probability,
        projector_kwargs={"device": "cpu", "proj_dim": job.proj_dim},
    )
    train, targets = job.loader(0), job.loader(1)
    real, trak.random_project = trak.random_project, lambda *_, **__: _unprojected
    try:
        kept = _project_once(attributor, real, len(job.checkpoints), (len(train), len(targets)))
        for factor in _scaled(factors, attributor, train, kept):
            attributor.regularization = factor
            attributor.cache(train)
            yield attributor.attribute(targets).numpy().astype(np.float32)
    finally:
        trak.random_project = real


def _unprojected(gradients: Tensor, *, ensemble_id: int) -> Tensor:
    return gradients


def _project_once(
    attributor: Any, project: Callable[..., Any], n_checkpoints: int, n_batches: tuple[int, int]
) -> list[Tensor]:
    """Let its gradient functions return projections, and return what those of training keep."""

    def projected(function: Callable[..., Tensor], n_batches: int) -> Callable[..., Tensor]:
        def call(parameters: Any, batch: Any, index: int) -> Tensor:
            g = function(parameters, batch)
            mapped = project(g, len(g), **attributor.projector_kwargs)
            return mapped(g, ensemble_id=index // n_batches).clone().detach()

        return call

    train, target = n_batches
    training, kept = _replayed(projected(attributor.grad_loss_func, train), n_checkpoints * train)
    attributor.grad_loss_func = training
    attributor.grad_target_func, _ = _replayed(
        projected(attributor.grad_target_func, target), n_checkpoints * target
    )
    probability = attributor.correct_probability_func
    attributor.correct_probability_func, _ = _replayed(
        lambda parameters, batch, index: probability(parameters, batch), n_checkpoints * train
    )
    return kept


def _replayed(
    function: Callable[..., Tensor], n_calls: int
) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """Compute the first ``n_calls`` results; then give them again, in their order."""
    kept: list[Tensor] = []
    calls = itertools.count()

    def call(parameters: Any, batch: Any) -> Tensor:
        index = next(calls) % n_calls
        if index == len(kept):
            kept.append(function(parameters, batch, index))
        return kept[index].clone()  # dattri scales it in place

    return call, kept


def _scaled(
    factors: Iterable[float], attributor: Any, train: Any, kept: list[Tensor]
) -> Iterator[float]:
    """Yield λ in dattri's units; a first pass at λ = 1 fills ``kept``."""
    attributor.regularization = 1.0
    attributor.cache(train)
    rows = [g / attributor.norm_scaler for g in kept]
    scale = _mean_eigenvalue(
        torch.cat(rows[start : start + len(train)]) for start in range(0, len(rows), len(train))
    )
    yield from (factor * scale for factor in factors)


def _mean_eigenvalue(gradients: Iterable[Tensor]) -> float:
    """tr(K²)/tr(K), mean over checkpoints: both packages take one λ for all."""
    kernels = [g.double() @ g.double().T for g in gradients]
    return float(np.mean([float(k.square().sum() / k.trace()) for k in kernels]))


PEERS = {"traker": traker, "dattri": dattri}
