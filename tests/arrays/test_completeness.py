from __future__ import annotations

import time
import warnings

import dask.array as da
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trakdask.arrays.completeness import GRID, Candidate, choose, curve
from trakdask.testing import raise_if_dask_computes


def oracle(values: list[float], m: int) -> float:
    """The largest ρ whose correlation is at most (1 - max²)/√m below the best, by a loop."""
    best, chosen = max(values), 0.0
    for rho, value in zip(GRID, values, strict=True):
        if value >= best - (1 - best**2) / m**0.5 / 2:
            chosen = rho
    return chosen


def made(values: list[float] | np.ndarray, m: int = 100) -> da.Array:
    return da.from_array(np.append(values, m), chunks=-1)


def candidates(*names: str) -> list[Candidate]:
    nothing = da.zeros(0)
    return [Candidate(name, nothing, nothing) for name in names]


def bump(peak: float, at: int, width: float = 1.0) -> np.ndarray:
    return peak - width * (np.arange(17) - at) ** 2 / 100


def test_curve__pearson_of_means_over_checkpoints() -> None:
    rng = np.random.default_rng(0)
    totals, outputs = rng.standard_normal((30, 17, 3)), rng.standard_normal((30, 3))
    totals[4, 3, 1] = outputs[9, 2] = np.nan
    with raise_if_dask_computes():
        found = curve(da.from_array(totals, chunks=(8, 17, 1)), da.from_array(outputs, chunks=5))
    good = np.delete(np.arange(30), [4, 9])
    expected = [
        np.corrcoef(totals[good, i].mean(1), outputs[good].mean(1))[0, 1] for i in range(17)
    ]
    np.testing.assert_allclose(found, [*expected, 28], rtol=1e-12)


@pytest.mark.parametrize("case", ["outputs alike", "totals alike", "one row", "all NaN"])
def test_curve__undefined_is_nan_without_warning(case: str) -> None:
    rng = np.random.default_rng(0)
    totals, outputs = rng.standard_normal((30, 17, 1)), rng.standard_normal((30, 1))
    if case == "outputs alike":
        outputs[:] = 0.1
    elif case == "totals alike":
        totals[:] = 0.1
    elif case == "one row":
        totals, outputs = totals[:1], outputs[:1]
    else:
        outputs[:] = np.nan
    found = curve(da.from_array(totals), da.from_array(outputs)).compute()
    assert np.isnan(found[:-1]).all()


@given(st.lists(st.floats(-1, 1), min_size=17, max_size=17), st.integers(50, 10_000))
def test_choose__largest_within_one_standard_error(values: list[float], m: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = choose(candidates("targets"), [made(values, m)]).compute(scheduler="sync")
    if max(values) < 0.4:
        assert np.isnan(found[0])
        assert found[1] == 1
    else:
        assert found[0] == oracle(values, m)
        assert found[1] == 0
        assert found[2] == max(values)
    np.testing.assert_array_equal(found[4:], values)


def test_choose__first_that_is_followed() -> None:
    names = candidates("calibration set", "targets", "training rows left out")
    curves = [made(bump(0.39, 8)), made(np.full(17, np.nan)), made(bump(0.8, 6))]
    with pytest.warns(UserWarning, match="instead") as caught:
        found = choose(names, curves).compute(scheduler="sync")
    assert found[1] == 2
    first, second = (str(w.message) for w in caught)
    assert "outputs of the calibration set correlate at most 0.39" in first
    assert "λ comes from the targets instead" in first
    assert "outputs of the targets or their totals of attributions are all alike" in second
    assert "λ comes from the training rows left out instead" in second


def test_choose__none_is_followed() -> None:
    with pytest.warns(UserWarning, match=r"at most 0\.20.*the closed form 0\.03"):
        found = choose(candidates("targets"), [made(bump(0.2, 8))]).compute(scheduler="sync")
    assert np.isnan(found[0])
    assert found[1] == 1
    np.testing.assert_array_equal(found[4:], bump(0.2, 8))


@pytest.mark.parametrize("at", [0, 16])
def test_choose__end_of_the_grid(at: int) -> None:
    with pytest.warns(UserWarning, match=rf"is {GRID[at]:g} tr\(K\)/n, an end of the grid"):
        found = choose(candidates("targets"), [made(bump(0.95, at), 10_000)]).compute()
    assert found[0] == GRID[at]


@pytest.mark.parametrize("kind", ["client", pytest.param("process_client", marks=pytest.mark.slow)])
def test_choose__warns_the_client_of_a_worker(kind: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(kind)
    curves = [made(bump(0.2, 8 + (kind == "client")))]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        choose(candidates("targets"), curves).compute()
        for _ in range(100):
            if any("at most 0.20" in str(w.message) for w in caught):
                break
            time.sleep(0.05)
    assert any("at most 0.20" in str(w.message) for w in caught)


def test_choose__copies_of_two_rows_whose_correlation_rounds_beyond_1() -> None:
    rng = np.random.default_rng(0)
    totals = np.repeat(rng.standard_normal((2, 17, 1)), 30, axis=0)
    outputs = np.repeat(rng.standard_normal((2, 1)), 30, axis=0)
    centred, y = totals[..., 0] - totals[..., 0].mean(0), outputs[:, 0] - outputs.mean()
    rounded = (y @ centred) / np.sqrt(np.square(centred).sum(0) * np.square(y).sum())
    assert rounded.max() > 1
    lazy = curve(da.from_array(totals, chunks=(16, 17, 1)), da.from_array(outputs, chunks=16))
    np.testing.assert_allclose(np.abs(lazy[:-1]), 1, rtol=1e-12)
    assert np.abs(lazy[:-1].compute()).max() <= 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert choose(candidates("targets"), [lazy]).compute()[0] in GRID


def test_choose__the_end_of_the_grid_is_warned_of_once() -> None:
    found = choose(candidates("targets"), [made(bump(0.9, 16))])
    with pytest.warns(UserWarning, match="an end of the grid"):
        found.compute(scheduler="sync")
    assert found.compute(scheduler="sync")[0] == 100  # a second warning would be an error
