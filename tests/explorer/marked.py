"""Features with marks and with text that would run in a browser."""

from __future__ import annotations

import numpy as np
import xarray as xr

import trakdask as td
from trakdask.explorer import Explorer
from trakdask.explorer.view import View

EVIL = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"


N, M = 150, 60


def features(n: int, seed: int) -> xr.Dataset:
    simulated = td.testing.simulate_features(n, 8, 3, chunks=64, seed=seed)
    note = np.array([f"{EVIL} no. {i}" if i % 2 else f"plain no. {i}" for i in range(n)], object)
    source = np.array(["web", "book", EVIL], object)[np.arange(n) % 3]
    about = {"task": "ImageClassification()", "label": "label", "default_estimator": "soft"}
    return simulated.assign_coords(source=("sample", source), note=("sample", note)).assign_attrs(
        about
    )


def samples(n: int, seed: int) -> xr.Dataset:
    images = np.random.default_rng(seed).random((n, 1, 8, 8), dtype=np.float32)
    return td.from_arrays({"image": images})


def top(explorer: Explorer, view: View, *, largest: bool = True) -> list[int]:
    """Return the positions that the function ranks: it has an oracle of its own."""
    target = explorer.targets.features.isel(sample=[view.target])
    scores = td.score(explorer.features, target, td.Trak(damping=0.1))
    where = scores.source == "web" if view.where else None
    ranked = td.top_k(scores, view.k, where=where, largest=largest).compute()
    return [int(position) for position in ranked.position.values[0]]
