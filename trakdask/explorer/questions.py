"""Small tables that answer questions to lazy attributions; nothing here knows of pages.

Each question computes what it returns and no more, by :func:`trakdask.explorer.computing.compute`:
on the active dask client, or on threads. Scores of all samples and targets never exist.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import dask.array as da
import numpy as np
import pandas as pd
import xarray as xr

import trakdask as td
from trakdask import arrays
from trakdask.attribution.conditions import Condition, selection
from trakdask.attribution.estimators import gather_options
from trakdask.attribution.groups import group_codes
from trakdask.attribution.scores import solver
from trakdask.explorer import tables
from trakdask.explorer.computing import compute
from trakdask.explorer.duplicates import duplicates
from trakdask.explorer.prepared import Preparation, Prepared
from trakdask.explorer.view import View
from trakdask.variables import CHECKPOINT, PROJ_DIM, SAMPLE, TARGET, lazy_features

__all__ = ["Histogram", "Questions", "Words"]

_MOST_GROUPS = 1000
_MOST_TARGETS = 25
"""How many targets are columns where they have no groups."""

_BINS = 30
_DIGITS = 6
"""Of the edges of bins."""

_ROWS_KEPT = 2
"""Of how many targets the scores of all training samples are kept: 8 bytes of each sample."""

Words = Callable[..., xr.DataArray]

_WITHOUT_WORDS = ("grad_cos", "relatif")
"""Estimators whose scores need norms of whole samples."""

_OWN_ESTIMATOR = {"relatif": "trak", "grad_cos": "grad_dot", "tracin": "grad_dot"}
"""Estimators without a self-influence of their own, and whose is taken."""


@dataclass(frozen=True)
class Histogram:
    """How many values lie between neighbouring edges; one more edge than counts.

    Edges have few digits, so that a condition can name them. A bin has its lower edge.
    """

    counts: np.ndarray
    edges: np.ndarray

    @property
    def heights(self) -> np.ndarray:
        """Logarithms of the counts."""
        return np.asarray(np.log1p(self.counts))

    def conditions(self, name: str) -> list[str]:
        """Return for each bin the condition that a column of this name is in it."""
        texts = [f"{edge:.{_DIGITS}g}" for edge in self.edges]
        return [f"{name} >= {low} and {name} < {high}" for low, high in pairwise(texts)]


class Questions:
    """Answers about features and targets.

    Parameters
    ----------
    features, targets
        As in :func:`trakdask.score`.
    words
        Returns the scores of tokens, given features, a target, positions of training samples and
        the options of a score; None if words are to have none.
    classifier
        Says what the model predicts; None if it is not at hand, or no classifier.
    **options
        ``estimator``, ``power``, ``damping``, ``calibrate`` and ``learning_rates``, as in
        :func:`trakdask.score`; a view may ask for another estimator and λ.
    """

    def __init__(
        self,
        features: xr.Dataset,
        targets: xr.Dataset,
        *,
        words: Words | None = None,
        classifier: tables.Classifier | None = None,
        **options: Any,
    ) -> None:
        self.features, self._words, self._classifier = features, words, classifier
        self.targets = tables.TargetTable(targets, features, classifier)
        self.preparation = Preparation(features, **options)
        self._scores = lru_cache(_ROWS_KEPT)(self._scored)
        self._influences = lru_cache(4)(_self_influences)
        self._duplicates = lru_cache(4)(self._find_duplicates)

    def with_targets(self, targets: xr.Dataset) -> Questions:
        """Return the same questions to other targets; what is known of training samples is kept."""
        other = copy.copy(self)
        other.targets = tables.TargetTable(targets, self.features, self._classifier)
        other._scores = lru_cache(_ROWS_KEPT)(other._scored)
        return other

    @cached_property
    def metadata(self) -> pd.DataFrame:
        """The coords of the training samples, by position."""
        return tables.metadata(self.features)

    @cached_property
    def groupings(self) -> list[str]:
        """The coords of the training samples that have from 2 to 1,000 different values."""
        return tables.few_values(self.metadata, _MOST_GROUPS)

    @cached_property
    def checkpoints(self) -> list[str]:
        """The names of the checkpoints."""
        return [str(name) for name in self.features[CHECKPOINT].values]

    def prepared(self, view: View) -> Prepared:
        """Return the features under the setting of a view."""
        return self.preparation.of(view)

    def condition_error(self, view: View) -> tables.ConditionError | None:
        """Return why the condition of a page cannot be evaluated; None if it can.

        Looks at one training sample or target, and at both on the page of a target.
        """
        try:
            if view.page == "targets" and view.targets_where:
                tables.condition_mask(self.targets.whole[:1], view.targets_where)
            elif view.page == "target" and view.where:
                one = self.features.isel({SAMPLE: slice(1)})
                target = self.targets.one(view.target, self.features[CHECKPOINT].values)
                _selected(td.score(one, target, estimator="grad_dot"), view.where)
            elif view.where:
                first = self.metadata[:1].assign(self_influence=0.0)
                tables.condition_mask(first, view.where)
        except tables.ConditionError as err:
            return err
        return None

    def top(self, view: View, *, largest: bool = True) -> pd.DataFrame:
        """Return the k training samples that helped or harmed a target most.

        Columns: ``sample``, its position; ``score``; ``spread``, the standard error of the score
        over checkpoints, NaN for one checkpoint; the coords of the sample. Fewer rows than k if the
        condition of the view selects fewer.
        """
        scores, spread = self._scores(self.prepared(view), view.target)
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
        prepared = self.prepared(view)
        target = self._target(prepared, view.target)
        lazy = self._words(prepared.features, target, position, **prepared.options)
        scores: xr.DataArray
        (scores,) = compute(lazy.isel({TARGET: 0}))
        return scores

    def has_words(self, view: View) -> bool:
        """Return whether words have scores under the estimator of a view."""
        estimator = view.estimator or self.preparation.estimator
        return self._words is not None and estimator not in _WITHOUT_WORDS

    def groups(self, view: View) -> pd.DataFrame:
        """Return the sum of a target's scores by group of training samples, largest sum first.

        Columns: the coord that the view groups by; ``score``, the sum; ``samples``, how many. Only
        samples that the condition of the view selects are counted.
        """
        by = view.group_by
        scores, _ = self._scores(self.prepared(view), view.target)
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
        row = self.scores(view)
        return _histogram(row[np.isfinite(row)], np.linspace)

    def scores(self, view: View) -> np.ndarray:
        """Return the scores of all training samples for a target, (sample,)."""
        return np.asarray(self._scores(self.prepared(view), view.target)[0].values[:, 0])

    def damping(self, view: View) -> xr.Dataset | None:
        """Return λ and the curve it was chosen by, as :func:`trakdask.damping`, computed."""
        return self.prepared(view).damping

    def targets_of(self, view: View) -> pd.DataFrame:
        """Return the targets that a training sample helped most and harmed most, best first.

        Columns: the coords of the targets, ``output``, ``loss``, ``disagreement`` and ``score``.
        At most 2 k rows.
        """
        prepared = self.prepared(view)
        tables.require_position(view.sample, prepared.features.sizes[SAMPLE], "training sample")
        targets = self.targets.of(prepared.features[CHECKPOINT].values)
        (scores,) = compute(_scores_of_sample(prepared, targets, view.sample))
        order = np.argsort(-scores, kind="stable")
        order = order[~np.isnan(scores[order])]
        ends = order if len(order) <= 2 * view.k else np.r_[order[: view.k], order[-view.k :]]
        table: pd.DataFrame = self.targets.whole.iloc[ends].assign(score=scores[ends])
        return table

    def sample(self, view: View) -> pd.Series:
        """Return the coords of a training sample, its output, Q and self-influence."""
        prepared = self.prepared(view)
        tables.require_position(view.sample, prepared.features.sizes[SAMPLE], "training sample")
        one = prepared.features.isel({SAMPLE: [view.sample]})
        influence, output, q = compute(
            _self_influence(prepared, one).data, one["output"].data, one["out_to_loss"].data
        )
        facts = {"output": output.mean(), "loss": q.mean(), "self_influence": influence[0]}
        row = tables.row_of(self.metadata, view.sample)
        whole: pd.Series[Any] = pd.concat([row, pd.Series(facts, dtype=object)])
        return whole

    def ranking(self, view: View) -> tables.TablePage:
        """Return training samples by self-influence, largest first, a page of them."""
        table = self.metadata.assign(self_influence=self.influences(view))
        table = table.iloc[self.selected(view)]
        table = table.sort_values("self_influence", ascending=False, kind="stable")
        page = table.iloc[view.first : view.first + tables.ROWS]
        return tables.TablePage(page, len(table))

    def selected(self, view: View) -> np.ndarray:
        """Return the positions of the training samples that meet the condition of a view.

        It may name ``self_influence``.
        """
        if not view.where:
            return np.arange(len(self.metadata))
        return np.flatnonzero(tables.condition_mask(self._table(view), view.where))

    def facets(self, view: View) -> list[tables.Facet]:
        """Return how many training samples, of those that a view selects, have which metadata."""
        names = [n for n in self.groupings if 2 * self.metadata[n].nunique() <= len(self.metadata)]
        return tables.facets(self._table(view), names, view.where)

    def _table(self, view: View) -> pd.DataFrame:
        """Return the columns that a condition on all training samples may name."""
        if "self_influence" not in view.where:
            return self.metadata
        return self.metadata.assign(self_influence=self.influences(view))

    def influence_histogram(self, view: View) -> Histogram:
        """Return how self-influence is distributed, in bins of equal width of its logarithm."""
        values = self.influences(view)
        return _histogram(values[np.isfinite(values) & (values > 0)], np.geomspace)

    def influences(self, view: View) -> np.ndarray:
        """Return the self-influence of every training sample, (sample,)."""
        return self._influences(self.prepared(view))

    def heatmap(self, view: View, across: str = "") -> pd.DataFrame:
        """Return mean scores of groups of training samples (rows) and of targets (columns).

        An entry is the sum of the scores of the group's samples for one target, averaged over the
        targets of a group: those that share the value of the coord ``across`` of the targets. A
        cosine has no mean over targets, so under ``"grad_cos"`` columns are the first targets.
        """
        prepared = self.prepared(view)
        across = "" if prepared.estimator.estimator == "grad_cos" else across
        of = self.targets.of(prepared.features[CHECKPOINT].values)
        targets, names = _mean_targets(of, across)
        lazy = td.group_score(prepared.features, targets, by=view.group_by, **prepared.options)
        (sums,) = compute(lazy)
        index = pd.Index(sums[view.group_by].values, name=view.group_by)
        return pd.DataFrame(sums.values, index=index, columns=pd.Index(names, name=across))

    def duplicates(self, view: View) -> pd.DataFrame:
        """Return training samples whose features point the same way as those of another one.

        Columns: ``group``, the number of the group of duplicates, and ``sample``.
        """
        chosen = [name for name in self.checkpoints if name in view.checkpoints]
        return self._duplicates((chosen or self.checkpoints)[0])

    def _find_duplicates(self, checkpoint: str) -> pd.DataFrame:
        return duplicates(lazy_features(self.features.sel({CHECKPOINT: [checkpoint]})))

    def _target(self, prepared: Prepared, position: int) -> xr.Dataset:
        return self.targets.one(position, prepared.features[CHECKPOINT].values)

    def _scored(self, prepared: Prepared, position: int) -> tuple[xr.DataArray, np.ndarray]:
        """Return the scores (sample, target) of one target, in memory but chunked as they were.

        And their standard errors over checkpoints (sample,), NaN for one checkpoint. All that the
        page of a target shows is taken from one such row.
        """
        target = self._target(prepared, position)
        apart = td.score(prepared.features, target, average=False, **prepared.options)
        (values,) = compute(apart.data[:, 0])
        scores = td.score(prepared.features, target, **prepared.options)
        mean = values.mean(axis=1, dtype=np.float64).astype(scores.dtype)
        kept = da.from_array(mean[:, None], chunks=scores.chunks)
        n = values.shape[1]
        if n < 2:
            return scores.copy(data=kept), np.full(len(values), np.nan, np.float32)
        return scores.copy(data=kept), values.std(axis=1, ddof=1) / np.float32(np.sqrt(n))

    def _ranked(self, position: np.ndarray, score: np.ndarray, spread: np.ndarray) -> pd.DataFrame:
        ranked = pd.DataFrame({"sample": position, "score": score, "spread": spread})
        coords = self.metadata.iloc[position].reset_index(drop=True)
        taken = [name for name in coords if name in ranked]
        return pd.concat([ranked, coords.drop(columns=taken)], axis=1)


def _selected(scores: xr.DataArray, where: str) -> np.ndarray:
    """Return which training samples meet a condition, for the only target of the scores.

    It may name ``score``.
    """
    if not where:
        return np.ones(scores.sizes[SAMPLE], bool)
    if "score" in where and "score" not in scores.coords:
        scores = scores.assign_coords(score=(scores.dims, scores.values))
    try:
        mask = selection(scores, where)
        if isinstance(mask, Condition):
            mask = mask(_with_positions(scores)).isel({TARGET: 0}, missing_dims="ignore")
    except ValueError as err:
        raise tables.ConditionError(str(err)) from err
    return np.asarray(mask.values)


def _with_positions(scores: xr.DataArray) -> xr.Dataset:
    """Return the coords of scores, with positions where there are no labels."""
    coords = scores.coords.to_dataset()
    missing = [dim for dim in (SAMPLE, TARGET) if dim not in coords.coords]
    return coords.assign_coords({dim: np.arange(scores.sizes[dim]) for dim in missing})


def _histogram(values: np.ndarray, spaced: Callable[..., np.ndarray]) -> Histogram:
    """Return how values are distributed over bins whose edges a function spaces."""
    if not len(values):
        return Histogram(np.zeros(0, np.int64), np.zeros(1))
    low, high = float(values.min()), float(values.max())
    margin = 10.0 ** (1 - _DIGITS)  # rounded edges do not leave out the ends
    low, high = low - abs(low) * margin, high + (abs(high) or 1) * margin
    edges = spaced(low, high, _BINS + 1)
    # In the precision of the values, in which conditions compare them.
    rounded = np.unique([float(f"{x:.{_DIGITS}g}") for x in edges]).astype(values.dtype)
    return Histogram(np.histogram(values, rounded)[0], rounded)


def _scores_of_sample(prepared: Prepared, targets: xr.Dataset, position: int) -> da.Array:
    """Return the scores of one training sample for all targets, (target,).

    With a gram matrix the sample's side is solved, one vector, instead of all targets'.
    """
    sample = prepared.features.isel({SAMPLE: [position]})
    if not prepared.estimator.has_gram:
        scores: da.Array = td.score(sample, targets, **prepared.options).data[0]
        return scores
    options = prepared.options
    gathered = gather_options(
        prepared.features, options["estimator"], options["power"], options["damping"], None, None
    )
    solved = solver(lazy_features(prepared.features), gathered)
    rows, one = lazy_features(targets), lazy_features(sample)
    products = arrays.score.score(rows["feature"].data, solved.vectors(one), None)[:, 0]
    scores = products * solved.weight(one).mean(axis=1)[0]
    return scores


def _self_influence(prepared: Prepared, features: xr.Dataset) -> xr.DataArray:
    """Return the lazy self-influence of some samples, under the gram matrix of all."""
    name = _OWN_ESTIMATOR.get(prepared.estimator.estimator, prepared.estimator.estimator)
    options = {name: value for name, value in prepared.options.items() if name != "learning_rates"}
    return td.self_influence(features, **{**options, "estimator": name})


def _self_influences(prepared: Prepared) -> np.ndarray:
    """Return the self-influence of every training sample, (sample,)."""
    (values,) = compute(_self_influence(prepared, prepared.features).data)
    return np.asarray(values)


def _mean_targets(targets: xr.Dataset, across: str) -> tuple[xr.Dataset, np.ndarray]:
    """Return the mean features of groups of targets, as targets, and the names of the groups.

    Scores are linear in the features of the target, so the score of the mean is the mean of the
    scores. Without a coord to group by, they are the first targets themselves.
    """
    if not across:
        first = targets.isel({SAMPLE: slice(_MOST_TARGETS)})
        return first, np.arange(first.sizes[SAMPLE])
    codes, groups = group_codes(targets[across].values)
    counts = np.bincount(codes[codes >= 0], minlength=len(groups))
    feature = lazy_features(targets)["feature"].data
    weight = da.from_array(
        np.repeat((1 / counts[codes])[:, None], feature.shape[2], axis=1),
        chunks=(feature.chunks[0], 1),
    )
    means = arrays.groups.group_sum(feature, weight, codes, len(groups), pooled=False)
    (values,) = compute(means)
    dims = (SAMPLE, PROJ_DIM, CHECKPOINT)
    data = da.from_array(values.astype(feature.dtype), chunks=(-1, -1, 1))
    coords = {CHECKPOINT: targets[CHECKPOINT]}
    return xr.Dataset({"feature": (dims, data)}, coords, targets.attrs), groups
