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
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from scipy.spatial import cKDTree

import trakdask as td
from trakdask import arrays
from trakdask.attribution.estimators import EstimatorLike, GradDot, GramEstimator, Trak, resolve
from trakdask.attribution.scores import solver
from trakdask.explorer import tables
from trakdask.explorer.computing import compute
from trakdask.explorer.prepared import Preparation, Prepared
from trakdask.explorer.view import View
from trakdask.variables import CHECKPOINT, SAMPLE, TARGET, checkpoint_names, lazy_features

__all__ = ["Questions", "Words"]

_MOST_GROUPS = 1000
_MOST_TARGETS = 25
"""How many targets are columns where they have no groups."""

_BINS = 30
_DIGITS = 6
"""Of the edges of bins, so that a condition can name them."""

_ROWS_KEPT = 2
"""Of how many targets the scores of all training samples are kept: 8 bytes of each sample."""

_SETTINGS_KEPT = 4
"""Of how many settings the self-influence of all training samples is kept."""

_SAME = 0.9999
"""Samples whose features have a larger cosine are called duplicates."""

_MOST_POINTS = 5000
"""How many samples are drawn on the map."""

_OF_AXES = 1000
"""How many of them its two directions are found from."""

_MOST_SAMPLES = 2_000_000
"""Above this, a search in the memory of one machine takes too long for a page."""

