from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest

from trakdask.arrays import gram as gram_module
from trakdask.arrays.solve import cholesky, closed_form_damping
from trakdask.arrays.spectrum import leverage, solve
from trakdask.testing import raise_if_dask_computes

LABELS = ("first", "second")


def oracle(k: np.ndarray, lam: np.ndarray, phi: np.ndarray) -> np.ndarray:
    """(K_c + λ_c I)⁻¹ φ_c(t) by a dense inverse in float64."""
    out = np.empty(phi.shape)
    for c in range(k.shape[2]):
        inverse = np.linalg.inv(k[:, :, c].astype(np.float64) + lam[c] * np.eye(len(k)))
        out[:, :, c] = phi[:, :, c].astype(np.float64) @ inverse.T
    return out


def features(n: int = 300, p: int = 12, scale: float = 1.0) -> np.ndarray:
    rng = np.random.default_rng(0)
    return (scale * rng.standard_normal((n, p, 2))).astype(np.float32)


def matrices(scale: float = 1.0) -> np.ndarray:
    x = features(scale=scale).astype(np.float64)
    return np.einsum("spc,sqc->pqc", x, x)


def lazy(x: np.ndarray, rows: int = -1) -> da.Array:
    return da.from_array(x, chunks=(rows, -1, 1))


def test_closed_form_damping__formula() -> None:
    k = matrices()
    expected = [0.03 * np.trace(m @ m) / np.trace(m) for m in np.moveaxis(k, 2, 0)]
    with raise_if_dask_computes():
        damping = closed_form_damping(lazy(k))
    assert damping.chunks == ((1, 1),)
    np.testing.assert_allclose(damping.compute(), expected, rtol=1e-13)
    single = closed_form_damping(lazy(k.astype(np.float32)), 0.3).compute()
    assert single.dtype == np.float64
    np.testing.assert_allclose(single, np.multiply(10, expected), rtol=1e-6)


def test_closed_form_damping__zeros_and_nan() -> None:
    k = np.ones((3, 3, 2))
    k[:, :, 1] = np.nan
    np.testing.assert_allclose(closed_form_damping(lazy(k), 1.0).compute(), [3, np.nan])
    k[:, :, 1] = 0
    with pytest.raises(ValueError, match="got 0 at checkpoint 'b'"):
        closed_form_damping(lazy(k), labels=["a", "b"]).compute(scheduler="sync")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_cholesky__factor_of_the_damped_matrix(dtype: str) -> None:
    k, lam = matrices().astype(dtype), np.array([0.5, 7.0])
    with raise_if_dask_computes():
        factor = cholesky(lazy(k), da.from_array(lam), LABELS)
    assert factor.chunks == ((12,), (12,), (1, 1))
    found = factor.compute()
    assert found.dtype == np.float64
    for c in range(2):
        lower = found[:, :, c]
        np.testing.assert_array_equal(lower, np.tril(lower))
        np.testing.assert_allclose(
            lower @ lower.T, k[:, :, c] + lam[c] * np.eye(12), rtol=1e-12, atol=1e-9
        )


def test_cholesky__one_task_per_checkpoint_and_input_unchanged() -> None:
    k = matrices()
    persisted = lazy(k.copy()).persist(scheduler="sync")
    cholesky(persisted, 1.0, LABELS).compute()
    np.testing.assert_array_equal(persisted.compute(), k)
    graph = dask.optimize(cholesky(persisted, 1.0, LABELS))[0].__dask_graph__()
    assert sum("cholesky" in str(key) for key in graph) == 2


def test_cholesky__singular_names_checkpoint_damping_and_remedy() -> None:
    k = matrices()
    k[3, :, 1] = k[:, 3, 1] = 0
    with pytest.raises(
        np.linalg.LinAlgError,
        match=r"checkpoint 'second' .*λ = 0, smallest diagonal of K = 0, condition up to inf"
        r".*larger damping.* the closed form .* = \d",
    ):
        cholesky(lazy(k), 0.0, LABELS).compute()


def test_cholesky__condition_is_norm_over_damping() -> None:
    k = -np.eye(2)[:, :, None]
    with pytest.raises(np.linalg.LinAlgError, match=r"λ = 0.001, .* = -1, condition up to 1e\+03"):
        cholesky(lazy(k), 1e-3, ["c"]).compute()


