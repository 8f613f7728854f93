"""Small tables that answer questions to lazy attributions; nothing here knows of pages.

Each question computes what it returns and no more, by :func:`trakdask.explorer.computing.compute`:
on the active dask client, or on threads. Scores of all samples and targets never exist.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import dask.array as da
import numpy as np
import pandas as pd
import xarray as xr

import trakdask as td
from trakdask import arrays
from trakdask.attribution.conditions import Condition, selection
from trakdask.attribution.estimators import (
    DEFAULT_POWER,
    Damping,
    Estimator,
    Power,
    gather_options,
)
from trakdask.attribution.groups import group_codes
from trakdask.attribution.scores import solver
from trakdask.explorer import corpus, duplicates
from trakdask.explorer.attributions import Attributions, Ready
from trakdask.explorer.computing import compute, computed
from trakdask.explorer.metadata import condition_mask, few_values, metadata
from trakdask.explorer.state import View
from trakdask.explorer.target_table import ROWS, TablePage, TargetTable, require_position, row_of
from trakdask.variables import CHECKPOINT, SAMPLE, TARGET, lazy_features

__all__ = ["Histogram", "Questions", "Words"]

MOST_GROUPS = 1000

_BINS = 60
_ROWS_KEPT = 2
"""Of how many targets the scores of all training samples are kept: 8 bytes of each sample."""


Words = Callable[..., xr.DataArray]

_WITHOUT_WORDS = ("grad_cos", "relatif")
"""Estimators whose scores need norms of whole samples."""


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
    words
        Returns the scores of tokens, given features, a target, positions of training samples and
        the options of a score; None if words are to have none.
    """

    def __init__(
        self,
        features: xr.Dataset,
        targets: xr.Dataset,
        *,
        estimator: Estimator = "auto",
        power: Power = DEFAULT_POWER,
        damping: Damping = "auto",
        calibrate: xr.Dataset | None = None,
        learning_rates: Any = None,
        words: Words | None = None,
    ) -> None:
        self.features, self._words = features, words
        self.targets = TargetTable(targets)
        self._attributions = Attributions(
            features,
            estimator=estimator, power=power, damping=damping, calibrate=calibrate,
            learning_rates=learning_rates,
        )  # fmt: skip
        self._scores = lru_cache(_ROWS_KEPT)(self._scored)
        self._influences = lru_cache(4)(corpus.self_influences)
        self._duplicates = lru_cache(4)(self._found_duplicates)

    def with_targets(self, targets: xr.Dataset) -> Questions:
        """Return the same questions to other targets; what is known of training samples is kept."""
        other = copy.copy(self)
        other.targets = TargetTable(targets)
        other._scores = lru_cache(_ROWS_KEPT)(other._scored)
        return other

    @cached_property
    def metadata(self) -> pd.DataFrame:
        """The coords of the training samples, by position."""
        return metadata(self.features)

    @cached_property
    def groupings(self) -> list[str]:
        """The coords of the training samples that have from 2 to 1,000 different values."""
        return few_values(self.metadata, MOST_GROUPS)

    @cached_property
    def checkpoints(self) -> list[str]:
        """The names of the checkpoints."""
        return [str(name) for name in self.features[CHECKPOINT].values]

    def ready(self, view: View) -> Ready:
        """Return features and targets under the setting of a view."""
        return self._attributions.ready(view)

    def top(self, view: View, *, largest: bool = True) -> pd.DataFrame:
        """Return the k training samples that helped or harmed a target most.

        Columns: ``sample``, its position; ``score``; ``spread``, the standard error of the score
        over checkpoints, NaN for one checkpoint; the coords of the sample. Fewer rows than k if the
        condition of the view selects fewer.
        """
        scores, spread = self._scores(self.ready(view), view.target)
        mask = _selected(scores, view.where)
        n_selected = int(mask.sum())
        if n_selected == 0:
            return self._ranked(np.empty(0, np.int64), np.empty(0), np.empty(0))
        lazy = td.top_k(scores, min(view.k, n_selected), where=mask, largest=largest)
        position, score = compute(lazy["position"].data[0], lazy["score"].data[0])
        is_there = position >= 0
        position, score = position[is_there], score[is_there]
        return self._ranked(position, score, spread[position])

    def words(self, view: View, position: np.ndarray) -> xr.DataArray:
        """Return the scores of the tokens of some training samples for one target.

        (sample, token), with the coord ``text``; they add up to the scores of the samples.
        """
        assert self._words is not None
        ready = self.ready(view)
        target = self._target(ready, view.target)
        scores = self._words(ready.features, target, position, **ready.options)
        return computed(scores.isel({TARGET: 0}))

    def has_words(self, view: View) -> bool:
        """Return whether words have scores under the estimator of a view."""
        return self._words is not None and self.ready(view).estimator.name not in _WITHOUT_WORDS

    def groups(self, view: View) -> pd.DataFrame:
        """Return the sum of a target's scores by group of training samples, largest sum first.

        Columns: the coord that the view groups by; ``score``, the sum; ``samples``, how many. Only
        samples that the condition of the view selects are counted.
        """
        by = view.group_by
        scores, _ = self._scores(self.ready(view), view.target)
        codes, groups = group_codes(np.asarray(self.features[by].values))
        codes = np.where(_selected(scores, view.where), codes, -1)
        is_counted = codes >= 0
        row = np.nan_to_num(scores.values[is_counted, 0].astype(np.float64))
        sums = np.bincount(codes[is_counted], row, minlength=len(groups))
        counts = np.bincount(codes[is_counted], minlength=len(groups))
        table = pd.DataFrame({by: groups, "score": sums, "samples": counts})[counts > 0]
        return table.sort_values("score", ascending=False, kind="stable", ignore_index=True)

    def score_histogram(self, view: View) -> Histogram:
        """Return how the scores of one target are distributed over the training samples."""
        scores, _ = self._scores(self.ready(view), view.target)
        row = scores.values[:, 0]
        row = row[np.isfinite(row)]
        if not len(row):
            return Histogram(np.zeros(0, np.int64), np.zeros(1))
        low, high = row.min(), row.max()
        return Histogram(*np.histogram(row, np.linspace(low, _above(low, high), _BINS + 1)))

    def damping(self, view: View) -> xr.Dataset | None:
        """Return λ and the curve it was chosen by, as :func:`trakdask.damping`, computed."""
        return self.ready(view).damping

    def targets_of(self, view: View) -> pd.DataFrame:
        """Return the targets that a training sample helped most and harmed most, best first.

        Columns: the coords of the targets, ``output``, ``loss``, ``disagreement`` and ``score``.
        At most 2 k rows.
        """
        ready = self.ready(view)
        require_position(view.sample, ready.features.sizes[SAMPLE], SAMPLE)
        targets = self.targets.of(ready.features[CHECKPOINT].values)
        (scores,) = compute(_scores_of_sample(ready, targets, view.sample))
        order = np.argsort(-scores, kind="stable")
        order = order[~np.isnan(scores[order])]
        ends = order if len(order) <= 2 * view.k else np.r_[order[: view.k], order[-view.k :]]
        table: pd.DataFrame = self.targets.whole.iloc[ends].assign(score=scores[ends])
        return table

    def sample(self, view: View) -> pd.Series:
        """Return the coords of a training sample, its output, Q and self-influence."""
        ready = self.ready(view)
        require_position(view.sample, ready.features.sizes[SAMPLE], SAMPLE)
        one = ready.features.isel({SAMPLE: [view.sample]})
        influence, output, q = compute(
            corpus.self_influence(ready, one).data, one["output"].data, one["out_to_loss"].data
        )
        facts = {"output": output.mean(), "loss": q.mean(), "self_influence": influence[0]}
        row = row_of(self.metadata, view.sample)
        whole: pd.Series[Any] = pd.concat([row, pd.Series(facts, dtype=object)])
        return whole

    def ranking(self, view: View) -> TablePage:
        """Return training samples by self-influence, largest first, a page of them."""
        influence = self._influences(self.ready(view))
        table = self.metadata.assign(self_influence=influence)
        if view.where:
            table = table[self._mask(view.where)]
        table = table.sort_values("self_influence", ascending=False, kind="stable")
        page = table.iloc[view.first : view.first + ROWS]
        return TablePage(page, len(table), len(influence))

    def influence_histogram(self, view: View) -> Histogram:
        """Return how self-influence is distributed, in bins of equal width of its logarithm."""
        values = self._influences(self.ready(view))
        positive = values[np.isfinite(values) & (values > 0)]
        if not len(positive):
            return Histogram(np.zeros(0, np.int64), np.zeros(1))
        low, high = np.log10(positive.min()), np.log10(positive.max())
        edges = np.logspace(low, _above(low, high), _BINS + 1)
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
        of = self.targets.of(ready.features[CHECKPOINT].values)
        targets, names = corpus.mean_targets(of, across)
        sums = computed(td.group_score(ready.features, targets, by=view.group_by, **ready.options))
        index = pd.Index(sums[view.group_by].values, name=view.group_by)
        return pd.DataFrame(sums.values, index=index, columns=pd.Index(names, name=across))

    def duplicates(self, view: View) -> pd.DataFrame:
        """Return training samples whose features point the same way as those of another one.

        Columns: ``group``, the number of the group of duplicates; ``sample``; their coords.
        """
        found = self._duplicates(str(self.ready(view).features[CHECKPOINT].values[0]))
        table = self.metadata.iloc[found["sample"]].reset_index(drop=True)
        return pd.concat([found, table], axis=1)

    def _found_duplicates(self, checkpoint: str) -> pd.DataFrame:
        return duplicates.duplicates(lazy_features(self.features.sel({CHECKPOINT: [checkpoint]})))

    def _target(self, ready: Ready, position: int) -> xr.Dataset:
        return self.targets.one(position, ready.features[CHECKPOINT].values)

    def _scored(self, ready: Ready, position: int) -> tuple[xr.DataArray, np.ndarray]:
        """Return the scores (sample, target) of one target, in memory but chunked as they were.

        And their standard errors over checkpoints (sample,), NaN for one checkpoint. All that the
        page of a target shows is taken from one such row.
        """
        target = self._target(ready, position)
        apart = td.score(ready.features, target, average=False, **ready.options)
        (values,) = compute(apart.data[:, 0])
        scores = td.score(ready.features, target, **ready.options)
        mean = values.mean(axis=1, dtype=np.float64).astype(scores.dtype)
        kept = da.from_array(mean[:, None], chunks=scores.chunks)
        n = values.shape[1]
        if n < 2:
            return scores.copy(data=kept), np.full(len(values), np.nan, np.float32)
        return scores.copy(data=kept), values.std(axis=1, ddof=1) / np.float32(np.sqrt(n))

    def _mask(self, where: str) -> np.ndarray:
        return condition_mask(self.metadata, where, SAMPLE)

    def _ranked(self, position: np.ndarray, score: np.ndarray, spread: np.ndarray) -> pd.DataFrame:
        ranked = pd.DataFrame({"sample": position, "score": score, "spread": spread})
        coords = self.metadata.iloc[position].reset_index(drop=True)
        taken = [name for name in coords if name in ranked]
        return pd.concat([ranked, coords.drop(columns=taken)], axis=1)


