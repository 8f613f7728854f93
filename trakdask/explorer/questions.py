"""Small tables that answer questions to lazy attributions; nothing here knows of pages.

Each question computes its answer and no more, by :func:`trakdask.explorer.computing.compute`: on
the active dask client, or on threads. Scores of all samples and targets never exist.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

import trakdask as td
from trakdask.attribution.estimators import EstimatorLike
from trakdask.attribution.protocol import LEAST_FOLDS
from trakdask.attribution.uncertainty import estimated
from trakdask.explorer import tables
from trakdask.explorer.computing import compute
from trakdask.explorer.conditions import condition_mask
from trakdask.explorer.marks import Marks
from trakdask.explorer.training_questions import Setting, TrainingQuestions, scores_of_sample
from trakdask.explorer.view import View
from trakdask.variables import SAMPLE, TARGET, TRAINED_ON

LEVEL = 0.9
"""The part of the intervals that contains the score, as a rule."""

_ROWS_KEPT = 2
"""How many targets keep the scores of all training samples, 8 bytes for each sample."""

_TARGETS_TOGETHER, _INTERVALS_KEPT = 256, 8
"""How many targets get effects or intervals in one pass over the features, and how many passes are
kept: 16 bytes for each group and target."""


class Questions(TrainingQuestions):
    """Answers about features and targets.

    Parameters
    ----------
    features, targets
        As in :func:`trakdask.score`.
    estimator
        As in :func:`trakdask.score`.
    words
        Returns the scores of tokens, given features, a target, positions of training samples and
        an estimator; None if words are to have none.
    classifier, training_classifier
        Predict classes of targets and of training samples; None if the model is not at
        hand, or no classifier.
    marks
        The marks of training samples; None if none are kept.
    """

    def __init__(
        self,
        features: xr.Dataset,
        targets: xr.Dataset,
        estimator: EstimatorLike = "auto",
        *,
        words: Callable[..., xr.DataArray] | None = None,
        classifier: tables.Classifier | None = None,
        training_classifier: tables.Classifier | None = None,
        marks: Marks | None = None,
    ) -> None:
        super().__init__(features, estimator, training_classifier, marks)
        self._words, self._classifier = words, classifier
        self.known_grade: xr.Dataset | None = None
        self.has_words = words is not None and SAMPLE not in self.estimator.norms
        self.has_intervals = len(self.checkpoints) >= LEAST_FOLDS
        self.has_grade = TRAINED_ON in features and len(self.checkpoints) > 3
        is_signed = features.attrs.get("loss_kind") == "squared error"
        is_sum = TARGET not in self.estimator.norms
        self._has_shares = self.has_intervals and is_sum and not is_signed
        self._explain(targets)

    def with_targets(self, targets: xr.Dataset) -> Questions:
        """Return the same questions to other targets; answers about training samples are kept."""
        other = copy.copy(self)
        other._explain(targets)
        return other

    def _explain(self, targets: xr.Dataset) -> None:
        self.targets = tables.SampleTable(targets, self.features, self._classifier)
        self._scores = lru_cache(_ROWS_KEPT)(self._scored)
        self._credits = lru_cache(_ROWS_KEPT)(self._credited)
        self._bounds = lru_cache(_INTERVALS_KEPT)(self._bounds_of)

    def top(self, view: View, *, largest: bool = True) -> pd.DataFrame:
        """Return the k training samples that helped or harmed a target most.

        Columns: ``sample``, its position; ``score``; ``spread``, see :func:`_spread`; the coords of
        the sample. Fewer rows than k if the condition of the view selects fewer.
        """
        scores, spread = self._scores(view.target)
        selected = pd.Series(scores)[self._mask(view)].dropna()
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
        target, setting = self._target(view.target), self.setting
        lazy = self._words(setting.features, target, position, setting.estimator)
        scores: xr.DataArray
        (scores,) = compute(lazy.isel({TARGET: 0}))
        return scores

    def groups(self, view: View) -> pd.DataFrame:
        """Return what groups of training samples did to a target, the most helpful first.

        Columns: the coord that the view groups by; ``samples``, how many; ``score`` and ``spread``,
        the sum of scores and half of its interval, NaN for fewer than five checkpoints. Only
        samples that the condition of the view selects are counted. Where all are, and checkpoints
        of halves tell, ``score`` is the effect in units of the output, and there are the columns of
        :func:`_with_effects`.
        """
        by, scores, mask = view.group_by, self.scores(view).astype(np.float64), self._mask(view)
        table = pd.DataFrame({by: self.metadata[by], "score": scores})[mask]
        sums = table.groupby(by).agg(score=("score", "sum"), samples=("score", "size"))
        # 1. What is computed for many targets at once. The last block has the rest, too, since
        # effects need many targets.
        block = min(view.target, max(len(self.targets.metadata) - _TARGETS_TOGETHER, 0))
        block //= _TARGETS_TOGETHER
        found = self._bounds(by, mask.tobytes(), block) if mask.any() else None
        # 2. One target of these.
        if found is not None:
            found = found.isel({TARGET: view.target - block * _TARGETS_TOGETHER})
        if found is not None and "effect" in found:
            sums = _with_effects(sums, found, self._vanishing(by, [view.target]))
        else:
            half = np.nan if found is None else (found["upper"] - found["score"]).to_series()
            sums = sums.assign(spread=half)
        return sums.sort_values("score", ascending=False, kind="stable").reset_index()

    def _bounds_of(self, by: str, mask: bytes, block: int) -> xr.Dataset | None:
        """Return the effects of groups on a block of targets, or sums, with bounds if they can be.

        Nearly all of the time goes into sums of features, which are the same for all targets.
        """
        setting, chosen = self.setting, np.flatnonzero(np.frombuffer(mask, bool))
        is_whole = len(chosen) == setting.features.sizes[SAMPLE]
        features = setting.features if is_whole else setting.features.isel({SAMPLE: chosen})
        start, n = block * _TARGETS_TOGETHER, len(self.targets.metadata)
        stop = n if n - start < 2 * _TARGETS_TOGETHER else start + _TARGETS_TOGETHER
        targets = self.targets.features.isel({SAMPLE: slice(start, stop)})
        if is_whole:
            with suppress(ValueError):
                return _effects(setting, targets, by)
        if not self.has_intervals:
            return None
        lazy = td.group_score(features, targets, setting.estimator, by=by, level=LEVEL)
        found: xr.Dataset
        (found,) = compute(lazy[["score", "upper"]])
        return found

    def _vanishing(self, by: str, targets: Any) -> list[Any]:
        """Return the groups that have all training samples of the class of one of some targets."""
        label = self.targets.label
        if label not in self.metadata:
            return []
        groups = self.metadata[by].groupby(self.metadata[label])
        is_one = groups.nunique(dropna=False) == 1
        classes = self.targets.metadata[label].iloc[targets]
        return groups.first()[is_one & is_one.index.isin(classes)].tolist()

    @property
    def has_credit(self) -> bool:
        """Whether it can be known what groups of training samples did to many targets."""
        return (self.has_grade or self._has_shares) and bool(self.groupings)

    def credit(self, view: View) -> pd.DataFrame:
        """Return what groups did to the targets that a view selects, the most helpful first.

        Columns as of :meth:`groups`: with checkpoints of halves, ``score`` is the effect on the
        mean loss. Else, it is the group's share of all scores, whose error is not known.
        """
        view = view.replace(page="targets", first=0, sort="", ascending=False)
        return self._credits(view)

    def _credited(self, view: View) -> pd.DataFrame:
        setting, by = self.setting, view.group_by
        selected = np.sort(self.targets.selected(view).index)
        selected = selected[self.targets.numbers.iloc[selected, -1].notna()]
        targets = self.targets.features.isel({SAMPLE: selected})
        counts = self.metadata[by].value_counts().rename("samples").to_frame()
        found, gone = None, self._vanishing(by, selected)
        if len(gone) < len(counts):
            try:
                found = _effects(setting, targets, by, metric="loss").isel({TARGET: 0})
            except ValueError:
                if not self._has_shares:
                    raise
        table = counts.assign(score=np.nan, spread=np.nan)
        if (found is None or gone) and self._has_shares:
            features, estimator = setting.features, setting.estimator
            (shares,) = compute(td.group_score(features, targets, estimator, by=by, share=True))
            table["score"] = shares.to_series()
        if found is None:
            table = table.dropna(subset="score")
            return table.sort_values("score", ascending=False, kind="stable").reset_index()
        return _with_effects(table, found, gone).sort_values("score", kind="stable").reset_index()

    def grade(self) -> xr.Dataset:
        """Return how well scores predict checkpoints that were left out; computed once."""
        if self.known_grade is None:
            features, estimator = self.setting.features, self.setting.estimator
            targets = self.targets.features
            self.known_grade = td.evaluate.cross_validate(features, targets, estimator)
        return self.known_grade

    def scores(self, view: View) -> np.ndarray:
        """Return the scores of all training samples for a target, (sample,)."""
        return self._scores(view.target)[0]

    def _target(self, position: int) -> xr.Dataset:
        tables.require_position(position, self.targets.features.sizes[SAMPLE], "target")
        return self.targets.features.isel({SAMPLE: [position]})

    def _scored(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the scores of one target, (sample,), and their :func:`_spread`.

        It is NaN for one checkpoint. All that the page of a target shows is taken from them.
        """
        target, setting = self._target(position), self.setting
        if len(self.checkpoints) < 2:
            (scores,) = compute(td.score(setting.features, target, setting.estimator).data[:, 0])
            return scores, np.full(len(scores), np.nan, np.float32)
        _, lazy, _ = estimated(setting.features, target, setting.estimator)
        (tiles,) = compute(lazy[:, 0])
        return tiles["score"].copy(), _spread(tiles["error"], len(self.checkpoints))

    def _mask(self, view: View) -> np.ndarray:
        """Return which training samples meet a condition, which may name the target's ``score``."""
        table = self._table(view).assign(score=self.scores(view))
        return condition_mask(table, view.where, self.targets.one(view.target, "target"))

    def targets_of(self, view: View) -> pd.DataFrame:
        """Return the targets that a training sample helped most and harmed most, best first.

        Columns: the columns of the table of targets, ``score`` and ``spread``, see
        :func:`_spread`. At most 2 k rows.
        """
        setting, k = self.setting, view.k
        tables.require_position(view.sample, setting.features.sizes[SAMPLE], "training sample")
        targets = self.targets.features
        (scores,) = compute(scores_of_sample(setting, targets, view.sample))
        table = self.targets.whole.assign(score=scores).dropna(subset="score")
        table = table.sort_values("score", ascending=False, kind="stable")
        table = table if len(table) <= 2 * k else pd.concat([table[:k], table[-k:]])
        table["spread"] = np.nan
        if len(self.checkpoints) > 1 and len(table):
            shown = targets.isel({SAMPLE: table.index.to_numpy()})
            sample = setting.features.isel({SAMPLE: [view.sample]})
            _, lazy, _ = estimated(sample, shown, setting.estimator)
            (tiles,) = compute(lazy[0])
            table["spread"] = _spread(tiles["error"], len(self.checkpoints))
        return table


