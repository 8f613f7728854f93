"""Masks: sizes, seeds and labels."""

from __future__ import annotations

import numpy as np
import pytest

import trakdask as td
from trakdask.testing import raise_if_dask_computes, simulate_features

FEATURES = simulate_features(n_samples=30, proj_dim=4)


def test_subsets__lazy_seeded_and_labelled() -> None:
    with raise_if_dask_computes():
        masks = td.evaluate.subsets(FEATURES, 12, fraction=0.2, seed=3)
        assert "mask" in repr(masks)
    assert masks.dims == ("subset", "sample")
    assert masks.dtype == bool
    assert (masks.sum("sample") == 6).all()
    np.testing.assert_array_equal(masks.label, FEATURES.label)
    plain = td.evaluate.subsets(30, 20, fraction=0.2, seed=3)
    np.testing.assert_array_equal(plain[:12], masks)
    assert (td.evaluate.subsets(30, 12, fraction=0.2) != masks).any()


def test_subsets__of_scores_take_no_coords_of_targets() -> None:
    masks = td.evaluate.subsets(td.score(FEATURES, FEATURES), 2)
    assert set(masks.coords) == {"label"}


@pytest.mark.parametrize("form", ["coord", "array", "DataArray"])
def test_subsets__by_label(form: str) -> None:
    source = np.array(list("abcdef") * 5, dtype=object)
    samples = FEATURES.assign_coords(source=("sample", source))
    by = {"coord": "source", "array": source, "DataArray": samples.source}[form]
    masks = td.evaluate.subsets(samples, 8, by=by, fraction=1 / 3)
    inside = masks.values.reshape(8, 5, 6)
    assert (inside == inside[:, :1]).all()
    assert (inside[:, 0].sum(axis=1) == 2).all()


def test_leave_one_out__each_once_or_some() -> None:
    with raise_if_dask_computes():
        masks = td.evaluate.leave_one_out(FEATURES)
        some = td.evaluate.leave_one_out(30, [7, 7, 2])
    np.testing.assert_array_equal(~masks, np.eye(30, dtype=bool))
    assert (~some.values).nonzero()[1].tolist() == some.left_out.values.tolist() == [7, 7, 2]
