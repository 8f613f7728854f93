"""The automatic damping against dense float64 numpy; its order of rules, and its warnings."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

import trakdask as td
from tests.arrays.test_damping import oracle_choice, oracle_left_out, oracle_totals
from tests.attribution.float64_features import float64_features, with_values
from trakdask.arrays.damping import GRID

N, P, C, M = 120, 8, 3, 60


def dataset(n: int, seed: int, chunks: int = 32) -> xr.Dataset:
    """Features with falling eigenvalues."""
    features = float64_features(n, P, C, seed, chunks)
    falling = features.feature * xr.DataArray(0.6 ** np.arange(P), dims="proj_dim")
    return features.assign(feature=falling).assign_attrs(source=f"{seed}")


def weights(ds: xr.Dataset, power: float) -> tuple[np.ndarray, np.ndarray]:
    q = ds.out_to_loss.values.astype("f8")
    return q**power * (1 - q), (q**power).mean(1)


def totals(train: xr.Dataset, rows: xr.Dataset, rho: float, h, g) -> np.ndarray:
    """Mean over checkpoints of φ(t)ᵀ (K + λI)⁻¹ r."""
    x, t = (ds.feature.values.astype("f8") for ds in (train, rows))
    return oracle_totals(x, h, g, t, [rho])[:, 0].mean(axis=1)


def curve_of(train: xr.Dataset, rows: xr.Dataset, h, g) -> np.ndarray:
    """The correlation of outputs with totals for every ρ."""
    f = rows.output.values.mean(1)
    return np.array([np.corrcoef(totals(train, rows, rho, h, g), f)[0, 1] for rho in GRID])


def totals_left_out(train: xr.Dataset, rho: float, h, g) -> np.ndarray:
    """As totals, of each row under the sums of the others, at the λ of all."""
    x = train.feature.values.astype("f8")
    return oracle_left_out(x, h, g, [rho])[:, 0].mean(axis=1)


def following(train: xr.Dataset, rows: xr.Dataset, rho: float, noise: float = 0.3) -> xr.Dataset:
    """Give rows outputs that are their totals at a damping, and noise."""
    # At import, on workers too: not by a scheduler that waits for them.
    train, known = (ds.compute(scheduler="synchronous") for ds in (train, rows))
    f = totals(train, known, rho, *weights(train, 0.5))
    f = f + noise * f.std() * np.random.default_rng(9).standard_normal(len(f))
    return with_outputs(rows, f)


def with_outputs(rows: xr.Dataset, f: np.ndarray) -> xr.Dataset:
    # The mean over checkpoints is f.
    return with_values(rows, output=f[:, None] + np.linspace(-1, 1, C))


TRAIN = dataset(N, 0)
TARGETS = following(TRAIN, dataset(M, 1, 25), 0.5)
RANDOM = with_outputs(TARGETS, np.random.default_rng(5).standard_normal(M))


def closed_form(train: xr.Dataset, h: np.ndarray) -> np.ndarray:
    x = train.feature.values
    k = np.stack([(x[..., c] * h[:, [c]]).T @ x[..., c] for c in range(C)])
    return 0.03 * (k**2).sum((1, 2)) / np.trace(k, axis1=1, axis2=2)


@pytest.mark.parametrize(
    ("power", "rho", "noise", "chosen"),
    [
        *((power, 0.5, 0.3, (1, 1000)) for power in (0.0, 0.5, 1.0)),
        (0.5, 0.05, 0, (1, 1)),  # never below the prior, although totals follow better there
        (0.5, 300.0, 0.1, (30, 1000)),  # as after a short training
    ],
)
def test_damping__by_a_calibration_set(power, rho, noise, chosen) -> None:
    """The outputs choose under weights of power ½; ρ is then one of the estimator's own matrix."""
    h, g = weights(TRAIN, 0.5)
    rows = following(TRAIN, dataset(M, 1, 25), rho, noise)
    curve = curve_of(TRAIN, rows, h, g)
    found = td.damping(TRAIN, td.Soft(power=power), calibrate=rows).compute()
    np.testing.assert_allclose(found.curve, curve, atol=1e-10)
    assert float(found.relative) == oracle_choice(curve)
    assert chosen[0] <= float(found.relative) <= chosen[1]
    assert float(found.peak) == pytest.approx(curve.max(), abs=1e-10)
    least = np.tanh(np.arctanh(curve[GRID > 1].max()) - 0.2)  # of few samples
    assert float(found.threshold) == pytest.approx(least, abs=1e-10)
    assert str(found.rule.values) == "completeness, calibration set"
    x = TRAIN.feature.values
    trace = np.einsum("spc,spc,sc->c", x, x, weights(TRAIN, power)[0])
    np.testing.assert_allclose(found.damping, float(found.relative) * trace / N, rtol=1e-12)
    np.testing.assert_array_equal(found.relative_damping, GRID)
    another = td.Soft(power=power, damping=found.damping * (3 / found.relative))
    np.testing.assert_allclose(td.damping(TRAIN, another).damping, 3 * trace / N, rtol=1e-12)


