"""Small tables that answer questions to lazy attributions; nothing here knows of pages.

Each question computes what it returns and no more, by :func:`trakdask.explorer.computing.compute`:
on the active dask client, or on threads. Scores of all samples and targets never exist.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import dask.array as da
import numpy as np
import pandas as pd
import xarray as xr

import trakdask as td
from trakdask.attribution.conditions import selection
from trakdask.attribution.dampings import Damping
from trakdask.attribution.estimators import Estimator
from trakdask.attribution.groups import group_codes
from trakdask.explorer import corpus, duplicates
from trakdask.explorer.attributions import Attributions, Ready
from trakdask.explorer.computing import compute, computed
from trakdask.explorer.metadata import condition_mask, few_values, metadata, searched
from trakdask.explorer.state import View
from trakdask.variables import CHECKPOINT, SAMPLE, TARGET

__all__ = ["ROWS", "Histogram", "Questions", "TargetsPage"]

ROWS = 25
"""Rows of a page of a table."""

MOST_GROUPS = 1000
MOST_COLUMNS = 40

_BINS = 60


@dataclass(frozen=True)
class TargetsPage:
    """Some rows of the table of targets, indexed by position, and how many there are in all."""

    table: pd.DataFrame
    found: int
    total: int


@dataclass(frozen=True)
class Histogram:
    """How many values lie between neighbouring edges; one more edge than counts."""

    counts: np.ndarray
    edges: np.ndarray


class Questions:
    """Answers about features and targets.

    Parameters
    ----------
    features, targets, estimator, power, damping, calibrate, learning_rates
        As in :func:`trakdask.score`; a view may ask for another estimator and λ.
    parts
        Features of the tokens of the training samples, if words are to have scores.
    """

    def __init__(
        self,
        features: xr.Dataset,
        targets: xr.Dataset,
        *,
        estimator: Estimator = "auto",
        power: float = 0.5,
        damping: Damping = "auto",
        calibrate: xr.Dataset | None = None,
        learning_rates: Any = None,
        parts: xr.Dataset | None = None,
    ) -> None:
        self.features, self.targets, self.parts = features, targets, parts
        self._attributions = Attributions(
            features, targets,
            estimator=estimator, power=power, damping=damping, calibrate=calibrate,
            learning_rates=learning_rates,
        )  # fmt: skip
        self._influences = lru_cache(4)(corpus.self_influences)

    @cached_property
    def metadata(self) -> pd.DataFrame:
        """The coords of the training samples, by position."""
        return metadata(self.features)

    @cached_property
    def target_metadata(self) -> pd.DataFrame:
        """The coords of the targets, by position."""
        return metadata(self.targets)

    @cached_property
    def groupings(self) -> list[str]:
        """The coords of the training samples that have from 2 to 1,000 different values."""
        return few_values(self.metadata, MOST_GROUPS)

    @cached_property
    def target_groupings(self) -> list[str]:
        """The coords of the targets that have from 2 to 40 different values."""
        return few_values(self.target_metadata, MOST_COLUMNS)

    @cached_property
    def checkpoints(self) -> list[str]:
        """The names of the checkpoints."""
        return [str(name) for name in self.features[CHECKPOINT].values]

    @cached_property
    def _target_table(self) -> pd.DataFrame:
        """Metadata, output, loss and disagreement of all targets."""
        names = [name for name in ("output", "out_to_loss") if name in self.targets]
        values = compute(*(self.targets[name].data for name in names))
        table = self.target_metadata.copy()
        for name, of_checkpoints in zip(names, values, strict=True):
            mean = np.asarray(of_checkpoints, np.float64).mean(axis=1)
            table["output" if name == "output" else "loss"] = mean
            if name == "output" and of_checkpoints.shape[1] > 1:
                table["disagreement"] = np.std(of_checkpoints, axis=1, ddof=1, dtype=np.float64)
        return table

    def ready(self, view: View) -> Ready:
        """Return features and targets under the setting of a view."""
        return self._attributions.ready(view)

    def targets_page(self, view: View) -> TargetsPage:
        """Return the targets that a view searches and filters for, sorted, a page of them.

        Columns: the coords of the targets; ``output``, its mean over checkpoints; ``loss``, the
        mean of Q = ∂loss/∂output; ``disagreement``, the standard deviation of the output between
        checkpoints.
        """
        table = self._target_table
        found = searched(table, view.search)
        if view.targets_where:
            found = found[condition_mask(table, view.targets_where, SAMPLE)[found.index]]
        if view.sort in found:
            found = found.sort_values(view.sort, ascending=view.ascending, kind="stable")
        return TargetsPage(found.iloc[view.first : view.first + ROWS], len(found), len(table))

    def target(self, position: int) -> pd.Series:
        """Return what the table of targets has about one of them."""
        _require_position(position, len(self._target_table), TARGET)
        return _row(self._target_table, position)

    def top(self, view: View, *, largest: bool = True) -> pd.DataFrame:
        """Return the k training samples that helped or harmed a target most.

        Columns: ``sample``, its position; ``score``; ``spread``, the standard error of the score
        over checkpoints, NaN for one checkpoint; the coords of the sample. Fewer rows than k if the
        condition of the view selects fewer.
        """
        ready = self.ready(view)
        scores = self._scores(ready, view)
        where, n_selected = self._where(scores, view)
        if n_selected == 0:
            return self._ranked(np.empty(0, np.int64), np.empty(0), np.empty(0))
        lazy = td.top_k(scores, min(view.k, n_selected), where=where, largest=largest)
        position, score = compute(lazy["position"].data[0], lazy["score"].data[0])
        is_there = position >= 0
        position, score = position[is_there], score[is_there]
        return self._ranked(position, score, self._spread(ready, view, position))

    def words(self, view: View, position: np.ndarray) -> xr.DataArray:
        """Return the scores of the tokens of some training samples for one target.

        (sample, token), with the coord ``text``; they add up to the scores of the samples.
        """
        assert self.parts is not None
        ready = self.ready(view)
        parts = self.parts.sel({CHECKPOINT: ready.features[CHECKPOINT].values})
        of = parts.isel({SAMPLE: position})
        scores = td.score(ready.features, self._target(ready, view), of=of, **ready.options)
        return computed(scores.isel({TARGET: 0}))

    def groups(self, view: View) -> pd.DataFrame:
        """Return the sum of a target's scores by group of training samples, largest sum first.

        Columns: the coord that the view groups by; ``score``, the sum; ``samples``, how many. Only
        samples that the condition of the view selects are counted.
        """
        ready, by = self.ready(view), view.group_by
        features = ready.features
        if view.where:
            mask = self._mask(view.where)
            features = features.isel({SAMPLE: np.flatnonzero(mask)})
        if not features.sizes[SAMPLE]:
            return pd.DataFrame({by: [], "score": [], "samples": []})
        target = self._target(ready, view)
        sums = computed(td.group_score(features, target, by=by, **ready.options))
        codes, groups = group_codes(features[by].values)
        counts = np.bincount(codes[codes >= 0], minlength=len(groups))
        table = pd.DataFrame({by: groups, "score": sums.values[:, 0], "samples": counts})
        return table.sort_values("score", ascending=False, kind="stable", ignore_index=True)

    def score_histogram(self, view: View) -> Histogram:
        """Return how the scores of one target are distributed over the training samples."""
        scores = self._scores(self.ready(view), view).data[:, 0]
        low, high = compute(da.nanmin(scores), da.nanmax(scores))
        if not np.isfinite([low, high]).all():
            return Histogram(np.zeros(0, np.int64), np.zeros(1))
        edges = np.linspace(low, high if high > low else low + 1, _BINS + 1)
        (counts,) = compute(da.histogram(scores, bins=edges)[0])
        return Histogram(counts, edges)

    def damping(self, view: View) -> xr.Dataset | None:
        """Return λ and the curve it was chosen by, as :func:`trakdask.damping`, computed."""
        return self.ready(view).damping

    def targets_of(self, view: View) -> pd.DataFrame:
        """Return the targets that a training sample helped most and harmed most, best first.

        Columns: the coords of the targets, ``output``, ``loss``, ``disagreement`` and ``score``.
        At most 2 k rows.
        """
        ready = self.ready(view)
        _require_position(view.sample, ready.features.sizes[SAMPLE], SAMPLE)
        (scores,) = compute(_scores_of_sample(ready, view.sample))
        order = np.argsort(-scores, kind="stable")
        order = order[~np.isnan(scores[order])]
        ends = order if len(order) <= 2 * view.k else np.r_[order[: view.k], order[-view.k :]]
        table: pd.DataFrame = self._target_table.iloc[ends].assign(score=scores[ends])
        return table

    def sample(self, view: View) -> pd.Series:
        """Return the coords of a training sample, its output, Q and self-influence."""
        ready = self.ready(view)
        _require_position(view.sample, ready.features.sizes[SAMPLE], SAMPLE)
        one = ready.features.isel({SAMPLE: [view.sample]})
        influence, output, q = compute(
            corpus.self_influence(ready, one).data, one["output"].data, one["out_to_loss"].data
        )
        facts = {"output": output.mean(), "loss": q.mean(), "self_influence": influence[0]}
        row = _row(self.metadata, view.sample)
        whole: pd.Series[Any] = pd.concat([row, pd.Series(facts, dtype=object)])
        return whole

    def ranking(self, view: View) -> TargetsPage:
        """Return training samples by self-influence, largest first, a page of them."""
        influence = self._influences(self.ready(view))
        table = self.metadata.assign(self_influence=influence)
        if view.where:
            table = table[self._mask(view.where)]
        table = table.sort_values("self_influence", ascending=False, kind="stable")
        page = table.iloc[view.first : view.first + ROWS]
        return TargetsPage(page, len(table), len(influence))

    def influence_histogram(self, view: View) -> Histogram:
        """Return how self-influence is distributed, in bins of equal width of its logarithm."""
        values = self._influences(self.ready(view))
        positive = values[np.isfinite(values) & (values > 0)]
        if not len(positive):
            return Histogram(np.zeros(0, np.int64), np.zeros(1))
        low, high = np.log10(positive.min()), np.log10(positive.max())
        edges = np.logspace(low, high if high > low else low + 1, _BINS + 1)
        edges[0], edges[-1] = min(edges[0], positive.min()), max(edges[-1], positive.max())
        return Histogram(*np.histogram(positive, bins=edges))

    def heatmap(self, view: View, across: str = "") -> pd.DataFrame:
        """Return mean scores of groups of training samples (rows) and of targets (columns).

        An entry is the sum of the scores of the group's samples for one target, averaged over the
        targets of a group: those that share the value of the coord ``across`` of the targets. A
        cosine has no mean over targets, so under ``"grad_cos"`` columns are the first targets.
        """
        ready = self.ready(view)
        across = "" if ready.estimator.name == "grad_cos" else across
        targets, names = corpus.mean_targets(ready.targets, across)
        sums = computed(td.group_score(ready.features, targets, by=view.group_by, **ready.options))
        index = pd.Index(sums[view.group_by].values, name=view.group_by)
        return pd.DataFrame(sums.values, index=index, columns=pd.Index(names, name=across))

    def duplicates(self, view: View) -> pd.DataFrame:
        """Return training samples whose features point the same way as those of another one.

        Columns: ``group``, the number of the group of duplicates; ``sample``; their coords.
        """
        ready = self.ready(view)
        found = duplicates.duplicates(ready.features)
        table = self.metadata.iloc[found["sample"]].reset_index(drop=True)
        return pd.concat([found, table], axis=1)

    def _target(self, ready: Ready, view: View) -> xr.Dataset:
        _require_position(view.target, ready.targets.sizes[SAMPLE], TARGET)
        return ready.targets.isel({SAMPLE: [view.target]})

    def _scores(self, ready: Ready, view: View) -> xr.DataArray:
        return td.score(ready.features, self._target(ready, view), **ready.options)

    def _where(self, scores: xr.DataArray, view: View) -> tuple[Any, int]:
        """Return the condition of a view for ``top_k``, and how many samples it may select."""
        if not view.where:
            return None, scores.sizes[SAMPLE]
        where = selection(scores, view.where)
        if isinstance(where, xr.DataArray):
            return where, int(where.values.sum())
        return where, scores.sizes[SAMPLE]

    def _mask(self, where: str) -> np.ndarray:
        return condition_mask(self.metadata, where, SAMPLE)

    def _spread(self, ready: Ready, view: View, position: np.ndarray) -> np.ndarray:
        """Return the standard errors over checkpoints of the scores of some samples."""
        n = ready.features.sizes[CHECKPOINT]
        if n < 2:
            return np.full(len(position), np.nan)
        rows = ready.features.isel({SAMPLE: position})
        apart = td.score(rows, self._target(ready, view), average=False, **ready.options)
        (values,) = compute(apart.data[:, 0])
        return np.asarray(values.std(axis=1, ddof=1) / np.sqrt(n))

    def _ranked(self, position: np.ndarray, score: np.ndarray, spread: np.ndarray) -> pd.DataFrame:
        ranked = pd.DataFrame({"sample": position, "score": score, "spread": spread})
        coords = self.metadata.iloc[position].reset_index(drop=True)
        taken = [name for name in coords if name in ranked]
        return pd.concat([ranked, coords.drop(columns=taken)], axis=1)


def _scores_of_sample(ready: Ready, position: int) -> da.Array:
    """Return the scores of one training sample for all targets, (target,).

    With a gram matrix the sample's side is solved, one vector, instead of all targets'.
    """
    sample = ready.features.isel({SAMPLE: [position]})
    if not ready.estimator.has_gram:
        own: da.Array = td.score(sample, ready.targets, **ready.options).data[0]
        return own
    ones = da.ones_like(ready.targets["feature"].data[:, 0, :])
    rows = ready.targets.assign(out_to_loss=((SAMPLE, CHECKPOINT), ones))
    name = "trak" if ready.estimator.name == "relatif" else ready.estimator.name
    options = {**ready.options, "estimator": name}
    products: da.Array = td.score(ready.features, sample, of=rows, **options).data[:, 0]
    weight = ready.estimator.weights.loss_data(sample).mean(axis=1)[0]
    if ready.estimator.name == "relatif":
        sample_rows = sample.assign(out_to_loss=xr.ones_like(sample["out_to_loss"]))
        leverage = td.score(ready.features, sample, of=sample_rows, **options).data[0, 0]
        weight = da.where(weight < 0, -1.0, 1.0) / da.sqrt(leverage)
    scores: da.Array = products * weight
    return scores


def _row(table: pd.DataFrame, position: int) -> pd.Series[Any]:
    """Return a row in which integers are still integers."""
    return table.iloc[[position]].astype(object).iloc[0]


def _require_position(position: int, n: int, what: str) -> None:
    if not 0 <= position < n:
        raise ValueError(f"expected a {what} from 0 to {n - 1}, got {position}; try {what} 0")
