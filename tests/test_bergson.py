"""Stores that bergson wrote, recorded in ``bergson_stores.json``, against what bergson reads."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trakdask as td
from trakdask.bergson import open_bergson

RECORDED: dict[str, Any] = json.loads(
    Path(__file__).with_name("bergson_stores.json").read_text("utf-8")
)["stores"]


def written(folder: Path, name: str) -> Path:
    """Write the files of a recorded store."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in RECORDED[name]["files"].items():
        (folder / file).write_bytes(base64.b64decode(content))
    return folder


def gradients(name: str) -> np.ndarray:
    return np.array(RECORDED[name]["gradients"], np.float32)


@pytest.mark.parity
@pytest.mark.parametrize("name", list(RECORDED))
def test_open_bergson__gradients_are_those_that_bergson_reads(name: str, tmp_path: Path) -> None:
    with td.testing.raise_if_dask_computes():
        features = open_bergson(written(tmp_path / "store", name))
    assert features.feature.dims == ("sample", "proj_dim", "checkpoint")
    assert features.feature.dtype == np.float32
    assert np.array_equal(features.feature.values[:, :, 0], gradients(name))
    assert (features.out_to_loss == 1).all()
    assert features.output.isnull().all()


def test_open_bergson__several_checkpoints(tmp_path: Path) -> None:
    first, second = (written(tmp_path / name, name) for name in ("float16", "bfloat16"))
    listed = open_bergson([first, second])
    assert listed.checkpoint.values.tolist() == ["0", "1"]
    named = open_bergson({"late": second, "early": first})
    found = named.feature.sel(checkpoint=["early", "late"]).values
    expected = np.stack([gradients("float16"), gradients("bfloat16")], 2)
    assert np.array_equal(found, expected)
    assert named.attrs["stored_dtype"] == {"late": "bfloat16", "early": "float16"}


def test_open_bergson__tokens_say_where_they_are(tmp_path: Path) -> None:
    features = open_bergson(written(tmp_path, "tokens"))
    # Documents of 3, 2 and 4 tokens; the first token of each is not predicted.
    assert features.document.values.tolist() == [0, 0, 1, 2, 2, 2]
    assert features.token.values.tolist() == [0, 1, 0, 0, 1, 2]
    by_document = td.group_score(features, features.isel(sample=[0]), by="document")
    assert by_document.document.values.tolist() == [0, 1, 2]


def test_open_bergson__scores_are_those_of_the_gradients(tmp_path: Path) -> None:
    g = gradients("build").astype(np.float64)
    features = open_bergson(written(tmp_path, "build"))
    targets = features.isel(sample=slice(2))
    unit = g / np.linalg.norm(g, axis=1, keepdims=True)
    found = td.score(features, targets, estimator="grad_cos")
    np.testing.assert_allclose(found, unit @ unit[:2].T, rtol=1e-5, atol=1e-6)
    found = td.score(features, targets, td.Trak(damping=td.Absolute(0.5)))
    expected = g @ np.linalg.solve(g.T @ g + 0.5 * np.eye(16), g[:2].T)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_open_bergson__stores_of_other_settings_cannot_be_mixed(tmp_path: Path) -> None:
    train = open_bergson(written(tmp_path / "train", "build"))
    query, other = (written(tmp_path / name, "build") for name in ("query", "other"))
    text = (query / "config.yaml").read_text()
    (query / "config.yaml").write_text(
        text.replace("dataset: texts.jsonl", "dataset: queries").replace("bergrun", "elsewhere")
    )
    assert (query / "config.yaml").read_text() != text
    assert td.score(train, open_bergson(query), estimator="grad_dot").shape == (6, 6)
    (other / "config.yaml").write_text(text.replace("loss_fn: ce", "loss_fn: log_odds"))
    with pytest.raises(td.errors.StoreMismatchError, match="checkpoints"):
        td.score(train, open_bergson(other), estimator="grad_dot")
