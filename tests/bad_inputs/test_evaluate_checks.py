"""Bad inputs of evaluate.*: what judges scores without retraining."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xarray as xr

import trakdask as td
from tests.bad_inputs.bad_input import BadInput, check, parametrize
from tests.bad_inputs.test_evaluate import NOTHING, SCORES, VALUES, WRONG, M, N, nan_at, rows, train

LABELLED = SCORES.assign_coords(
    label=("sample", np.arange(N) % 3),
    target_label=("target", np.arange(M)),
    marked=("sample", WRONG),
    target_marked=("target", [True, False, False]),
)
RUNS = xr.concat([SCORES, -SCORES], xr.Variable("run", ["a", "b"]))


def mislabelled_curve(**changed: object) -> object:
    given = {"values": VALUES, "is_mislabelled": WRONG, **changed}
    return td.evaluate.mislabelled_curve(**given).compute(scheduler="sync")


def class_detection(**changed: object) -> object:
    given = {"scores": LABELLED, "ks": [1], "resamples": 2, **changed}
    return td.evaluate.class_detection(**given).compute(scheduler="sync")


def shortcut_detection(**changed: object) -> object:
    given = {"scores": LABELLED, "by": "marked", "resamples": 2, **changed}
    return td.evaluate.shortcut_detection(**given).compute(scheduler="sync")


def randomization_check(**changed: object) -> object:
    given = {"scores": SCORES, "randomized": -SCORES, "resamples": 2, **changed}
    return td.evaluate.randomization_check(**given).compute(scheduler="sync")


def seed_agreement(**changed: object) -> object:
    given = {"scores": RUNS, "dim": "run", "resamples": 2, **changed}
    return td.evaluate.seed_agreement(**given).compute(scheduler="sync")


CURVES = rows(
    "mislabelled_curve",
    mislabelled_curve,
    ("values are an array", {"values": VALUES.values}, TypeError, ["values", "ndarray"]),
    ("a NaN", {"values": nan_at(VALUES, 7)}, ValueError, ["values", "NaN", "sample 7"]),
    ("positions", {"is_mislabelled": [0, 1, 2]}, ValueError, ["is_mislabelled", "bool", "int64"]),
    ("other samples", {"is_mislabelled": WRONG[:9]}, ValueError, ["sample", "9", "12"]),
    ("all right", {"is_mislabelled": WRONG & ~WRONG}, ValueError, ["is_mislabelled", "0", "12"]),
    ("a number for fractions", {"fractions": 0.2}, TypeError, ["fractions", "0.2", "[0.2]"]),
    ("percent", {"fractions": [20]}, ValueError, ["fraction", "20", "0 and 1"]),
    ("everything", {"fractions": [1.0]}, ValueError, ["fraction", "1.0"]),
    ("a text for a fraction", {"fractions": ["a"]}, TypeError, ["fraction", "'a'"]),
    ("no fractions", {"fractions": []}, ValueError, ["fraction", "[]"]),
    ("confidence 1", {"confidence": 1}, ValueError, ["confidence", "1", "0.95"]),
)

BOOTSTRAP = (
    ("no resamples", {"resamples": 0}, ValueError, ["resamples", "0", "resamples=1000"]),
    ("seed 1.5", {"seed": 1.5}, TypeError, ["seed", "1.5"]),
    ("confidence in percent", {"confidence": 95}, ValueError, ["confidence", "95"]),
)

DETECTED = [
    *rows(
        "class_detection",
        class_detection,
        *BOOTSTRAP,
        (
            "scores are an array",
            {"scores": SCORES.values},
            TypeError,
            ["scores", "ndarray", "td.score"],
        ),
        ("scores of one target", {"scores": LABELLED[:, 0]}, ValueError, ["scores", "('sample',)"]),
        (
            "no labels",
            {"scores": SCORES},
            ValueError,
            ["'label'", "'sample'", "assign_coords(label="],
        ),
        (
            "no labels of targets",
            {"scores": LABELLED.drop_vars("target_label")},
            ValueError,
            ["'target_label'", "'target'"],
        ),
        ("unknown coord", {"by": "digit"}, ValueError, ["'digit'", "'marked'"]),
        ("coord of targets", {"by": "target_label"}, ValueError, ["'target_label'", "'sample'"]),
        ("labels instead of a name", {"by": np.arange(N)}, TypeError, ["by", "array"]),
        ("unknown group", {"within": "digit"}, ValueError, ["'digit'", "'marked'"]),
        ("group is a number", {"within": 3}, TypeError, ["within", "3"]),
        (
            "texts and numbers",
            {"scores": LABELLED.assign_coords(target_label=("target", list("abc")))},
            ValueError,
            ["int64", "<U1", "'target_label'"],
        ),
        (
            "a label is missing",
            {"scores": LABELLED.assign_coords(label=("sample", [np.nan] + [1.0] * 11))},
            ValueError,
            ["'label'", "1 without", "sample 0"],
        ),
        (
            "a label of a target is missing",
            {"scores": LABELLED.assign_coords(target_label=("target", [0, 1, np.nan]))},
            ValueError,
            ["'label'", "target 2"],
        ),
        (
            "labels of nobody",
            {"scores": LABELLED.assign_coords(target_label=("target", [7, 8, 9]))},
            ValueError,
            ["'label'", "3 targets", "between 0 and 0 of 12"],
        ),
        (
            "one label",
            {
                "scores": LABELLED.assign_coords(
                    label=("sample", [1] * 12), target_label=("target", [1] * 3)
                )
            },
            ValueError,
            ["'label'", "12 of 12"],
        ),
        ("subclasses within themselves", {"within": "label"}, ValueError, ["'label'", "3 targets"]),
        ("a number for ks", {"ks": 5}, TypeError, ["ks", "5", "ks=[5]"]),
        ("no ks", {"ks": []}, ValueError, ["ks", "[]"]),
        ("k is 0", {"ks": [0]}, ValueError, ["k", "0"]),
        ("k above the samples", {"ks": [13]}, ValueError, ["k", "13", "[1, 13)"]),
        ("k is a share", {"ks": [0.5]}, TypeError, ["k", "0.5"]),
        (
            "scores are NaN",
            {"scores": LABELLED * np.nan},
            ValueError,
            ["scores", "NaN", "3 targets"],
        ),
    ),
    *rows(
        "shortcut_detection",
        shortcut_detection,
        *BOOTSTRAP,
        ("scores are None", {"scores": None}, TypeError, ["scores", "NoneType"]),
        ("no marks", {"scores": SCORES}, ValueError, ["'marked'", "'sample'"]),
        (
            "no marks of targets",
            {"scores": LABELLED.drop_vars("target_marked")},
            ValueError,
            ["'target_marked'"],
        ),
        ("marks instead of a name", {"by": WRONG}, TypeError, ["by", "array"]),
        ("marks are numbers", {"by": "label"}, ValueError, ["'label'", "bool", "int64"]),
        (
            "no target is marked",
            {"scores": LABELLED.assign_coords(target_marked=("target", [False] * 3))},
            ValueError,
            ["'marked'", "0 of 3 targets"],
        ),
        (
            "no sample is marked",
            {"scores": LABELLED.assign_coords(marked=("sample", [False] * 12))},
            ValueError,
            ["'marked'", "0 of 12 samples"],
        ),
        (
            "all samples are marked",
            {"scores": LABELLED.assign_coords(marked=("sample", [True] * 12))},
            ValueError,
            ["'marked'", "12 of 12 samples"],
        ),
        (
            "scores of marked targets are NaN",
            {"scores": nan_at(LABELLED, slice(None), 0)},
            ValueError,
            ["scores", "NaN", "1 targets"],
        ),
    ),
]

AGREED = [
    *rows(
        "randomization_check",
        randomization_check,
        *BOOTSTRAP,
        ("scores are an array", {"scores": SCORES.values}, TypeError, ["scores", "ndarray"]),
        ("scores of an ensemble", {"scores": RUNS}, ValueError, ["scores", "'run'"]),
        ("randomized is a model", {"randomized": train}, TypeError, ["randomized", "function"]),
        (
            "randomized of other samples",
            {"randomized": SCORES[:9]},
            ValueError,
            ["sample", "9", "12"],
        ),
        (
            "randomized of other targets",
            {"randomized": SCORES[:, :2]},
            ValueError,
            ["target", "2", "3"],
        ),
        (
            "two further dimensions",
            {"randomized": SCORES.expand_dims(a=2, b=2)},
            ValueError,
            ["'a'", "'b'"],
        ),
        ("scores are zero", {"scores": SCORES * 0}, ValueError, ["scores", "differ", "3 targets"]),
        ("randomized is NaN", {"randomized": NOTHING}, ValueError, ["scores", "NaN", "3 targets"]),
    ),
    *rows(
        "seed_agreement",
        seed_agreement,
        *BOOTSTRAP,
        (
            "scores of one model",
            {"scores": SCORES},
            ValueError,
            ["run", "('sample', 'target')", "average=False"],
        ),
        ("unknown dimension", {"dim": "checkpoint"}, ValueError, ["checkpoint", "'run'"]),
        ("dim is sample", {"dim": "sample"}, ValueError, ["dim", "'sample'", "dim='checkpoint'"]),
        ("dim is a number", {"dim": 2}, ValueError, ["dim", "2"]),
        ("one model", {"scores": RUNS[:1]}, ValueError, ["2 models", "'run'", "1"]),
        ("a number for n_models", {"n_models": 5}, TypeError, ["n_models", "5"]),
        ("no n_models", {"n_models": []}, ValueError, ["n_models", "[]"]),
        ("no model", {"n_models": [0]}, ValueError, ["n_models", "0"]),
        ("scores are NaN", {"scores": RUNS * np.nan}, ValueError, ["scores", "NaN", "3 targets"]),
    ),
]

ROWS = [*CURVES, *DETECTED, *AGREED]


@parametrize(ROWS)
def test_bad_input(row: BadInput, tmp_path: Path) -> None:
    check(row, tmp_path)
