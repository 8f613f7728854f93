"""Bad inputs of evaluate.*: what draws subsets, retrains models, and judges by them."""

from __future__ import annotations

from pathlib import Path

import dask
import numpy as np
import xarray as xr

import trakdask as td
from tests.bad_inputs.bad_input import BadInput, check, parametrize

N, M, SUBSETS = 12, 3, 6
SCORES = xr.DataArray(np.random.default_rng(0).standard_normal((N, M)), dims=("sample", "target"))
MASKS = td.evaluate.subsets(N, SUBSETS).compute(scheduler="synchronous")
OUTPUTS = xr.dot(MASKS, SCORES, dim="sample")
VALUES = SCORES[:, 0]
WRONG = np.arange(N) < 4
NOTHING = xr.full_like(SCORES, np.nan)


def train(positions: np.ndarray, seed: int) -> np.ndarray:
    return SCORES.values[positions].sum(axis=0)


def rows(name: str, call: object, *cases: tuple[object, ...]) -> list[BadInput]:
    """Return a row per (case, changed arguments, error, words): the others are good."""
    return [
        BadInput(f"evaluate.{name}", case, lambda folder, c=changed: call(**c), error, words)
        for case, changed, error, words in cases
    ]


def lds(**changed: object) -> object:
    given = {"scores": SCORES, "masks": MASKS, "outputs": OUTPUTS, "resamples": 2, **changed}
    return td.evaluate.lds(**given).compute(scheduler="sync")


def subsets(**changed: object) -> object:
    given = {"samples": N, "n_subsets": 4, **changed}
    return td.evaluate.subsets(**given).compute(scheduler="sync")


def leave_one_out(**changed: object) -> object:
    return td.evaluate.leave_one_out(**{"samples": N, **changed}).compute(scheduler="sync")


def mislabelled_auc(**changed: object) -> object:
    given = {"values": VALUES, "is_mislabelled": WRONG, **changed}
    return td.evaluate.mislabelled_auc(**given).compute(scheduler="sync")


def retrain(**changed: object) -> object:
    given = {"train_fn": train, "masks": MASKS, "targets": M, "progress": False, **changed}
    with dask.config.set(scheduler="sync"):
        return td.evaluate.retrain(**given).compute()


def brittleness(**changed: object) -> object:
    given = {"train_fn": train, "scores": SCORES, "ks": [2], "n_random": 1, **changed}
    return td.evaluate.brittleness(**given).compute(scheduler="sync")


def removal_curve(**changed: object) -> object:
    given = {"train_fn": train, "scores": SCORES, "fractions": [0.2], "n_random": 1, **changed}
    return td.evaluate.removal_curve(**given).compute(scheduler="sync")


def returning(value: object) -> dict[str, object]:
    return {"train_fn": lambda positions, seed: value}


def failing(positions: np.ndarray, seed: int) -> np.ndarray:
    raise FloatingPointError("loss is NaN")


def nan_at(array: xr.DataArray, *where: object) -> xr.DataArray:
    changed = array.copy()
    changed[where] = np.nan
    return changed


