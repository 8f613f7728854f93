"""Bad inputs of featurize, of models that are run by it, and of everything in td.tasks."""

from __future__ import annotations

import functools

import numpy as np
import torch
import xarray as xr
from torch import nn

import trakdask as td
from tests.bad_inputs.bad_input import BadInput, one_test
from tests.bad_inputs.small_models import (
    BIG,
    IDS,
    NAN,
    NET,
    After,
    AllColumns,
    Detached,
    Language,
    Mean,
    TwoTowers,
    computed,
    data,
    drawn,
    labelled,
    language,
    options,
    pairs,
    tokens,
)


class NoScale(TwoTowers):
    def forward(self, image: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return super().forward(image, text)[:2]


class Spans(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 2)

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.embed(input_ids).unbind(-1)


TASKS = [
    BadInput("tasks.ImageClassification", "image", lambda _: td.tasks.ImageClassification(image=("a", "b")), ValueError, ["('a', 'b')"]),
    BadInput("tasks.ImageClassification", "label", lambda _: td.tasks.ImageClassification(label=3), TypeError, ["label", "3"]),
    *[BadInput(f"tasks.{name}", "positional a word", lambda _, name=name: getattr(td.tasks, name)(positional="no"), TypeError, ["positional", "'no'"]) for name in ("Regression", "CausalLM", "MultiLabel")],
    BadInput("tasks.Classification", "no inputs", lambda _: td.tasks.Classification(()), ValueError, ["inputs", "()"]),
    BadInput("tasks.Classification", "labels that are text", computed(After(), data().drop_vars("label").assign_coords(label=("sample", list("abca")))), TypeError, ["'label'", "return_inverse=True"]),
    BadInput("tasks.Classification", "a mapping without logits", labelled([0] * 4, After(lambda y: {"scores": y, "n": 3}), task=td.tasks.Classification("image")), RuntimeError, ["named ['scores']", "output='scores'"]),
    BadInput("tasks.Classification", "no such place", labelled([0] * 4, After(lambda y: (y,)), task=td.tasks.Classification("image", output=1)), RuntimeError, ["tuple", "wrapping the model"]),
    BadInput("tasks.Classification", "output by both of its names", lambda _: td.tasks.Classification(output="a", returned="b"), TypeError, ["'a'", "'b'", "output="]),
    BadInput("tasks.Classification", "two weights", labelled([0] * 4, task=td.tasks.Classification("image", weights=[1, 2])), RuntimeError, ["3 classes", "2 weights"]),
    BadInput("tasks.Classification", "a weight below 0", lambda _: td.tasks.Classification(weights=[1, -2]), ValueError, ["weight >= 0", "-2"]),
    BadInput("tasks.MultiRegression", "one number", labelled([1.0] * 4, After(lambda y: y[:, 0]), task=td.tasks.MultiRegression("image", "label")), RuntimeError, ["task='regression'"]),
    BadInput("tasks.MultiRegression", "no such column", computed(After(), data(label=np.ones((4, 3)), at=np.array([0, 1, 3, 1])), td.tasks.MultiRegression("image", "label", "at")), RuntimeError, ["0..2", "got 3 at sample 2"]),
    BadInput("tasks.TokenClassification", "label out of range", computed(Language(), tokens(IDS % 7, labels=IDS), td.tasks.TokenClassification()), RuntimeError, ["classes in 0..6", "'labels'", "start at 0"]),
    BadInput("tasks.TokenClassification", "no label", computed(Language(), tokens(IDS % 7, labels=[[1, 2, 3], [-100] * 3, [1, 2, 3], [1, 2, 3]]), td.tasks.TokenClassification()), RuntimeError, ["to predict", "at sample 1"]),
    BadInput("tasks.Segmentation", "logits of images", labelled(np.zeros((4, 2, 2), int), task=td.tasks.Segmentation("image", "label")), RuntimeError, ["(batch, classes, rows, columns)", "3)"]),
    BadInput("tasks.QuestionAnswering", "position beyond the text", computed(Spans(), tokens(IDS % 7, start_positions=[0, 1, 2, 1], end_positions=[0, 3, 2, 1]), "question_answering"), RuntimeError, ["0..2", "'end_positions'", "got 3 at sample 1"]),
    BadInput("tasks.BinaryClassification", "label 2", labelled([0, 1, 2, 1], nn.Linear(4, 1), task=td.tasks.BinaryClassification("image")), RuntimeError, ["'label'", "got 2 at sample 2"]),
    BadInput("tasks.MultiLabel", "other shape", labelled([[0, 1]] * 4, task=td.tasks.MultiLabel("image")), RuntimeError, ["3)", "2)", "'label'"]),
    BadInput("tasks.Regression", "three outputs", labelled([1.0] * 4, task=td.tasks.Regression("image", "label")), RuntimeError, ["3)", "one number"]),
    BadInput("tasks.CausalLM", "token out of range", language(tokens(IDS)), RuntimeError, ["index out of range", "input_ids"]),
    BadInput("tasks.CausalLM", "label out of range", language(tokens(IDS % 7, y=IDS), task={"labels": "y"}), RuntimeError, ["0..6", "'y'", "got 9 at sample 2"]),
    BadInput("tasks.CausalLM", "other ignore_index", language(tokens(IDS % 7, y=[[1, 2, -1]] * 4), task={"labels": "y"}), RuntimeError, ["got -1 at sample 0", "ignore_index=-100"]),
    BadInput("tasks.CausalLM", "position that nothing predicts", language(tokens(IDS % 7, at=[1, 2, 0, 1]), task={"position": "at"}), RuntimeError, ["'at' = 0", "at sample 2"]),
    BadInput("tasks.CausalLM", "one token", language(tokens([[1], [2]])), RuntimeError, ["'input_ids'", "(2, 1)", "padding"]),
    BadInput("tasks.CausalLM", "no tokens", computed(Language(), data(), "causal_lm"), ValueError, ["'input_ids'", "CausalLM("]),
    BadInput("tasks.CausalLM", "tokens of other samples", lambda _: td.tasks.CausalLM().tokens({"ids": IDS}), ValueError, ["'input_ids'", "'ids'"]),
    BadInput("tasks.Clip", "no mapping", lambda _: td.tasks.Clip(drawn()["0"]), TypeError, ["tuple", "Clip.negatives_of"]),
    BadInput("tasks.Clip", "other shapes", lambda _: td.tasks.Clip({"0": (torch.ones(3, 2), torch.ones(2, 2))}), ValueError, ["(3, 2)", "(2, 2)"]),
    BadInput("tasks.Clip", "without negatives", computed(TwoTowers(), pairs(), "clip"), RuntimeError, ["'0'", "Clip.negatives_of"]),
    BadInput("tasks.Clip", "fewer rows", computed(TwoTowers(slice(1, None)), pairs(), td.tasks.Clip(drawn())), RuntimeError, ["(2, embedding)", "(1, 3)"]),
    BadInput("tasks.Clip", "no logit_scale", computed(NoScale(), pairs(), td.tasks.Clip(drawn())), RuntimeError, ["no logit_scale", "temperature=0.07"]),
    BadInput("tasks.Clip", "negatives of a module", lambda _: td.tasks.Clip.negatives_of(NET, pairs()), TypeError, ["Linear", "td.Model"]),
    BadInput("tasks.Batch", "missing", lambda _: td.tasks.Batch(x=torch.ones(2))["y"], ValueError, ["'y'", "['x']"]),
    *[
        BadInput("tasks.ImageClassification", f"temperature {t!r}", lambda _, t=t: td.tasks.ImageClassification(t), error, ["temperature", repr(t)])
        for error, bad in ((ValueError, (0, float("nan"))), (TypeError, ("cold",)))
        for t in bad
    ],
]  # fmt: skip


F = "featurize"

FEATURIZE = [
    BadInput(F, "samples a list", options([1]), TypeError, ["Dataset", "list"]),
    BadInput(F, "no sample dimension", options(xr.Dataset({"image": ("row", [1.0])})), ValueError, ["'sample'", "['row']"]),
    BadInput(F, "one sample without its dimension", options(data().isel(sample=0)), ValueError, ["'sample'", "isel(sample=[0])"]),
    BadInput(F, "like samples", lambda _: td.featurize(data(), td.Model(NET), like=data()), ValueError, ["'feature'", "in like", "td.featurize"]),
    BadInput(F, "like a path", lambda _: td.featurize(data(), td.Model(NET), like="train.zarr"), TypeError, ["like", "'train.zarr'", "td.open"]),
    BadInput(F, "no variables", options(xr.Dataset(coords={"c": ("sample", [1])})), ValueError, ["reset_coords"]),
    BadInput(F, "a module", lambda _: td.featurize(data(), NET), TypeError, ["td.Model", "Linear"]),
    BadInput("fit", "components a word", lambda _: td.fit(data(), td.Model(NET), components="no"), TypeError, ["components", "'no'", "True"]),
    *[BadInput(name, "progress a word", lambda _, call=call: call(progress="no"), TypeError, ["progress", "'no'"]) for name, call in {"fit": functools.partial(td.fit, data(), td.Model(NET)), "fits.curvature": functools.partial(td.fits.curvature, data(), td.Model(NET)), "fits.second_moments": functools.partial(td.fits.second_moments, td.Model(NET), [{}])}.items()],
    BadInput("fit", "sketch a name", lambda _: td.fit(data(), td.Model(NET), sketch="SJLT"), TypeError, ["sketch, got 'SJLT'", "try sketch=td.SJLT"]),
    BadInput("fit", "curvature a name", lambda _: td.fit(data(), td.Model(NET), curvature="off"), ValueError, ["'off'"]),
    BadInput(F, "projector a number", options(projector=512), TypeError, ["projector", "512"]),
    BadInput(F, "device", options(device="gpu"), ValueError, ["'gpu'"]),
    BadInput(F, "batch_size 0", options(batch_size=0), ValueError, ["batch_size", "0"]),
    BadInput(F, "batch statistics", computed(nn.Sequential(NET, nn.BatchNorm1d(3, track_running_stats=False))), RuntimeError, ["samples 0:"]),
    *[BadInput(F, f"label with {engine}", labelled(BIG, gradients=engine), RuntimeError, ["got 7 at sample 2"]) for engine in ("hooks", "vmap", "loop")],
    BadInput(F, "label in all of a block", labelled([9, 8, 7, 6], on_error="record"), RuntimeError, ["got 9 at sample 0"]),
    BadInput(F, "label float", labelled([0.0, 1, 2, 0]), RuntimeError, ["'label'", "float64"]),
    BadInput(F, "not finite", computed(After(), td.from_arrays(NAN)), RuntimeError, ["sample 1", "NaN"]),
    BadInput(F, "wrong width", computed(After(), data(image=np.ones((4, 5), "f4"))), RuntimeError, ["shapes", "(4, 5)", "the shape and range that the model was trained on"]),
    BadInput(F, "float64 images", computed(After(), data(image=np.ones((4, 4)))), RuntimeError, ["image float64", "dtype='float32')"]),
    *[BadInput(F, f"float64 weights, {engine}", computed(After().double(), gradients=engine), RuntimeError, ["image float32", "dtype='float32')"]) for engine in ("hooks", "vmap", "loop")],
    BadInput(F, "integer images", computed(After(), data(image=np.ones((4, 4), "u1"))), RuntimeError, ["image uint8", "samples.assign(image=samples['image'].astype('float32'))"]),
    BadInput(F, "fewer rows", computed(After(lambda y: y[1:])), RuntimeError, ["(2, classes)", "(1, 3)"]),
    BadInput(F, "mean of the batch", computed(After(lambda y: y - y.mean(0).detach())), RuntimeError, ["sample 0"]),
    BadInput(F, "dropout", computed(After(lambda y: nn.functional.dropout(y, 0.5))), RuntimeError, ["dropout"]),
    BadInput(F, "task without samples", computed(After(), task=Mean()), RuntimeError, ["task.output", "()"]),
    *[BadInput(F, f"no gradient, {name}", computed(After(), task=Detached(), gradients=name), RuntimeError, ["no gradient", "torch.no_grad()", ".detach()"]) for name in ("auto", "hooks", "vmap", "loop")],
    BadInput(F, "several outputs", computed(After(), task=AllColumns(3)), RuntimeError, ["(4, 3)", "td.tasks.MultiLabel()"]),
    BadInput(F, "an axis of one", computed(After(), task=AllColumns(1)), RuntimeError, ["(4, 1)", "try .flatten()"]),
    BadInput(F, "arguments", computed(TwoTowers()), RuntimeError, ["TypeError", "'text'"]),
]  # fmt: skip

test_bad_input = one_test([*TASKS, *FEATURIZE])
