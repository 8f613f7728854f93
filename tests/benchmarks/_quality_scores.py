"""Scores of the quality benchmark, by the package's public interface, and how good they are."""

from __future__ import annotations

import functools
import hashlib
import json
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import dask
import numpy as np
import xarray as xr
from _machine import made_once
from _quality_subjects import SUBJECTS
from _quality_tasks import Subject, members
from _quality_truth import checkpoints, truth
from numpy.typing import NDArray

import trakdask as td
from trakdask.projection import SJLT, Projector, Rademacher

PROJECTORS: dict[str, type[Rademacher] | type[SJLT]] = {"Rademacher": Rademacher, "SJLT": SJLT}
ESTIMATORS: dict[str, Any] = {
    "trak": td.Trak(),
    "soft": td.Soft(),
    "soft a=0.5": td.Soft(power=0.5),
    "soft a=0.75": td.Soft(power=0.75),
    "Gauss-Newton": td.Soft(power=1.0),
}
#: Multiples of tr(K²)/tr(K): two decades on either side of the closed form, a quarter apart.
FACTORS = 0.03 * 10.0 ** np.linspace(-2, 2, 17)
#: The last two are completeness, with λ chosen by training rows left out and by the targets.
RULES = ("closed_form", "auto", "by targets")
DEFAULTS = (*RULES, "default")  # the last is another package's
#: What the package calls the rule that looks at the outputs, for every estimator.
AUTO = "completeness"

Floats = NDArray[np.float64]
Row = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """One set of scores, at every damping."""

    task: str
    projector: str
    proj_dim: int
    checkpoints: int
    estimator: str


def evaluate(setting: Setting, cache: Path) -> Row:
    """Score a setting and return its LDS at every λ; what the cache has is not made again."""
    subject = SUBJECTS[setting.task]
    path = cache / "rows" / f"{digest(asdict(setting), subject.digest())}.json"
    if not path.exists():
        scores, choice = score_all(*selected(setting, cache), ESTIMATORS[setting.estimator])
        keep_row(path, subject, scores, asdict(setting) | choice)
    return read_row(path)


def keep_row(path: Path, subject: Subject, scores: xr.DataArray, facts: Row) -> None:
    """Keep the LDS at every damping, and the scores at those that are compared."""
    bare = scores.drop_vars([name for name in scores.coords if name != "damping"])
    every = td.evaluate.lds(bare, *ground(subject), resamples=1).lds_mean.compute()
    best = str(every.idxmax("damping").values)
    names = {name: name for name in DEFAULTS if name in every.damping} | {"best": best}
    path.parent.mkdir(parents=True, exist_ok=True)
    compared = bare.sel(damping=list(names.values())).transpose("damping", "sample", "target")
    np.save(path.with_suffix(".npy"), compared.values.astype(np.float32))
    pairs = zip(every.damping.values, every.values, strict=True)
    by_damping = {str(damping): round(float(value), 5) for damping, value in pairs}
    row = {**facts, "best_at": best, "by_damping": by_damping, "entries": list(names)}
    made_once(path, lambda path: path.write_text(json.dumps(row)))  # last: a row is complete


def read_row(path: Path) -> Row:
    """Read what :func:`keep_row` wrote."""
    row: Row = json.loads(path.read_text())
    return row | {"scores": np.load(path.with_suffix(".npy"))}


def judge(subject: Subject, rows: list[Row], resamples: int) -> Row:
    """Give every entry of a task's rows its LDS, interval and draws; return the noise ceiling.

    All at once: draws are paired within one evaluation only.
    """
    stacked = np.concatenate([row.pop("scores") for row in rows])
    scores = xr.DataArray(stacked, dims=("entry", "sample", "target"))
    found = td.evaluate.lds(scores, *ground(subject), resamples=resamples).compute()
    number = 0
    for row in rows:
        row["at"] = {}
        for name in row.pop("entries"):
            one = found.isel(entry=number)
            row["at"][name] = {
                "lds": float(one.lds_mean),
                "interval": one.interval.values.tolist(),
                "draws": one.draws.values,
            }
            number += 1
    interval = found.ceiling_interval.values.tolist()
    return {"ceiling": {"value": float(found.ceiling_mean), "interval": interval}}


def ground(subject: Subject) -> tuple[xr.DataArray, xr.DataArray]:
    """Return which samples each model was trained on, and the outputs."""
    outputs = xr.DataArray(truth(subject), dims=("subset", "seed", "target"))
    n_train = len(subject.data()[0][0])
    drawn = np.stack([members(subset, n_train) for subset in range(len(outputs))])
    return xr.DataArray(drawn, dims=("subset", "sample")), outputs