LDS = rows(
    "lds",
    lds,
    (
        "scores are an array",
        {"scores": SCORES.values},
        TypeError,
        ["scores", "ndarray", "td.score"],
    ),
    ("scores are None", {"scores": None}, TypeError, ["scores", "NoneType"]),
    (
        "scores are features",
        {"scores": td.testing.simulate_features()},
        TypeError,
        ["scores", "Dataset"],
    ),
    ("scores of one target", {"scores": SCORES[:, 0]}, ValueError, ["scores", "('sample',)"]),
    ("scores are texts", {"scores": SCORES.astype(str)}, ValueError, ["scores", "<U"]),
    ("scores are complex", {"scores": SCORES * 1j}, ValueError, ["scores", "complex128"]),
    (
        "no targets",
        {"scores": SCORES[:, :0], "outputs": OUTPUTS[:, :0]},
        ValueError,
        ["scores", "target"],
    ),
    (
        "masks and outputs swapped",
        {"masks": OUTPUTS, "outputs": MASKS},
        ValueError,
        ["masks", "'target'"],
    ),
    ("masks are positions", {"masks": MASKS.astype(int)}, ValueError, ["masks", "bool", "int64"]),
    ("masks of other samples", {"masks": MASKS[:, :9]}, ValueError, ["sample", "9", "12"]),
    ("outputs of fewer subsets", {"outputs": OUTPUTS[:4]}, ValueError, ["subset", "4", "6"]),
    ("outputs of fewer targets", {"outputs": OUTPUTS[:, :2]}, ValueError, ["target", "2", "3"]),
    (
        "targets in another order",
        {
            "scores": SCORES.assign_coords(target=[0, 1, 2]),
            "outputs": OUTPUTS.assign_coords(target=[1, 0, 2]),
        },
        ValueError,
        ["'target'", "1", "0", "position 0"],
    ),
    (
        "one subset",
        {"masks": MASKS[:1], "outputs": OUTPUTS[:1]},
        ValueError,
        ["2 subsets", "1", "td.evaluate.subsets"],
    ),
    ("scores are NaN", {"scores": NOTHING}, ValueError, ["scores", "NaN", "3 targets"]),
    ("a sample is NaN", {"scores": nan_at(SCORES, 5)}, ValueError, ["scores", "NaN", "3 targets"]),
    (
        "outputs are NaN",
        {"outputs": nan_at(OUTPUTS, 2)},
        ValueError,
        ["outputs", "NaN", "3 targets"],
    ),
    (
        "outputs are constant",
        {"outputs": OUTPUTS * 0},
        ValueError,
        ["outputs", "differ", "3 targets"],
    ),
    ("scores are zero", {"scores": SCORES * 0}, ValueError, ["scores", "differ", "3 targets"]),
    ("no resamples", {"resamples": 0}, ValueError, ["resamples", "0", "resamples=1000"]),
    ("resamples 1.5", {"resamples": 1.5}, TypeError, ["resamples", "1.5"]),
    ("seed 1.5", {"seed": 1.5}, TypeError, ["seed", "1.5", "seed=0"]),
    ("seed -1", {"seed": -1}, ValueError, ["seed", "-1"]),
    ("confidence in percent", {"confidence": 95}, ValueError, ["confidence", "95", "0.95"]),
    ("confidence is NaN", {"confidence": float("nan")}, ValueError, ["confidence", "nan"]),
)

DRAWN = [
    *rows(
        "subsets",
        subsets,
        ("no samples", {"samples": 0}, ValueError, ["samples", "0"]),
        ("samples is a list", {"samples": [1, 2]}, TypeError, ["samples", "[1, 2]"]),
        (
            "without sample",
            {"samples": xr.DataArray([1], dims="x")},
            ValueError,
            ["'sample'", "['x']"],
        ),
        ("no subsets", {"n_subsets": 0}, ValueError, ["n_subsets", "0", "100"]),
        ("n_subsets True", {"n_subsets": True}, TypeError, ["n_subsets", "True"]),
        ("fraction in percent", {"fraction": 50}, ValueError, ["fraction", "50", "0.5"]),
        ("fraction None", {"fraction": None}, TypeError, ["fraction", "None"]),
        ("empty subsets", {"fraction": 0.01}, ValueError, ["0.01", "11", "12 samples"]),
        ("seed 1.5", {"seed": 1.5}, TypeError, ["seed", "1.5"]),
        ("unknown coord", {"by": "source"}, ValueError, ["by", "'source'", "by=labels"]),
        ("labels of other samples", {"by": np.arange(3)}, ValueError, ["by", "(12,)", "(3,)"]),
        ("jagged labels", {"by": [[1], [2, 3]]}, ValueError, ["by", "[[1], [2, 3]]"]),
        ("a missing label", {"by": [None] + [1] * 11}, ValueError, ["by", "1", "sample 0"]),
        ("one label", {"by": np.zeros(N)}, ValueError, ["1 labels", "fraction"]),
    ),
    *rows(
        "leave_one_out",
        leave_one_out,
        ("no samples", {"samples": None}, TypeError, ["samples", "None"]),
        ("out of range", {"positions": [3, 12]}, ValueError, ["0..11", "12", "index 1"]),
        ("negative", {"positions": [-1]}, ValueError, ["0..11", "-1", "index 0"]),
        ("floats", {"positions": [0.5]}, ValueError, ["positions", "float64", "(1,)"]),
        ("a mask", {"positions": WRONG}, ValueError, ["positions", "bool", "(12,)"]),
        ("empty", {"positions": []}, ValueError, ["positions", "(0,)"]),
        ("jagged", {"positions": [[1], [2, 3]]}, ValueError, ["positions", "[[1], [2, 3]]"]),
        ("texts", {"positions": ["a"]}, ValueError, ["positions", "<U1"]),
    ),
]

