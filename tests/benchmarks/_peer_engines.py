"""What :mod:`compare_peers` measures: one job of one engine, run in a process of its own."""

from __future__ import annotations

import importlib
import logging
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

# torch, trakdask and the peers are imported inside functions: the process that directs the
# measurements must stay small, because a child's peak RSS starts at its parent's.
import numpy as np
from _machine import peak_memory
from numpy.typing import NDArray

__all__ = ["Job", "measure", "prepare"]

N_HELD_OUT = 200


@dataclass(frozen=True)
class Job:
    """One measurement of one engine; ``damping`` is λ for gradients that nobody has scaled."""

    engine: str
    build: str
    checkpoints: tuple[str, ...]
    damping: float
    proj_dim: int | None  # None: no projection
    batch_size: int
    n_train: int
    n_target: int
    seed: int = 0
    half: bool = False  # traker's own default; the other packages have float32


class Digits(NamedTuple):
    images: Any
    labels: Any
    target_images: Any
    target_labels: Any


class Stopwatch:
    """Seconds by name, added up over calls: on the clock, and of this process's CPU time."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.cpu_seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start, time.process_time() - cpu)

    def add(self, name: str, seconds: float, cpu_seconds: float) -> None:
        self.seconds[name] += seconds
        self.cpu_seconds[name] += cpu_seconds

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self(name):
                return function(*args, **kwargs)

        return timed


# --- models ---------------------------------------------------------------------------------------


def tiny_mlp() -> Any:
    """64-32-10: small enough that every engine can solve without a projection."""
    from torch import nn

    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def builder(name: str) -> Callable[[], Any]:
    from trakdask import examples

    return tiny_mlp if name == "tiny_mlp" else getattr(examples, name)


def load_digits(job: Job) -> Digits:
    from trakdask.examples import digits

    train, target = ((ds.image.values, ds.label.values) for ds in digits(N_HELD_OUT))
    rows = np.arange(job.n_train) % len(train[0])  # more samples than digits: some come twice
    return Digits(*(a[rows] for a in train), *(a[: job.n_target] for a in target))


def n_parameters(job: Job) -> int:
    return sum(parameter.numel() for parameter in builder(job.build)().parameters())


# --- engines: (job, digits, folder, stopwatch) -> scores (n_train, n_target) ----------------------


def run_trakdask(job: Job, digits: Digits, folder: Path, watch: Stopwatch) -> NDArray[np.float32]:
    import dask

    import trakdask as td

    kind = td.Rademacher if job.engine == "rademacher" else td.SJLT
    projector = kind(job.proj_dim, seed=job.seed) if job.proj_dim else td.Identity()
    model = td.Model(builder(job.build), list(job.checkpoints), task="image_classification")
    options: dict[str, Any] = {"projector": projector, "batch_size": job.batch_size}

    def samples(images: Any, labels: Any) -> Any:
        chunks = max(job.batch_size, 512)
        return td.from_arrays({"image": images}, coords={"label": labels}, chunks=chunks)

    with dask.config.set(scheduler="sync"):
        with watch("featurize"), _trakdask_parts(watch):
            train = samples(digits.images, digits.labels)
            store = folder / "train.zarr"
            features = td.save(td.featurize(train, model, **options), store, estimator=None)
        with watch("targets"):
            queries = samples(digits.target_images, digits.target_labels)
            store = folder / "targets.zarr"
            targets = td.save(td.featurize(queries, model, **options), store, estimator=None)
        with watch("finalize_score"):  # with the gram matrix, as the peers
            damping = td.Absolute(job.damping)
            scores = td.score(features, targets, td.Trak(damping=damping)).values
    return scores


@contextmanager
def _trakdask_parts(watch: Stopwatch) -> Iterator[None]:
    """Time gradients and projection; the engine hands each gradient to the projection."""
    from trakdask.models.gradients import ENGINES
    from trakdask.projection import ProjectionStream

    engine, add, result = ENGINES["hooks"], ProjectionStream.add, ProjectionStream.result
    ENGINES["hooks"] = watch.wrap("engine", engine)
    ProjectionStream.add = watch.wrap("add", add)  # type: ignore[method-assign]
    ProjectionStream.result = watch.wrap("result", result)  # type: ignore[method-assign]
    try:
        yield
    finally:
        ENGINES["hooks"] = engine
        ProjectionStream.add, ProjectionStream.result = add, result  # type: ignore[method-assign]
    seconds = watch.seconds
    seconds["gradients"] = seconds["engine"] - seconds["add"]
    seconds["projection"] = seconds["add"] + seconds["result"]


def run_traker(job: Job, digits: Digits, folder: Path, watch: Stopwatch) -> NDArray[np.float32]:
    package = "trakdask.trak" if job.engine == "drop-in" else "trak"
    projectors = importlib.import_module(f"{package}.projectors")
    traker = importlib.import_module(package).TRAKer(
        model=builder(job.build)(),
        task="image_classification",
        train_set_size=len(digits.images),
        save_dir=folder,
        device="cpu",
        projector=projectors.NoOpProjector(device="cpu") if job.proj_dim is None else None,
        proj_dim=job.proj_dim or 0,
        projector_seed=job.seed,
        use_half_precision=job.half,
        # traker divides by sqrt(number of parameters) and not by sqrt(proj_dim).
        lambda_reg=job.damping * (job.proj_dim or 1) / n_parameters(job),
        logging_level=logging.ERROR,
    )
    with watch("featurize"), _traker_parts(traker, watch):
        for index, path in enumerate(job.checkpoints):
            traker.load_checkpoint(_load(path), model_id=index)
            for batch in _batches(digits.images, digits.labels, job.batch_size):
                traker.featurize(batch, num_samples=len(batch[0]))
    with watch("finalize_score"):
        traker.finalize_features()
    with watch("targets"):
        for index, path in enumerate(job.checkpoints):
            traker.start_scoring_checkpoint("targets", _load(path), index, job.n_target)
            for batch in _batches(digits.target_images, digits.target_labels, job.batch_size):
                traker.score(batch, num_samples=len(batch[0]))
    with watch("finalize_score"):
        return np.array(traker.finalize_scores("targets"))


@contextmanager
def _traker_parts(traker: Any, watch: Stopwatch) -> Iterator[None]:
    """Time gradients and projection while the training samples are featurized."""
    computer, projector = traker.gradient_computer, traker.projector
    computer.compute_per_sample_grad = watch.wrap("gradients", computer.compute_per_sample_grad)
    projector.project = watch.wrap("projection", projector.project)
    try:
        yield
    finally:
        del computer.compute_per_sample_grad, projector.project


def run_dattri(job: Job, digits: Digits, folder: Path, watch: Stopwatch) -> NDArray[np.float32]:
    import torch
    from dattri.algorithm import trak
    from dattri.task import AttributionTask

    model = builder(job.build)()
    margin, probability = dattri_functions(model)
    # Both are gradients of the margin: dattri takes the training side's from the "loss".
    task = AttributionTask(margin, model, [_load(path) for path in job.checkpoints])
    kind = {"proj_type": "identity"} if job.proj_dim is None else {"proj_dim": job.proj_dim}
    attributor = trak.TRAKAttributor(
        task,
        probability,
        projector_kwargs={"proj_seed": job.seed, "device": "cpu", **kind},
        regularization=job.damping / n_parameters(job),
    )

    class ClockedLoader(torch.utils.data.DataLoader[Any]):
        """Times its use, up to the last batch of a checkpoint: dattri solves right after."""

        seconds = cpu_seconds = 0.0

        def __iter__(self) -> Any:
            start, cpu = time.perf_counter(), time.process_time()
            yield from super().__iter__()
            self.seconds += time.perf_counter() - start
            self.cpu_seconds += time.process_time() - cpu

    def loader(images: Any, labels: Any) -> ClockedLoader:
        tensors = torch.utils.data.TensorDataset(torch.tensor(images), torch.tensor(labels))
        return ClockedLoader(tensors, batch_size=job.batch_size)

    train, targets = loader(*digits[:2]), loader(*digits[2:])
    whole = Stopwatch()
    with whole("all"):
        with _dattri_parts(trak, attributor, watch):
            attributor.cache(train)
        scores = attributor.attribute(targets)
    watch.add("featurize", train.seconds, train.cpu_seconds)
    watch.add("targets", targets.seconds, targets.cpu_seconds)
    used = train.seconds + targets.seconds, train.cpu_seconds + targets.cpu_seconds
    watch.add("finalize_score", whole.seconds["all"] - used[0], whole.cpu_seconds["all"] - used[1])
    return np.asarray(scores)


@contextmanager
def _dattri_parts(trak: Any, attributor: Any, watch: Stopwatch) -> Iterator[None]:
    """Time gradients and projection while the training samples are featurized."""
    gradient, random_project = attributor.grad_loss_func, trak.random_project

    def timed_project(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        with watch("projection"):
            project = random_project(*args, **kwargs)
        return watch.wrap("projection", project)

    attributor.grad_loss_func = watch.wrap("gradients", gradient)
    trak.random_project = timed_project
    try:
        yield
    finally:
        attributor.grad_loss_func, trak.random_project = gradient, random_project


def dattri_functions(model: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the margin and the probability of one sample, as dattri calls them."""
    import torch

    def logits(parameters: Any, data: Any) -> tuple[Any, Any]:
        image, label = data
        out = torch.func.functional_call(model, parameters, image.unsqueeze(0))[0]
        return out, torch.arange(out.shape[0]) == label

    def margin(parameters: Any, data: Any) -> Any:
        out, is_label = logits(parameters, data)
        others = out.masked_fill(is_label, -torch.inf).logsumexp(0)
        return out.masked_fill(~is_label, 0).sum() - others

    def probability(parameters: Any, data: Any) -> Any:
        out, is_label = logits(parameters, data)
        return out.softmax(0).masked_fill(~is_label, 0).sum()

    return margin, probability


