"""Do intervals of effects hold? Against models of new halves, and of all data without a source.

    python tests/benchmarks/effects.py    # an hour

The rows of small tasks come from twelve made sources, which have 1 to 30 % of the samples and
prefer some classes. In three sources of `wrong`, 40 % of the labels are wrong. Scores are of ten
checkpoints of random halves, or of the first five, with the columns of `td.fit`. The truth is the
mean of eight models of all samples, less each of four models without a source ("one"), or their
mean ("mean", whose own error is added to the interval), and 75 models of 25 new halves. "Loss"
is the mean loss of all targets, by metric="loss"; "ranks" are of its twelve effects.

"Slope" is what sums of scores are multiplied by, beside what fits the retrained effects best.
"Wide" is the mean width of the 90 % intervals, relative to those of an oracle, normal with the
deviation of the true errors. "Certain" is the share of the 90 % intervals for the mean that exclude
0, and "right" how often the sign of the retrained effect is theirs.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pandas as pd
import torch
import xarray as xr
from _machine import made_once, parser_of
from _quality_tasks import N_PACKAGES, N_WORDS, SUBJECTS, Subject, perceptron, split, text
from scipy.special import ndtri, stdtrit
from scipy.stats import spearmanr
from torch import Tensor, nn

import trakdask as td
from trakdask import arrays
from trakdask.attribution.effects import left_out
from trakdask.attribution.estimators import resolve
from trakdask.attribution.operands import operands_of, solver

N_HALVES, NEW, NEW_SEEDS, FULL, SEEDS = 10, 25, 3, 8, 4
SIZES = np.array([0.01, 0.01, 0.02, 0.02, 0.04, 0.05, 0.06, 0.09, 0.10, 0.12, 0.18, 0.30])
WRONG = (5, 8, 9)


class Bag(nn.Module):
    """The mean of embedded words, and a hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(N_WORDS, 32)
        nn.init.normal_(self.words.weight, std=0.1)
        self.body = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, N_PACKAGES))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.body(self.words(tokens).mean(1))


class Filters(nn.Module):
    """Filters of three words, and the strongest answer of each."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(N_WORDS, 32)
        nn.init.normal_(self.words.weight, std=0.1)
        self.filters = nn.Conv1d(32, 48, 3)
        self.head = nn.Linear(48, N_PACKAGES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.filters(self.words(tokens).mT).relu().amax(2))


def counts() -> Any:
    """The square roots of how often each word is in a snippet."""

    def counted(part: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        rows = np.stack([np.bincount(row, minlength=N_WORDS) for row in part[0]])
        return np.sqrt(rows).astype(np.float32), part[1]

    train, targets = text()
    return counted(train), counted(targets)


def wine() -> Any:
    from sklearn.datasets import load_wine  # optional, as in trakdask.examples

    return split(*load_wine(return_X_y=True), n_target=50)


TASKS = {
    subject.name: subject
    for subject in (
        *(SUBJECTS[name] for name in ("cancer", "mlp", "early", "diabetes", "surface")),
        dataclasses.replace(SUBJECTS["mlp"], name="wrong"),
        dataclasses.replace(SUBJECTS["mlp"], name="short", epochs=5),
        Subject("bag", Bag, functools.cache(text), 12, 100),
        Subject("counts", perceptron((N_WORDS, 32, N_PACKAGES)), functools.cache(counts), 8, 100),
        Subject("filters", Filters, functools.cache(text), 12, 100),
        Subject("wine", perceptron((13, 32, 32, 3)), functools.cache(wine), 30, 100),
        dataclasses.replace(SUBJECTS["transformer"], name="text-early", epochs=6),
    )
}


def sources(labels: np.ndarray, has_wrong: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the source of each sample, and the labels."""
    rng = np.random.default_rng([7, len(labels)])
    classes = pd.qcut(labels, 5, labels=False) if labels.dtype.kind == "f" else labels
    prefers = SIZES[:, None] * rng.dirichlet(np.ones(classes.max() + 1), len(SIZES))
    source = np.array([rng.choice(12, p=prefers[:, c] / prefers[:, c].sum()) for c in classes])
    labels = labels.copy()
    if has_wrong:
        bad = np.isin(source, WRONG) & (rng.random(len(labels)) < 0.4)
        wrong = labels[bad] + rng.integers(1, labels.max() + 1, bad.sum())
        labels[bad] = wrong % (labels.max() + 1)
    return source, labels


