"""Small tables that answer questions to lazy attributions; nothing here knows of pages.

Each question computes its answer and no more, by :func:`trakdask.explorer.computing.compute`: on
the active dask client, or on threads. Scores of all samples and targets never exist.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
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
from trakdask.explorer.settings import Setting
from trakdask.explorer.training_questions import TrainingQuestions, scores_of_sample
from trakdask.explorer.view import View
from trakdask.variables import SAMPLE, TARGET, TRAINED_ON

LEVEL = 0.9
"""The part of the intervals that contains the score, as a rule."""

_MOST_TARGETS = 25
"""How many targets are columns where they have no groups."""

_ROWS_KEPT = 2
"""How many targets keep the scores of all training samples, 8 bytes for each sample."""

_TARGETS_TOGETHER, _INTERVALS_KEPT = 256, 8
"""How many targets get the intervals of sums in one pass over the features, and how many passes are
kept: 4 bytes for each group and target."""


class Questions(TrainingQuestions):
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
        self._grades: dict[tuple[Any, ...], xr.Dataset] = {}
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
        self._half_intervals = lru_cache(_INTERVALS_KEPT)(self._half_intervals_of)

    def top(self, view: View, *, largest: bool = True) -> pd.DataFrame:
        """Return the k training samples that helped or harmed a target most.

        Columns: ``sample``, its position; ``score``; ``spread``, see :func:`_spread`; the coords of
        the sample. Fewer rows than k if the condition of the view selects fewer.
        """
        scores, spread = self._scores(self.setting(view), view.target)
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

        Columns: the coord that the view groups by; ``score``, the sum; ``samples``, how many;
        ``spread``, half of the interval of the sum, NaN for fewer than five checkpoints. Only
        samples that the condition of the view selects are counted.
        """
        by, scores, mask = view.group_by, self.scores(view).astype(np.float64), self._mask(view)
        table = pd.DataFrame({by: self.metadata[by], "score": scores})[mask]
        sums = table.groupby(by).agg(score=("score", "sum"), samples=("score", "size"))
        sums["spread"] = np.nan
        if self.has_intervals(view) and mask.any():
            block, place = divmod(view.target, _TARGETS_TOGETHER)
            half = self._half_intervals(self.setting(view), by, mask.tobytes(), block)
            sums["spread"] = half.isel({TARGET: place}).to_series()
        return sums.sort_values("score", ascending=False, kind="stable").reset_index()

    def _half_intervals_of(
        self, setting: Setting, by: str, mask: bytes, block: int
    ) -> xr.DataArray:
        """Return half of the intervals of the sums by group, for a block of targets.

        Nearly all of the time goes into sums of features, which are the same for all targets.
        """
        chosen = np.flatnonzero(np.frombuffer(mask, bool))
        is_whole = len(chosen) == setting.features.sizes[SAMPLE]
        features = setting.features if is_whole else setting.features.isel({SAMPLE: chosen})
        some = slice(block * _TARGETS_TOGETHER, (block + 1) * _TARGETS_TOGETHER)
        targets = self.targets.at(setting.checkpoints).isel({SAMPLE: some})
        lazy = td.group_score(features, targets, setting.estimator, by=by, level=LEVEL)
        (found,) = compute(lazy[["score", "upper"]])
        return found["upper"] - found["score"]

    def has_intervals(self, view: View) -> bool:
        """Return whether there are the five checkpoints that intervals need."""
        return len(view.checkpoints or self.checkpoints) >= LEAST_FOLDS

    def has_credit(self, view: View) -> bool:
        """Return whether groups of training samples have shares of the scores of many targets."""
        is_sum = TARGET not in self.settings.estimator(view.estimator).norms
        is_signed = self.features.attrs.get("loss_kind") == "squared error"
        has_shares = is_sum and not is_signed
        return self.has_intervals(view) and has_shares and bool(self.groupings)

    def credit(self, view: View) -> pd.DataFrame:
        """Return each group's share of the scores of the targets that a view selects.

        Columns: the coord that the view groups by; ``score``, the share; ``spread``, NaN, as the
        error of a share is not known; ``samples``, how many. Largest share first.
        """
        view = view.replace(page="targets", first=0, sort="", ascending=False)
        return self._credits(view)

    def _credited(self, view: View) -> pd.DataFrame:
        setting, selected = self.setting(view), np.sort(self.targets.selected(view).index)
        targets = self.targets.at(setting.checkpoints).isel({SAMPLE: selected})
        failed = self.targets.numbers.iloc[selected, -1].isna().to_numpy()
        targets = targets.isel({SAMPLE: ~failed})
        by = view.group_by
        lazy = td.group_score(setting.features, targets, setting.estimator, by=by, share=True)
        (found,) = compute(lazy)
        table: pd.DataFrame = found.to_dataframe(name="score").assign(spread=np.nan)
        table = table.dropna(subset="score")
        counts = pd.Series(setting.features[by].values).value_counts()
        table["samples"] = counts.reindex(table.index).to_numpy(int)
        return table.sort_values("score", ascending=False, kind="stable").reset_index()

    def has_grade(self, view: View) -> bool:
        """Return whether it is known which samples the checkpoints were trained on."""
        return TRAINED_ON in self.features and len(view.checkpoints or self.checkpoints) > 3

    def known_grade(self, view: View) -> xr.Dataset | None:
        """Return the grade if it was computed before."""
        return self._grades.get(_key(view))

    def grade(self, view: View) -> xr.Dataset:
        """Return how well scores predict checkpoints that were left out; computed once."""
        if (grade := self.known_grade(view)) is None:
            setting = self.setting(view)
            targets = self.targets.at(setting.checkpoints)
            grade = td.evaluate.cross_validate(setting.features, targets, setting.estimator)
            self._grades[_key(view)] = grade
        return grade

    def scores(self, view: View) -> np.ndarray:
        """Return the scores of all training samples for a target, (sample,)."""
        return self._scores(self.setting(view), view.target)[0]

    def values(self, view: View, name: str) -> np.ndarray:
        """Return the ``score``, the ``self_influence`` or a number of every training sample."""
        return self.scores(view) if name == "score" else super().values(view, name)

    def _target(self, setting: Setting, position: int) -> xr.Dataset:
        tables.require_position(position, self.targets.features.sizes[SAMPLE], "target")
        return self.targets.at(setting.checkpoints).isel({SAMPLE: [position]})

    def _scored(self, setting: Setting, position: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the scores of one target, (sample,), and their :func:`_spread`.

        It is NaN for one checkpoint. All that the page of a target shows is taken from them.
        """
        target = self._target(setting, position)
        if len(setting.checkpoints) < 2:
            (scores,) = compute(td.score(setting.features, target, setting.estimator).data[:, 0])
            return scores, np.full(len(scores), np.nan, np.float32)
        _, lazy, _ = estimated(setting.features, target, setting.estimator)
        (tiles,) = compute(lazy[:, 0])
        return tiles["score"].copy(), _spread(tiles["error"], setting)

    def _mask(self, view: View) -> np.ndarray:
        """Return which training samples meet a condition, which may name the target's ``score``."""
        table = self._table(view).assign(score=self.scores(view))
        return condition_mask(table, view.where, self.targets.one(view.target, "target"))

    def targets_of(self, view: View) -> pd.DataFrame:
        """Return the targets that a training sample helped most and harmed most, best first.

        Columns: the columns of the table of targets, ``score`` and ``spread``, see
        :func:`_spread`. At most 2 k rows.
        """
        setting, k = self.setting(view), view.k
        tables.require_position(view.sample, setting.features.sizes[SAMPLE], "training sample")
        targets = self.targets.at(setting.checkpoints)
        (scores,) = compute(scores_of_sample(setting, targets, view.sample))
        table = self.targets.whole.assign(score=scores).dropna(subset="score")
        table = table.sort_values("score", ascending=False, kind="stable")
        table = table if len(table) <= 2 * k else pd.concat([table[:k], table[-k:]])
        table["spread"] = np.nan
        if len(setting.checkpoints) > 1 and len(table):
            shown = targets.isel({SAMPLE: table.index.to_numpy()})
            sample = setting.features.isel({SAMPLE: [view.sample]})
            _, lazy, _ = estimated(sample, shown, setting.estimator)
            (tiles,) = compute(lazy[0])
            table["spread"] = _spread(tiles["error"], setting)
        return table

    def heatmap(self, view: View, across: str = "") -> pd.DataFrame:
        """Return mean scores of groups of training samples (rows) and of targets (columns).

        An entry is the sum of the scores of the group's samples for one target, averaged over the
        targets that share a value of their coord ``across``. A
        cosine has no mean over targets, so under ``"grad_cos"`` columns are the first targets.
        """
        setting = self.setting(view)
        targets = self.targets.at(setting.checkpoints)
        if across and TARGET not in setting.estimator.norms:
            is_whole = self.targets.numbers.iloc[:, -1].notna().to_numpy()  # the loss, or Q
            targets = td.combine(targets.isel({SAMPLE: is_whole}), by=across)
            names = targets[across].values
        else:
            across, targets = "", targets.isel({SAMPLE: slice(_MOST_TARGETS)})
            names = np.arange(targets.sizes[SAMPLE])
        lazy = td.group_score(setting.features, targets, setting.estimator, by=view.group_by)
        (sums,) = compute(lazy)
        index = pd.Index(sums[view.group_by].values, name=view.group_by)
        return pd.DataFrame(sums.values, index=index, columns=pd.Index(names, name=across))


def _spread(error: np.ndarray, setting: Setting) -> np.ndarray:
    """Return half of the intervals of scores, from their standard errors over checkpoints.

    With fewer than five checkpoints the standard errors themselves.
    """
    from scipy.special import stdtrit  # slow to import

    n = len(setting.checkpoints)
    width = stdtrit(n - 1, (1 + LEVEL) / 2) if n >= LEAST_FOLDS else 1
    return np.asarray(error * width, np.float32)


def _key(view: View) -> tuple[Any, ...]:
    return view.estimator, view.damping, view.checkpoints