def test_damping__failed_samples_do_not_choose() -> None:
    failed = TARGETS.compute()
    failed.feature[4], failed.output[9, 2] = np.nan, np.nan
    whole = TARGETS.isel(sample=np.delete(np.arange(M), [4, 9]))
    found, expected = (td.damping(TRAIN, "soft", calibrate=each) for each in (failed, whole))
    np.testing.assert_allclose(found.curve, expected.curve, rtol=1e-12)


def test_damping__in_coordinates_that_name_their_prior() -> None:
    """Whatever made the features: λ is a multiple of their prior, by every rule."""
    prior = 10**0.5
    train, rows = (
        ds.assign_attrs(damping_prior=prior) for ds in (TRAIN, following(TRAIN, TARGETS, 0.5))
    )
    h = weights(TRAIN, 0.5)[0]
    found = td.damping(train, calibrate=rows, estimator="soft").compute()
    plain = td.damping(TRAIN, td.Soft(damping="trace")).damping
    assert float(found.relative) == prior
    np.testing.assert_allclose(found.damping, prior * plain, rtol=1e-12)
    trace = td.damping(train, td.Soft(damping="trace")).compute()
    np.testing.assert_allclose(trace.damping, prior * plain, rtol=1e-12)
    assert str(trace.rule.values) == "3.16 tr(K)/n"
    automatic = td.damping(train, "trak").damping
    np.testing.assert_allclose(automatic, prior * closed_form(TRAIN, np.ones_like(h)))
    number = td.damping(train, td.Soft(damping=0.03))
    np.testing.assert_allclose(number.damping, closed_form(TRAIN, h))


def test_damping__by_training_rows_left_out() -> None:
    h, g = weights(TRAIN, 0.5)
    f = totals_left_out(TRAIN, 0.5, h, g)
    f = f + 0.2 * f.std() * np.random.default_rng(9).standard_normal(N)
    train = with_outputs(TRAIN, f)
    found = td.damping(train, estimator="soft").compute()
    curve = np.array([np.corrcoef(totals_left_out(train, r, h, g), f)[0, 1] for r in GRID])
    np.testing.assert_allclose(found.curve, curve, atol=1e-10)
    assert float(found.relative) == oracle_choice(curve)
    assert str(found.rule.values) == "completeness, training rows left out"


def test_damping__trace_of_tasks_that_name_it() -> None:
    train = TRAIN.assign_attrs(default_damping="trace")
    found = td.damping(train).compute()
    assert str(found.rule.values) == "tr(K)/n"
    norms = np.square(TRAIN.feature.values).sum(axis=1)
    np.testing.assert_allclose(found.damping, norms.mean(axis=0), rtol=1e-12)
    assert np.isnan(found.relative)
    h = weights(TRAIN, 0.5)[0]
    soft = td.damping(TRAIN, td.Soft(damping="trace")).compute()
    np.testing.assert_allclose(soft.damping, (h * norms).mean(axis=0), rtol=1e-12)
    few = td.damping(train.isel(sample=slice(30))).compute()
    np.testing.assert_allclose(few.damping, norms[:30].mean(axis=0), rtol=1e-12)


def test_damping__given_weights_of_the_gram_matrix() -> None:
    h = np.random.default_rng(3).random((N, C))
    given = xr.DataArray(h, dims=("sample", "checkpoint"))
    soft_h, g = weights(TRAIN, 0.5)
    # It is chosen under soft weights: others are not known once the matrix is reduced.
    train = TRAIN.assign(gram=td.gram(TRAIN, weights=given))
    for kind in (td.Soft, td.Trak):
        found = td.damping(train, kind(damping="completeness"), calibrate=TARGETS).compute()
        np.testing.assert_allclose(found.curve, curve_of(TRAIN, TARGETS, soft_h, g), atol=1e-10)
        trace = np.einsum("spc,spc,sc->c", *[TRAIN.feature.values] * 2, h)
        np.testing.assert_allclose(found.damping, float(found.relative) * trace / N, rtol=1e-12)


