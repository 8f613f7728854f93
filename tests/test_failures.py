"""Samples that fail are recorded, and everything after is as if they were not there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import xarray as xr

import trakdask as td
from tests.featurization.test_lazy import model
from trakdask.attribution.estimators import GradCos, GradDot
from trakdask.projection import Projector

N = 20
RAISES, NOT_FINITE = [3, 4, 17], [9, 16]
BAD = sorted(RAISES + NOT_FINITE)
GOOD = [i for i in range(N) if i not in BAD]


def samples(*, raises: list[int] = RAISES, not_finite: list[int] = NOT_FINITE) -> xr.Dataset:
    x = np.random.default_rng(0).standard_normal((N, 2, 3)).astype("f4")
    x[not_finite, 1, 2] = np.inf
    label = np.arange(N) % 3
    label[raises] = 99  # of three
    return td.from_arrays({"image": x}, coords={"label": label}, chunks=8)


def featurize(data: xr.Dataset, **options) -> xr.Dataset:
    options = {"projector": td.Identity(), "on_error": "record", **options}
    return td.featurize(data, model(), **options)


def oracle(**options) -> xr.Dataset:
    """The samples that do not fail, alone."""
    good = samples(raises=[], not_finite=[]).isel(sample=GOOD).chunk(sample=8)
    return td.featurize(good, model(), **options)


@pytest.mark.parametrize(
    ("gradients", "batch_size"), [("hooks", "auto"), ("hooks", 3), ("vmap", 3), ("loop", 1)]
)
def test_featurize__failures_are_recorded_and_the_rest_is_right(
    gradients: str, batch_size: int | str
) -> None:
    lazy = featurize(samples(), gradients=gradients, batch_size=batch_size)
    assert lazy.attrs["on_error"] == "record"
    assert lazy.error.chunks == ((8, 8, 4), (1, 1))
    found = lazy.compute(scheduler="sync")
    expected = oracle(projector=td.Identity(), gradients=gradients).compute(scheduler="sync")
    for name in ("feature", "output", "out_to_loss"):
        np.testing.assert_allclose(found[name][GOOD], expected[name], rtol=1e-5, atol=1e-7)
        assert found[name][BAD].isnull().all()
    assert (found.error[GOOD] == "").all()
    for why in found.error[RAISES].values.ravel():
        assert re.match(r"ValueError: expected label in 0..2 .* got 99 at sample \d+;", why)
    # tanh makes 1 of infinity; its gradient is not finite
    assert set(found.error[NOT_FINITE].values.ravel()) == {"the gradient is NaN or infinite"}


@pytest.mark.parametrize("projector", [td.Identity(), td.Rademacher(32), td.SJLT(32)], ids=repr)
def test_featurize__other_samples_of_a_block_do_not_notice(projector: Projector) -> None:
    """To the bit: a NaN beside a sample must not reach its digits."""
    with_nan = featurize(samples(raises=[]), projector=projector)
    without = featurize(samples(raises=[], not_finite=[]), projector=projector)
    found, expected = (ds.feature.compute(scheduler="sync") for ds in (with_nan, without))
    kept = [i for i in range(N) if i not in NOT_FINITE]
    np.testing.assert_array_equal(found[kept], expected[kept])


class _Flaky(td.tasks.ImageClassification):
    error: ClassVar[type[Exception]]

    def output(self, forward, batch):
        raise self.error("no space left")


@pytest.mark.parametrize("error", [OSError, MemoryError, torch.OutOfMemoryError])
def test_featurize__errors_of_the_machine_are_not_of_a_sample(error: type[Exception]) -> None:
    task = _Flaky()
    task.error = error
    features = td.featurize(samples(), model(task=task), on_error="record")
    with pytest.raises(td.errors.BlockError, match=f"{error.__name__}: no space left"):
        features.compute(scheduler="sync")


def partly_failed(n: int = 60, proj_dim: int = 8) -> tuple[xr.Dataset, xr.Dataset]:
    """Simulated features of which some samples failed, two at one checkpoint only; and the rest."""
    whole = td.testing.simulate_features(n, proj_dim, 3).compute()
    failed = np.zeros((n, 3), bool)
    failed[[3, 20, 41]] = True
    failed[[7, 50], [0, 2]] = True
    error = xr.DataArray(np.where(failed, "why", ""), dims=("sample", "checkpoint"))
    with_failures = whole.where(error == "").assign(error=error.astype(np.dtypes.StringDType()))
    return with_failures.chunk(sample=16), whole.isel(sample=~failed.any(axis=1))


ESTIMATORS = [
    td.Trak(),
    td.RelatIF(),
    td.Soft(damping=0.03),
    GradDot(),
    GradCos(),
    td.TracIn({"c0": 0.1, "c1": 0.2, "c2": 0.3}),
]
TARGETS = td.testing.simulate_features(60, 8, 3, seed=1)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda estimator: estimator.name)
def test_score__failed_samples_are_nan_and_the_others_right(estimator: Any) -> None:
    features, rest = partly_failed()
    failed = (features.error != "").any("checkpoint").compute()
    # A sample that failed at one checkpoint has no score, but the other gram matrices keep it.
    everywhere = features.drop_vars("error").where(~failed)
    for some in (features, everywhere):
        scores = td.score(some, TARGETS, estimator).compute()
        assert np.isnan(scores[failed.values]).all()
        assert np.isfinite(scores[~failed.values]).all()
        groups = td.group_score(some, TARGETS, estimator, by="label")
        np.testing.assert_allclose(groups, scores.groupby("label").sum(), rtol=1e-4, atol=1e-6)
    expected = td.score(rest, TARGETS, estimator)
    np.testing.assert_allclose(scores[~failed.values], expected, rtol=1e-4, atol=1e-7)
    top = td.top_k(scores, 57 - 2).compute()
    assert not np.isin(top.position, np.flatnonzero(failed)).any()


def test_save__goes_on_recording_where_a_run_that_raises_stopped(tmp_path: Path) -> None:
    store = tmp_path / "f.zarr"
    with pytest.raises(td.errors.BlockError):
        td.save(featurize(samples(raises=[17]), on_error="raise"), store, progress=False)
    assert not (store / "error").exists()
    recorded = td.save(featurize(samples(raises=[17])), store, progress=False)
    assert np.argwhere(recorded.error.values != "")[:, 0].tolist() == [9, 9, 16, 16, 17, 17]
    again = td.save(featurize(samples(raises=[17]), on_error="raise"), store, progress=False)
    np.testing.assert_array_equal(again.error, recorded.error)
