"""Small tables that answer questions to lazy attributions; nothing here knows of pages.

Each question computes what it returns and no more, by :func:`trakdask.explorer.computing.compute`:
on the active dask client, or on threads. Scores of all samples and targets never exist.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import dask.array as da
import numpy as np
import pandas as pd
import xarray as xr

import trakdask as td
from trakdask import arrays
from trakdask.attribution.estimators import EstimatorLike, GradDot, Trak, resolve
from trakdask.attribution.protocol import GramEstimator
from trakdask.attribution.scores import solver
from trakdask.attribution.uncertainty import estimated
from trakdask.explorer import tables
from trakdask.explorer.computing import compute
from trakdask.explorer.conditions import condition_mask
from trakdask.explorer.directions import find_duplicates, find_places
from trakdask.explorer.settings import Setting, Settings
from trakdask.explorer.view import View
from trakdask.variables import CHECKPOINT, SAMPLE, TARGET, checkpoint_names, lazy_features

_MOST_GROUPS = 1000
_MOST_TARGETS = 25
"""How many targets are columns where they have no groups."""

_BINS = 30
_DIGITS = 6
"""Digits of the edges of bins, so that a condition can name them."""

_ROWS_KEPT = 2
"""How many targets keep the scores of all training samples, 8 bytes for each sample."""

_SETTINGS_KEPT = 4
"""How many settings keep the self-influence of all training samples."""

_MOST_POINTS = 5000
"""How many samples are drawn on the map."""

Words = Callable[..., xr.DataArray]


class Questions:
    """Answers about features and targets.

    Parameters
    ----------
    features, targets
        As in :func:`trakdask.score`.
    estimator
        As in :func:`trakdask.score`; a view may ask for another one, and for another λ.
    words
        Returns the scores of tokens, given features, a target, positions of training samples and
        an estimator; None if words are to have none.
    classifier
        Says what the model predicts; None if it is not at hand, or no classifier.
    """

    def __init__(
        self,
        features: xr.Dataset,
        targets: xr.Dataset,
        estimator: EstimatorLike = "auto",
        *,
        words: Words | None = None,
        classifier: tables.Classifier | None = None,
    ) -> None:
        self.features, self._words, self._classifier = features, words, classifier
        self.settings = Settings(features, estimator)
        self._influences: dict[tuple[Any, ...], np.ndarray] = {}
        self._duplicates = lru_cache(4)(lambda name: find_duplicates(self._features_at(name)))
        self._map = lru_cache(4)(lambda name: find_places(self._features_at(name), self.points))
        self._explain(targets)

    def with_targets(self, targets: xr.Dataset) -> Questions:
        """Return the same questions to other targets; answers about training samples are kept."""
        other = copy.copy(self)
        other._explain(targets)
        return other

    def _explain(self, targets: xr.Dataset) -> None:
        self.targets = tables.TargetTable(targets, self.features, self._classifier)
        self._scores = lru_cache(_ROWS_KEPT)(self._scored)
        self._masks = lru_cache(_ROWS_KEPT)(self._mask)

    @cached_property
    def metadata(self) -> pd.DataFrame:
        """The coords of the training samples, by position."""
        return tables.metadata(self.features)

    @cached_property
    def groupings(self) -> list[str]:
        """The coords of the training samples that have from 2 to 1,000 different values."""
        return tables.few_values(self.metadata, _MOST_GROUPS)

    @cached_property
    def facet_names(self) -> list[str]:
        """The groupings whose values are shared by two samples or more, on average."""
        return [n for n in self.groupings if 2 * self.metadata[n].nunique() <= len(self.metadata)]

    @cached_property
    def checkpoints(self) -> list[str]:
        """The names of the checkpoints."""
        return checkpoint_names(self.features)

    def setting(self, view: View) -> Setting:
        """Return how a view makes scores."""
        return self.settings.of(view)

    # ----------------------------------------------------------------------------------- a target

    def top(self, view: View, *, largest: bool = True) -> pd.DataFrame:
        """Return the k training samples that helped or harmed a target most.

        Columns: ``sample``, its position; ``score``; ``spread``, the standard error of the score
        over checkpoints, NaN for one checkpoint; the coords of the sample. Fewer rows than k if the
        condition of the view selects fewer.
        """
        setting = self.setting(view)
        scores, spread = self._scores(setting, view.target)
        selected = pd.Series(scores)[self._masks(setting, view.target, view.where)].dropna()
        ranked = selected.nlargest(view.k) if largest else selected.nsmallest(view.k)
        position = ranked.index.to_numpy()
        table = pd.DataFrame({SAMPLE: position, "score": ranked, "spread": spread[position]})
        coords = self.metadata.drop(columns=list(table), errors="ignore")
        return table.join(coords).reset_index(drop=True)

    def words(self, view: View, position: np.ndarray) -> xr.DataArray:
        """Return the scores of the tokens of some training samples for one target.

        (sample, token), with the coord ``text``; they add up to the scores of the samples.
        """
        assert self._words is not None
        setting = self.setting(view)
        target = self._target(setting, view.target)
        lazy = self._words(setting.features, target, position, setting.estimator)
        scores: xr.DataArray
        (scores,) = compute(lazy.isel({TARGET: 0}))
        return scores

    def has_words(self, view: View) -> bool:
        """Return whether words have scores under the estimator of a view."""
        estimator = self.settings.estimator(view.estimator)
        return self._words is not None and SAMPLE not in estimator.norms

    def groups(self, view: View) -> pd.DataFrame:
        """Return the sum of a target's scores by group of training samples, largest sum first.

        Columns: the coord that the view groups by; ``score``, the sum; ``samples``, how many. Only
        samples that the condition of the view selects are counted.
        """
        by, scores = view.group_by, self.scores(view).astype(np.float64)
        table = pd.DataFrame({by: self.metadata[by], "score": scores})
        table = table[self._masks(self.setting(view), view.target, view.where)]
        sums = table.groupby(by).agg(score=("score", "sum"), samples=("score", "size"))
        return sums.sort_values("score", ascending=False, kind="stable").reset_index()

    def scores(self, view: View) -> np.ndarray:
        """Return the scores of all training samples for a target, (sample,)."""
        return self._scores(self.setting(view), view.target)[0]

    def values(self, view: View, name: str) -> np.ndarray:
        """Return the ``score`` for a target, or ``self_influence``, of every training sample."""
        return self.scores(view) if name == "score" else self.influences(view)

    def histogram(self, view: View, name: str) -> pd.DataFrame:
        """Return how the ``score`` or ``self_influence`` of training samples is distributed.

        A row for each bin: its ends ``low`` and ``high``, how many ``samples`` are in it, their
        logarithm as ``height``, and the ``condition`` that a sample is in it. Bins have the same
        width, in the logarithm of self-influence.
        """
        is_score, values = name == "score", self.values(view, name)
        values = values[np.isfinite(values) & ((values > 0) | is_score)]
        edges = _edges(values, is_logarithmic=not is_score) if len(values) else values
        counts = np.histogram(values, edges)[0] if len(values) else values
        ends = [f"{edge:.{_DIGITS}g}" for edge in edges]
        return pd.DataFrame(
            {
                "low": edges[:-1],
                "high": edges[1:],
                "samples": counts,
                "height": np.log1p(counts),
                "condition": [f"{name} >= {x} and {name} < {y}" for x, y in pairwise(ends)],
            }
        )

    def _target(self, setting: Setting, position: int) -> xr.Dataset:
        tables.require_position(position, self.targets.features.sizes[SAMPLE], "target")
        return self.targets.at(setting.checkpoints).isel({SAMPLE: [position]})

    def _scored(self, setting: Setting, position: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the scores of one target, (sample,), and their standard errors over checkpoints.

        These are NaN for one checkpoint. All that the page of a target shows is taken from them.
        """
        target = self._target(setting, position)
        if len(setting.checkpoints) < 2:
            (scores,) = compute(td.score(setting.features, target, setting.estimator).data[:, 0])
            return scores, np.full(len(scores), np.nan, np.float32)
        _, lazy, _ = estimated(setting.features, target, setting.estimator)
        (tiles,) = compute(lazy[:, 0])
        return tiles["score"].copy(), tiles["error"].copy()

    def _mask(self, setting: Setting, position: int, where: str) -> np.ndarray:
        """Return which training samples meet a condition, which may name the target's ``score``."""
        table = self.metadata.assign(score=self._scores(setting, position)[0])
        return condition_mask(table, where, self.targets.metadata.iloc[[position]])

    # ------------------------------------------------------------------------ one training sample

    def targets_of(self, view: View) -> pd.DataFrame:
        """Return the targets that a training sample helped most and harmed most, best first.

        Columns: the columns of the table of targets, and ``score``. At most 2 k rows.
        """
        setting, k = self.setting(view), view.k
        tables.require_position(view.sample, setting.features.sizes[SAMPLE], "training sample")
        targets = self.targets.at(setting.checkpoints)
        (scores,) = compute(_scores_of_sample(setting, targets, view.sample))
        table = self.targets.whole.assign(score=scores).dropna(subset="score")
        table = table.sort_values("score", ascending=False, kind="stable")
        return table if len(table) <= 2 * k else pd.concat([table[:k], table[-k:]])

    def sample(self, view: View) -> pd.Series:
        """Return the coords of a training sample, its output, loss and self-influence."""
        setting = self.setting(view)
        tables.require_position(view.sample, setting.features.sizes[SAMPLE], "training sample")
        one = setting.features.isel({SAMPLE: [view.sample]})
        influence, output, q = compute(
            _self_influence(setting, one).data, tables.output_of(one), one["out_to_loss"].data
        )
        name, loss = tables.mean_loss(self.features.attrs.get("task"), output, q)
        facts = {"output": output.mean(), name: loss[0], "self_influence": influence[0]}
        row = tables.row_of(self.metadata, view.sample)
        whole: pd.Series[Any] = pd.concat([row, pd.Series(facts, dtype=object)])
        return whole

    # ----------------------------------------------------------------------- all training samples

    def ranking(self, view: View, name: str = "self_influence") -> pd.DataFrame:
        """Return the training samples that a view selects, largest ``values`` of a name first.

        Without a name in their order.
        """
        table = self.metadata.iloc[self.selected(view)]
        if not name:
            return table
        table = table.assign(**{name: self.values(view, name)[table.index]})
        return table.sort_values(name, ascending=False, kind="stable")

    def selected(self, view: View) -> np.ndarray:
        """Return the positions of the training samples that meet the condition of a view.

        It may name ``self_influence``, ``map_x`` and ``map_y``.
        """
        return np.flatnonzero(condition_mask(self._table(view), view.where))

    def facets(self, view: View) -> list[tables.Facet]:
        """Return how many of the training samples that a view selects have which metadata."""
        return tables.facets(self._table(view), self.facet_names, view.where)

    def _table(self, view: View) -> pd.DataFrame:
        """Return the columns that a condition on all training samples may name."""
        table = self.metadata
        if "self_influence" in view.where:
            table = table.assign(self_influence=self.influences(view))
        return table.assign(**self.map(view)) if "map_" in view.where else table

    def influences(self, view: View) -> np.ndarray:
        """Return the self-influence of every training sample, (sample,)."""
        key = _key(view)
        if (values := self._influences.get(key)) is None:
            setting = self.setting(view)
            (values,) = compute(_self_influence(setting, setting.features).data)
            self._influences[key] = values
            for old in list(self._influences)[:-_SETTINGS_KEPT]:
                self._influences.pop(old, None)
        return np.asarray(values)

    def has_influences(self, view: View) -> bool:
        """Return whether :meth:`influences` are at hand, without a computation."""
        return _key(view) in self._influences

    def heatmap(self, view: View, across: str = "") -> pd.DataFrame:
        """Return mean scores of groups of training samples (rows) and of targets (columns).

        An entry is the sum of the scores of the group's samples for one target, averaged over the
        targets that share a value of their coord ``across``. A
        cosine has no mean over targets, so under ``"grad_cos"`` columns are the first targets.
        """
        setting = self.setting(view)
        targets = self.targets.at(setting.checkpoints)
        if across and TARGET not in setting.estimator.norms:
            is_whole = self.targets.whole.iloc[:, -1].notna().to_numpy()  # the loss, or Q
            targets = td.combine(targets.isel({SAMPLE: is_whole}), by=across)
            names = targets[across].values
        else:
            across, targets = "", targets.isel({SAMPLE: slice(_MOST_TARGETS)})
            names = np.arange(targets.sizes[SAMPLE])
        lazy = td.group_score(setting.features, targets, setting.estimator, by=view.group_by)
        (sums,) = compute(lazy)
        index = pd.Index(sums[view.group_by].values, name=view.group_by)
        return pd.DataFrame(sums.values, index=index, columns=pd.Index(names, name=across))

    def duplicates(self, view: View) -> pd.DataFrame:
        """Return training samples whose features point the same way as another sample's.

        Columns: ``group``, numbered from 0 by the first sample of each, and ``sample``.

        Raises
        ------
        ValueError
            If there are more than two million samples.
        """
        return self._duplicates(self.first_checkpoint(view))

    def map(self, view: View) -> pd.DataFrame:
        """Return where training samples lie in the two directions in which they differ most.

        Columns: ``map_x`` and ``map_y``, from 0 to 100. These are components of features of length
        one, at one checkpoint, so that samples are near each other whose gradients point the same
        way. NaN for samples without features.
        """
        return self._map(self.first_checkpoint(view))

    @cached_property
    def points(self) -> np.ndarray:
        """The positions of the training samples that are drawn on the map, at random."""
        n = self.features.sizes[SAMPLE]
        return np.random.default_rng(0).choice(n, min(n, _MOST_POINTS), replace=False)

    def first_checkpoint(self, view: View) -> str:
        """Return the first checkpoint of a view, for what is found from one alone."""
        return next(c for c in self.checkpoints if c in (view.checkpoints or self.checkpoints))

    def _features_at(self, checkpoint: str) -> da.Array:
        one = lazy_features(self.features.sel({CHECKPOINT: [checkpoint]}))
        feature: da.Array = one["feature"].data[:, :, 0]
        return feature


