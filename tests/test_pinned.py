"""Scores, λ and rankings of fixed features, compared with numbers that an earlier version gave.

Nothing here knows how they are computed, so the tests hold through a redesign. The numbers were
written by ``python tests/test_pinned.py`` at commit 1067064; those that depend on λ by completeness
were written again when its rule changed.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

import trakdask as td
from trakdask.provenance import DEFAULTS

RECORDED = Path(__file__).with_name("pinned.json")
N_TRAIN, N_TARGET, P = 160, 9, 48
NAMES = ("a", "b", "c")

ESTIMATORS: dict[str, Any] = {
    "default": "auto",
    "soft, power 0.5": td.Soft(power=0.5),
    "soft, power 1": td.Soft(power=1.0),
    "soft, closed form": "soft",
    "soft, λ 0.1": td.Soft(damping=0.1),
    "trak": "trak",
    "trak, closed form": "trak",
    "trak, trace": td.Trak(damping="trace"),
    "trak, λ absolute": td.Trak(damping=td.Absolute(0.3)),
    "relatif": "relatif",
    "grad_dot": "grad_dot",
    "grad_cos": td.GradCos(),
    "tracin": td.TracIn({"a": 0.1, "b": 0.2, "c": 0.4}),
}
TASKS = ("Classification", "Regression", "CausalLM")


def features_of(n: int, task: str, seed: int, chunks: int = 40) -> xr.Dataset:
    """Features of a few shared directions and noise; outputs follow the first."""
    rng = np.random.default_rng(seed)
    directions = np.random.default_rng(0).standard_normal((6, P, len(NAMES)))
    mixture = rng.standard_normal((n, 6)) * [2, 2, 1, 1, 0.5, 0.5] + [3, 0, 0, 0, 0, 0]
    noise = 0.3 * rng.standard_normal((n, P, len(NAMES)))
    feature = np.einsum("nk,kpc->npc", mixture, directions) / np.sqrt(P) + noise / np.sqrt(P)
    output = mixture[:, :1] + 0.3 * rng.standard_normal((n, len(NAMES)))
    q = 1 / (1 + np.exp(output)) if task != "Regression" else 0.1 * output
    kind = getattr(td.tasks, task)
    attrs = {
        "projector": {"kind": "simulated", "proj_dim": P},
        "checkpoints": dict(zip(NAMES, NAMES, strict=True)),
        "checkpoint_ids": {name: i for i, name in enumerate(NAMES)},
        "parameters": {},
        "task": f"{task}()",
        "source": f"pinned-{seed}",
        **{name: getattr(kind, name) for name in DEFAULTS if hasattr(kind, name)},
    }
    ds = xr.Dataset(
        {
            "feature": (("sample", "proj_dim", "checkpoint"), feature.astype("f4")),
            "output": (("sample", "checkpoint"), output.astype("f4")),
            "out_to_loss": (("sample", "checkpoint"), q.astype("f4")),
        },
        coords={
            "label": ("sample", np.arange(n) % 4),
            "checkpoint": ("checkpoint", np.array(NAMES, dtype=object)),
        },
        attrs=attrs,
    )
    return ds.chunk(sample=chunks, proj_dim=-1, checkpoint=1)


def closed_form(features: xr.Dataset, estimator: str) -> xr.DataArray:
    """λ = 0.03 tr(K²)/tr(K) of each checkpoint."""
    x, q = (features[name].astype("f8") for name in ("feature", "out_to_loss"))
    h = q**0.5 * (1 - q) if estimator == "soft" else xr.ones_like(q)
    k = xr.dot(x * h, x.rename(proj_dim="other"), dim="sample")
    trace = xr.dot(x * h, x, dim=["sample", "proj_dim"])
    return (0.03 * (k**2).sum(["proj_dim", "other"]) / trace).compute()


def numbers(task: str, name: str, store: Path | None = None) -> dict[str, Any]:
    """What users look at: a corner of the scores, their size, λ, a ranking, sums of groups."""
    estimator = ESTIMATORS[name]
    features, targets = features_of(N_TRAIN, task, 1), features_of(N_TARGET, task, 2, 4)
    if store is not None:
        features = td.save(features, store, progress=False)
    if name.endswith("closed form"):
        kind = {"soft": td.Soft, "trak": td.Trak}[estimator]
        estimator = kind(damping=closed_form(features, estimator))
    scores = td.score(features, targets, estimator)
    groups = td.group_score(features, targets, estimator, by="label")
    top = td.top_k(scores, k=3, where=scores.label != 1).compute()
    values = scores.values.astype(np.float64)
    return {
        "corner": values[:3, :3].tolist(),
        "size": float(np.sqrt((values**2).mean())),
        "groups": groups.values[:, :3].tolist(),
        "positions": top.position.values.tolist(),
        "top": top.score.values.tolist(),
    }


def dampings(task: str, store: Path | None = None) -> list[float]:
    """λ of each checkpoint."""
    features = features_of(N_TRAIN, task, 1)
    if store is not None:
        features = td.save(features, store, progress=False)
    values: list[float] = td.damping(features).damping.values.tolist()
    return values


def of_all(kind: str) -> list[tuple[str, str]]:
    """Return the combinations of task and options, those of a store only at the defaults."""
    if kind == "store":
        return [(task, "default") for task in TASKS]
    soft = [("Classification", name) for name in ESTIMATORS]
    return soft + [(task, name) for task in TASKS[1:] for name in ("default", "trak, closed form")]


def assert_close(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual["positions"] == expected["positions"]
    for name in ("corner", "groups", "top"):
        scale = np.abs(expected[name]).max()
        np.testing.assert_allclose(actual[name], expected[name], rtol=1e-5, atol=1e-6 * scale)
    np.testing.assert_allclose(actual["size"], expected["size"], rtol=1e-6)


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    values: dict[str, Any] = json.loads(RECORDED.read_text())
    return values


@pytest.mark.filterwarnings("ignore::UserWarning")  # of λ that was chosen by few outputs
@pytest.mark.parametrize(("task", "name"), of_all("lazy"))
def test_scores__are_those_of_before(task: str, name: str, recorded: dict[str, Any]) -> None:
    assert_close(numbers(task, name), recorded[f"{task}: {name}"])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("task", "name"), of_all("store"))
def test_scores__of_a_store_are_those_of_before(
    task: str, name: str, recorded: dict[str, Any], tmp_path: Path
) -> None:
    found = numbers(task, name, tmp_path / "store.zarr")
    assert_close(found, recorded[f"{task}: {name}, stored"])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("task", TASKS)
def test_damping__is_that_of_before(task: str, recorded: dict[str, Any], tmp_path: Path) -> None:
    for store in (None, tmp_path / "store.zarr"):
        np.testing.assert_allclose(dampings(task, store), recorded[f"{task}: λ"], rtol=1e-6)


def main() -> None:
    """Write the numbers of the version at hand."""
    import tempfile

    warnings.simplefilter("ignore")
    made: dict[str, Any] = {}
    for task, name in of_all("lazy"):
        made[f"{task}: {name}"] = numbers(task, name)
    for task, name in of_all("store"):
        with tempfile.TemporaryDirectory() as folder:
            store = Path(folder, "store.zarr")
            made[f"{task}: {name}, stored"] = numbers(task, name, store)
    made |= {f"{task}: λ": dampings(task) for task in TASKS}
    RECORDED.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
