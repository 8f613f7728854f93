"""Bad inputs of score_parts, and of combine."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
import xarray as xr
from torch import nn

import trakdask as td
from tests.bad_inputs.bad_input import one_test, row
from tests.bad_inputs.small_models import Language, data, tokens
from trakdask.projection import FastJL
from trakdask.testing import simulate_features

TASK = td.tasks.CausalLM("input_ids")
X = simulate_features(20, 4, 3, chunks=8)
T = simulate_features(5, 4, 3, chunks=8, seed=1)
KINDS = T.assign_coords(kind=("sample", np.array(["a", "b", "a", None, "b"], object)))
IDS = np.array([[1, 2, 3], [4, 5, 6], [0, 1, 2]])


def language(seed: int = 0, task: object = TASK, **options: object) -> td.Model:
    torch.manual_seed(seed)
    return td.Model(Language(), task=task, **options)  # type: ignore[arg-type]


def known_of_fast_jl() -> xr.Dataset:
    spec = FastJL(512, num_sms=1).spec()
    return simulate_features(3, 512, 1).assign_attrs(projector=spec)


def computed(lazy: Callable[[], object]) -> Callable[[], object]:
    return lambda: lazy().compute(scheduler="sync")  # type: ignore[attr-defined]


def mixing() -> td.Model:
    return td.Model(nn.Sequential(nn.Conv1d(1, 1, 3)), task=TASK)


C, Q = "combine", "score_parts"
FEW = {"estimator": "grad_dot"}


@functools.cache
def known() -> xr.Dataset:
    return td.featurize(tokens(IDS), language(), projector=td.SJLT(8)).compute(scheduler="sync")


def asked(
    of: object = None, features: xr.Dataset | None = None, model: object = None, **options: object
) -> Callable[[], object]:
    def call() -> object:
        ours = known() if features is None else features
        words = tokens(IDS) if of is None else of
        made = language() if model is None else model
        return td.score_parts(ours, known(), made, of=words, **FEW | options)  # type: ignore[arg-type]

    return call


ROWS = [
    row(Q, "features on both sides", lambda: td.score_parts(known(), known(), language()), ValueError, "none of them", "of="),
    row(Q, "features that were not featurized", lambda: td.score_parts(X.drop_attrs(), T.drop_attrs(), language(), of=tokens(IDS), **FEW), ValueError, "attrs"),  # type: ignore[arg-type]
    row(Q, "features of some columns", lambda: td.score_parts(known().isel(proj_dim=slice(4)), known().isel(proj_dim=slice(4)), language(), of=tokens(IDS), **FEW), td.errors.StoreMismatchError, "proj_dim", "4"),  # type: ignore[arg-type]
    row(Q, "targets of another projector", lambda: td.score_parts(known(), td.featurize(tokens(IDS), language(), projector=td.SJLT(8, seed=1)), language(), of=tokens(IDS)), td.errors.StoreMismatchError, "seed"),
    row(Q, "training features of another projector", lambda: td.score_parts(known(), tokens(IDS), language(), of=td.featurize(tokens(IDS), language(), projector=td.SJLT(8, seed=1))), td.errors.StoreMismatchError, "seed"),
    row(Q, "a projector without a transpose", lambda: td.score_parts(known_of_fast_jl(), known_of_fast_jl(), language(), of=tokens(IDS), **FEW), ValueError, "FastJL"),
    row(Q, "another checkpoint", asked(model=language(1)), td.errors.StoreMismatchError, "checkpoint"),
    row(Q, "parts of a misspelled word", asked(parts="tokens"), ValueError, "'tokens'"),
    row(Q, "text of groups", asked(parts=["wte"], text=str), ValueError, "text"),
    row(Q, "an estimator with norms", asked(estimator="grad_cos"), ValueError, "'grad_cos'"),
    row(Q, "groups of targets", asked(by="kind"), ValueError, "'kind'", "td.combine"),
    row(Q, "samples without tokens", asked(data().rename(label="input_ids")), ValueError, "'input_ids'", "(4,)"),
    row(Q, "groups that overlap", asked(parts={"a": "w*", "b": "wte*"}), ValueError, "'wte.weight'", "'a'", "'b'"),
    row(Q, "text of a word", asked(text="abc"), TypeError, "'abc'"),
    row(Q, "texts of fewer tokens", computed(asked(text=["a", "b"])), ValueError, "up to 3", "2 texts", "tokenizer.decode"),
    row(Q, "another model", asked(model=mixing()), td.errors.StoreMismatchError, "parameters", "0.weight"),
    row(C, "neither", lambda: td.combine(T), ValueError, "none"),
    row(C, "by missing values", lambda: td.combine(KINDS.assign_coords(kind=("sample", [None] * 5)), by="kind"), ValueError, "'kind'"),
    row(C, "weights of a list", lambda: td.combine(T, weights=[1, -1]), ValueError, "[1, -1]"),  # type: ignore[arg-type]
    row(C, "weights of other targets", lambda: td.combine(T, weights={"a": [1, -1]}), ValueError, "5 targets", "(2,)"),
]  # fmt: skip

test_bad_input = one_test(ROWS)
