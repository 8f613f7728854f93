"""Stores that are made to hurt: nothing in them runs."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import zarr

import trakdask as td
from trakdask.testing import simulate_features

FEATURES = simulate_features(n_samples=40, proj_dim=8, chunks=16)


class Evil:
    """Unpickling it leaves a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def test_open__pickled_objects_of_the_older_format_do_not_run(tmp_path: Path) -> None:
    """Format 2 has a codec that unpickles; we never write it, and must never read it."""
    group = zarr.open_group(tmp_path / "old.zarr", mode="w", zarr_format=2)
    group.attrs["layout"] = {"samples": 1, "block": 1, "dtype": "float32"}
    (tmp_path / "old.zarr/label").mkdir()
    metadata = {
        "zarr_format": 2, "shape": [1], "chunks": [1], "dtype": "|O", "fill_value": None,
        "compressor": None, "filters": [{"id": "pickle", "protocol": 5}], "order": "C",
    }  # fmt: skip
    (tmp_path / "old.zarr/label/.zarray").write_text(json.dumps(metadata))
    values = np.array([Evil(tmp_path / "mark")], dtype=object)
    (tmp_path / "old.zarr/label/0").write_bytes(pickle.dumps(values))
    with pytest.raises(FileNotFoundError, match=r"old\.zarr"):
        td.open(tmp_path / "old.zarr")
    with pytest.raises(FileExistsError, match=r"old\.zarr"):
        td.save(FEATURES, tmp_path / "old.zarr", progress=False)
    assert not (tmp_path / "mark").exists()
