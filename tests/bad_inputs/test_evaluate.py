"""Bad inputs of evaluate.*: what would give a wrong number, or an error nobody can read."""

from __future__ import annotations

import functools

import dask
import numpy as np
import pytest
import xarray as xr

import trakdask as td
from tests.bad_inputs.bad_input import BadInput, changed, one_test

N, M, SUBSETS = 12, 3, 6
SCORES = xr.DataArray(np.random.default_rng(0).standard_normal((N, M)), dims=("sample", "target"))
MASKS = td.evaluate.subsets(N, SUBSETS).compute(scheduler="synchronous")
OUTPUTS = xr.dot(MASKS, SCORES, dim="sample")
WRONG = np.arange(N) < 4
LABELLED = SCORES.assign_coords(
    label=("sample", np.arange(N) % 3),
    target_label=("target", np.arange(M)),
    marked=("sample", WRONG),
    target_marked=("target", [True, False, False]),
)


def train(positions: np.ndarray, seed: int) -> np.ndarray:
    return SCORES.values[positions].sum(axis=0)


def failing(positions: np.ndarray, seed: int) -> np.ndarray:
    raise FloatingPointError("loss is NaN")


def returning(value: object) -> dict[str, object]:
    return {"train_fn": lambda positions, seed: value}


def nan_at(array: xr.DataArray, *where: object) -> xr.DataArray:
    copied = array.copy()
    copied[where] = np.nan
    return copied


GROUPS = LABELLED.label
SUMS = SCORES.groupby(GROUPS).sum()
FEATURES = td.testing.simulate_features(n_samples=N, proj_dim=4)
TEXTS = ["a sea"] * N
PROMPTS = FEATURES.assign_coords(text=("sample", TEXTS))
GOOD = {
    "baselines": {"features": FEATURES, "targets": FEATURES, "texts": (TEXTS, TEXTS)},
    "lds": {"scores": SCORES, "masks": MASKS, "outputs": OUTPUTS, "resamples": 2},
    "subsets": {"samples": N, "n_subsets": 4},
    "leave_one_out": {"samples": N},
    "mislabelled_curve": {"values": SCORES[:, 0], "is_mislabelled": WRONG},
    "retrain": {"train_fn": train, "masks": MASKS, "targets": M, "progress": False},
    "removal_curve": {"train_fn": train, "scores": SCORES, "fractions": [0.2], "n_random": 1},
    "leave_group_out": {"train_fn": train, "sums": SUMS, "groups": GROUPS, "resamples": 2},
}


def call(name: str, **options: object) -> object:
    with dask.config.set(scheduler="sync"):
        return getattr(td.evaluate, name)(**{**GOOD[name], **options}).compute()


@pytest.mark.parametrize("name", GOOD)
def test_good_input(name: str) -> None:
    """So that each row fails for what it changes."""
    call(name)


def rows(name: str, *cases: tuple[object, ...]) -> list[BadInput]:
    return changed(f"evaluate.{name}", functools.partial(call, name), *cases)