def trained(name: str, path: Path) -> None:
    """Write features of checkpoints of halves, and outputs of models that are the truth."""
    subject = TASKS[name]
    (inputs, given), targets = subject.data()
    source, labels = sources(given, name == "wrong")
    subject = dataclasses.replace(subject, data=lambda: ((inputs, labels), targets))
    n = len(inputs)

    def outputs(mask: Any, seed: int) -> np.ndarray:
        return subject.outputs(subject.train(mask, seed))

    halves, new = (td.evaluate.subsets(n, k, seed=s).values for k, s in ((N_HALVES, 1), (NEW, 2)))
    folder = path.parent / name
    folder.mkdir(parents=True, exist_ok=True)
    checkpoints = {f"h{j}": folder / f"h{j}.pt" for j in range(N_HALVES)}
    for j, file in enumerate(checkpoints.values()):
        torch.save(subject.train(halves[j], 100 + j), file)
    truth = {
        "new": new,
        "f_new": [[outputs(m, 1000 + 10 * j + k) for k in range(NEW_SEEDS)]
                  for j, m in enumerate(new)],
        "f_full": [outputs(None, 5000 + k) for k in range(FULL)],
        "f_rem": [[outputs(source != g, 6000 + 10 * g + k) for k in range(SEEDS)]
                  for g in range(len(SIZES))],
        "source": source,
    }  # fmt: skip
    known = xr.DataArray(halves, {"checkpoint": [*checkpoints]}, ("checkpoint", "sample"))
    samples = subject.samples(0).assign_coords(trained_on=known, source=("sample", source))
    model = td.Model(subject.build, checkpoints, subject.task)
    train = td.featurize(samples, model, td.fit(samples, model, progress=False)).compute()
    asked = td.featurize(subject.samples(1), model, like=train).compute()
    (folder / "features.pkl").write_bytes(pickle.dumps((train, asked)))
    with path.open("wb") as file:
        np.savez(file, **{key: np.asarray(value) for key, value in truth.items()})


def inside(found: xr.Dataset, prefix: str, truth: np.ndarray, error: float = 0.0) -> float:
    """Return how often effects (group, ..., target) are within bounds; add the truth's error."""
    level = found.attrs["level"]
    middle, upper = (found[name].transpose("source", ...).values for name in ("effect", prefix))
    half = np.hypot(upper - middle, ndtri((1 + level) / 2) * error)
    middle, half = (x.reshape(len(x), *(1,) * (truth.ndim - 2), -1) for x in (middle, half))
    return float((abs(truth - middle) < half).mean())