def _batches(images: Any, labels: Any, batch_size: int) -> Iterator[list[Any]]:
    import torch

    for start in range(0, len(images), batch_size):
        rows = slice(start, start + batch_size)
        yield [torch.from_numpy(images[rows]), torch.from_numpy(labels[rows])]


def _load(path: str) -> dict[str, Any]:
    import torch

    return dict(torch.load(path, weights_only=True))


RUN = {
    "trakdask": run_trakdask,
    "rademacher": run_trakdask,
    "traker": run_traker,
    "drop-in": run_traker,
    "dattri": run_dattri,
}


# --- the measured process -------------------------------------------------------------------------


def measure(job: Job, scores_path: Path) -> dict[str, Any]:
    """Run one job here, after a warm-up on a few samples, and keep its scores."""
    import torch

    torch.set_num_threads(1)
    digits = load_digits(job)
    with tempfile.TemporaryDirectory() as folder:
        few = Digits(*(array[:8] for array in digits))
        RUN[job.engine](replace(job, n_target=8), few, Path(folder), Stopwatch())
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder, watch("total"):
        scores = RUN[job.engine](job, digits, Path(folder), watch)
    np.save(scores_path, scores)
    return {
        "seconds": dict(watch.seconds),
        "cpu_seconds": dict(watch.cpu_seconds),
        "peak_rss_mb": peak_memory() / 2**20,
    }


