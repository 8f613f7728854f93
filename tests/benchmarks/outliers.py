"""Rows with huge gradients: what they do to scores, and what helps.

python tests/benchmarks/outliers.py --cache demo-output/quality

Five training samples get gradients that are 10 or 100 times as large, or inputs that are 100 times
as large. The ground truth knows nothing of it, so LDS should stay as it was. A cap c scales the
features of a row down to c times the median norm of its checkpoint. "dropped" leaves out the rows
whose norm is above 30 medians, whose scores are then 0. In the end nothing is planted, and the cap
is to do no harm.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from _fits import ALL, arguments_of, print_gains, setting
from _machine import made_once
from _quality_truth import ground

import trakdask as td

PROJECTOR = td.SJLT(proj_dim=1024)
N_CHECKPOINTS, N_PLANTED, LIMIT = 3, 5, 30
CAPS = (3, 5, 10)
PLANTED = ("mlp", "cnn", "transformer", "cancer", "diabetes", "language")


def scaled(features: xr.Dataset, factor: xr.DataArray) -> xr.Dataset:
    """Return features whose rows are multiplied by a factor."""
    feature = (features.feature * factor).astype("f4").transpose(*features.feature.dims)
    return features.assign(feature=feature)


def norms(features: xr.Dataset) -> xr.DataArray:
    """Return the norm of each row in units of the median of its checkpoint."""
    norm = np.sqrt((features.feature**2).sum("proj_dim"))
    return norm / norm.median("sample")


def capped(features: xr.Dataset, cap: float) -> xr.Dataset:
    """Return features whose norms are at most ``cap`` times the median of their checkpoint."""
    return scaled(features, np.minimum(1, cap / norms(features)))


def lds(subject: Any, features: xr.Dataset, targets: xr.Dataset) -> float:
    """Return the LDS of features; samples that were left out have scores of 0."""
    masks, outputs = ground(subject)
    kept, scores = features.row.values, np.zeros((masks.sizes["sample"], targets.sizes["sample"]))
    scores[kept] = td.score(features, targets)
    result = td.evaluate.lds(xr.DataArray(scores, dims=("sample", "target")), masks, outputs)
    return float(result.lds_mean.compute())


def planted(samples: xr.Dataset, by: float) -> xr.DataArray:
    """Return the factor of each training sample: 1 for all but the planted ones."""
    factor = np.ones(samples.sizes["sample"])
    factor[np.random.default_rng(0).permutation(len(factor))[:N_PLANTED]] = by
    return xr.DataArray(factor, dims="sample")


def measure(name: str, cache: Path) -> dict[str, float]:
    subject, model, (samples, queries) = setting(name, cache, N_CHECKPOINTS)
    samples = samples.assign_coords(row=("sample", np.arange(samples.sizes["sample"])))
    train, targets = (td.featurize(s, model, PROJECTOR).compute() for s in (samples, queries))
    row = {"largest norm": float(norms(train).max()), "clean": lds(subject, train, targets)}
    row |= {f"clean, cap {cap}": lds(subject, capped(train, cap), targets) for cap in CAPS}
    if name not in PLANTED:
        return row
    sets = {f"gradients x {by}": scaled(train, planted(train, by)) for by in (10, 100)}
    inputs = samples[next(iter(samples.data_vars))]
    if inputs.dtype.kind == "f":
        large = (inputs * planted(samples, 100)).astype("f4")
        changed = samples.assign({inputs.name: large}).assign_attrs(source="changed")
        sets["inputs x 100"] = td.featurize(changed, model, PROJECTOR).compute()
    for planting, features in sets.items():
        row[planting] = lds(subject, features, targets)
        is_regular = (norms(features) <= LIMIT).all("checkpoint")
        row[f"{planting}, left out"] = float((~is_regular).sum())
        row[f"{planting}, dropped"] = lds(subject, features.isel(sample=is_regular), targets)
        for cap in CAPS:
            row[f"{planting}, cap {cap}"] = lds(subject, capped(features, cap), targets)
    return row


def main() -> None:
    options = arguments_of(__doc__, ALL)
    rows = {}
    for name in options.tasks:
        file = made_once(
            options.cache / "outliers" / f"{name}.json",
            lambda path, name=name: pd.Series(measure(name, options.cache)).to_json(path),
        )
        rows[name] = pd.read_json(file, typ="series")
    frame = pd.DataFrame(rows).T
    for planting in ("gradients x 10", "gradients x 100", "inputs x 100"):
        ways = ("left out", "dropped", *(f"cap {cap}" for cap in CAPS))
        columns = ["clean", planting, *(f"{planting}, {way}" for way in ways)]
        shown = frame.reindex(columns=columns).dropna()
        shown.columns = ["clean", "planted", *ways]
        print(f"\nLDS, {planting} for {N_PLANTED} samples, {N_CHECKPOINTS} checkpoints")
        print(shown.round(3).to_string())
    print("\nNothing planted: the largest norm in units of the median, and the gain of LDS")
    gains = pd.DataFrame({
        "largest norm": frame["largest norm"],
        **{f"cap {cap}": frame[f"clean, cap {cap}"] - frame["clean"] for cap in CAPS},
    })  # fmt: skip
    print(gains.round(3).to_string())
    for cap in CAPS:
        print(f"cap {cap}: ", end="")
        print_gains(gains[f"cap {cap}"])


if __name__ == "__main__":
    main()