TURNED = {
    "scores": SCORES.assign_coords(target=[0, 1, 2]),
    "outputs": OUTPUTS.assign_coords(target=[1, 0, 2]),
}
FAILED = td.errors.BlockError
ROWS = [
    *rows(
        "baselines",
        ("texts of fewer targets", {"texts": (TEXTS, TEXTS[1:])}, ValueError, ["texts", "11"]),
        ("dimensions differ", {"embeddings": (np.eye(N), np.eye(N)[:, 1:])}, ValueError, ["11"]),
        ("unknown coord", {"texts": "body"}, ValueError, ["features", "'body'", "'label'"]),
        ("coord of one side", {"features": PROMPTS, "texts": "text"}, ValueError, ["targets", "'text'", "texts="]),
    ),
    *rows(
        "lds",
        ("no resamples", {"resamples": 0}, ValueError, ["resamples", "0"]),
        ("confidence in percent", {"confidence": 95}, ValueError, ["confidence", "95"]),
        ("seed a word", {"seed": "one"}, TypeError, ["integer for seed", "'one'"]),
        ("scores of numpy", {"scores": SCORES.values}, TypeError, ["DataArray ('sample', 'target')", "got array"]),
        ("scores of no estimator", {"scores": {}}, ValueError, ["none", "'soft'"]),
        ("scores of one target", {"scores": SCORES[:, 0]}, ValueError, ["target"]),
        ("masks are numbers", {"masks": MASKS.astype(int)}, ValueError, ["masks", "int64"]),
        ("masks of other samples", {"masks": MASKS[:, :9]}, ValueError, ["sample", "9", "12"]),
        ("targets in another order", TURNED, ValueError, ["'target'"]),
        ("a sample is NaN", {"scores": nan_at(SCORES, 5)}, ValueError, ["scores", "3 targets"]),
        ("complex scores", {"scores": 1j * SCORES}, TypeError, ["real", "complex128", ".real"]),
        ("outputs in words", {"outputs": OUTPUTS.astype(str)}, TypeError, ["real", "<U32"]),
        ("no target", {"scores": SCORES[:, :0], "outputs": OUTPUTS[:, :0]}, ValueError, ["targets, got none"]),
    ),
    *rows(
        "subsets",
        ("seed below 0", {"seed": -1}, ValueError, ["seed >= 0", "-1"]),
        ("no samples", {"samples": 0}, ValueError, ["samples >= 1, got 0"]),
        ("empty subsets", {"fraction": 0.01}, ValueError, ["0.01", "12 samples"]),
        ("one label", {"by": np.zeros(N)}, ValueError, ["1 labels", "0.5"]),
        ("unknown coord", {"by": "source"}, KeyError, ["'source'"]),
        ("labels of other samples", {"by": np.arange(3)}, ValueError, ["by", "12", "3"]),
    ),
    *rows(
        "leave_one_out",
        ("out of range", {"positions": [3, 12]}, ValueError, ["12"]),
    ),
    *rows(
        "mislabelled_curve",
        ("one number", {"fractions": 0.2}, ValueError, ["fractions", "0.2", "[0.1, 0.2]"]),
        ("a NaN", {"values": nan_at(SCORES[:, 0], [7, 9])}, ValueError, ["2 of 12", "sample 7"]),
        ("positions", {"is_mislabelled": [0, 1, 2]}, ValueError, ["int64"]),
        ("other samples", {"is_mislabelled": WRONG[:9]}, ValueError, ["12", "9"]),
        ("all right", {"is_mislabelled": WRONG & ~WRONG}, ValueError, ["is_mislabelled", "0"]),
    ),
    *rows(
        "retrain",
        ("progress a word", {"progress": "no"}, TypeError, ["progress", "'no'", "True"]),
        ("raises", {"train_fn": failing}, FAILED, ["subset", "loss is NaN"]),
        ("returns NaN", returning([1.0, np.nan, 2.0]), FAILED, ["NaN", "target 1"]),
        ("returns complex numbers", returning([1j, 2, 3]), FAILED, ["real", "complex", ".real"]),
        ("the result of training", {"train_fn": np.ones(3)}, TypeError, ["train_fn", "array([1., 1., 1.])"]),
        ("one mask", {"masks": MASKS[0]}, ValueError, ["subset"]),
        ("no targets", {"targets": 0}, ValueError, ["targets >= 1, got 0"]),
        ("targets without target", {"targets": MASKS}, KeyError, ["target"]),
        ("seeds twice", {"seeds": [1, 1]}, ValueError, ["seeds", "[1, 1]"]),
        ("no name", {**returning(0), "store": "s"}, ValueError, ["train_fn", "lambda"]),
    ),
    *rows(
        "removal_curve",
        ("scores are NaN", {"scores": SCORES * np.nan}, ValueError, ["scores", "NaN"]),
    ),
    *rows(
        "leave_group_out",
        ("groups of numpy", {"groups": GROUPS.values}, TypeError, ["DataArray ('sample',)"]),
        ("one group", {"sums": SUMS[:1]}, ValueError, ["[0]", "two or more", "[0, 1, 2]", "'label'"]),
    ),
]  # fmt: skip

test_bad_input = one_test(ROWS)