WRONG_LABELS = rows(
    "mislabelled_auc",
    mislabelled_auc,
    (
        "values are an array",
        {"values": VALUES.values},
        TypeError,
        ["values", "ndarray", "dims='sample'"],
    ),
    ("values of targets", {"values": SCORES[0]}, ValueError, ["values", "('target',)"]),
    (
        "arguments swapped",
        {"values": WRONG, "is_mislabelled": VALUES},
        TypeError,
        ["values", "ndarray"],
    ),
    ("a NaN", {"values": nan_at(VALUES, 7)}, ValueError, ["values", "NaN", "sample 7"]),
    ("positions", {"is_mislabelled": [0, 1, 2]}, ValueError, ["is_mislabelled", "bool", "int64"]),
    ("jagged", {"is_mislabelled": [[True], [True, False]]}, ValueError, ["is_mislabelled"]),
    ("other samples", {"is_mislabelled": WRONG[:9]}, ValueError, ["sample", "9", "12"]),
    ("all right", {"is_mislabelled": WRONG & ~WRONG}, ValueError, ["is_mislabelled", "0", "12"]),
    ("all wrong", {"is_mislabelled": WRONG | ~WRONG}, ValueError, ["is_mislabelled", "12 wrong"]),
    ("confidence 1", {"confidence": 1}, ValueError, ["confidence", "1", "0.95"]),
    ("confidence is a text", {"confidence": "0.95"}, TypeError, ["confidence", "'0.95'"]),
)

RETRAINED = [
    *rows(
        "retrain",
        retrain,
        (
            "outputs instead of a function",
            {"train_fn": OUTPUTS.values},
            TypeError,
            ["train_fn", "array"],
        ),
        (
            "takes no seed",
            {"train_fn": lambda positions: 0},
            td.BlockError,
            ["training on subset", "TypeError"],
        ),
        (
            "raises",
            {"train_fn": failing},
            td.BlockError,
            ["training on subset", "6 samples", "loss is NaN"],
        ),
        (
            "returns NaN",
            returning([1.0, np.nan, 2.0]),
            td.BlockError,
            ["training on subset", "NaN", "target 1"],
        ),
        ("returns None", returning(None), td.BlockError, ["training on subset", "(3,)", "()"]),
        (
            "returns a text",
            returning("good"),
            td.BlockError,
            ["training on subset", "numbers", "'good'"],
        ),
        (
            "returns too few",
            returning([1.0, 2.0]),
            td.BlockError,
            ["training on subset", "(3,)", "(2,)"],
        ),
        (
            "returns a matrix",
            returning(np.zeros((3, 1))),
            td.BlockError,
            ["training on subset", "(3,)", "(3, 1)"],
        ),
        (
            "returns jagged lists",
            returning([[1], [2, 3]]),
            td.BlockError,
            ["training on subset", "[[1], [2, 3]]"],
        ),
        ("masks are an array", {"masks": MASKS.values}, TypeError, ["masks", "ndarray", "subsets"]),
        (
            "masks are numbers",
            {"masks": MASKS.astype(float)},
            ValueError,
            ["masks", "bool", "float64"],
        ),
        ("one mask", {"masks": MASKS[0]}, ValueError, ["masks", "('sample',)"]),
        ("no masks", {"masks": MASKS[:0]}, ValueError, ["masks", "0", "subset"]),
        ("no targets", {"targets": 0}, ValueError, ["targets", "0"]),
        ("targets is a list", {"targets": [1, 2]}, TypeError, ["targets", "[1, 2]"]),
        ("targets without target", {"targets": MASKS}, ValueError, ["'target'", "'subset'"]),
        ("no seeds", {"seeds": 0}, ValueError, ["seeds", "0", "seeds=3"]),
        ("a billion seeds", {"seeds": 10**12}, ValueError, ["seeds", "1000000000000"]),
        ("seeds twice", {"seeds": [1, 1]}, ValueError, ["seeds", "[1, 1]"]),
        ("seeds 1.5", {"seeds": 1.5}, TypeError, ["seeds", "1.5"]),
        ("seeds is a text", {"seeds": "3"}, TypeError, ["seeds", "'3'"]),
        ("jagged seeds", {"seeds": [[1], [2, 3]]}, ValueError, ["seeds", "[[1], [2, 3]]"]),
        ("store is a number", {"store": 5}, TypeError, ["store", "5"]),
        ("tag is a number", {"tag": 5}, TypeError, ["tag", "5"]),
    ),
    BadInput(
        "evaluate.retrain",
        "no name for the store",
        lambda folder: retrain(train_fn=lambda *_: 0, store=folder / "s"),
        ValueError,
        ["train_fn", "lambda", "tag="],
    ),
    BadInput(
        "evaluate.retrain",
        "store is a folder of something else",
        lambda folder: (folder / "notes.txt").write_text("mine") and retrain(store=folder),
        FileExistsError,
        ["something else", "another path"],
    ),
    BadInput(
        "evaluate.retrain",
        "store of another experiment",
        lambda folder: [retrain(store=folder / "s", tag=tag) for tag in ("cnn", "mlp")],
        td.StoreMismatchError,
        ["tag", "'cnn'", "'mlp'"],
    ),
    BadInput(
        "evaluate.retrain",
        "damaged spec",
        lambda folder: (folder / "spec.json").write_text("{") and retrain(store=folder),
        ValueError,
        ["spec.json", "damaged"],
    ),
]

