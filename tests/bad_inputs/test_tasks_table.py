"""Bad inputs of everything in td.tasks."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

import trakdask as td
from tests.bad_inputs.bad_input import BadInput, one_test
from tests.bad_inputs.small_models import (
    IDS,
    NET,
    After,
    Language,
    TwoTowers,
    computed,
    data,
    drawn,
    labelled,
    language,
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


ROWS = [
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
    BadInput("tasks.TokenClassification", "labels", lambda _: td.tasks.TokenClassification(labels=None), TypeError, ["labels", "None"]),
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
    BadInput("tasks.CausalLM", "too long", language(tokens(np.ones((2, 6), int))), RuntimeError, ["index out of range", "input_ids"]),
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

test_bad_input = one_test(ROWS)
