"""Methods of :mod:`leaderboard`: checkpoint files and data in, scores (sample, target) out.

    python tests/benchmarks/_leaderboard_peers.py METHOD TASK scores.npz CHECKPOINT...

Every method runs in a process of its own, in the environment that has its package. Each function
yields pairs of a setting and its scores. The first setting is the documented default; the others
are dampings among which one may choose in hindsight.
"""

from __future__ import annotations

import importlib
import json
import logging
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

# What everybody needs is imported before the clock runs, and so is the package of the method.
import torch
import torch.nn.functional as F
from _fits import ALL
from _machine import peak_memory
from _quality_damping import FIRST
from _quality_tasks import Language, Subject, members
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

Scores = Iterator[tuple[str, Any]]
BATCH = 100
DEFAULT = "default"
CPU_LIMIT = 900  # seconds of a method on a task
RELATIVE = (0.1, 1.0, 10.0, 100.0)  # λ of TRAK, times tr(K)/n


# --- what the packages are told of a task ---------------------------------------------------------


def data_of(subject: Subject, part: int) -> TensorDataset:
    """Return inputs and labels; the labels of a language model are its words."""
    inputs, labels = subject.data()[part]
    labels = inputs if isinstance(subject, Language) else labels
    return TensorDataset(torch.from_numpy(inputs), torch.from_numpy(np.asarray(labels)))


def model_of(subject: Subject, path: str) -> nn.Module:
    model = subject.build()
    model.load_state_dict(torch.load(path, weights_only=True))
    return model.eval()