REMOVED = [
    *rows(
        "brittleness",
        brittleness,
        ("no function", {"train_fn": None}, TypeError, ["train_fn", "None"]),
        (
            "scores of an ensemble",
            {"scores": SCORES.expand_dims("checkpoint")},
            ValueError,
            ["checkpoint"],
        ),
        ("scores are an array", {"scores": SCORES.values}, TypeError, ["scores", "ndarray"]),
        ("a number for ks", {"ks": 2}, TypeError, ["ks", "2", "ks=[2]"]),
        ("a text for ks", {"ks": "2"}, TypeError, ["ks", "'2'"]),
        ("remove none", {"ks": [0]}, ValueError, ["k", "0", "ks=[10]"]),
        ("remove all", {"ks": [12]}, ValueError, ["11", "12"]),
        ("remove a share", {"ks": [0.1]}, TypeError, ["k", "0.1"]),
        ("no ks", {"ks": []}, ValueError, ["[]", "11"]),
        ("n_random 0", {"n_random": 0}, ValueError, ["n_random", "0"]),
        ("random_seed 1.5", {"random_seed": 1.5}, TypeError, ["random_seed", "1.5"]),
        ("threshold is NaN", {"threshold": float("nan")}, ValueError, ["threshold", "nan"]),
        ("threshold is None", {"threshold": None}, TypeError, ["threshold", "None"]),
        ("confidence 95", {"confidence": 95}, ValueError, ["confidence", "95"]),
        ("scores are NaN", {"scores": NOTHING}, ValueError, ["2 scores", "NaN", "0", "position 0"]),
        (
            "returns NaN",
            returning(np.full(M, np.nan)),
            td.BlockError,
            ["training on all", "NaN", "target 0"],
        ),
        ("store is a number", {"store": 1.5}, TypeError, ["store", "1.5"]),
    ),
    *rows(
        "removal_curve",
        removal_curve,
        ("no function", {"train_fn": "train"}, TypeError, ["train_fn", "'train'"]),
        ("scores of one target", {"scores": SCORES[:, 0]}, ValueError, ["scores", "('sample',)"]),
        ("a number for fractions", {"fractions": 0.2}, TypeError, ["fractions", "0.2", "[0.2]"]),
        ("percent", {"fractions": [20]}, ValueError, ["fraction", "20", "0 and 1"]),
        ("all", {"fractions": [1.0]}, ValueError, ["fraction", "1.0"]),
        ("less than a sample", {"fractions": [0.01]}, ValueError, ["1 to 11", "[0]"]),
        ("almost all", {"fractions": [0.99]}, ValueError, ["1 to 11", "[12]"]),
        ("texts", {"fractions": ["a"]}, TypeError, ["fraction", "'a'"]),
        ("n_random -1", {"n_random": -1}, ValueError, ["n_random", "-1"]),
        ("seeds None", {"seeds": None}, TypeError, ["seeds", "None"]),
        ("scores are NaN", {"scores": NOTHING}, ValueError, ["scores", "NaN"]),
        ("tag is a list", {"tag": ["a"]}, TypeError, ["tag", "['a']"]),
    ),
]

ROWS = [*LDS, *DRAWN, *WRONG_LABELS, *RETRAINED, *REMOVED]


@parametrize(ROWS)
def test_bad_input(row: BadInput, tmp_path: Path) -> None:
    check(row, tmp_path)
