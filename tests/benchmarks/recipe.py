"""How much of the curvature to take out of features, and which λ then suits: without any sketch.

    python tests/benchmarks/recipe.py --cache demo-output/quality    # half an hour

On every task of the quality benchmark, with 1 and 3 checkpoints: LDS of whole gradients in the
coordinates of the curvature, scaled by (Λ + δ mean Λ)^-1/2, over λ = ρ tr(K)/n. As many components
as samples are exact; 512 are what a store of a quarter of the size would hold. Wrong classes are
left out. The constants of ``td.curvature`` and ``td.fit`` (δ, ρ, the least number of samples) were
chosen by these tables, so they are no evidence for other tasks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import xarray as xr
from _fits import ALL, arguments_of, setting
from _machine import made_once
from _quality_damping import unit_ranks
from _quality_truth import ground
from numpy.typing import NDArray

import trakdask as td
from trakdask.attribution.estimators import with_gram
from trakdask.tensors import places_of

Floats = NDArray[np.floating]
PLAIN = np.inf
DELTAS = PLAIN, 100, 30, 10, 3, 1
RHOS = 10 ** np.arange(-1, 2.76, 0.25)
COLUMNS = 512, 2000
SHORT = "early", "short"
"""Trained for a few steps: λ has to be chosen by outputs, no constant suits."""
FEW = 500
_SMALL = 1e-3  # δ of the fit from which all others are computed


def rescaled(name: str, cache: Path) -> Iterator[dict[float, tuple[xr.Dataset, xr.Dataset]]]:
    """Yield, for each checkpoint, exact features of training samples and targets for every δ.

    The gram matrix of the n samples has n eigenvectors, in whose coordinates products of training
    samples with anything equal the products of whole gradients.
    """
    _, model, parts = setting(name, cache, 3)
    for checkpoint in model.checkpoints:
        one = model.at_checkpoints([checkpoint.name])
        fit = td.curvature(parts[0], one, damping=_SMALL, leading=0)
        scale = fit.arrays["curvature_scale"][:, 0].astype(np.float64)
        mean, total = np.empty_like(scale), scale**-2
        for place in places_of(one.shapes).values():
            mean[place] = total[place].mean() / (1 + _SMALL)
        eigenvalues = np.maximum(total - _SMALL * mean, 0)
        projector = fit.then(td.Identity())
        pair = [td.featurize(samples, one, projector).compute() for samples in parts]
        x, t = (ds.feature.values[:, :, 0] for ds in pair)
        by_delta = {}
        for delta in DELTAS:
            wanted = 1 if delta == PLAIN else (eigenvalues + delta * mean) ** -0.5
            factor = (wanted / scale).astype(np.float32)
            rows = x * factor
            values, vectors = np.linalg.eigh((rows @ rows.T).astype(np.float64))
            kept = values > 1e-9 * values[-1]
            root, vectors = np.sqrt(values[kept][::-1]), vectors[:, kept][:, ::-1]
            exact = vectors * root, (t * factor) @ rows.T @ (vectors / root)
            by_delta[delta] = tuple(
                ds[["output", "out_to_loss"]].assign(
                    feature=(("sample", "proj_dim", "checkpoint"), features[:, :, None])
                )
                for ds, features in zip(pair, exact, strict=True)
            )
        yield by_delta


def curves(name: str, cache: Path) -> dict[str, list[float]]:
    """Return LDS at every ρ by δ, columns and number of checkpoints."""
    drawn, outputs = ground(ALL[name])
    masks, truth = drawn.values.astype(np.float32), unit_ranks(outputs.mean("seed").values)
    checkpoints = list(rescaled(name, cache))

    def lds(products: Floats, g: Floats) -> list[float]:
        predicted = [unit_ranks(masks @ (g[:, None] * product)) for product in products]
        return [round(float((p * truth).sum(axis=0).mean()), 4) for p in predicted]

    found = {}
    for delta in DELTAS:
        train = xr.concat([pair[delta][0].drop_vars("feature") for pair in checkpoints],
                          "checkpoint", join="override")  # fmt: skip
        for width in COLUMNS:
            pairs = [pair[delta] for pair in checkpoints]
            singles, together = [], 0
            for c, (some, targets) in enumerate(pairs):
                alone = train.isel(checkpoint=[c])
                singles.append(lds(products(some, targets, alone, width), g_of(alone)))
                together = together + products(some, targets, train, width, c)
            found[f"{delta},{width},1"] = np.mean(singles, axis=0).round(4).tolist()
            found[f"{delta},{width},3"] = lds(together, g_of(train))
    return found


def g_of(weights: xr.Dataset) -> Floats:
    ds = weights.chunk()
    return np.asarray(with_gram(ds, "auto").of_scores(ds).g(ds).compute().mean(axis=1))


def products(
    train: xr.Dataset, targets: xr.Dataset, weights: xr.Dataset, width: int, c: int = 0
) -> Floats:
    """Return φ(z)ᵀ(K + λI)⁻¹φ(t) for every ρ, (ρ, z, t)."""
    x, t = (ds.feature.values[:, :width, 0].astype(np.float64) for ds in (train, targets))
    h = with_gram(weights.chunk(), "auto").of_sums().h(weights.chunk())
    h = np.ones(len(x)) if h is None else h.compute()[:, c]
    values, vectors = np.linalg.eigh((h[:, None] * x).T @ x)
    lam = RHOS * values.mean() * len(values) / len(x)
    a, b = x @ vectors, t @ vectors
    return np.stack([((a / (values + one)) @ b.T).astype(np.float32) for one in lam])


def print_best(rows: dict[str, dict[str, list[float]]], n: int, width: int) -> None:
    print(f"\n{n} checkpoint{'s' * (n > 1)}, {width} columns: LDS at the best ρ, and that ρ")
    cells = {
        task: [f"{max(row[key]):.3f} ({RHOS[np.argmax(row[key])]:.2g})"
               for key in (f"{d},{width},{n}" for d in DELTAS)]
        for task, row in rows.items()
    }  # fmt: skip
    titles = [f"δ = {d}" if d != PLAIN else "plain" for d in DELTAS]
    print(pd.DataFrame(cells, titles).T.to_string())


def print_constants(rows: dict[str, dict[str, list[float]]], n_samples: dict[str, int]) -> None:
    """Print what constants lose against the best δ and ρ of each task, exact features."""
    counted = [t for t in rows if t not in SHORT and n_samples[t] >= FEW]
    best = {
        (t, n): max(max(rows[t][f"{d},2000,{n}"]) for d in DELTAS) for t in rows for n in (1, 3)
    }
    table = []
    for delta in DELTAS:
        for i, rho in enumerate(RHOS):
            lost = {(t, n): best[t, n] - rows[t][f"{delta},2000,{n}"][i]
                    for t in counted for n in (1, 3)}  # fmt: skip
            worst = max(lost, key=lambda key: lost[key])
            table.append(
                (delta, round(rho, 2), np.mean(list(lost.values())), lost[worst], worst[0])
            )
    frame = pd.DataFrame(table, columns=["δ", "ρ", "mean", "worst", "of"])
    print(
        f"\nLDS lost by constants, {len(counted)} tasks trained to the end, {FEW} samples or more"
    )
    print(
        frame.sort_values("mean").groupby("δ", sort=False).head(2).round(4).to_string(index=False)
    )
    print(f"\nTasks of fewer than {FEW} samples: best LDS with δ = 10 less that of plain features")
    for task in (t for t in rows if n_samples[t] < FEW):
        gains = [
            max(rows[task][f"10,2000,{n}"]) - max(rows[task][f"{PLAIN},2000,{n}"]) for n in (1, 3)
        ]
        print(f"{task} (n = {n_samples[task]}): {gains[0]:.3f}, {gains[1]:.3f}")


def main() -> None:
    arguments = arguments_of(__doc__)

    def row(name: str) -> dict[str, list[float]]:
        path = arguments.cache / "recipe" / f"{name}-{ALL[name].digest()}.json"
        write = lambda path: path.write_text(json.dumps(curves(name, arguments.cache)))  # noqa: E731
        made_once(path, write)
        found: dict[str, list[float]] = json.loads(path.read_text())
        return found

    rows = {name: row(name) for name in arguments.tasks}
    for n in (1, 3):
        for width in COLUMNS[::-1]:
            print_best(rows, n, width)
    print_constants(rows, {name: len(ALL[name].data()[0][0]) for name in rows})


if __name__ == "__main__":
    main()
