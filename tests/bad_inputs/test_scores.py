"""Bad inputs of gram, damping, Absolute, score, group_score, self_influence, top_k, accessors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import dask.array as da
import numpy as np
import pandas as pd
import xarray as xr

import trakdask as td
from tests.bad_inputs.bad_input import one_test, row
from trakdask.testing import simulate_features

X = simulate_features(20, 4, 3, chunks=8)
T = simulate_features(5, 4, 3, chunks=8, seed=1)
SEEDS = simulate_features(20, 4, 5, chunks=8)
EVERYTHING = xr.DataArray(np.ones((20, 5), bool), dims=("sample", "checkpoint"))
NAMES = [f"s{i}" for i in range(20)]
CHECKPOINTS = ["c0", "c1", "c2"]
H = np.ones(20)
MISMATCH = td.errors.StoreMismatchError


@functools.cache
def scores() -> xr.DataArray:
    return td.score(X, T, td.Trak(damping=0.1))


MANY = X.assign_coords({f"c{i}": ("sample", np.arange(20)) for i in range(30)})


def changed(name: str, row: int, value: float) -> xr.Dataset:
    """The features with one value at all of a row, or at one element of it, of one checkpoint."""
    values = X[name].values.copy()
    values[(row, 2, 1) if name == "feature" else (row, 1)] = value
    return X.assign({name: X[name].copy(data=da.from_array(values, chunks=X[name].data.chunks))})


def computed(function: Callable[..., Any], *args: Any, **options: Any) -> object:
    """Wrong values can be known only when they are computed."""
    return function(*args, **options).compute(scheduler="sync")


def weights(values: Any, **coords: Any) -> xr.DataArray:
    return xr.DataArray(values, dims=("sample", "checkpoint")[: np.ndim(values)], coords=coords)


def score(features: Any = X, targets: Any = T, estimator: Any = "auto") -> Any:
    return td.score(features, targets, estimator)


def with_coord(data: Any, name: str) -> Any:
    return data.assign_coords({name: ("sample", np.arange(20))})


def damped(damping: Any) -> object:
    return score(estimator=td.Trak(damping=damping))


def tracin(rates: Any) -> object:
    return score(estimator=td.TracIn(rates))


FEATURES = [
    ("a path", lambda: td.gram("f.zarr"), TypeError, ["'f.zarr'"]),
    ("features with a renamed dimension", lambda: td.gram(X.rename(sample="row")), ValueError, ["('row', 'proj_dim', 'checkpoint')", "ds.rename({'row': 'sample'})"]),
    ("features of one checkpoint", lambda: score(X.isel(checkpoint=0)), ValueError, ["('sample', 'proj_dim')", "ds.isel(checkpoint=[0])"]),
    ("features in chunks of proj_dim", lambda: score(X.chunk(proj_dim=2)), ValueError, ["2 (2, 2)"]),
    ("features of no checkpoints", lambda: score(X.isel(checkpoint=[]), T.isel(checkpoint=[])), ValueError, ["one or more checkpoints"]),
    ("features of no samples", lambda: score(X.isel(sample=slice(0))), ValueError, ["0 samples"]),
    ("weights of other samples", lambda: td.gram(X, weights=weights(H[:7])), ValueError, ["{'sample': 7}", "'sample': 20"]),
    ("negative weights", lambda: td.gram(X, weights=weights(H - 2)), ValueError, ["-1.0", "'sample': 0"]),
    ("weights with NaN", lambda: td.gram(X, weights=weights(np.where(np.arange(20) == 5, np.nan, 1))), ValueError, ["nan", "'sample': 5"]),
    ("weights of unknown samples", lambda: td.gram(X.assign_coords(sample=NAMES), weights=weights(H, sample=[*NAMES[1:], "x"])), ValueError, ["'s0'", "weights"]),
]  # fmt: skip

LAMBDA = [
    *((f"damping of {bad!r}", lambda bad=bad: damped(bad), ValueError, [repr(bad)])
      for bad in ("closed-form", np.nan, True)),
    ("damping without checkpoints", lambda: damped(xr.DataArray(np.ones(3), dims="c")), ValueError, ["damping"]),
    ("damping of unknown checkpoints", lambda: damped(xr.DataArray(np.ones(3), coords={"checkpoint": ["c0", "c1", "x"]})), ValueError, ["'c2'"]),
    ("negative damping of an array", lambda: damped(xr.DataArray([1.0, -1, 1], coords={"checkpoint": CHECKPOINTS})), ValueError, ["'c1': -1.0"]),
    *((f"estimator of {bad!r}", lambda bad=bad: score(estimator=bad), ValueError, [repr(bad)]) for bad in ("sfot", None)),
    *((f"power of {bad!r}", lambda bad=bad: td.Soft(power=bad), ValueError, [repr(bad)]) for bad in (2, np.nan)),
    ("power of a squared error", lambda: score(*(ds.assign_attrs(task="Regression()", loss_kind="squared error") for ds in (X, T)), td.Soft(power=0.5)), ValueError, ["Regression()", "0.5"]),
    ("calibrate without a rule for it", lambda: td.damping(X, td.Trak(damping=0.1), calibrate=T), ValueError, ["0.1", "calibrate"]),
    ("calibrate of few samples", lambda: td.damping(X, "soft", calibrate=T), ValueError, ["5", "50"]),
    ("calibrate without outputs", lambda: td.damping(X, "soft", calibrate=T.drop_vars("output")), ValueError, ["calibrate", "'output'"]),
    ("a list with a learning rate too few", lambda: tracin([0.1, 0.1]), ValueError, ["3 checkpoints", "[0.1, 0.1]", "td.TracIn("]),
    ("one learning rate for all", lambda: tracin(0.1), ValueError, ["3 checkpoints", "got 0.1", "td.TracIn("]),
    ("a learning rate too few", lambda: tracin({"c0": 0.1, "c1": 0.1}), ValueError, ["'c2'"]),
    *((f"a learning rate of {bad!r}", lambda bad=bad: tracin({**dict.fromkeys(CHECKPOINTS, 0.1), "c1": bad}), ValueError, [repr(bad), "'c1'"])
      for bad in (np.nan, True)),
]  # fmt: skip

SCORE = [
    ("features without Q", lambda: score(X.drop_vars("out_to_loss")), ValueError, ["'out_to_loss'"]),
    ("targets of fewer checkpoints", lambda: score(X, T.isel(checkpoint=[0, 1])), MISMATCH, ["checkpoint", "c2"]),
    ("checkpoints in another order", lambda: score(X, T.isel(checkpoint=[1, 0, 2])), MISMATCH, ["['c1', 'c0', 'c2']"]),
    ("targets of another width", lambda: score(X, T.isel(proj_dim=slice(2))), MISMATCH, ["proj_dim", "2"]),
    ("targets of another projector", lambda: score(X, T.assign_attrs(projector={"kind": "simulated", "proj_dim": 4, "seed": 7})), MISMATCH, ["projector['seed']", "7"]),
    ("targets of other weights", lambda: score(X, T.assign_attrs(checkpoints=dict.fromkeys(CHECKPOINTS, "ff"))), MISMATCH, ["checkpoints['c0']", "'ff'"]),
    ("coords of one name on both sides", lambda: score(X.assign_coords(target_label=X.label)), ValueError, ["'target_label'"]),
    *((f"a coord named {name}", lambda name=name: score(with_coord(X, name)), ValueError, [f"'{name}'", f"'my_{name}'"])
      for name in ("score", "rank", "target", "output", "gram", "error", "checkpoint")),
    ("Q outside of 0 to 1", lambda: computed(score, changed("out_to_loss", 3, 2.5), T, td.Soft(damping=0.1)), ValueError, ["2.5"]),
    ("a feature of infinity", lambda: computed(score, changed("feature", 3, np.inf), T, td.Trak(damping=0.1)), ValueError, ["'c1'", "not finite"]),
    ("features of zero", lambda: computed(score, X.assign(feature=X.feature * 0), T, td.Trak(damping=0.1)), ValueError, ["'c"]),
    ("Q of 1 for all", lambda: computed(score, X.assign(out_to_loss=X.out_to_loss * 0 + 1), T, td.Soft(damping=0.1)), ValueError, ["'c", "'trak'"]),
    ("no damping of few samples", lambda: computed(score, X.isel(sample=slice(2)), T, td.Trak(damping=0)), np.linalg.LinAlgError, ["'c"]),
]  # fmt: skip

GROUPS = [
    *((f"by {by!r}", lambda by=by: td.group_score(X, T, by=by), ValueError, [repr(by), "'label'"])
      for by in ("lable", [], "target")),
    ("coords of 20 values", lambda: td.group_score(MANY, T, by=[*MANY.drop_vars(["label", "checkpoint"]).coords]), ValueError, ["by", f"{20**5:,}", "assign_coords"]),
]  # fmt: skip

OTHERS = {
    "self_influence": [
        ("another estimator", lambda: td.self_influence(X, "relatif"), ValueError, ["RelatIF("]),
    ],
    "intervals": [
        ("too few checkpoints", lambda: td.score(X, T, level=0.9), ValueError, ["5 or more", "got 3", "average=False"]),
        *((f"level of {bad!r}", lambda bad=bad: td.score(SEEDS, SEEDS, level=bad), ValueError, ["level", repr(bad)]) for bad in (1, 90)),
        *((f"of samples with the coord {name}", lambda name=name: td.score(with_coord(SEEDS, name), SEEDS, level=0.9), ValueError, [f"'{name}'"]) for name in ("lower", "snr")),
        ("q of 5", lambda: td.score(SEEDS, SEEDS, q=5, level=0.9), ValueError, ["q", "5"]),
        ("q alone", lambda: td.score(SEEDS, SEEDS, q=0.1), TypeError, ["level", "None"]),
        ("of each checkpoint", lambda: td.score(SEEDS, SEEDS, level=0.9, average=False), ValueError, ["average=True"]),
    ],
    "share": [
        ("with bounds", lambda: td.group_score(X, T, by="label", share=True, level=0.9), ValueError, ["neither units", "effect=True, level=0.9"]),
        ("of a regression", lambda: td.group_score(X, T.assign_attrs(loss_kind="squared error"), by="label", share=True), ValueError, ["both signs", "metric='loss'"]),
        ("of a metric", lambda: td.group_score(X, T, by="label", share=True, metric="loss"), ValueError, ["metric=", "share="]),
        ("a word", lambda: td.group_score(X, T, by="label", share="yes"), TypeError, ["share", "'yes'", "True"]),
        *((f"a word for {name}", call, TypeError, [name, "'no'", "True"]) for name, call in {
            "effect": lambda: td.group_score(X, T, by="label", effect="no"),
            "average": lambda: td.score(X, T, average="no"),
            "largest": lambda: td.top_k(td.score(X, T), 3, largest="no"),
            "wrong_classes": lambda: td.Soft(wrong_classes="no"),
            "pilot": lambda: td.plan(X, pilot="no"),
            "second_moments": lambda: td.keep_checkpoints("x", second_moments="no"),
            "overwrite": lambda: td.to_parquet(td.top_k(td.score(X, T), 3), "x", overwrite="no"),
        }.items()),
        ("labels of samples", lambda: td.group_score(X, T, by=xr.DataArray(["a"] * X.sizes["sample"], dims="sample")), ValueError, ["labels ('sample',)", "assign_coords", "by='group'"]),
        ("parts of targets", lambda: td.group_score(SEEDS, SEEDS, by=xr.DataArray(np.ones((20, 3)), dims=("target", "author"))), ValueError, ["('target', 'author')", "xr.DataArray"]),
        *((f"parts as {dtype}", lambda dtype=dtype: td.group_score(SEEDS, SEEDS, by=xr.DataArray(np.ones((20, 3)).astype(dtype), dims=("sample", "author"))), ValueError, ["finite parts", "('sample', 'author')"]) for dtype in (str, object)),
        *((f"parts of each {dim}", lambda dim=dim: td.group_score(SEEDS, SEEDS, by=xr.DataArray(np.ones((20, 20)), dims=("sample", dim))), ValueError, [f"'{dim}'", f"'my_{dim}'"]) for dim in ("target", "target_label")),
        ("parts that are missing", lambda: td.group_score(SEEDS, SEEDS, by=xr.DataArray(np.full((20, 3), np.nan), dims=("sample", "author"))), ValueError, ["finite"]),
    ],
    "effects": [
        ("of all data", lambda: td.group_score(X, T, by="label", effect=True), ValueError, ["'trained_on'", "try td.evaluate.train_on_halves"]),
        ("of the same data", lambda: td.group_score(SEEDS.assign(trained_on=EVERYTHING).assign_coords(source=("sample", np.arange(20) % 5)), SEEDS, "trak", by="source", effect=True).compute(), ValueError, ["the same for all", "try td.evaluate.train_on_halves"]),
        ("of few targets", lambda: td.group_score(SEEDS.assign(trained_on=EVERYTHING), SEEDS[{"sample": [0]}], by="label", effect=True), ValueError, ["20 or more targets", "got 1"]),
        ("bounds of a metric that is a guess", lambda: td.group_score(X, T, by="label", metric="loss", level=0.9), ValueError, ["try effect=True, level=0.9"]),
        ("chosen by q", lambda: td.group_score(X, T, by="label", effect=True, level=0.9, q=0.1), ValueError, ["q=0.1", "scores alone"]),
        ("level of 90", lambda: td.group_score(X, T, by="label", effect=True, level=90), ValueError, ["level", "90"]),
    ],
    "damping": [
        ("estimator without damping", lambda: td.damping(X, "grad_cos"), ValueError, ["GradCos()"]),
    ],
    "Absolute": [
        (repr(bad), lambda bad=bad: td.Absolute(bad), ValueError, [repr(bad)])
        for bad in (-1, np.nan, None, True)
    ],
}  # fmt: skip


def top(k: Any = 3, **options: Any) -> Any:
    return td.top_k(scores(), k, **options)


def over(**options: Any) -> Any:
    return td.top_k(scores(), **{"fraction": 0.1, "over_targets": "max", **options})


RANKED = [
    *((f"a {type(bad).__name__}", lambda bad=bad: td.top_k(bad, 3), ValueError, ["scores"])
      for bad in (X, None, np.ones((20, 5)))),
    ("scores of an ensemble", lambda: td.top_k(td.score(X, T, average=False), 3), ValueError, ["'checkpoint'"]),
    *((f"k of {bad!r}", lambda bad=bad: top(bad), ValueError, ["k", repr(bad)]) for bad in (0, 21, None)),
    *((f"k of {bad!r}", lambda bad=bad: top(bad), TypeError, ["k", repr(bad)]) for bad in (3.0, True)),
    *((f"fraction of {bad!r}", lambda bad=bad: top(None, fraction=bad), ValueError, ["fraction", repr(bad)]) for bad in (0, 5)),
    *((f"samples with the coord {name}", lambda name=name: td.top_k(with_coord(scores(), name), 3), ValueError, [f"'{name}'", f"'my_{name}'"])
      for name in ("score", "rank", "target", "position")),
    ("k and fraction", lambda: top(3, fraction=0.1), ValueError, ["k=3", "fraction=0.1"]),
    ("rank_by of one array", lambda: td.top_k(td.score(SEEDS, SEEDS), 3, rank_by="lower"), ValueError, ["rank_by='lower'", "level=0.9"]),
    ("an unknown rank_by", lambda: td.top_k(td.score(SEEDS, SEEDS, level=0.9), 3, rank_by="low"), ValueError, ["rank_by='low'", "'lower'"]),
    ("by without over_targets", lambda: top(3, by="label"), ValueError, ["over_targets", "'label'"]),
    ("by missing values", lambda: td.top_k(scores().assign_coords(kind=("sample", [None] * 20)), 3, over_targets="max", by="kind"), ValueError, ["got none"]),
    ("over targets by pairs", lambda: over(where=lambda tile: tile.label == tile.target_label), ValueError, ["where"]),
    ("over no targets", lambda: td.top_k(scores()[:, :0], 3, over_targets="max"), ValueError, ["one or more targets"]),
    ("a mask that is missing for one", lambda: top(where=pd.Series([pd.NA] + [True] * 19, dtype="boolean")), ValueError, ["bool over samples", "got boolean"]),
    ("nothing selected", lambda: top(where=np.zeros(20, bool)), ValueError, ["got none", "try a condition"]),
    ("positions for a mask", lambda: top(where=[3, 4, 5]), ValueError, ["int64", "{'sample': 3}"]),
    ("a mask of other samples", lambda: top(where=np.ones(19, bool)), ValueError, ["{'sample': 19}"]),
    ("a mask without one label", lambda: td.top_k(scores().assign_coords(sample=NAMES), 3, where=weights(np.ones(19, bool), sample=NAMES[:19])), ValueError, ["'s19'"]),
    ("a mask in another order", lambda: top(where=X.sortby("label").label == 1), ValueError, ["'label'", "sample 1"]),
    ("a function of all scores", lambda: computed(top, where=lambda tile: scores().label == 1), ValueError, ["{'sample': 20}", "'target': 5"]),
]  # fmt: skip


TABLES = {"features": FEATURES, "options": LAMBDA, "score": SCORE, "group_score": GROUPS, **OTHERS}
TABLES["top_k"] = RANKED
test_bad_input = one_test(
    row(function, case, call, error, *words)
    for function, cases in TABLES.items()
    for case, call, error, words in cases
)