def features(
    subject: Subject, projector: Projector, cache: Path, paths: list[Path]
) -> tuple[xr.Dataset, xr.Dataset]:
    """Return features of training samples and targets; those of the cache are not made again."""
    model = td.Model(subject.build, checkpoints=paths, task=subject.task)
    name = f"{subject.name}-{digest(projector.spec(), [path.name for path in paths])}"
    parts = []
    for part, role in enumerate(("train", "targets")):
        store = cache / "features" / f"{name}-{role}.zarr"
        lazy = td.featurize(subject.samples(part), model, projector=projector)
        parts.append(td.save(lazy, store, estimator=None, progress=False).load())
    return parts[0], parts[1]


def digest(*made_of: Any) -> str:
    """Name a file by what it is made of, and by the version that makes it."""
    text = json.dumps([td.__version__, *made_of], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def selected(setting: Setting, cache: Path) -> tuple[xr.Dataset, xr.Dataset]:
    """Return the features of a setting, in as few dimensions as they span."""
    most = max(10, setting.checkpoints)
    parts = _compacted(setting.task, setting.projector, setting.proj_dim, most, cache)
    train, targets = (part.isel(checkpoint=slice(setting.checkpoints)) for part in parts)
    return train, targets


@functools.lru_cache(maxsize=1)
def _compacted(
    task: str, projector: str, proj_dim: int, n_checkpoints: int, cache: Path
) -> tuple[xr.Dataset, xr.Dataset]:
    # A smaller Rademacher projection is a prefix of a larger one; that of an SJLT is not.
    p = max(2048, proj_dim) if projector == "Rademacher" else proj_dim
    made_by = PROJECTORS[projector](proj_dim=p, seed=0)
    paths = checkpoints(SUBJECTS[task], cache, n_checkpoints)
    parts = features(SUBJECTS[task], made_by, cache, paths)
    parts = compact(*(part.isel(proj_dim=slice(proj_dim)) for part in parts))
    return tuple(part.chunk(checkpoint=1) for part in parts)  # named once, not for every λ


def compact(train: xr.Dataset, targets: xr.Dataset) -> tuple[xr.Dataset, xr.Dataset]:
    """Turn all features into the span of their rows: the same inner products in fewer dimensions.

    Scores and λ depend on the features through inner products alone, so they stay as they are, and
    hundreds of damped solves of 2048 columns become solves of as many as there are rows.
    """
    n_train, rows = train.sizes["sample"], train.sizes["sample"] + targets.sizes["sample"]
    if rows >= train.sizes["proj_dim"]:
        return train, targets
    both = np.concatenate([train.feature.values, targets.feature.values]).astype(np.float64)
    turned = np.stack([np.linalg.qr(x.T, mode="r").T for x in np.moveaxis(both, 2, 0)], axis=2)
    return _replaced(train, turned[:n_train]), _replaced(targets, turned[n_train:])


def _replaced(ds: xr.Dataset, values: Floats) -> xr.Dataset:
    feature = ds.feature.dims, values.astype(np.float32), ds.feature.attrs
    return ds.drop_vars("feature").assign(feature=feature)


def score_all(
    train: xr.Dataset, targets: xr.Dataset, estimator: Any
) -> tuple[xr.DataArray, dict[str, Any]]:
    """Return scores (sample, target, damping), of every rule, then of every factor; and the choice.

    The choice is what the rule took for λ, and how well outputs follow totals there.
    """
    automatic = estimator.with_damping(AUTO)
    by_targets = td.damping(train, automatic, calibrate=targets)
    given: list[Any] = [0.03, AUTO, by_targets, *FACTORS.tolist()]
    with warnings.catch_warnings():
        # Of few checkpoints and of λ at an end of the grid: the choice reports both.
        warnings.simplefilter("ignore", UserWarning)
        lazy = [td.score(train, targets, estimator.with_damping(each)) for each in given]
        found = td.damping(train, automatic)
        found, *scores = dask.compute(found, *lazy)  # at once: they share the gram matrix
    choice = {
        "rho": float(found.relative),
        "peak": float(found.peak),
        "rule": str(found.rule.values),
        "curve": found.curve.values.round(4).tolist(),
    }
    names = [*RULES, *(f"{factor:.4g}" for factor in FACTORS)]
    every = xr.concat([s.drop_attrs() for s in scores], "damping")
    return every.assign_coords(damping=names), choice
