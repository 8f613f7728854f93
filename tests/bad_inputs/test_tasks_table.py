"""Bad inputs of everything in td.tasks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

import trakdask as td
from tests.bad_inputs.bad_input import BadInput, check, parametrize, rows
from tests.bad_inputs.small_models import (
    BIG,
    IDS,
    NET,
    After,
    Language,
    TwoTowers,
    computed,
    data,
    drawn,
    fine,
    labelled,
    language,
    pairs,
    tokens,
)


class NoScale(TwoTowers):
    def forward(self, image: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return super().forward(image, text)[:2]


ROWS = [
    *rows(
        "tasks.ImageClassification",
        ValueError,
        ("image", lambda _: td.tasks.ImageClassification(image=("a", "b")), "('a', 'b')"),
    ),
    *rows(
        "tasks.ImageClassification",
        TypeError,
        ("label", lambda _: td.tasks.ImageClassification(label=3), "label", "3"),
    ),
    *rows(
        "tasks.Classification",
        ValueError,
        ("no inputs", lambda _: td.tasks.Classification(()), "inputs", "()"),
        ("no such variable", labelled(BIG, task="classification"), "'x'"),
    ),
    *rows(
        "tasks.TextClassification",
        ValueError,
        ("no inputs", lambda _: td.tasks.TextClassification(()), "inputs", "()"),
        ("inputs", lambda _: td.tasks.TextClassification(3), "inputs", "3"),
        ("temperature", lambda _: td.tasks.TextClassification(temperature=0), "temperature", "0"),
    ),
    *rows(
        "tasks.TextClassification",
        RuntimeError,
        (
            "label out of range",
            labelled(BIG, task=td.tasks.TextClassification("image", positional=True)),
            "got 7 at sample 2",
            "3 classes",
        ),
    ),
    *rows(
        "tasks.BinaryClassification",
        RuntimeError,
        (
            "label 2",
            labelled([0, 1, 2, 1], nn.Linear(4, 1), task=td.tasks.BinaryClassification("image")),
            "'label'",
            "got 2 at sample 2",
        ),
        (
            "signs",
            labelled([1, -1, 1, -1], nn.Linear(4, 1), task=td.tasks.BinaryClassification("image")),
            "got -1 at sample 1",
            "labels > 0",
        ),
        (
            "three logits",
            labelled([1, 0, 1, 0], task=td.tasks.BinaryClassification("image")),
            "3)",
            "one number per sample",
        ),
    ),
    *rows(
        "tasks.BinaryClassification",
        ValueError,
        ("inputs", lambda _: td.tasks.BinaryClassification([1]), "[1]"),
    ),
    *rows(
        "tasks.MultiLabel",
        RuntimeError,
        (
            "label 2",
            labelled([[0, 1, 0]] * 3 + [[1, 2, 0]], task=td.tasks.MultiLabel("image")),
            "'label'",
            "got 2 at sample 3",
        ),
        (
            "other shape",
            labelled([[0, 1]] * 4, task=td.tasks.MultiLabel("image")),
            "3)",
            "2)",
            "'label'",
        ),
    ),
    *rows(
        "tasks.MultiLabel",
        TypeError,
        ("label None", lambda _: td.tasks.MultiLabel(label=None), "label", "None"),
    ),
    *rows(
        "tasks.Regression",
        RuntimeError,
        (
            "three outputs",
            labelled([1.0] * 4, task=td.tasks.Regression("image", "label")),
            "3)",
            "one number",
        ),
        (
            "fewer rows",
            labelled(
                [1.0] * 4, After(lambda y: y[1:, 0]), task=td.tasks.Regression("image", "label")
            ),
            "(1,)",
            "batch of ",
        ),
    ),
    *rows(
        "tasks.Regression",
        TypeError,
        ("target", lambda _: td.tasks.Regression(target=["y"]), "target", "['y']"),
    ),
    *rows(
        "tasks.CausalLM",
        RuntimeError,
        ("token out of range", language(tokens(IDS)), "index out of range", "input_ids"),
        ("token negative", language(tokens([[1, 2], [-5, 1]])), "index out of range", "input_ids"),
        (
            "label out of range",
            language(tokens(IDS % 7, y=IDS), task={"labels": "y"}),
            "0..6",
            "'y'",
            "got 9 at sample 2",
        ),
        (
            "other ignore_index",
            language(tokens(IDS % 7, y=[[1, 2, -1]] * 4), task={"labels": "y"}),
            "got -1 at sample 0",
            "ignore_index=-100",
        ),
        ("too long", language(tokens(np.ones((2, 6), int))), "index out of range", "input_ids"),
        (
            "all labels ignored",
            language(
                tokens(IDS % 7, y=[[1, 2, 3], [1, -100, -100], [1, 2, 3], [1, 2, 3]]),
                task={"labels": "y"},
            ),
            "token to predict",
            "2 labels -100",
            "at sample 1",
        ),
        (
            "position that nothing predicts",
            language(tokens(IDS % 7, at=[1, 2, 0, 1]), task={"position": "at"}),
            "'at'",
            "got 0 at sample 2",
        ),
        ("one token", language(tokens([[1], [2]])), "'input_ids'", "(2, 1)", "padding"),
        (
            "float tokens",
            computed(After(), data(), td.tasks.CausalLM("image", positional=True)),
            "'image'",
            "float32",
        ),
    ),
    *rows(
        "tasks.CausalLM",
        TypeError,
        ("ignore_index", lambda _: td.tasks.CausalLM(ignore_index="pad"), "ignore_index", "'pad'"),
        ("labels", lambda _: td.tasks.CausalLM(labels=3), "labels", "3"),
    ),
    *rows(
        "tasks.expand_tokens",
        TypeError,
        (
            "task",
            lambda _: td.tasks.expand_tokens({"input_ids": IDS}, "causal_lm"),
            "CausalLM",
            "'causal_lm'",
        ),
        ("an array", lambda _: td.tasks.expand_tokens(IDS), "ndarray"),
    ),
    *rows(
        "tasks.expand_tokens",
        ValueError,
        ("no tokens", lambda _: td.tasks.expand_tokens({"ids": IDS}), "'input_ids'", "'ids'"),
    ),
    *rows(
        "tasks.CausalLM",
        ValueError,
        ("no tokens", computed(Language(), data(), "causal_lm"), "'input_ids'", "CausalLM("),
    ),
    *rows(
        "tasks.Classification",
        TypeError,
        (
            "labels that are text",
            computed(
                After(), data().drop_vars("label").assign_coords(label=("sample", list("abca")))
            ),
            "'label'",
            "return_inverse=True",
        ),
    ),
    *rows(
        "tasks.Classification",
        RuntimeError,
        (
            "labels that are one-hot",
            labelled(np.eye(4, 3, dtype=int), task="image_classification"),
            "'label'",
            "argmax",
        ),
    ),
    *rows(
        "tasks.Clip",
        TypeError,
        ("seed 1.5", lambda _: td.tasks.Clip(seed=1.5), "seed", "1.5"),
        ("n_negatives", lambda _: td.tasks.Clip(n_negatives=0.5), "n_negatives", "0.5"),
        ("no mapping", lambda _: td.tasks.Clip(drawn()["0"]), "tuple", "clip_embeddings"),
    ),
    *rows(
        "tasks.Clip",
        ValueError,
        ("seed negative", lambda _: td.tasks.Clip(seed=-1), "seed", "-1"),
        ("too few", lambda _: td.tasks.Clip(drawn()), "300", "1..5", "'0'"),
        ("temperature", lambda _: td.tasks.Clip(temperature=-1), "temperature", "-1"),
        ("NaN", lambda _: td.tasks.Clip({"0": (torch.ones(2, 2) * torch.nan,) * 2}), "'0'", "NaN"),
        (
            "other shapes",
            lambda _: td.tasks.Clip({"0": (torch.ones(3, 2), torch.ones(2, 2))}),
            "(3, 2)",
            "(2, 2)",
        ),
    ),
    *rows(
        "tasks.Clip",
        RuntimeError,
        ("without negatives", computed(TwoTowers(), pairs(), "clip"), "'0'", "clip_embeddings"),
        (
            "fewer rows",
            computed(TwoTowers(slice(1, None)), pairs(), td.tasks.Clip(drawn(), n_negatives=5)),
            "(2, embedding)",
            "(1, 3)",
        ),
        (
            "no logit_scale",
            computed(NoScale(), pairs(), td.tasks.Clip(drawn(), n_negatives=5)),
            "no logit_scale",
            "temperature=0.07",
        ),
        (
            "one tower",
            computed(nn.Bilinear(4, 4, 3), pairs(), td.tasks.Clip(drawn(), n_negatives=5)),
            "image embedding",
            "(2, 3)",
        ),
    ),
    *rows(
        "tasks.clip_embeddings",
        TypeError,
        (
            "other task",
            lambda _: td.tasks.clip_embeddings(fine(), pairs()),
            "ImageClassification",
            "clip",
        ),
        ("a module", lambda _: td.tasks.clip_embeddings(NET, pairs()), "Linear", "td.Model"),
    ),
    *rows(
        "tasks.clip_embeddings",
        ValueError,
        (
            "batch_size",
            lambda _: td.tasks.clip_embeddings(
                td.Model(TwoTowers(), task="clip"), pairs(), batch_size=0
            ),
            "batch_size",
            "0",
        ),
        (
            "no text",
            lambda _: td.tasks.clip_embeddings(
                td.Model(TwoTowers(), task="clip"), pairs().drop_vars("text")
            ),
            "'text'",
            "'image'",
        ),
    ),
    *rows(
        "tasks.Batch",
        ValueError,
        ("missing", lambda _: td.tasks.Batch(x=torch.ones(2))["y"], "'y'", "['x']"),
    ),
    *rows(
        "tasks.resolve_task",
        ValueError,
        ("a name", lambda _: td.tasks.resolve_task("lm"), "'lm'", "'causal_lm'"),
    ),
    *rows(
        "tasks.resolve_task", TypeError, ("None", lambda _: td.tasks.resolve_task(None), "NoneType")
    ),
    *[
        BadInput(
            "tasks.ImageClassification",
            f"temperature {t!r}",
            lambda _, t=t: td.tasks.ImageClassification(t),
            ValueError if isinstance(t, float) or t == 0 else TypeError,
            ["temperature", repr(t)],
        )
        for t in (0, -1.0, float("nan"), float("inf"), "cold", None, True)
    ],
]


@parametrize(ROWS)
def test_bad_input(row: BadInput, tmp_path: Path) -> None:
    check(row, tmp_path)
