"""Bad inputs of gram, damping, Absolute, score, group_score, self_influence, top_k, accessors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pandas as pd
import torch
import xarray as xr

import trakdask as td
from tests.bad_inputs.bad_input import BadInput, check, parametrize
from trakdask.testing import simulate_features

X = simulate_features(20, 4, 3, chunks=8)
T = simulate_features(5, 4, 3, chunks=8, seed=1)
NAMES = [f"s{i}" for i in range(20)]
CHECKPOINTS = ["c0", "c1", "c2"]


@functools.cache
def scores() -> xr.DataArray:
    return td.score(X, T, damping=0.1)


def changed(ds: xr.Dataset, name: str, row: int, value: float) -> xr.Dataset:
    """The same with one value at all of a row, of one checkpoint."""
    values = ds[name].values.copy()
    values[row, ..., 1] = value
    data = da.from_array(values, chunks=ds[name].data.chunks)
    return ds.assign({name: ds[name].copy(data=data)})


def one_element(value: float) -> xr.Dataset:
    values = X.feature.values.copy()
    values[3, 2, 1] = value
    return X.assign(feature=X.feature.copy(data=da.from_array(values, chunks=(8, 4, 1))))


def computed(function: Callable[..., Any], *args: Any, **options: Any) -> object:
    """What is wrong with values can be known only when they are computed."""
    return function(*args, **options).compute(scheduler="sync")


def row(
    function: str,
    case: str,
    call: Callable[[], object],
    error: type[Exception],
    *words: str,
) -> BadInput:
    return BadInput(function, case, lambda _: call(), error, words)


def options_of_gram(function: str, call: Callable[..., Any], damped: bool = True) -> list[BadInput]:
    """Rows of what the functions have in common that make a gram matrix of ``call(features)``."""
    h = np.ones(20)
    rows = [
        ("features of None", lambda: call(None), TypeError, ["features", "NoneType", "td.open"]),
        ("features that are a path", lambda: call("f.zarr"), TypeError, ["'f.zarr'", "td.open"]),
        ("features that are an array", lambda: call(X.feature), TypeError, ["DataArray"]),
        ("features that are a tensor", lambda: call(torch.ones(3, 4)), TypeError, ["Tensor"]),
        ("features without feature", lambda: call(X.drop_vars("feature")), ValueError, ["'feature'", "'output'"]),
        ("features that are samples", lambda: call(xr.Dataset({"x": ("sample", h)})), ValueError, ["'x'", "td.featurize"]),
        ("features transposed", lambda: call(X.transpose("checkpoint", ...)), ValueError, ["('checkpoint', 'sample', 'proj_dim')", "ds.transpose"]),
        ("features of one checkpoint", lambda: call(X.isel(checkpoint=0)), ValueError, ["('sample', 'proj_dim')", "checkpoint=[0]"]),
        ("features in chunks of proj_dim", lambda: call(X.chunk(proj_dim=2)), ValueError, ["got 2 (2, 2)", "ds.chunk(proj_dim=-1)"]),
        ("features of integers", lambda: call(X.assign(feature=X.feature.astype(int))), ValueError, ["int64", "astype('float32')"]),
        ("features of no samples", lambda: call(X.isel(sample=slice(0))), ValueError, ["0 samples"]),
        ("weights of a list", lambda: call(X, weights=[1.0] * 20), ValueError, ["list", "xr.DataArray(h, dims='sample')"]),
        ("weights of numpy", lambda: call(X, weights=h), ValueError, ["ndarray"]),
        ("weights of other samples", lambda: call(X, weights=xr.DataArray(h[:7], dims="sample")), ValueError, ["{'sample': 7}", "'sample': 20"]),
        ("weights of another dimension", lambda: call(X, weights=xr.DataArray(h, dims="row")), ValueError, ["{'row': 20}"]),
        ("weights transposed", lambda: call(X, weights=xr.DataArray(np.ones((5, 20)), dims=("target", "sample"))), ValueError, ["'target': 5"]),
        ("negative weights", lambda: call(X, weights=xr.DataArray(h - 2, dims="sample")), ValueError, ["-1.0", "sample 0"]),
        ("weights with NaN", lambda: call(X, weights=xr.DataArray(np.where(np.arange(20) == 5, np.nan, 1), dims="sample")), ValueError, ["nan", "sample 5"]),
        ("infinite weights", lambda: call(X, weights=xr.DataArray(np.where(np.arange(20) == 5, np.inf, 1), dims="sample")), ValueError, ["inf", "sample 5"]),
        ("weights of text", lambda: call(X, weights=xr.DataArray(np.full(20, "1"), dims="sample")), ValueError, ["<U1"]),
        ("weights of unknown samples", lambda: call(X.assign_coords(sample=NAMES), weights=xr.DataArray(h, coords={"sample": [*NAMES[1:], "x"]})), ValueError, ["'s0'", "weights"]),
        ("weights of unknown checkpoints", lambda: call(X, weights=xr.DataArray(np.ones((20, 3)), dims=("sample", "checkpoint"), coords={"checkpoint": ["c0", "c1", "C2"]})), ValueError, ["'c2'", "'C2'"]),
        ("weights of sorted samples", lambda: call(X, weights=xr.ones_like(X.sortby("label").label)), ValueError, ["'label'", "sample 1"]),
    ]  # fmt: skip
    if damped:
        rows += [
            ("damping that is misspelled", lambda: call(X, damping="closed-form"), ValueError, ["'closed-form'", "'closed_form'"]),
            ("negative damping", lambda: call(X, damping=-0.1), ValueError, ["-0.1"]),
            ("damping of NaN", lambda: call(X, damping=np.nan), ValueError, ["nan"]),
            ("infinite damping", lambda: call(X, damping=np.inf), ValueError, ["inf"]),
            ("damping of None", lambda: call(X, damping=None), ValueError, ["NoneType"]),
            ("damping of a list", lambda: call(X, damping=[0.1, 0.1, 0.1]), ValueError, ["list", "td.Absolute"]),
            ("damping of a bool", lambda: call(X, damping=True), ValueError, ["True"]),
            ("damping of an array without checkpoints", lambda: call(X, damping=xr.DataArray(np.ones(3), dims="c")), ValueError, ["('c',)"]),
            ("damping of unknown checkpoints", lambda: call(X, damping=xr.DataArray(np.ones(3), coords={"checkpoint": ["c0", "c1", "x"]})), ValueError, ["'c2'"]),
            ("damping that is features", lambda: call(X, damping=T), ValueError, ["'feature'", "td.damping"]),
            ("negative damping of an array", lambda: call(X, damping=xr.DataArray([1.0, -1, 1], coords={"checkpoint": CHECKPOINTS})), ValueError, ["'c1': -1.0"]),
            ("estimator that is misspelled", lambda: call(X, estimator="sfot"), ValueError, ["'sfot'", "'soft'"]),
            ("estimator of None", lambda: call(X, estimator=None), ValueError, ["None"]),
            ("estimator of a list", lambda: call(X, estimator=["trak"]), ValueError, ["['trak']"]),
            ("power above 1", lambda: call(X, estimator="soft", power=2), ValueError, ["2", "[0, 1]"]),
            ("power of text", lambda: call(X, estimator="soft", power="half"), ValueError, ["'half'"]),
            ("power of NaN", lambda: call(X, estimator="soft", power=np.nan), ValueError, ["nan"]),
            ("calibrate without a rule for it", lambda: call(X, damping=0.1, calibrate=T), ValueError, ["0.1", "damping='completeness'"]),
            ("calibrate of few samples", lambda: call(X, damping="completeness", calibrate=T), ValueError, ["5", "50"]),
            ("calibrate that is an array", lambda: call(X, damping="completeness", calibrate=T.feature), TypeError, ["calibrate", "DataArray"]),
            ("calibrate of other checkpoints", lambda: call(X, damping="completeness", calibrate=T.isel(checkpoint=[1, 0, 2])), ValueError, ["calibration", "checkpoint"]),
        ]  # fmt: skip
    return [
        BadInput(function, case, lambda _, f=f: f(), error, words) for case, f, error, words in rows
    ]  # type: ignore[misc]


def options_of_score(function: str, call: Callable[..., Any]) -> list[BadInput]:
    """Rows of what functions of features and targets have in common."""
    rows = [
        ("targets of None", lambda: call(X, None), TypeError, ["targets", "NoneType"]),
        ("targets that are an array", lambda: call(X, T.feature), TypeError, ["targets", "DataArray"]),
        ("targets without feature", lambda: call(X, T[["output"]]), ValueError, ["targets", "'output'"]),
        ("features without Q", lambda: call(X.drop_vars("out_to_loss"), T), ValueError, ["'out_to_loss'"]),
        ("targets of fewer checkpoints", lambda: call(X, T.isel(checkpoint=[0, 1])), td.errors.StoreMismatchError, ["checkpoint", "c2"]),
        ("targets of checkpoints in another order", lambda: call(X, T.isel(checkpoint=[1, 0, 2])), td.errors.StoreMismatchError, ["['c1', 'c0', 'c2']"]),
        ("targets of another width", lambda: call(X, T.isel(proj_dim=slice(2))), td.errors.StoreMismatchError, ["proj_dim", "got 2"]),
        ("targets of another projector", lambda: call(X, T.assign_attrs(projector={"kind": "simulated", "proj_dim": 4, "seed": 7})), td.errors.StoreMismatchError, ["projector['seed']", "got 7"]),
        ("targets of another task", lambda: call(X, T.assign_attrs(task="MultiLabel(inputs=('x',))")), td.errors.StoreMismatchError, ["task", "MultiLabel", "simulated"]),
        ("targets of other parameters", lambda: call(X, T.assign_attrs(parameters={"w": [3]})), td.errors.StoreMismatchError, ["parameters['w']", "[3]"]),
        ("targets of other weights", lambda: call(X, T.assign_attrs(checkpoints=dict.fromkeys(CHECKPOINTS, "ff"))), td.errors.StoreMismatchError, ["checkpoints['c0']", "'ff'"]),
        ("learning rates for trak", lambda: call(X, T, estimator="trak", learning_rates={"c0": 1}), ValueError, ["'trak'", "'tracin'"]),
        ("tracin without learning rates", lambda: call(X, T, estimator="tracin"), ValueError, ["None", "'c0'"]),
        ("learning rates of a list", lambda: call(X, T, estimator="tracin", learning_rates=[0.1] * 3), ValueError, ["[0.1, 0.1, 0.1]"]),
        ("a learning rate too few", lambda: call(X, T, estimator="tracin", learning_rates={"c0": 0.1, "c1": 0.1}), ValueError, ["'c2'"]),
        ("a learning rate of NaN", lambda: call(X, T, estimator="tracin", learning_rates={"c0": 0.1, "c1": np.nan, "c2": 0.1}), ValueError, ["nan", "'c1'"]),
        ("a learning rate of text", lambda: call(X, T, estimator="tracin", learning_rates=dict.fromkeys(CHECKPOINTS, "0.1")), ValueError, ["'0.1'", "'c0'"]),
        ("learning rates of unknown checkpoints", lambda: call(X, T, estimator="tracin", learning_rates=xr.DataArray(np.ones(3), coords={"checkpoint": ["a", "b", "c"]})), ValueError, ["'a'", "'c0'"]),
        ("damping without gram matrix", lambda: call(X, T, estimator="grad_dot", damping=0.1), ValueError, ["'grad_dot'", "damping"]),
        ("weights without gram matrix", lambda: call(X, T, estimator="grad_cos", weights=xr.DataArray(np.ones(20), dims="sample")), ValueError, ["'grad_cos'", "weights"]),
        ("Q outside of 0 to 1", lambda: computed(call, changed(X, "out_to_loss", 3, 2.5), T, estimator="soft", damping=0.1), ValueError, ["2.5", "estimator='trak'"]),
        ("a feature of infinity", lambda: computed(call, one_element(np.inf), T, damping=0.1), ValueError, ["'c1'", "not finite"]),
        ("a feature of NaN in part", lambda: computed(call, one_element(np.nan), T, damping=0.1), ValueError, ["'c1'", "not finite"]),
        ("features of zero", lambda: computed(call, X.assign(feature=X.feature * 0), T, damping=0.1), ValueError, ["got 0 at checkpoint 'c"]),
        ("Q of 1 for all", lambda: computed(call, X.assign(out_to_loss=X.out_to_loss * 0 + 1), T, estimator="soft", damping=0.1), ValueError, ["got 0 at checkpoint 'c", "estimator='trak'"]),
        ("no damping of few samples", lambda: computed(call, X.isel(sample=slice(2)), T, damping=0), np.linalg.LinAlgError, ["checkpoint 'c", "larger damping"]),
    ]  # fmt: skip
    return [
        BadInput(function, case, lambda _, f=f: f(), error, words) for case, f, error, words in rows
    ]  # type: ignore[misc]


def top_k_of(**where: Any) -> Callable[[], object]:
    return lambda: td.top_k(scores(), 3, **where)


OTHERS = [
    row("score", "features and targets swapped with a name", lambda: td.score(X, T, "trak"), TypeError, "positional"),  # type: ignore[misc]
    row("score", "average of text", lambda: td.score(X, T, average="no"), TypeError, "'no'", "average"),
    row("score", "an option that is misspelled", lambda: td.score(X, T, lamda=0.1), TypeError, "lamda"),  # type: ignore[call-arg]
    row("score", "coords of one name on both sides", lambda: td.score(X.assign_coords(target_label=X.label), T), ValueError, "'target_label'"),
    row("self_influence", "estimator without self-influence", lambda: td.self_influence(X, estimator="relatif"), ValueError, "'relatif'"),
    row("self_influence", "average of a number", lambda: td.self_influence(X, average=2), TypeError, "2"),
    row("self_influence", "features without Q", lambda: td.self_influence(X.drop_vars("out_to_loss")), ValueError, "'out_to_loss'"),
    row("damping", "targets instead of a rule", lambda: td.damping(X, T), ValueError, "'feature'", "calibrate="),
    row("damping", "estimator without damping", lambda: td.damping(X, estimator="tracin"), ValueError, "'tracin'"),
    row("damping", "features without outputs", lambda: td.damping(X.drop_vars("output"), "completeness"), ValueError, "'output'"),
    row("Absolute", "negative", lambda: td.Absolute(-1), ValueError, "-1"),
    row("Absolute", "NaN", lambda: td.Absolute(np.nan), ValueError, "nan"),
    row("Absolute", "infinite", lambda: td.Absolute(np.inf), ValueError, "inf"),
    row("Absolute", "text", lambda: td.Absolute("1"), ValueError, "'1'"),
    row("Absolute", "None", lambda: td.Absolute(None), ValueError, "None"),
    row("Absolute", "a bool", lambda: td.Absolute(True), ValueError, "True"),
    row("Absolute", "one per checkpoint", lambda: td.Absolute([1.0, 2.0]), ValueError, "[1.0, 2.0]"),
    row("group_score", "by a coord that is not there", lambda: td.group_score(X, T, by="lable"), ValueError, "'lable'", "['label']"),
    row("group_score", "by a list", lambda: td.group_score(X, T, by=["label"]), ValueError, "['label']"),
    row("group_score", "by the targets", lambda: td.group_score(X, T, by="target"), ValueError, "'target'"),
    row("group_score", "by an array", lambda: td.group_score(X, T, by=X.label), ValueError, "label", "one coord"),
    row("group_score", "by a coord of the targets", lambda: td.group_score(X, T, by="target_label"), ValueError, "'target_label'"),
    row("group_score", "by None", lambda: td.group_score(X, T, by=None), ValueError, "None"),
    row("group_score", "by a coord of checkpoints", lambda: td.group_score(X, T, by="checkpoint"), ValueError, "'checkpoint'"),
    row("group_score", "not by anything", lambda: td.group_score(X, T), TypeError, "by"),  # type: ignore[call-arg]
    row("top_k", "features", lambda: td.top_k(X, 3), TypeError, "Dataset", "td.score"),
    row("top_k", "None", lambda: td.top_k(None, 3), TypeError, "NoneType"),
    row("top_k", "numpy", lambda: td.top_k(np.ones((20, 5)), 3), TypeError, "ndarray"),
    row("top_k", "a ranking", lambda: td.top_k(td.top_k(scores(), 3), 2), TypeError, "Dataset"),
    row("top_k", "scores transposed", lambda: td.top_k(scores().T, 3), ValueError, "('target', 'sample')", "scores.transpose('sample', 'target')"),
    row("top_k", "scores of one target", lambda: td.top_k(scores().isel(target=0), 3), ValueError, "isel(target=[0])"),
    row("top_k", "scores of one sample", lambda: td.top_k(scores().isel(sample=0), 3), ValueError, "isel(sample=[0])"),
    row("top_k", "scores of an ensemble", lambda: td.top_k(td.score(X, T, damping=0.1, average=False), 3), ValueError, "scores.mean('checkpoint')"),
    row("top_k", "scores of no samples", lambda: td.top_k(scores().isel(sample=slice(0)), 1), ValueError, "got 0"),
    row("top_k", "scores of integers", lambda: td.top_k(scores().astype(int), 3), TypeError, "int64"),
    row("top_k", "k of 0", lambda: td.top_k(scores(), 0), ValueError, "got 0", "20 samples"),
    row("top_k", "negative k", lambda: td.top_k(scores(), -3), ValueError, "got -3"),
    row("top_k", "k of more than there are", lambda: td.top_k(scores(), 21), ValueError, "got 21", "20 samples"),
    row("top_k", "k of a float", lambda: td.top_k(scores(), 3.0), ValueError, "got 3.0"),
    row("top_k", "k of text", lambda: td.top_k(scores(), "3"), ValueError, "got '3'"),
    row("top_k", "k of a bool", lambda: td.top_k(scores(), True), ValueError, "got True"),
    row("top_k", "k of None", lambda: td.top_k(scores(), None), ValueError, "got None"),
    row("top_k", "largest of text", lambda: td.top_k(scores(), 3, largest="no"), TypeError, "'no'"),
    row("top_k", "nothing selected", top_k_of(where=np.zeros(20, bool)), ValueError, "got 0 of 20", "selects some"),
    row("top_k", "too few selected", top_k_of(where=np.arange(20) < 2), ValueError, "got 2 of 20", "k=2"),
    row("top_k", "positions for a mask", top_k_of(where=[3, 4, 5]), ValueError, "int64", "{'sample': 3}"),
    row("top_k", "a mask of other samples", top_k_of(where=np.ones(19, bool)), ValueError, "{'sample': 19}"),
    row("top_k", "a mask of three axes", top_k_of(where=np.ones((20, 5, 2), bool)), ValueError, "'axis 2': 2"),
    row("top_k", "a mask transposed", top_k_of(where=np.ones((5, 20), bool)), ValueError, "{'sample': 5, 'target': 20}"),
    row("top_k", "a mask of text", top_k_of(where="label == 1"), ValueError, "<U10"),
    row("top_k", "a single bool", top_k_of(where=True), ValueError, "bool over {}"),
    row("top_k", "a mask with hidden entries", top_k_of(where=np.ma.masked_array(np.ones(20, bool), np.arange(20) < 4)), TypeError, "hides 4 of 20"),
    row("top_k", "a mask of a dictionary", top_k_of(where={"label": 1}), ValueError, "object"),
    row("top_k", "a mask of pandas with its own labels", top_k_of(where=xr.DataArray(pd.Series(np.ones(20, bool), index=NAMES).rename_axis("sample"))), ValueError, "'s0'", "drop_vars('sample')"),
    row("top_k", "a mask in another order", top_k_of(where=X.sortby("label").label == 1), ValueError, "'label'", "sample 1"),
    row("top_k", "a function of a coord that is not there", lambda: computed(td.top_k, scores(), 3, where=lambda tile: tile.source == "web"), ValueError, "source", "'label'"),
    row("top_k", "a function that raises", lambda: computed(td.top_k, scores(), 3, where=lambda tile: 1 / 0), ValueError, "ZeroDivisionError", "targets 0:5"),
    row("top_k", "a function that returns a coord", lambda: computed(td.top_k, scores(), 3, where=lambda tile: tile.label), ValueError, "int64"),
    row("top_k", "a function that returns numpy", lambda: computed(td.top_k, scores(), 3, where=lambda tile: tile.label.values == 1), ValueError, "ndarray"),
    row("top_k", "a function of all scores", lambda: computed(td.top_k, scores(), 3, where=lambda tile: scores().label == 1), ValueError, "{'sample': 20}", "'target': 5"),
    row("top_k", "a function without arguments", lambda: computed(td.top_k, scores(), 3, where=lambda: True), ValueError, "TypeError"),
    row("accessor.features", "gram of samples", lambda: xr.Dataset({"x": ("sample", [1.0])}).trak.gram(), ValueError, "'x'"),
    row("accessor.features", "damping that is misspelled", lambda: X.trak.damping(damping="atuo"), ValueError, "'atuo'"),
    row("accessor.features", "score of no targets", lambda: X.trak.score(None), TypeError, "NoneType"),
    row("accessor.features", "score with an unknown option", lambda: X.trak.score(T, lamda=1), TypeError, "lamda"),
    row("accessor.features", "group_score by nothing there", lambda: X.trak.group_score(T, by="x"), ValueError, "'x'"),
    row("accessor.features", "self_influence of an unknown estimator", lambda: X.trak.self_influence(estimator="x"), ValueError, "'x'"),
    row("accessor.scores", "top_k of too many", lambda: scores().trak.top_k(21), ValueError, "got 21"),
    row("accessor.scores", "top_k of features", lambda: X.feature.trak.top_k(1), ValueError, "('sample', 'proj_dim', 'checkpoint')"),
    row("accessor.scores", "top_k of a selection", lambda: scores().isel(target=0).trak.top_k(1), ValueError, "isel(target=[0])"),
]  # fmt: skip

ROWS = [
    *options_of_gram("gram", td.gram, damped=False),
    *options_of_gram("damping", td.damping),
    *options_of_gram("score", lambda features, **options: td.score(features, T, **options)),
    *options_of_gram("self_influence", td.self_influence),
    *options_of_score("score", td.score),
    *options_of_score("group_score", functools.partial(td.group_score, by="label")),
    *OTHERS,
]


@parametrize(ROWS)
def test_bad_input(row: BadInput, tmp_path: Path) -> None:
    check(row, tmp_path)