def flat(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits and the label of each prediction: a language model makes many."""
    return (logits[:, :-1], y[:, 1:]) if logits.ndim == 3 else (logits, y)


def losses(out: Tensor, y: Tensor) -> Tensor:
    """Return the loss that the model was trained with, (batch,), summed over words."""
    if y.is_floating_point():
        return (out[:, 0] - y).square() / 2
    logits, labels = flat(out, y)
    return (
        F.cross_entropy(logits.movedim(-1, 1), labels, reduction="none").reshape(len(y), -1).sum(1)
    )


def margins(out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs that are attributed, and TRAK's Q, each (batch,)."""
    if y.is_floating_point():
        return out[:, 0], y - out[:, 0]
    logits, labels = flat(out, y)
    is_label = torch.arange(logits.shape[-1]) == labels[..., None]
    others = logits.masked_fill(is_label, -torch.inf).logsumexp(-1)
    margin = (logits.masked_fill(~is_label, 0).sum(-1) - others).reshape(len(y), -1)
    return margin.sum(1), torch.sigmoid(-margin).mean(1)


class Loss(nn.Module):
    """The losses of a batch, or their sum, in a form that captum asks for."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        values = losses(out, y)
        return values.sum() if self.reduction == "sum" else values


def trace(subject: Subject, model: nn.Module) -> float:
    """Return tr(K)/n of the whole gradients of some samples: the unit of λ."""

    def output(parameters: Any, x: Tensor, y: Tensor) -> Tensor:
        return margins(functional_call(model, parameters, (x[None],)), y[None])[0].sum()

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    per_sample = torch.func.vmap(torch.func.grad(output), in_dims=(None, 0, 0))
    gradients = per_sample(parameters, *data_of(subject, 0)[:BATCH])
    return sum(float(g.square().sum()) for g in gradients.values()) / BATCH


def size_of(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# --- trakdask -------------------------------------------------------------------------------------


def trakdask(subject: Subject, files: list[str], folder: Path, kind: str = "fit") -> Scores:
    import dask

    import trakdask as td

    dask.config.set(scheduler="synchronous")
    train, model = subject.samples(0), td.Model(subject.build, files, subject.task)
    if kind == "halves":
        n = train.sizes["sample"]
        masks = np.array([members(FIRST + j, n) for j in range(len(files))])
        train = train.assign_coords(trained_on=(("checkpoint", "sample"), masks))
    projector = td.SJLT(2048) if kind == "plain" else td.fit(train, model, progress=False)
    features = td.featurize(train, model, projector)
    features = td.save(features, folder / "train.zarr", progress=False)
    targets = td.featurize(subject.samples(1), model, like=features)
    targets = td.save(targets, folder / "targets.zarr", estimator=None, progress=False)
    yield DEFAULT, td.score(features, targets).values


# --- peers ----------------------------------------------------------------------------------------


def traker(subject: Subject, files: list[str], folder: Path) -> Scores:
    """TRAK, the original: 2,048 normal columns, no λ by default."""
    from trak import TRAKer
    from trak.modelout_functions import AbstractModelOutput

    class Output(AbstractModelOutput):
        def __init__(self) -> None: ...

        @staticmethod
        def get_output(model: Any, weights: Any, buffers: Any, x: Tensor, y: Tensor) -> Tensor:
            return margins(functional_call(model, (weights, buffers), (x[None],)), y[None])[0].sum()

        def get_out_to_loss_grad(self, model: Any, weights: Any, buffers: Any, batch: Any) -> Any:
            out = functional_call(model, (weights, buffers), (batch[0],))
            return margins(out, batch[1])[1][:, None].detach()

    train, targets = data_of(subject, 0), data_of(subject, 1)
    states = [torch.load(path, weights_only=True) for path in files]
    model = model_of(subject, files[0])
    it = TRAKer(
        model=model, task=Output(), train_set_size=len(train), save_dir=folder, device="cpu",
        logging_level=logging.ERROR, use_half_precision=False,
    )  # fmt: skip
    for number, state in enumerate(states):
        it.load_checkpoint(state, model_id=number)
        for batch in DataLoader(train, BATCH):
            it.featurize(batch, num_samples=len(batch[0]))
    it.finalize_features()
    for number, state in enumerate(states):
        it.start_scoring_checkpoint("targets", state, number, len(targets))
        for batch in DataLoader(targets, BATCH):
            it.score(batch, num_samples=len(batch[0]))
    yield DEFAULT, np.array(it.finalize_scores("targets"))
    # Its features are divided by √parameters, and not by √columns.
    unit = trace(subject, model) * it.proj_dim / size_of(model)
    it.projector.free_memory = lambda: None  # fails when it is called twice
    for factor in RELATIVE:
        it.score_computer.lambda_reg = factor * unit
        for about in it.saver.model_ids.values():
            about["is_finalized"] = 0
        it.finalize_features()
        yield f"λ = {factor:g} tr(K)/n", np.array(it.finalize_scores("targets"))


def dattri(subject: Subject, files: list[str], folder: Path) -> Scores:
    """TRAK: 512 normal columns, no λ by default."""
    from dattri.algorithm.trak import TRAKAttributor
    from dattri.task import AttributionTask

    model = model_of(subject, files[0])

    def output(parameters: Any, data: Any, which: int = 0) -> Tensor:
        out = functional_call(model, parameters, (data[0][None],))
        return margins(out, data[1][None])[which].sum()

    def probability(parameters: Any, data: Any) -> Tensor:
        return 1 - output(parameters, data, 1)

    states = [torch.load(path, weights_only=True) for path in files]
    unit = trace(subject, model) / size_of(model)
    for factor in (0.0, *RELATIVE):
        it = TRAKAttributor(
            AttributionTask(output, model, states), probability, regularization=factor * unit
        )
        it.cache(DataLoader(data_of(subject, 0), BATCH))
        scores = it.attribute(DataLoader(data_of(subject, 1), BATCH))
        yield f"λ = {factor:g} tr(K)/n" if factor else DEFAULT, scores


def kronfluence(subject: Subject, files: list[str], folder: Path) -> Scores:
    """EK-FAC of linear layers and convolutions, with labels drawn from the model."""
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task

    class Margin(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            out, y = model(batch[0]), batch[1]
            if sample and y.is_floating_point():
                y = out.detach()[:, 0] + torch.randn(len(y))
            elif sample:
                drawn = torch.distributions.Categorical(logits=out.detach()).sample()
                # The word after the last is not in the text: it is only there to be cut off.
                y = torch.cat([y[:, :1], drawn[:, :-1]], 1) if out.ndim == 3 else drawn
            return losses(out, y).sum()

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return -margins(model(batch[0]), batch[1])[0].sum()  # as a loss: to be small

    task, train = Margin(), data_of(subject, 0)
    model = prepare_model(model_of(subject, files[0]), task)
    it = Analyzer(
        "ekfac", model, task, cpu=True, output_dir=str(folder), disable_tqdm=True, log_level=40
    )
    it.fit_all_factors("factors", train, per_device_batch_size=BATCH,
                       factor_args=FactorArguments(strategy="ekfac"))  # fmt: skip
    for damping in (1e-8, None, 1e-4, 1e-3, 1e-2, 1e-1):
        name = DEFAULT if damping == 1e-8 else f"damping {damping or '0.1 mean'}"
        it.compute_pairwise_scores(
            "scores", "factors", data_of(subject, 1), train, per_device_query_batch_size=BATCH,
            per_device_train_batch_size=BATCH, overwrite_output_dir=True,
            score_args=ScoreArguments(damping_factor=damping),
        )  # fmt: skip
        yield name, it.load_pairwise_scores("scores")["all_modules"].numpy().T


def captum(subject: Subject, files: list[str], folder: Path, kind: str) -> Scores:
    """TracIn and influence functions by Arnoldi's iteration, of losses of targets."""
    from captum.influence import TracInCP, TracInCPFast
    from captum.influence._core.arnoldi_influence_function import ArnoldiInfluenceFunction

    train, targets = data_of(subject, 0), data_of(subject, 1)
    model = model_of(subject, files[0])
    if kind == "TracInCPFast":  # of the last layer
        last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
        it = TracInCPFast(model, last, train, files, loss_fn=Loss("sum"), batch_size=BATCH)
    elif kind == "TracInCP":
        it = TracInCP(model, train, files, loss_fn=Loss("none"), batch_size=BATCH)
    else:
        it = ArnoldiInfluenceFunction(
            model, train, files[0], loss_fn=Loss("none"), batch_size=BATCH
        )
    yield DEFAULT, it.influence(targets.tensors).detach().numpy().T


def pydvl(subject: Subject, files: list[str], folder: Path, kind: str) -> Scores:
    """Influence functions of the mean loss; the first λ is the one of its notebooks."""
    from pydvl.influence import torch as influence

    model, train = model_of(subject, files[0]), data_of(subject, 0)
    for damping in (0.1, 1.0, 0.01, 0.001):
        if kind == "EK-FAC":
            it = influence.EkfacInfluence(
                model, update_diagonal=True, hessian_regularization=damping
            )
        else:
            it = influence.NystroemSketchInfluence(
                model, lambda out, y: losses(out, y).mean(), damping, rank=256
            )
        it.fit(DataLoader(train, BATCH))
        factors = it.influence_factors(*data_of(subject, 1).tensors)
        parts = [it.influences_from_factors(factors, *some) for some in DataLoader(train, BATCH)]
        yield DEFAULT if damping == 0.1 else f"λ = {damping:g}", torch.cat(parts, 1).detach().T


def bm25(subject: Subject, files: list[str], folder: Path) -> Scores:
    """Rank texts by the words that they share with a target; there is no model."""
    import bm25s

    texts, asked = ([[f"{word}" for word in text] for text in subject.data()[k][0]] for k in (0, 1))
    it = bm25s.BM25()
    it.index(texts, show_progress=False)
    yield DEFAULT, np.stack([it.get_scores(words) for words in asked], axis=1)


def bergson(subject: Subject, files: list[str], folder: Path, kind: str) -> Scores:
    """TRAK of log odds with 512 columns, and EK-FAC, of the linear layers without biases."""
    from bergson import DataConfig, IndexConfig, PreprocessConfig, ScoreConfig, config
    from bergson.cli.trak import trak
    from bergson.data import load_scores
    from bergson.hessians.pipeline import hessian_pipeline
    from datasets import Dataset

    models = [
        _hugging_face(model_of(subject, file), folder / f"{k}") for k, file in enumerate(files)
    ]
    for k, name in enumerate(("train", "targets")):
        words = subject.data()[k][0].tolist()
        Dataset.from_dict({"input_ids": words, "labels": words}).save_to_disk(folder / name)
    queries = config.config.QuerySetConfig(dataset=str(folder / "targets"))
    for damping in (0.0, 1.0) if kind == "TRAK" else (0.1, 0.01, 1.0):
        run = folder / f"run-{damping}"
        about = IndexConfig(run_path=str(run), model=models[0], max_batch_size=BATCH,
                            data=DataConfig(dataset=str(folder / "train")))  # fmt: skip
        inversion = config.config.InversionConfig(damping_factor=damping)
        if kind == "TRAK":
            about.projection_dim, about.projection_target = 512, "global"
            about.loss_fn = "log_odds"
            preprocess = PreprocessConfig(inversion_cfg=inversion)
            trak(about, config.config.TrakConfig(query=queries, preprocess_cfg=preprocess,
                                                 checkpoints=models))  # fmt: skip
        else:
            hessian_pipeline(
                about, config.config.HessianConfig(method="kfac", ev_correction=True),
                ScoreConfig(), PreprocessConfig(),
                config.config.HessianPipelineConfig(query=queries, inversion_cfg=inversion),
            )  # fmt: skip
        name = f"damping {damping:g}" if damping != (0.1, 0.0)[kind == "TRAK"] else DEFAULT
        yield name, np.asarray(load_scores(run / "scores")[:])


def _hugging_face(model: nn.Module, folder: Path) -> str:
    """Save a model as one of transformers, beside a tokenizer that is asked for and not used."""
    import transformers
    from tokenizers import Tokenizer, models
    from transformers.modeling_outputs import CausalLMOutput

    class Config(transformers.PreTrainedConfig):
        model_type = "words"

    class Words(transformers.PreTrainedModel):
        config_class = Config

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.network = type(model)()
            self.post_init()

        def _init_weights(self, module: nn.Module) -> None: ...

        def get_input_embeddings(self) -> nn.Module:
            return self.network.words

        def forward(self, input_ids: Tensor, **options: Any) -> CausalLMOutput:
            return CausalLMOutput(logits=self.network(input_ids))

    transformers.AutoConfig.register("words", Config, exist_ok=True)
    transformers.AutoModelForCausalLM.register(Config, Words, exist_ok=True)
    words = Words(Config())
    words.network.load_state_dict(model.state_dict())
    words.save_pretrained(folder)
    vocabulary = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=vocabulary).save_pretrained(folder)
    return str(folder)


