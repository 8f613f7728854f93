from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest

from trakdask.arrays.completeness import GRID, curve
from trakdask.arrays.gram import gram_and_sum
from trakdask.arrays.totals import held_out, left_out, mean_trace, solve, spectrum, spread_rows
from trakdask.testing import raise_if_dask_computes

LABELS = ["a", "b"]


def oracle(x: np.ndarray, h: np.ndarray, g: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """φ(t)ᵀ (K + λI)⁻¹ r by dense solves, (row, ρ, checkpoint); h (n, C), g (n,)."""
    totals = np.empty((len(rows), len(GRID), x.shape[2]))
    for c in range(x.shape[2]):
        k, r = (x[..., c] * h[:, [c]]).T @ x[..., c], g @ x[..., c]
        for i, rho in enumerate(GRID):
            system = k + rho * np.trace(k) / len(x) * np.eye(len(k))
            totals[:, i, c] = rows[..., c] @ np.linalg.solve(system, r)
    return totals


def oracle_left_out(x: np.ndarray, h: np.ndarray, g: np.ndarray) -> np.ndarray:
    """Each row in turn: its weights set to 0, at the λ of the whole."""
    totals = np.empty((len(x), len(GRID), x.shape[2]))
    for c in range(x.shape[2]):
        trace = np.trace((x[..., c] * h[:, [c]]).T @ x[..., c])
        for z in range(len(x)):
            others = np.delete(np.arange(len(x)), z)
            a = x[others, :, c]
            k, r = (a * h[others, c][:, None]).T @ a, g[others] @ a
            for i, rho in enumerate(GRID):
                system = k + rho * trace / len(x) * np.eye(len(k))
                totals[z, i, c] = x[z, :, c] @ np.linalg.solve(system, r)
    return totals


def data(n: int = 40, p: int = 6) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, p, 2)) * 0.5 ** np.arange(p)[:, None]
    return x, rng.random((n, 2)), rng.random((n, 2)), rng.standard_normal((9, p, 2))


def lazy(x: np.ndarray, rows: int = 7) -> da.Array:
    return da.from_array(x, chunks=(rows, -1, 1) if x.ndim == 3 else (rows, 1))


def decomposed(x: np.ndarray, h: np.ndarray | None, g: np.ndarray) -> da.Array:
    k, r = gram_and_sum(lazy(x), None if h is None else lazy(h), lazy(g))
    return spectrum(k, r, len(x), LABELS)


@pytest.mark.parametrize("n", [40, 4])
def test_held_out__dense_solves(n: int) -> None:
    x, h, g, rows = data(n)
    with raise_if_dask_computes():
        found = held_out(decomposed(x, h, g), lazy(rows, 4))
    assert found.chunks == ((4, 4, 1), (17,), (1, 1))
    np.testing.assert_allclose(found, oracle(x, h, g.mean(1), rows), rtol=1e-10)


@pytest.mark.parametrize("weighted", [True, False])
def test_left_out__dense_solves_without_each_row(weighted: bool) -> None:
    x, h, g, _ = data(12)
    h = h if weighted else np.ones_like(h)
    with raise_if_dask_computes():
        whole = decomposed(x, h if weighted else None, g)
        found = left_out(whole, lazy(x), lazy(h) if weighted else None, lazy(g))
    np.testing.assert_allclose(found, oracle_left_out(x, h, g.mean(1)), rtol=1e-9)


def test_left_out__skipped_where_an_earlier_curve_is_high() -> None:
    x, h, g, _ = data()
    whole = decomposed(x, h, g)
    for peak, is_skipped in ((0.3, False), (0.5, True), (np.nan, False)):
        earlier = da.from_array(np.append(np.full(17, peak), 99.0), chunks=-1)
        found = left_out(whole, lazy(x), lazy(h), lazy(g), unless=[earlier]).compute()
        assert np.isnan(found).all() == is_skipped
        assert np.isnan(found).any() == is_skipped


def test_spectrum__one_decomposition_per_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    x, h, g, rows = data()
    whole = decomposed(x, h, g)
    both = held_out(whole, lazy(rows)), left_out(whole, lazy(x), lazy(h), lazy(g))
    eigh, calls = np.linalg.eigh, []
    monkeypatch.setattr(np.linalg, "eigh", lambda matrix: calls.append(1) or eigh(matrix))
    dask.compute(*both, scheduler="sync")
    assert len(calls) == 2


