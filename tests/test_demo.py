"""``make demo`` from an empty folder: what it writes can be read by others."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import matplotlib.image
import pandas as pd
import pytest
import xarray as xr

import trakdask as td


@pytest.mark.slow
def test_demo__writes_what_it_says(tmp_path: Path, run_python) -> None:
    # In fewer dimensions, for the time; `make demo` runs it as it is.
    smaller = "from trakdask import demo; demo.PROJ_DIM = 512; demo.main()"
    printed = run_python("-c", smaller, cwd=tmp_path)
    assert "Dask dashboard: http" in printed
    assert "21/21" in printed
    output = tmp_path / "demo-output"
    frame = pd.read_parquet(output / "top.parquet")
    assert len(frame) == 200 * 100
    scores = xr.open_zarr(output / "scores.zarr").score
    assert scores.shape == (1597, 200)
    best = frame[frame["rank"] == 0].sort_values("target")
    assert (scores.values.argmax(0) == best["position"].values).all()
    # Digits are helped by digits of their own class: a wrong sign or order would show here.
    assert (best["label"] == best["target_label"]).mean() > 0.7
    assert td.open(output / "train.zarr").sizes["checkpoint"] == 3
    # The last line opens the explorer on these results.
    line = shlex.split(printed.rstrip().splitlines()[-1])
    subprocess.run([*line, "--save", "view.html"], cwd=tmp_path, check=True, timeout=280)
    page = (tmp_path / "view.html").read_text()
    assert "1,597 training samples, 200 targets" in page
    assert page.count("<img") == 25
    assert matplotlib.image.imread(output / "gallery.png").shape[0] > 500