def prepare(folder: Path, build: str, n_checkpoints: int) -> dict[str, Any]:
    """Train the checkpoints, and choose λ by the closed form for the first one's gradients."""
    import torch

    from trakdask.examples import digits, digits_checkpoints

    torch.set_num_threads(1)
    paths = digits_checkpoints(folder, builder(build), n_checkpoints, n_target=N_HELD_OUT)
    train, _ = digits(N_HELD_OUT)
    images, labels = train.image.values, train.label.values
    few, n = slice(256), len(images)
    gradients = _gradients(builder(build)(), _load(str(paths[0])), images[few], labels[few])
    kernel = gradients @ gradients.T
    squares = kernel.diagonal() ** 2
    off_diagonal = (kernel.square().sum() - squares.sum()) / (len(kernel) * (len(kernel) - 1))
    trace_of_square = n * squares.mean() + n * (n - 1) * off_diagonal
    damping = 0.03 * trace_of_square / (n * kernel.diagonal().mean())
    return {"checkpoints": [str(path) for path in paths], "damping": float(damping)}


def _gradients(model: Any, state: dict[str, Any], images: Any, labels: Any) -> Any:
    import torch

    margin, _ = dattri_functions(model)
    per_sample = torch.func.vmap(torch.func.grad(margin), in_dims=(None, 0))
    gradients = per_sample(state, (torch.from_numpy(images), torch.from_numpy(labels)))
    return torch.cat([g.flatten(1) for g in gradients.values()], dim=1).double()
