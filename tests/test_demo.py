"""``make demo`` from an empty folder: what it writes can be read by others."""

from __future__ import annotations

import runpy
import shlex
import sys
from pathlib import Path

import matplotlib.image
import pandas as pd
import pytest
import xarray as xr

import trakdask as td
from docs import demo
from trakdask import examples
from trakdask.command_line.commands import app


@pytest.mark.slow
def test_demo__writes_what_it_says(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Fewer models, digits and dimensions, for the time; `make demo` runs it as it is.
    first = tuple(samples.isel(sample=slice(1200)) for samples in examples.mnist())
    monkeypatch.setattr(examples, "mnist", lambda **_: first)
    monkeypatch.setattr(demo, "N_CHECKPOINTS", 4)
    monkeypatch.setattr(demo, "PROJ_DIM", 256)
    monkeypatch.chdir(tmp_path)
    demo.main()
    printed = capsys.readouterr().out
    assert "on the threads of this process" in printed
    assert "12/12" in printed
    assert "How good are they? These scores predict left-out checkpoints at " in printed
    output = tmp_path / "demo-output"
    frame = pd.read_parquet(output / "top.parquet")
    assert len(frame) == 200 * 100
    scores = xr.open_zarr(output / "scores.zarr").score
    assert scores.shape == (1200, 200)
    best = frame[frame["rank"] == 0].sort_values("target")
    assert (scores.values.argmax(0) == best["position"].values).all()
    # Digits are helped by digits of their own class: a wrong sign or order would show here.
    assert (best["label"] == best["target_label"]).mean() > 0.7
    assert td.open(output / "train.zarr").sizes["checkpoint"] == 4
    # The last line opens the explorer on these results.
    line = shlex.split(printed.rstrip().splitlines()[-1])
    arguments = line[line.index("trakdask") + 1 :]
    app(args=[*arguments, "--save", "view.html"], standalone_mode=False)
    page = (tmp_path / "view.html").read_text()
    assert "1,200 training samples, 200 targets" in page
    assert page.count("<img") == 24  # the first page of targets
    for picture in ("gallery.png", "suspicious.png"):
        assert matplotlib.image.imread(output / picture).shape[0] > 300


def test_demo__help_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--help"])
    with pytest.raises(SystemExit):
        runpy.run_path(demo.__file__, run_name="__main__")
    assert "takes no arguments" in " ".join(capsys.readouterr().out.split())
    assert not [*tmp_path.iterdir()]
