"""The first screen of the README runs as it stands and prints what it shows."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

import trakdask as td

README = (Path(__file__).parents[1] / "README.md").read_text("utf-8")


def block(language: str, section: str = "# trakdask") -> str:
    text = README[README.index(f"{section}\n") :]
    return re.search(rf"```{language}\n(.*?)```", text, flags=re.DOTALL).group(1)


def shape_of(text: str) -> list[str]:
    """Words and columns; digits depend on the machine that trained the models."""
    return re.sub(r"-?\d+(\.\d+)?(e-?\d+)?", "#", text).split()


def test_readme__first_screen_is_short() -> None:
    lines = [line for line in block("python").splitlines() if line.strip()]
    assert len(lines) <= 15


@pytest.mark.slow
def test_readme__first_screen_prints_what_it_shows(tmp_path: Path, run_python) -> None:
    printed = run_python("-c", block("python"), cwd=tmp_path)
    table = printed[printed.index("target_label") :]
    assert shape_of(table) == shape_of(block("text"))


def test_readme__stores_as_they_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block of the section runs line by line, on ten samples and a linear model."""
    weights = [{"weight": torch.eye(3, 4) * scale, "bias": torch.zeros(3)} for scale in (1, 2)]

    def samples(start: int, stop: int) -> xr.Dataset:
        rows = np.arange(start, stop)
        x = np.random.default_rng(0).normal(size=(10, 4)).astype("f4")[rows]
        coords = {"label": rows % 3, "source": ["spam", "wbe"] * (len(rows) // 2)}
        return td.from_arrays({"image": x}, coords=coords, chunks=4)

    def model(**checkpoints: object) -> td.Model:
        return td.Model(torch.nn.Linear(4, 3), checkpoints, task="image_classification")

    names = {
        "td": td, "train": samples(0, 6), "more_samples": samples(6, 10),
        "model": model(a=weights[0]), "fourth": model(d=weights[1]),
        "all_four": model(a=weights[0], d=weights[1]), "corrected": ["spam", "web"] * 5,
    }  # fmt: skip
    monkeypatch.chdir(tmp_path)
    exec(block("python", "## Stores"), names)
    assert names["features"].source.values.tolist() == ["web"] * 5
    assert names["features"].sizes["checkpoint"] == 2
    assert td.verify("features.zarr", checksums=True).empty