@settings(max_examples=8)
@given(
    st.integers(10, N),
    st.integers(10, M),
    st.lists(st.floats(1e-4, 1e4), min_size=C, max_size=C),
    st.sampled_from(["sync", "threads"]),
)
def test_damping__free_of_chunks_scheduler_and_gradient_scales(
    rows: int, target_rows: int, scales: list[float], scheduler: str
) -> None:
    expected = td.damping(TRAIN, calibrate=TARGETS, estimator="soft").compute()
    scale = xr.DataArray(scales, dims="checkpoint")
    ours, theirs = (
        ds.assign(feature=ds.feature * scale).chunk(sample=size)
        for ds, size in ((TRAIN, rows), (TARGETS, target_rows))
    )
    found = td.damping(ours, calibrate=theirs, estimator="soft").compute(scheduler=scheduler)
    assert float(found.relative) == float(expected.relative)
    np.testing.assert_allclose(found.curve, expected.curve, atol=1e-9)
    np.testing.assert_allclose(found.damping, expected.damping * np.square(scales), rtol=1e-9)


def test_damping__trace_is_last() -> None:
    with pytest.warns(UserWarning, match="λ comes from") as caught:
        found = td.damping(TRAIN, calibrate=RANDOM, estimator="soft").compute(scheduler="sync")
    texts = [str(w.message) for w in caught]
    assert len(texts) == 1
    assert "of the calibration set do not follow the sums of their scores" in texts[0]
    same = r"are all the same.*td.calibrate\('train.zarr', held_out\)"
    with pytest.warns(UserWarning, match=same):  # the outputs of TRAIN are 0
        td.damping(TRAIN, estimator="soft").compute(scheduler="sync")
    assert str(found.rule.values) == "tr(K)/n"
    assert np.isnan(found.relative)
    np.testing.assert_allclose(
        found.damping, td.damping(TRAIN, td.Soft(damping="trace")).damping, rtol=1e-12
    )


def test_damping__few_samples() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        td.damping(TRAIN, estimator="soft", calibrate=following(TRAIN, dataset(50, 2), 1))
        found = td.damping(TRAIN.isel(sample=slice(49)), estimator="soft").compute()
    assert str(found.rule.values) == "tr(K)/n"
    one = td.damping(TRAIN.isel(sample=[3]), estimator="soft").compute()
    assert np.isfinite(one.damping).all()


def test_damping__quadratic_loss_has_weights_one() -> None:
    train = dataset(N, 0).assign_attrs(loss_kind="squared error", default_damping="trace")
    signed = train.assign(out_to_loss=train.out_to_loss - 0.5)
    r = signed.out_to_loss.values.mean(1)
    f = totals(signed, TARGETS, 0.5, np.ones((N, C)), r)
    targets = with_outputs(TARGETS, f)
    found = td.damping(signed, td.Trak(damping="completeness"), calibrate=targets).compute()
    curve = curve_of(signed, targets, np.ones((N, C)), r)
    np.testing.assert_allclose(found.curve, curve, atol=1e-10)
    soft = td.damping(signed, td.Soft(power=1), calibrate=targets).compute()
    np.testing.assert_array_equal(soft.damping, found.damping)


def test_damping__scores_do_not_depend_on_the_other_targets() -> None:
    """Chosen by training rows; ``calibrate=targets`` lets the targets choose."""
    f = totals_left_out(TRAIN, 30.0, *weights(TRAIN, 0.5))
    train = with_outputs(TRAIN, f + 0.2 * f.std() * np.random.default_rng(9).standard_normal(N))
    alone = td.score(train, TARGETS.isel(sample=[4]), estimator="soft").compute()
    among = td.score(train, TARGETS, estimator="soft").isel(target=[4]).compute()
    chosen = td.damping(train, estimator="soft").compute()
    np.testing.assert_allclose(alone, among, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(
        among, td.score(train, TARGETS, td.Soft(damping=chosen)).isel(target=[4])
    )
    by_targets = td.damping(train, estimator="soft", calibrate=TARGETS)
    assert float(by_targets.relative) != float(chosen.relative)
