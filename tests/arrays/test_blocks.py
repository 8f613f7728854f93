"""The parts of large inputs that tasks get, or read from stores, against slices of numpy."""

from __future__ import annotations

import pickle

import dask
import dask.array as da
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse

from tests.stored_arrays import stored
from trakdask import arrays
from trakdask.arrays.blocks import add, block_starts, flat
from trakdask.arrays.gram import pooled
from trakdask.arrays.graphs import map_stored, packed, read_in_task, unpacked

_sizes = st.lists(st.integers(0, 20), min_size=1, max_size=6).map(tuple)


@given(_sizes, st.sampled_from([1, 2, 3, 7, 8, 255, 256, 70_000]), st.integers(0, 2**32))
def test_packed_rows__are_the_integers(sizes: tuple[int, ...], most: int, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, most + 1, sum(sizes))
    rows, starts = packed(values, most, sizes), block_starts(sizes)
    for i in range(len(sizes)):
        block = unpacked(rows[(i,)])
        np.testing.assert_array_equal(block, values[starts[i] : starts[i + 1]])
        assert block.dtype == np.int64


def blocks_of(array: da.Array, **options: object) -> list[list[np.ndarray]]:
    """Return what each task reads."""
    argument, _ = read_in_task(array, **options)
    shape = argument.numblocks
    return [list(flat(pickle.loads(pickle.dumps(argument[i])))) for i in np.ndindex(*shape)]


def test_read_in_task__blocks() -> None:
    values = np.random.default_rng(0).standard_normal((10, 3, 2))
    array = stored(values, ((4, 3, 3), 3, 1))
    expected = [[values[s, :, c : c + 1] for c in (0, 1)] for s in ROWS]
    for found, wanted in zip(blocks_of(array), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)
    groups = blocks_of(array, groups=[[0, 2], [1]], by_checkpoint=True)
    assert [len(group) for group in groups] == [2, 2, 1, 1]
    np.testing.assert_array_equal(groups[1][1], values[7:, :, 1:])


ROWS = [slice(0, 4), slice(4, 7), slice(7, 10)]


def test_read_in_task__what_is_made_of_stored_blocks() -> None:
    values = np.random.default_rng(0).random((10, 2))
    weights = stored(values, (5, 1))
    made = map_stored(np.sqrt, weights, name="roots")
    (first, _), (_, last) = blocks_of(made)
    np.testing.assert_array_equal(first, np.sqrt(values[:5, :1]))
    np.testing.assert_array_equal(last, np.sqrt(values[5:, 1:]))
    (mean,), _ = blocks_of(pooled(weights))
    np.testing.assert_allclose(mean, values[:5].mean(axis=1))


def test_add__sums_in_list_order_without_changing_its_inputs() -> None:
    parts = [np.full((1, 2), value) for value in (1e16, 1.0, -1e16)]
    np.testing.assert_array_equal(add(parts, keepdims=True), [[(1e16 + 1.0) - 1e16] * 2])
    assert add(parts).shape == (2,)
    assert parts[0][0, 0] == 1e16


X, W = (np.random.default_rng(i).normal(size=(n, 5, 3)) for i, n in enumerate((40, 6)))
G = np.random.default_rng(2).random((40, 3))
MATRIX = np.einsum("spc,sqc->pqc", X, X)
PARTS = sparse.csr_array(np.eye(4)[np.arange(40) % 4])


def kernels(x: da.Array, w: da.Array, matrix: da.Array) -> dict[str, da.Array]:
    g, labels, lam = da.from_array(G), ["a", "b", "c"], da.full(3, 2.0, chunks=1)
    inverse = arrays.solve.cholesky(matrix, lam, labels)
    factors = arrays.spectra.eigenvectors(matrix, labels, 5)
    r = arrays.gram.loss_gradient(x, g)
    spectrum = arrays.spectra.spectrum(*factors, r, 40, labels)
    sums = arrays.groups.weighted_sums(x, g)
    members = arrays.groups.weighted_sums(x, da.ones((40, 4), chunks=-1), PARTS, 4)
    return {
        "gram": arrays.gram.gram(x, g),
        "gram and sum": arrays.gram.gram_and_sum(x, g, g)[1],
        "loss gradient": r,
        "traces": arrays.gram.traces(matrix, labels),
        "score": arrays.score.score(x, w, g),
        "score of each": arrays.score.score(x, w, g, average=False),
        "score with errors": arrays.score.score(x, w, g, folds=g)["error"],
        "groups": arrays.groups.weighted_sums(x, g, np.arange(40) % 4, 4, axes="sc"),
        "members": arrays.jackknife.member_score(members, w)["error"],
        "top": arrays.topk.top_k(arrays.score.score(x, w, g), 3)[0],
        "solve": arrays.solve.solve(inverse, w),
        "eigenvectors": arrays.solve.solve(arrays.spectra.inverse(spectrum, lam), w),
        "leverage": arrays.solve.leverage(inverse, x),
        "norms": arrays.weights.squared_norm(x),
        "self-influence": arrays.weights.self_influence(
            arrays.solve.leverage(inverse, x), g.rechunk((8, 1)), average=True
        ),
        "folds": arrays.folds.predicted(sums, w),
        "totals of folds": arrays.folds.totals(spectrum, sums, x),
        "totals": arrays.damping.left_out(spectrum, x, g, g),
        "totals of others": arrays.damping.held_out(spectrum, w),
        "checked": arrays.score.checked(x, arrays.weights.squared_norm(x), g),
    }


@pytest.mark.parametrize("size", [2, 3])
def test_kernels__take_chunks_of_several_checkpoints(size: int) -> None:
    found, expected = (
        dask.compute(kernels(*(da.from_array(x, chunks=(8, -1, c)) for x in (X, W, MATRIX))))[0]
        for c in (size, 1)
    )
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-10, err_msg=name)
    scores = np.einsum("spc,tpc->st", X, W) / 3 * G.mean(1)[:, None]
    np.testing.assert_allclose(found["score"], scores)