def test_cholesky__non_finite_names_checkpoint() -> None:
    k = matrices()
    k[2, 2, 1] = np.nan
    with pytest.raises(ValueError, match=r"not finite for checkpoint 'second'"):
        cholesky(lazy(k), closed_form_damping(lazy(k)), LABELS).compute()
    with pytest.raises(ValueError, match=r"damping .*got -1.0 for checkpoint 'first'"):
        cholesky(lazy(matrices()), [-1.0, 1.0], LABELS).compute(scheduler="sync")


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e6])
@pytest.mark.parametrize("relative", [1e-6, 1.0])
def test_solve__dense_inverse(scale: float, relative: float) -> None:
    k, target = matrices(scale), features(30, scale=scale)
    lam = relative * np.trace(k) / len(k)
    with raise_if_dask_computes():
        solved = solve(cholesky(lazy(k), lam, LABELS), lazy(target, 8))
    assert solved.chunks == ((8, 8, 8, 6), (12,), (1, 1))
    assert solved.dtype == np.float32
    expected = oracle(k, lam, target)
    np.testing.assert_allclose(solved.compute(), expected, atol=2e-7 * np.abs(expected).max())


def test_solve__factor_from_a_store_in_c_order() -> None:
    target = lazy(features(30), 8)
    factor = cholesky(lazy(matrices()), 1.0, LABELS)
    stored = np.ascontiguousarray(factor.compute())
    per_checkpoint = da.concatenate(
        [lazy(stored[:, :, c : c + 1].copy()) for c in range(2)], axis=2
    )
    np.testing.assert_allclose(
        solve(per_checkpoint, target).compute(), solve(factor, target).compute(), rtol=1e-6
    )


def test_solve__selected_targets_read_only_their_blocks() -> None:
    read = []

    def block(block_id: tuple[int, ...]) -> np.ndarray:
        read.append(block_id)
        return features(10)[:, :, :1]

    chunks = ((10,) * 5, (12,), (1, 1))
    target = da.map_blocks(block, chunks=chunks, dtype="f4", meta=np.empty((0, 0, 0), "f4"))
    solved = solve(cholesky(lazy(matrices()), 1.0, LABELS), target)
    solved[12:18, :, 1].compute(scheduler="sync")
    assert read == [(1, 0, 1)]


def test_solve__nan_target_stays_alone() -> None:
    target = features(9)
    factor = cholesky(lazy(matrices()), 1.0, LABELS)
    clean = solve(factor, lazy(target)).compute()
    target[4, 3, 0] = np.nan
    found = solve(factor, lazy(target)).compute()
    assert np.isnan(found[4, :, 0]).any()
    assert np.isfinite(np.delete(found, 4, 0)).all()
    np.testing.assert_allclose(np.delete(found, 4, 0), np.delete(clean, 4, 0), rtol=1e-6)


def test_solve__same_bits_on_sync_and_threads() -> None:
    x = lazy(features(), 50)
    k = gram_module.gram(x)
    solved = solve(cholesky(k, closed_form_damping(k), LABELS), x[:40])
    sync, threads = (solved.compute(scheduler=s) for s in ("sync", "threads"))
    assert sync.tobytes() == threads.tobytes()


@pytest.mark.slow
def test_cholesky__error_survives_processes(process_client: object) -> None:
    k = matrices()
    k[:, :, 1] = 0
    with pytest.raises(np.linalg.LinAlgError, match="'second'"):
        cholesky(lazy(k), 0.0, LABELS).compute()
    factor = cholesky(lazy(k), 1.0, LABELS)
    found = solve(factor, lazy(features(10), 3)).compute()
    np.testing.assert_array_equal(
        found, solve(factor, lazy(features(10), 3)).compute(scheduler="sync")
    )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_leverage__diagonal_of_the_dense_product(dtype: str) -> None:
    k, phi = matrices(), features(30).astype(dtype)
    with raise_if_dask_computes():
        found = leverage(cholesky(lazy(k), 0.7, LABELS), lazy(phi, 8))
    assert found.chunks == ((8, 8, 8, 6), (1, 1))
    expected = np.einsum("spc,spc->sc", oracle(k, np.array([0.7, 0.7]), phi), phi)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_solve__float64_targets() -> None:
    k, target = matrices(), features(30).astype(np.float64)
    solved = solve(cholesky(lazy(k), 0.7, LABELS), lazy(target, 8))
    assert solved.dtype == np.float64
    np.testing.assert_allclose(solved, oracle(k, np.array([0.7, 0.7]), target), rtol=1e-12)
