"""Stores that version 0.1 wrote stay readable: one of them lies beside this file."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import trakdask as td
from tests.storage.store_of_0_1.made_from import features

HERE = Path(__file__).parent / "store_of_0_1"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Unpack a store with two checkpoints, an appended part and a drop."""
    shutil.unpack_archive(HERE / "store.zip", tmp_path / "f.zarr")
    return tmp_path / "f.zarr"


def test_open__values_are_what_they_were(store: Path) -> None:
    opened = td.open(store)
    with np.load(HERE / "expected.npz") as expected:
        assert len(expected.files) == 8
        for name in expected.files:
            found = np.asarray(opened[name].values)
            assert found.astype(expected[name].dtype).tobytes() == expected[name].tobytes(), name
    assert td.verify(store, checksums=True).empty


def test_save__goes_on_with_it_and_computes_nothing(store: Path) -> None:
    """Its source was computed from all numeric coords, among them ``year``, which is no input."""
    for rows, append_dim in [((0, 6), None), ((6, 10), "sample")]:
        opened = td.save(features(*rows), store, append_dim=append_dim, progress=False)
        assert opened.sizes["sample"] == 9
    blocks = [path for path in store.glob("**/records/*/*/*.json") if path.stem.isdigit()]
    with np.load(HERE / "expected.npz") as expected:
        np.testing.assert_array_equal(opened.feature, expected["feature"])
    assert len(blocks) == 2 * (2 + 1)
    assert not (store / "parts/2").exists()


@pytest.mark.filterwarnings("ignore:scores are made from 2 checkpoints")
def test_calibrate__adds_what_0_1_did_not_store(store: Path) -> None:
    old = td.open(store)
    calibrated = td.calibrate(store)
    assert {"gram_eigenvalues", "gram_eigenvectors", "damping"} <= set(calibrated)
    np.testing.assert_allclose(calibrated.damping, td.damping(old).damping, rtol=1e-12)
    np.testing.assert_array_equal(calibrated.feature, old.feature)