def _effects(setting: Setting, targets: xr.Dataset, by: str, **how: Any) -> xr.Dataset:
    """Return effects of groups, with bounds for one training without each of them."""
    lazy = td.group_score(
        setting.features, targets, setting.estimator, by=by, effect=True, level=LEVEL, **how
    )
    found = lazy[["effect", "upper"]]
    # As arrays: of this part of the Dataset, dask loses a key.
    values = compute(*(variable.data for variable in found.data_vars.values()))
    return found.copy(data=dict(zip(found, values, strict=True)))


def _with_effects(table: pd.DataFrame, found: xr.Dataset, gone: list[Any]) -> pd.DataFrame:
    """Return a table in which effects take the place of the column ``score``.

    ``spread`` is half of their intervals, and ``sum`` is what was in ``score``. Effects are NaN for
    the groups that are ``gone``: what models without them make of their class is not known.
    """
    effects = found.to_dataframe()[["effect", "upper"]].dropna()
    effects["sum"] = table["score"]
    effects["samples"] = table["samples"]
    effects["spread"] = effects["upper"] - effects["effect"]
    effects.loc[effects.index.isin(gone), ["effect", "spread"]] = np.nan
    return effects.rename(columns={"effect": "score"}).drop(columns="upper")


def _spread(error: np.ndarray, n: int) -> np.ndarray:
    """Return half of the intervals of scores, from their standard errors over n checkpoints.

    With fewer than five checkpoints the standard errors themselves.
    """
    from scipy.special import stdtrit  # slow to import

    width = stdtrit(n - 1, (1 + LEVEL) / 2) if n >= LEAST_FOLDS else 1
    return np.asarray(error * width, np.float32)