def row(name: str, n: int, cache: Path) -> dict[str, Any]:
    with np.load(made_once(cache / f"{name}.npz", functools.partial(trained, name))) as file:
        new, f_new, f_full, f_rem = (file[key] for key in ("new", "f_new", "f_full", "f_rem"))
    features = pickle.loads((cache / name / "features.pkl").read_bytes())
    some = {"checkpoint": slice(n)}
    train, targets = (ds.isel(some).drop_vars("gram", errors="ignore") for ds in features)
    # 1. Sources that are left out of all data.
    sums = td.group_score(train, targets, by="source").compute()
    nine, five = (
        td.group_score(train, targets, by="source", effect=True, level=level).compute()
        for level in (0.9, 0.5)
    )
    one = f_full.mean(0) - f_rem
    mean, noise = one.mean(1), np.sqrt(f_rem.var(1, ddof=1).mean() * (1 / SEEDS + 1 / FULL))
    best = float((sums.values * mean).sum() / np.square(sums.values).sum())
    rest = np.square(mean - best * sums.values).mean() - noise**2
    oracle = np.sqrt(f_rem.var(1, ddof=1).mean() + max(rest, 0)) * ndtri(0.95)
    is_certain = (nine.mean_lower.values > 0) | (nine.mean_upper.values < 0)
    right = np.sign(nine.effect.values) == np.sign(mean)
    size = np.bincount(train.source, minlength=12) / train.sizes["sample"]
    parts = [size < 0.03, (size >= 0.03) & (size < 0.1), size >= 0.1]
    # 2. The same of a metric, the mean loss of all targets.
    loss_nine, loss_five = (
        td.group_score(train, targets, by="source", metric="loss", effect=True, level=at).compute()
        for at in (0.9, 0.5)
    )
    all_loss, rem_loss = loss_of(f_full, targets), loss_of(f_rem, targets)
    loss_one = (all_loss.mean() - rem_loss)[..., None]
    loss_mean = loss_one.mean(1)
    loss_noise = float(np.sqrt(rem_loss.var(1, ddof=1).mean() * (1 / SEEDS + 1 / FULL)))
    # 3. New halves, with the slope of halves and the errors of targets.
    t = stdtrit(n - 1, 0.95)
    sigma = ((nine.upper - nine.effect).values / t) ** 2 - (0.3 * nine.effect.values) ** 2
    is_early = "cross-entropy" in targets.attrs["loss_kind"] and targets.output.mean() < 1
    sigma = np.sqrt((sigma / (1 + (30 if is_early else 3) * size[:, None]))[0])
    scores, f = td.score(train, targets).values, targets.output.values
    knows = train.trained_on.transpose("sample", "checkpoint").values
    predicted = (new - knows.mean(1)) @ scores
    slope = slope_of(train, targets)
    miss = abs(f_new - f.mean(1) - slope * predicted[:, None])
    return {
        "task": name,
        "halves": n,
        "slope": float((nine.effect.values * sums.values).sum() / np.square(sums.values).sum()),
        "best": best,
        "90 %, one": inside(nine, "upper", one),
        "50 %, one": inside(five, "upper", one),
        **{
            f"{title}, one": inside(nine.isel(source=of), "upper", one[of])
            for title, of in zip(("< 3 %", "< 10 %", "more"), parts, strict=True)
        },
        "wide": float((nine.upper - nine.effect).mean() / oracle),
        "90 %, mean": inside(nine, "mean_upper", mean, noise),
        "50 %, mean": inside(five, "mean_upper", mean, noise),
        "certain": float(is_certain.mean()),
        "right": float(right[is_certain].mean()) if is_certain.any() else np.nan,
        "90 %, loss": inside(loss_nine, "upper", loss_one),
        "50 %, loss": inside(loss_five, "upper", loss_one),
        "90 %, mean loss": inside(loss_nine, "mean_upper", loss_mean, loss_noise),
        "ranks, loss": float(spearmanr(loss_nine.effect.values[:, 0], loss_mean[:, 0])[0]),
        "90 %, halves": float((miss < t * sigma).mean()),
        "50 %, halves": float((miss < stdtrit(n - 1, 0.75) * sigma).mean()),
    }


def loss_of(outputs: np.ndarray, targets: xr.Dataset) -> np.ndarray:
    """Return the mean loss of outputs (..., target)."""
    dims = (*"ab"[: outputs.ndim - 1], "target")
    return td.evaluate.metric(xr.DataArray(outputs, dims=dims), targets, "loss").values[..., 0]


def slope_of(train: xr.Dataset, targets: xr.Dataset) -> float:
    """Return the slope of outputs of left-out checkpoints."""
    features, asked = operands_of(train, targets)
    operands = solver(features, resolve(features, "auto"))
    predicted = left_out(operands, operands.vectors(asked))
    return float(arrays.effects.slope(predicted, asked.output.data).compute())


def kept(name: str, n: int, cache: Path) -> dict[str, Any]:
    def write(path: Path) -> None:
        path.write_text(json.dumps(row(name, n, cache)))

    return dict(json.loads(made_once(cache / f"{name}-{n}.json", write).read_text()))


def main() -> None:
    options = parser_of(
        __doc__ or "", tasks=[*TASKS], cache=Path("demo-output/effects")
    ).parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dask.config.set(scheduler="synchronous")
    rows = pd.DataFrame([kept(name, n, options.cache) for name in options.tasks for n in (10, 5)])
    table = rows.set_index(["task", "halves"])
    print(table.round(2).to_string())
    print("\nMeans over tasks")
    print(table.groupby("halves").mean().round(2).to_string())


if __name__ == "__main__":
    main()