_DIRECTIONS = 16

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
        self.preparation = Preparation(features, estimator)
        self._influences: dict[tuple[Any, ...], np.ndarray] = {}
        self._duplicates = lru_cache(4)(lambda name: _find_duplicates(self._features_at(name)))
        self._map = lru_cache(4)(lambda name: _find_places(self._features_at(name), self.points))
        self._explain(targets)

    def with_targets(self, targets: xr.Dataset) -> Questions:
        """Return the same questions to other targets; what is known of training samples is kept."""
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
        """Those of them whose values are shared by two samples or more, on average."""
        return [n for n in self.groupings if 2 * self.metadata[n].nunique() <= len(self.metadata)]

    @cached_property
    def checkpoints(self) -> list[str]:
        """The names of the checkpoints."""
        return checkpoint_names(self.features)

    def prepared(self, view: View) -> Prepared:
        """Return the features under the setting of a view."""
        return self.preparation.of(view)

    # ----------------------------------------------------------------------------------- a target

    def top(self, view: View, *, largest: bool = True) -> pd.DataFrame:
        """Return the k training samples that helped or harmed a target most.

        Columns: ``sample``, its position; ``score``; ``spread``, the standard error of the score
        over checkpoints, NaN for one checkpoint; the coords of the sample. Fewer rows than k if the
        condition of the view selects fewer.
        """
        prepared = self.prepared(view)
        scores, spread = self._scores(prepared, view.target)
        selected = pd.Series(scores)[self._masks(prepared, view.target, view.where)].dropna()
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
        prepared = self.prepared(view)
        target = self._target(prepared, view.target)
        lazy = self._words(prepared.features, target, position, prepared.estimator)
        scores: xr.DataArray
        (scores,) = compute(lazy.isel({TARGET: 0}))
        return scores

    def has_words(self, view: View) -> bool:
        """Return whether words have scores under the estimator of a view."""
        estimator = self.preparation.chosen(view.estimator)
        return self._words is not None and SAMPLE not in estimator.norms

    def groups(self, view: View) -> pd.DataFrame:
        """Return the sum of a target's scores by group of training samples, largest sum first.

        Columns: the coord that the view groups by; ``score``, the sum; ``samples``, how many. Only
        samples that the condition of the view selects are counted.
        """
        by, scores = view.group_by, self.scores(view).astype(np.float64)
        table = pd.DataFrame({by: self.metadata[by], "score": scores})
        table = table[self._masks(self.prepared(view), view.target, view.where)]
        sums = table.groupby(by).agg(score=("score", "sum"), samples=("score", "size"))
        return sums.sort_values("score", ascending=False, kind="stable").reset_index()

    def scores(self, view: View) -> np.ndarray:
        """Return the scores of all training samples for a target, (sample,)."""
        return self._scores(self.prepared(view), view.target)[0]

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

    def _target(self, prepared: Prepared, position: int) -> xr.Dataset:
        return self.targets.one(position, prepared.features[CHECKPOINT].values)

    def _scored(self, prepared: Prepared, position: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the scores of one target, (sample,), and their standard errors over checkpoints.

        These are NaN for one checkpoint. All that the page of a target shows is taken from them.
        """
        target = self._target(prepared, position)
        apart = td.score(prepared.features, target, prepared.estimator, average=False)
        (values,) = compute(apart.data[:, 0])
        n = values.shape[1]
        mean = values.mean(axis=1, dtype=np.float64).astype(values.dtype)
        if n < 2:
            return mean, np.full(len(values), np.nan, np.float32)
        return mean, values.std(axis=1, ddof=1) / np.float32(np.sqrt(n))

    def _mask(self, prepared: Prepared, position: int, where: str) -> np.ndarray:
        """Return which training samples meet a condition, which may name the target's ``score``."""
        table = self.metadata.assign(score=self._scores(prepared, position)[0])
        return tables.condition_mask(table, where, self.targets.metadata.iloc[[position]])

    # ------------------------------------------------------------------------ one training sample

    def targets_of(self, view: View) -> pd.DataFrame:
        """Return the targets that a training sample helped most and harmed most, best first.

        Columns: those of the table of targets, and ``score``. At most 2 k rows.
        """
        prepared, k = self.prepared(view), view.k
        tables.require_position(view.sample, prepared.features.sizes[SAMPLE], "training sample")
        targets = self.targets.of(prepared.features[CHECKPOINT].values)
        (scores,) = compute(_scores_of_sample(prepared, targets, view.sample))
        table = self.targets.whole.assign(score=scores).dropna(subset="score")
        table = table.sort_values("score", ascending=False, kind="stable")
        return table if len(table) <= 2 * k else pd.concat([table[:k], table[-k:]])

    def sample(self, view: View) -> pd.Series:
        """Return the coords of a training sample, its output, loss and self-influence."""
        prepared = self.prepared(view)
        tables.require_position(view.sample, prepared.features.sizes[SAMPLE], "training sample")
        one = prepared.features.isel({SAMPLE: [view.sample]})
        influence, output, q = compute(
            _self_influence(prepared, one).data, one["output"].data, one["out_to_loss"].data
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
        return np.flatnonzero(tables.condition_mask(self._table(view), view.where))

    def facets(self, view: View) -> list[tables.Facet]:
        """Return how many training samples, of those that a view selects, have which metadata."""
        return tables.facets(self._table(view), self.facet_names, view.where)

    def _table(self, view: View) -> pd.DataFrame:
        """Return the columns that a condition on all training samples may name."""
        table = self.metadata
        if "self_influence" in view.where:
            table = table.assign(self_influence=self.influences(view))
        return table.assign(**self.map(view)) if "map_" in view.where else table

    def influences(self, view: View) -> np.ndarray:
        """Return the self-influence of every training sample, (sample,)."""
        setting = _setting(view)
        if (values := self._influences.get(setting)) is None:
            prepared = self.prepared(view)
            (values,) = compute(_self_influence(prepared, prepared.features).data)
            self._influences[setting] = values
            for old in list(self._influences)[:-_SETTINGS_KEPT]:
                self._influences.pop(old, None)
        return np.asarray(values)

    def has_influences(self, view: View) -> bool:
        """Return whether :meth:`influences` are at hand, without a computation."""
        return _setting(view) in self._influences

    def heatmap(self, view: View, across: str = "") -> pd.DataFrame:
        """Return mean scores of groups of training samples (rows) and of targets (columns).

        An entry is the sum of the scores of the group's samples for one target, averaged over the
        targets of a group: those that share the value of the coord ``across`` of the targets. A
        cosine has no mean over targets, so under ``"grad_cos"`` columns are the first targets.
        """
        prepared = self.prepared(view)
        targets = self.targets.of(prepared.features[CHECKPOINT].values)
        if across and TARGET not in prepared.estimator.norms:
            has_features = self.targets.whole["output"].notna().to_numpy()
            targets = td.combine(targets.isel({SAMPLE: has_features}), by=across)
            names = targets[across].values
        else:
            across, targets = "", targets.isel({SAMPLE: slice(_MOST_TARGETS)})
            names = np.arange(targets.sizes[SAMPLE])
        lazy = td.group_score(prepared.features, targets, prepared.estimator, by=view.group_by)
        (sums,) = compute(lazy)
        index = pd.Index(sums[view.group_by].values, name=view.group_by)
        return pd.DataFrame(sums.values, index=index, columns=pd.Index(names, name=across))

    def duplicates(self, view: View) -> pd.DataFrame:
        """Return training samples whose features point the same way as those of another one.

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


def _scores_of_sample(prepared: Prepared, targets: xr.Dataset, position: int) -> da.Array:
    """Return the scores of one training sample for all targets, (target,).

    With a gram matrix the sample's side is solved, one vector, instead of all targets'.
    """
    sample = prepared.features.isel({SAMPLE: [position]})
    if not isinstance(prepared.estimator, GramEstimator):
        scores: da.Array = td.score(sample, targets, prepared.estimator).data[0]
        return scores
    features, one = lazy_features(prepared.features), lazy_features(sample)
    solved = solver(features, resolve(features, prepared.estimator))
    rows = lazy_features(targets)["feature"].data
    products = arrays.score.score(rows, solved.vectors(one), None)[:, 0]
    scores = products * solved.weight(one).mean(axis=1)[0]
    return scores


def _self_influence(prepared: Prepared, features: xr.Dataset) -> xr.DataArray:
    """Return the lazy self-influence of some samples, under the gram matrix of all."""
    estimator = prepared.estimator
    if estimator.norms or not estimator.pooled:  # it has no self-influence of its own
        estimator = Trak(estimator.damping) if isinstance(estimator, GramEstimator) else GradDot()
    return td.self_influence(features, estimator)


def _setting(view: View) -> tuple[Any, ...]:
    return view.estimator, view.damping, view.checkpoints


# ----------------------------------------------------------------------- the map, duplicates


def _find_places(feature: da.Array, rows: np.ndarray) -> pd.DataFrame:
    """Return the leading principal components of unit vectors, found from some rows, 0 to 100."""
    (some,) = compute(feature[np.sort(rows[:_OF_AXES])])
    unit = _unit(some.astype(np.float64))
    unit = unit[np.isfinite(unit).all(axis=1)]
    unit -= unit.mean(axis=0)
    # Of few rows and many columns, whose eigenvectors have the same span.
    weights = np.linalg.eigh(unit @ unit.T)[1][:, :-3:-1]
    place = _components(feature, np.linalg.qr(unit.T @ weights)[0])
    place -= np.nanmin(place, axis=0)
    place *= 100 / np.nanmax(place)
    return pd.DataFrame(place.round(2), columns=["map_x", "map_y"])


def _find_duplicates(feature: da.Array) -> pd.DataFrame:
    """Return groups of samples whose features, (sample, proj_dim), have a cosine above 0.9999.

    A sample is compared with its nearest neighbour in 16 random directions, so of a large group
    each is found through some other one of it. Two samples of the same content have the same
    gradient, unless the model is random; samples with the same gradient may differ where the model
    cannot see it.
    """
    n, p = feature.shape
    if n > _MOST_SAMPLES:
        raise ValueError(
            f"expected at most {_MOST_SAMPLES:,} samples to search for duplicates, got {n:,}; try "
            "td.explore of a selection of them"
        )
    directions = np.random.default_rng(0).standard_normal((p, _DIRECTIONS))
    pairs = _nearest(_components(feature, directions))
    left, right = (feature[rows] for rows in pairs.T)
    (cosines,) = compute(da.map_blocks(_cosines, left, right, drop_axis=1, dtype=np.float64))
    return _groups(pairs[cosines > _SAME], n)


def _components(feature: da.Array, directions: np.ndarray) -> np.ndarray:
    """Return the components of unit vectors in some directions, (sample, direction)."""
    chunks = feature.chunks[0], directions.shape[1:]
    lazy = da.map_blocks(_unit, feature, directions, chunks=chunks, dtype=np.float64)
    (components,) = compute(lazy)
    return np.asarray(components)


def _unit(block: np.ndarray, directions: np.ndarray | None = None) -> np.ndarray:
    """Return vectors divided by their lengths, or the components of these in some directions."""
    norms = np.linalg.norm(block, axis=1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        unit = block / norms
    return np.asarray(unit if directions is None else unit @ directions)


def _nearest(sketch: np.ndarray) -> np.ndarray:
    """Return pairs (n, 2) of each sample and its nearest neighbour, if that is near at all."""
    rows = np.flatnonzero(np.isfinite(sketch).all(axis=1))
    # |a - b|² = 2 (1 - cos); in a random direction a distance varies, hence the factor of 3.
    reach = 3 * np.sqrt(2 * (1 - _SAME) * _DIRECTIONS)
    tree = cKDTree(sketch[rows])
    index = tree.query(sketch[rows], k=2, distance_upper_bound=reach)[1]
    # Where several are at the same place, a sample need not be its own first neighbour.
    other = np.where(index[:, 0] == np.arange(len(rows)), index[:, 1], index[:, 0])
    is_near = other < len(rows)
    pairs = np.stack([rows[is_near], rows[other[is_near]]], axis=1)
    return np.unique(np.sort(pairs, axis=1), axis=0)


def _cosines(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    left, right = left.astype(np.float64), right.astype(np.float64)
    norms = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    return np.asarray(np.einsum("sp,sp->s", left, right) / norms)


def _groups(pairs: np.ndarray, n: int) -> pd.DataFrame:
    """Return the connected samples of two or more."""
    graph = coo_array((np.ones(len(pairs)), (pairs[:, 0], pairs[:, 1])), shape=(n, n))
    _, label = connected_components(graph, directed=False)
    sample = np.flatnonzero(np.bincount(label)[label] > 1)
    group = pd.factorize(label[sample])[0]
    table = pd.DataFrame({"group": group.astype(np.int64), "sample": sample})
    return table.sort_values(["group", "sample"], ignore_index=True)