# --- the table of methods -------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """How a method runs: where, from how many checkpoints, and on which tasks."""

    run: Callable[[Subject, list[str], Path], Scores]
    module: str  # imported before the clock runs
    environment: str = ""  # the folder of its virtual environment; here if it has none
    checkpoints: tuple[int, ...] = (1, 3)
    averaged: bool = False  # runs for each checkpoint, and scores are averaged
    tasks: Callable[[Subject], bool] = lambda subject: True
    halves: bool = False


def has_words(subject: Subject) -> bool:
    return hasattr(subject.build, "__mro__") and "words" in dict(subject.build().named_children())


def is_language(subject: Subject) -> bool:
    return isinstance(subject, Language)


_captum = partial(Method, module="captum.influence", environment="peers", averaged=True)
_pydvl = partial(Method, module="pydvl.influence.torch", environment="pydvl", averaged=True)

METHODS = {
    "trakdask": Method(trakdask, "trakdask.attribution"),
    "trakdask, random columns": Method(
        partial(trakdask, kind="plain"), "trakdask.attribution"
    ),
    "trakdask, halves": Method(
        partial(trakdask, kind="halves"), "trakdask.attribution", checkpoints=(3, 10), halves=True
    ),
    "traker": Method(traker, "trak"),
    "dattri": Method(dattri, "dattri.algorithm.trak", "peers"),
    "kronfluence": Method(kronfluence, "kronfluence.analyzer", "peers", averaged=True),
    "captum TracInCPFast": _captum(partial(captum, kind="TracInCPFast")),
    "captum TracInCP": _captum(partial(captum, kind="TracInCP")),
    "captum Arnoldi": _captum(partial(captum, kind="Arnoldi")),
    "pyDVL Nyström": _pydvl(partial(pydvl, kind="Nyström")),
    "pyDVL EK-FAC": _pydvl(partial(pydvl, kind="EK-FAC")),
    "bergson TRAK": Method(
        partial(bergson, kind="TRAK"), "bergson", "bergson", tasks=is_language
    ),
    "bergson EK-FAC": Method(
        partial(bergson, kind="EK-FAC"), "bergson", "bergson", averaged=True, tasks=is_language
    ),
    "BM25": Method(bm25, "bm25s", "peers", checkpoints=(1,), tasks=has_words),
}  # fmt: skip