def _edges(values: np.ndarray, *, is_logarithmic: bool) -> np.ndarray:
    """Return edges of bins of equal width around values, of few digits."""
    low, high = float(values.min()), float(values.max())
    margin = 10.0 ** (1 - _DIGITS)  # rounded edges do not leave out the ends
    low, high = low - abs(low) * margin, high + (abs(high) or 1) * margin
    edges = (np.geomspace if is_logarithmic else np.linspace)(low, high, _BINS + 1)
    # In the precision of the values, in which conditions compare them.
    return np.unique([float(f"{x:.{_DIGITS}g}") for x in edges]).astype(values.dtype)


def _scores_of_sample(setting: Setting, targets: xr.Dataset, position: int) -> da.Array:
    """Return the scores of one training sample for all targets, (target,).

    With a gram matrix the sample's side is solved, one vector, instead of all targets'.
    """
    sample = setting.features.isel({SAMPLE: [position]})
    if not isinstance(setting.estimator, GramEstimator):
        scores: da.Array = td.score(sample, targets, setting.estimator).data[0]
        return scores
    features, one = lazy_features(setting.features), lazy_features(sample)
    solved = solver(features, resolve(features, setting.estimator))
    rows = lazy_features(targets)["feature"].data
    products = arrays.score.score(rows, solved.vectors(one), None)[:, 0]
    scores = products * solved.weight(one).mean(axis=1)[0]
    return scores


def _self_influence(setting: Setting, features: xr.Dataset) -> xr.DataArray:
    """Return the lazy self-influence of some samples, under the gram matrix of all."""
    estimator = setting.estimator
    if estimator.norms or not estimator.pooled:  # it has no self-influence of its own
        estimator = Trak(estimator.damping) if isinstance(estimator, GramEstimator) else GradDot()
    return td.self_influence(features, estimator)


def _key(view: View) -> tuple[Any, ...]:
    return view.estimator, view.damping, view.checkpoints