def _selected(scores: xr.DataArray, where: str) -> np.ndarray:
    """Return which training samples meet a condition, for the only target of the scores."""
    if not where:
        return np.ones(scores.sizes[SAMPLE], bool)
    mask = selection(scores, where)
    if isinstance(mask, Condition):
        mask = mask(_with_positions(scores)).isel({TARGET: 0}, missing_dims="ignore")
    return np.asarray(mask.values)


def _with_positions(scores: xr.DataArray) -> xr.Dataset:
    """Return the coords of scores, with positions where there are no labels."""
    coords = scores.coords.to_dataset()
    missing = [dim for dim in (SAMPLE, TARGET) if dim not in coords.coords]
    return coords.assign_coords({dim: np.arange(scores.sizes[dim]) for dim in missing})


def _above(low: float, high: float) -> float:
    """Return an upper end of a range that is not empty."""
    return high if high > low else low + 1


def _scores_of_sample(ready: Ready, targets: xr.Dataset, position: int) -> da.Array:
    """Return the scores of one training sample for all targets, (target,).

    With a gram matrix the sample's side is solved, one vector, instead of all targets'.
    """
    sample = ready.features.isel({SAMPLE: [position]})
    if not ready.estimator.has_gram:
        own: da.Array = td.score(sample, targets, **ready.options).data[0]
        return own
    options = ready.options
    gathered = gather_options(
        ready.features, options["estimator"], options["power"], options["damping"], None, None
    )
    made = solver(lazy_features(ready.features), gathered)
    rows, one = lazy_features(targets), lazy_features(sample)
    products = arrays.score.score(rows["feature"].data, made.vectors(one), None)[:, 0]
    scores: da.Array = products * made.weight(one).mean(axis=1)[0]
    return scores
