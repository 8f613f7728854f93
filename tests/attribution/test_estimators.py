"""Estimators are values: how they look, which are equal, and what "auto" stands for."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import numpy as np
import torch
import xarray as xr
from dask.base import tokenize

import trakdask as td
from trakdask.attribution.estimators import KINDS, GradCos, GradDot, resolve
from trakdask.testing import simulate_features

FEATURES = simulate_features(60, 4, 3)
LAMBDA = xr.DataArray([1.0, 2.0, 3.0], coords={"checkpoint": ["c0", "c1", "c2"]}, name="damping")
VALUES = [
    td.Soft(),
    td.Soft(power=1),
    td.Soft(damping=0.1),
    td.Soft(damping=td.Absolute(0.1)),
    td.Soft(damping=LAMBDA),
    td.Soft(damping=2 * LAMBDA),
    td.Trak(),
    td.Trak(damping="trace"),
    td.RelatIF(),
    GradDot(),
    GradCos(),
    td.TracIn({"c0": 1, "c1": 2, "c2": 3}),
    td.TracIn({"c0": 3, "c1": 2, "c2": 1}),
]


def test_estimators__are_equal_if_their_options_are() -> None:
    for i, one in enumerate(VALUES):
        same = [copy.deepcopy(one), pickle.loads(pickle.dumps(one)), replace(one)]
        assert all(other == one and hash(other) == hash(one) for other in same)
        assert len({tokenize(other) for other in (one, *same)}) == 1
        assert [one == other for other in VALUES] == [i == j for j in range(len(VALUES))]
    assert td.Soft(1, 0) == td.Soft(power=1.0, damping=0.0) == td.Soft(np.float64(1), np.int64(0))
    assert td.Soft(damping=LAMBDA.to_dataset(name="damping")) == td.Soft(damping=LAMBDA)
    assert td.Trak() != "trak"
    names = {kind.__name__: kind for kind in (*KINDS.values(), td.Absolute)}
    for value in VALUES[:4] + VALUES[6:]:
        assert eval(repr(value), names) == value


class OwnTask:
    variables = ("x", "y")
    default_estimator = "soft"

    def output(self, forward, batch):
        return forward(batch["x"])[:, 0]

    def out_to_loss(self, forward, batch):
        return torch.sigmoid(-forward(batch["x"])[:, 0])


def test_auto__is_the_estimator_that_the_task_names() -> None:
    x = np.random.default_rng(0).random((6, 3), np.float32)
    model = td.Model(torch.nn.Linear(3, 2), task=OwnTask())
    features = td.featurize(td.from_arrays({"x": x, "y": x[:, 0]}), model, td.Identity())
    expected = td.Soft(damping="completeness", wrong_classes=False)
    assert resolve(features, "auto") == expected
    assert resolve(FEATURES, "auto") == td.Trak(damping=0.03)


def test_tracin__takes_a_list_in_the_order_of_checkpoints() -> None:
    x, t = (td.testing.simulate_features(n, 4, 3, seed=n) for n in (20, 5))
    rates = [0.5, 0.25, 1.0]
    phi, psi, q = (v.values.astype("f8") for v in (x.feature, t.feature, x.out_to_loss))
    expected = np.einsum("spc,tpc,sc,c->st", phi, psi, q, rates)
    by_name = {"c2": 1.0, "c0": 0.5, "c1": 0.25}
    for given in (rates, tuple(rates), np.array(rates), by_name):
        found = td.score(x, t, td.TracIn(given))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