def measured(method: Method, subject: Subject, files: list[str]) -> dict[str, Any]:
    """Return scores of every setting, and CPU seconds and bytes of the first."""
    start, scores, about = time.process_time(), {}, {}
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        for setting, values in method.run(subject, files, Path(folder)):
            if not scores:
                inside = [path for path in Path(folder).rglob("*") if path.is_file()]
                about = {
                    "cpu": time.process_time() - start, "peak": peak_memory(),
                    "kept": sum(path.stat().st_size for path in inside),
                }  # fmt: skip
            scores[setting] = np.asarray(values, np.float32)
    return about | {"scores": scores}


def main() -> None:
    name, task, path, *files = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT, CPU_LIMIT + 10))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    method, scores, costs = METHODS[name], {}, {}
    importlib.import_module(method.module)
    singles = [measured(method, ALL[task], [file]) for file in files if method.averaged]
    for n in method.checkpoints:
        runs = singles[:n] or [measured(method, ALL[task], files[:n])]
        costs[n] = {
            "cpu": sum(run["cpu"] for run in runs), "peak": max(run["peak"] for run in runs),
            "kept": sum(run["kept"] for run in runs),
        }  # fmt: skip
        for setting in runs[0]["scores"]:
            scores[f"{n}|{setting}"] = np.mean([run["scores"][setting] for run in runs], 0)
    np.savez(path, **scores)
    print(json.dumps(costs))


if __name__ == "__main__":
    main()