def test_spectrum__eigenvalues_that_rounding_made_negative_count_as_zero() -> None:
    k = np.diag([1.0, -1e-9])[:, :, None]
    whole = spectrum(lazy(k, 2), da.ones((2, 1), chunks=(2, 1)), 10**9, ["a"])
    found = held_out(whole, lazy(np.eye(2)[:, :, None])).compute()
    np.testing.assert_allclose(found[1, :, 0], 1 / (GRID * 1e-9), rtol=1e-6)


def test_spectrum__not_finite_names_checkpoint() -> None:
    x, h, g, rows = data()
    x[3, 1, 1] = np.nan
    with pytest.raises(ValueError, match=r"not finite for checkpoint 'b'"):
        held_out(decomposed(x, h, g), lazy(rows)).compute(scheduler="sync")


def test_held_out__nothing_but_zeros_is_nan() -> None:
    x, h, g, rows = data()
    assert np.isnan(held_out(decomposed(x, 0 * h, g), lazy(rows)).compute()).all()


def test_mean_trace__trace_by_samples() -> None:
    k = np.random.default_rng(0).random((5, 5, 2))
    found = mean_trace(lazy(k, 5), 10).compute()
    np.testing.assert_allclose(found, [np.trace(k[..., c]) / 10 for c in (0, 1)])


def test_totals__same_bits_on_sync_and_threads() -> None:
    x, h, g, rows = data()
    totals = held_out(decomposed(x, h, g), lazy(rows, 2))
    result = curve(totals, da.from_array(rows[:, 0], chunks=(3, 2)))
    sync, threads = (result.compute(scheduler=s) for s in ("sync", "threads"))
    assert sync.tobytes() == threads.tobytes()


@pytest.mark.parametrize(
    ("sizes", "most"), [((5,), 3), ((5,), 9), ((4,) * 20, 16), ((4,) * 20, 1000), ((1, 50, 2), 30)]
)
def test_spread_rows__bounded_ascending_and_within_blocks(
    sizes: tuple[int, ...], most: int
) -> None:
    rows = spread_rows(sizes, most)
    starts = np.cumsum((0, *sizes))
    blocks = [int(np.searchsorted(starts, r.start, "right")) - 1 for r in rows]
    assert sum(r.stop - r.start for r in rows) <= most
    assert blocks == sorted(set(blocks))
    assert len(blocks) <= 8
    assert blocks[0] == 0
    assert blocks[-1] == len(sizes) - 1
    assert all(0 < r.stop - r.start <= sizes[b] for r, b in zip(rows, blocks, strict=True))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_solve__equals_a_dense_solve(dtype: type) -> None:
    x, h, g, rows = data()
    rows[4] = np.nan
    damping = np.array([0.5, 2.0])
    parts = gram_and_sum(lazy(x), lazy(h), lazy(g[:, :1].repeat(2, 1)))
    target = lazy(rows.astype(dtype), 4)
    found = solve(spectrum(*parts, len(x), LABELS), da.from_array(damping), target)
    assert found.dtype == dtype
    assert found.chunks == target.chunks
    expected = np.empty_like(rows)
    for c in range(2):
        k = (x[..., c] * h[:, [c]]).T @ x[..., c] + damping[c] * np.eye(x.shape[1])
        expected[..., c] = np.linalg.solve(k, rows[..., c].T).T
    tolerance = 1e-10 if dtype is np.float64 else 1e-5
    np.testing.assert_allclose(found.compute(), expected, rtol=tolerance, atol=tolerance)


def test_solve__singular_names_the_checkpoint() -> None:
    x, h, g, rows = data()
    x[:, -1, 1] = 0
    parts = gram_and_sum(lazy(x), lazy(h), lazy(g[:, :1].repeat(2, 1)))
    found = solve(spectrum(*parts, len(x), LABELS), da.zeros(2), lazy(rows))
    with pytest.raises(np.linalg.LinAlgError, match=r"checkpoint 'b' .*λ = 0.*larger damping"):
        found.compute(scheduler="sync")
