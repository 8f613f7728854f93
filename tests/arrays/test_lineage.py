"""Selections are told from other operations, and from each other, without computing anything."""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest

from trakdask.arrays.lineage import columns, is_in_memory, selection, sources
from trakdask.testing import raise_if_dask_computes

X = da.random.default_rng(0).random((70, 6, 3), chunks=(32, 6, 1))
ORDER = np.random.default_rng(0).permutation(70)

SELECTIONS = {
    "nothing": lambda x: x,
    "slice": lambda x: x[3:60],
    "rows": lambda x: x[[3, 40, 7]],
    "twice": lambda x: x[[3, 40, 7]][1:],
    "shuffled": lambda x: x[ORDER],
    "reversed": lambda x: x[::-1],
    "mask": lambda x: x[np.arange(70) % 2 == 1],
    "checkpoint": lambda x: x[..., [2, 0]],
    "rechunked": lambda x: x.rechunk({0: 50}),
    "concatenated": lambda x: da.concatenate([x[40:], x[:9]]),
    "blocks": lambda x: x.blocks[[1, 0]],
    "persisted": lambda x: x.persist(scheduler="sync")[4:],
}
OTHERS = {
    "scaled": lambda x: 3 * x,
    "scaled and selected": lambda x: (3 * x)[4:],
    "selected and scaled": lambda x: 3 * x[4:],
    "where": lambda x: da.where(x > 0, x, 0),
    "cast": lambda x: x.astype("f4"),
    "another": lambda x: X + 1,
    "half another": lambda x: da.concatenate([x, x + 1]),
    "selected and persisted": lambda x: x[4:].persist(scheduler="sync"),
}


@pytest.mark.parametrize("change", SELECTIONS.values(), ids=SELECTIONS)
def test_sources__of_selections(change) -> None:
    assert sources(change(X)) == {X.name}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_sources__of_anything_else(change) -> None:
    assert sources(change(X)) != {X.name}


def test_sources__end_at_the_root() -> None:
    opened = X[::2]
    assert sources(opened[1:]) == {X.name}
    assert sources(opened[1:], opened.name) == {opened.name}


def test_is_in_memory__arrays_and_what_was_persisted() -> None:
    held = da.from_array(X.compute(), chunks=(32, 6, 1))
    kept = X.persist(scheduler="sync")
    for data in (held, kept, held[2:]):
        assert is_in_memory(data, sources(data))
    for data in (X, X[2:], held + 1):
        assert not is_in_memory(data, sources(data))


@pytest.mark.parametrize("name", SELECTIONS)
def test_selection__rows_are_equal_for_arrays_selected_alike(name: str) -> None:
    """Of an array without proj_dim, in blocks of the same rows."""
    q = X[:, 0].rechunk({0: 32})
    change = SELECTIONS[name]
    with raise_if_dask_computes() if name != "persisted" else dask.config.set():
        whole, part = change(X), change(q)
        found = [selection(a, sources(a, root.name)) for a, root in ((whole, X), (part, q))]
    assert found[0].rows == found[1].rows
    assert found[0].checkpoints == found[1].checkpoints
    assert not found[0].columns


def test_selection__rows_differ_for_arrays_selected_otherwise() -> None:
    among_blocks = [X[[3, 40, 7, 66]], X[[4, 41, 8, 67]], X[[7, 40, 3, 66]]]
    parts = (X, X[::-1], X[ORDER], X[ORDER[::-1]], X[:69], X[1:], X[[3, 40]], *among_blocks)
    rows = [repr(selection(part, {X.name}).rows) for part in parts]
    assert len(set(rows)) == len(rows)


@pytest.mark.parametrize(
    ("change", "is_whole"),
    [
        (lambda x: x, True),
        (lambda x: x[:, :4], True),
        (lambda x: x[:, [0, 1, 2]], True),
        (lambda x: x.rechunk({1: 3}).rechunk({1: 6}), True),
        (lambda x: x[:, ::-1], False),
        (lambda x: x[:, [5, 4, 3, 2, 1, 0]], False),
        (lambda x: x[:, 2:], False),
        (lambda x: x[[1, 50], ::-1][:, :3], False),
        (lambda x: x.rechunk({1: 3})[:, ::-1].rechunk({1: 6}), False),
        (lambda x: x.rechunk({1: 3})[:, [4, 0, 2, 1, 3, 5]].rechunk({1: 6}), False),
    ],
)
def test_selection__columns(change, is_whole: bool) -> None:
    assert (not selection(change(X), {X.name}).columns) is is_whole
    assert columns(change(X)) == selection(change(X), {X.name}).columns


def test_selection__checkpoints() -> None:
    assert selection(X, {X.name}).checkpoints == (0, 1, 2)
    assert selection(X[4:, :, [2, 0]], {X.name}).checkpoints == (2, 0)
    assert selection(X[..., ::-1], {X.name}).checkpoints == (2, 1, 0)
