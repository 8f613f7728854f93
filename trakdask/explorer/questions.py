"""Small tables that answer questions to lazy attributions; nothing here knows of pages.

Each question computes its answer and no more, by :func:`trakdask.explorer.computing.compute`: on
the active dask client, or on threads. Scores of all samples and targets never exist.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Self

import numpy as np
import pandas as pd
import xarray as xr

import trakdask as td
from trakdask import arrays
from trakdask.attribution.duplicates import find_duplicates
from trakdask.attribution.estimators import EstimatorLike, GradDot, Trak, kind_of, resolve
from trakdask.attribution.grams import with_decomposition
from trakdask.attribution.operands import solver
from trakdask.attribution.protocol import LEAST_FOLDS, LOGIT_VARIANCE, Estimator, GramEstimator
from trakdask.attribution.uncertainty import estimated
from trakdask.execution import active_client
from trakdask.explorer import tables
from trakdask.explorer.computing import compute, persist, released_if_failed
from trakdask.explorer.contents import NO_CONTENTS, Contents
from trakdask.explorer.marks import Marks
from trakdask.explorer.new_targets import TargetMaker
from trakdask.explorer.view import View, condition_mask
from trakdask.variables import (
    CHECKPOINT,
    DAMPING,
    DERIVED,
    LOSS_GRADIENT,
    N_SAMPLES,
    SAMPLE,
    TARGET,
    TRAINED_ON,
    checkpoint_names,
    lazy_features,
)

LEVEL = 0.9
"""The part of the intervals that contains the score, as a rule."""

_ROWS_KEPT = 2
"""How many targets keep the scores of all training samples, 8 bytes for each sample."""

_TARGETS_TOGETHER, _INTERVALS_KEPT = 256, 8
"""How many targets get effects or intervals in one pass over the features, and how many passes are
kept: 16 bytes for each group and target."""


@dataclass(frozen=True, eq=False)
class Scorer:
    """Features of training samples, with an estimator that has its λ."""

    features: xr.Dataset
    estimator: Estimator

    @classmethod
    def prepared(cls, features: xr.Dataset, estimator: Estimator) -> Self:
        """Compute p² numbers per checkpoint, which stay with the features in memory, and λ."""
        if not isinstance(estimator, GramEstimator):
            return cls(features, estimator)
        # 1. Gram matrix, eigenvectors and what λ needs go into memory: each later click uses them.
        features = lazy_features(features)
        features = with_decomposition(features, estimator.resolved(features).of_sums())
        wanted = {*DERIVED, "output", "out_to_loss"} - {LOSS_GRADIENT}
        names = [name for name in features if name in wanted]
        kept = zip(names, persist(*(features[name].data for name in names)), strict=True)
        features = features.assign({name: features[name].copy(data=data) for name, data in kept})
        # 2. λ, once for all targets, and the power of Q.
        variance = arrays.weights.logit_variance(features.out_to_loss.data)
        chosen, variance = compute(td.damping(features, estimator), variance)
        # As in stores, so that one sample has the power of Q that all have.
        about = {
            LOGIT_VARIANCE: variance.tolist(), N_SAMPLES: features.sizes[SAMPLE],
            "pooled_checkpoints": checkpoint_names(features),
        }  # fmt: skip
        damping = CHECKPOINT, chosen["damping"].values, about
        return cls(features.assign({DAMPING: damping}), estimator.with_damping(chosen))

    def at(self, positions: Sequence[int] | np.ndarray) -> Self:
        """Return the scorer of some of the training samples."""
        return replace(self, features=self.features.isel({SAMPLE: positions}))

    def self_influence(self) -> np.ndarray:
        """Return the self-influence of the samples, under the gram matrix of all, (sample,)."""
        known = self.estimator
        if known.norms or not known.pooled:  # for these there is no self-influence
            known = Trak(known.damping) if isinstance(known, GramEstimator) else GradDot()
        (values,) = compute(td.self_influence(self.features, known).data)
        return np.asarray(values)

    def scores(self, targets: xr.Dataset) -> tuple[np.ndarray, np.ndarray]:
        """Return scores and half of their intervals, both (sample, target).

        With fewer than five checkpoints these are their standard errors, NaN for one checkpoint.
        """
        from scipy.special import stdtrit  # slow to import

        if (n := self.features.sizes[CHECKPOINT]) < 2:
            (scores,) = compute(td.score(self.features, targets, self.estimator).data)
            return scores, np.full(scores.shape, np.nan, np.float32)
        _, lazy, _ = estimated(self.features, targets, self.estimator)
        (tiles,) = compute(lazy)
        width = stdtrit(n - 1, (1 + LEVEL) / 2) if n >= LEAST_FOLDS else 1
        return tiles["score"], np.asarray(tiles["error"] * width, np.float32)

    def scores_of(self, position: int, targets: xr.Dataset) -> np.ndarray:
        """Return the scores of one training sample for many targets, (target,).

        With a gram matrix the sample's side is solved, one vector, instead of all targets'.
        """
        sample = self.at([position]).features
        if isinstance(self.estimator, GramEstimator):
            one, rows = lazy_features(sample), lazy_features(targets)["feature"].data
            # (K + λ)⁻¹ is symmetric: φ(z)ᵀ (K + λ)⁻¹ φ(t) is the product of φ(t) with the solved z.
            solved = solver(lazy_features(self.features), resolve(self.features, self.estimator))
            products = arrays.score.score(rows, solved.vectors(one), None)[:, 0]
            lazy = products * solved.weight(one).mean(axis=1)[0]
        else:
            lazy = td.score(sample, targets, self.estimator).data[0]
        (scores,) = compute(lazy)
        return np.asarray(scores)

    def groups(self, targets: xr.Dataset, by: str, **how: Any) -> Any:
        """Return sums of scores of groups, with the options of :func:`trakdask.group_score`."""
        (found,) = compute(td.group_score(self.features, targets, self.estimator, by=by, **how))
        return found


class Questions:
    """Answers about features and targets, for several users.

    Results such as the eigenvectors of the gram matrix are computed for the first user, and kept
    for the others.

    Parameters
    ----------
    features, targets
        As in :func:`trakdask.score`.
    estimator
        As in :func:`trakdask.score`.
    contents
        How training samples and targets are shown.
    words
        As :func:`trakdask.score_parts`, with a model; None if words are to have no scores.
    marks
        The marks of training samples; None if none are kept.
    maker
        Makes new targets, and predicts classes; None without a model.
    """

    def __init__(
        self,
        features: xr.Dataset,
        targets: xr.Dataset,
        estimator: EstimatorLike = "auto",
        *,
        contents: tuple[Contents, Contents] = (NO_CONTENTS, NO_CONTENTS),
        words: Callable[..., xr.DataArray] | None = None,
        marks: Marks | None = None,
        maker: TargetMaker | None = None,
    ) -> None:
        self.features, self.marks, self.maker, self._words = features, marks, maker, words
        # The name of each training sample in the marks, (sample,). Now, because other people may
        # drop samples of the store, or append some, while pages are open.
        self.sample_ids = np.empty(0) if marks is None else marks.ids(features)
        self.client, self.checkpoints = active_client(), checkpoint_names(features)
        reader = maker.probabilities if maker and maker.finds_class else None
        self.training = tables.SampleTable(
            features, features, "training sample", contents[0], reader
        )
        if not isinstance(estimator, Estimator):
            estimator = kind_of(features, estimator)()
        self.estimator: Estimator = estimator
        # In functions that copies share.
        self._prepared = lru_cache(1)(lambda: Scorer.prepared(features, estimator))
        self.duplicates = lru_cache(1)(  # by the first checkpoint
            lambda: find_duplicates(lazy_features(features)["feature"].data[:, :, 0], compute)
        )
        self.influences = lru_cache(1)(lambda: self.setting.self_influence())
        self.has_words = words is not None and SAMPLE not in self.estimator.norms
        self.has_intervals = len(self.checkpoints) >= LEAST_FOLDS
        self.has_grade = TRAINED_ON in features and len(self.checkpoints) > 3
        is_signed = features.attrs.get("loss_kind") == "squared error"
        is_sum = TARGET not in self.estimator.norms
        self._has_shares = self.has_intervals and is_sum and not is_signed
        self.known_grade: xr.Dataset | None = None
        self._explain(tables.SampleTable(targets, features, "target", contents[1], reader))

    def _explain(self, targets: tables.SampleTable) -> None:
        self.targets = targets
        self._scores = lru_cache(_ROWS_KEPT)(self._scored)
        self._credits = lru_cache(_ROWS_KEPT)(self._credited)
        self._bounds = lru_cache(_INTERVALS_KEPT)(self._bounds_of)

    def with_target(self, features: xr.Dataset, html: str) -> Self:
        """Return the same questions to one more target; answers about training samples are kept."""
        other = copy.copy(self)
        other._explain(self.targets.with_one_more(features, html))
        return other

    def view(self, query: str) -> View:
        """Return the view of a URL; names of columns that are not there are errors, too."""
        view = View.from_query(query)
        columns: dict[str, Callable[[], list[str]]] = {
            "sort": lambda: self.targets.columns, "group_by": lambda: self.training.groupings,
        }  # fmt: skip
        for field, names in columns.items():
            name, default = getattr(view, field), getattr(View(), field)
            if name not in ("", default) and name not in (known := names()):
                text = f"There is no column {name!r:.60}; there are {', '.join(known) or 'none'}."
                view = view.replace(**{field: default}, errors={**view.errors, field: text})
        return view

    # ------------------------------------------------------------------------ training samples

    def marked(self) -> pd.DataFrame:
        """Return all marks with the ``position`` of their samples, newest first; none if not kept.

        Marks of absent samples are left out. Samples that share a label share its marks.
        """
        if self.marks is None:
            return pd.DataFrame({SAMPLE: [], "mark": [], "position": []})
        table, names = self.marks.table(), pd.Series(self.sample_ids, name=SAMPLE)
        names = names[names.isin(table[SAMPLE])]
        places = names.rename_axis("position").reset_index()
        # As objects, because pandas merges no numbers with texts.
        found = table.astype({SAMPLE: object}).merge(places.astype({SAMPLE: object}), on=SAMPLE)
        return found.iloc[::-1].reset_index(drop=True)

    def mark_texts(self) -> pd.Series[str]:
        """Return the marks that each training sample has, as one text."""
        table = self.marked().sort_values("mark")
        texts = table.groupby("position")["mark"].agg(", ".join)
        return texts.reindex(self.training.metadata.index, fill_value="").astype(object)

    @property
    def setting(self) -> Scorer:
        """Features and estimator of all scores, prepared when they are first asked for."""
        if released_if_failed(self._prepared().features):
            self._prepared.cache_clear()
        return self._prepared()

    def sample(self, view: View) -> pd.Series:
        """Return the coords of a training sample, its output, loss and self-influence."""
        row = self.training.row(view.sample)
        (row["self_influence"],) = self.setting.at([view.sample]).self_influence()
        return row

    def ranking(self, view: View) -> pd.DataFrame:
        """Return the training samples that a view selects, in its order, largest first."""
        name = self.training.by(view.order)
        return tables.chosen(self._table(view, name), view.where, name)

    def facets(self, view: View) -> dict[str, tuple[pd.Series[int], int]]:
        """Return how many of the training samples that a view selects have which metadata."""
        table, names = self._table(view), self.training.groupings
        if self.marks is not None and (texts := self.mark_texts()).any():
            table, names = table.assign(mark=texts), [*names, "mark"]
        return tables.facets(table, names, view.where)

    def _table(self, view: View, *names: str) -> pd.DataFrame:
        """Return metadata and numbers, and other columns that a view or some names ask for."""
        asked = {*re.findall(r"\w+", view.where), *names}
        more: dict[str, Callable[[], Any]] = {
            "self_influence": self.influences, "mark": self.mark_texts,
        }  # fmt: skip
        columns = {name: values() for name, values in more.items() if name in asked}
        return self.training.numbered.assign(**columns) if columns else self.training.numbered

    @cached_property
    def first_row(self) -> pd.DataFrame:
        """One row with the columns that a condition on training samples may name."""
        return self.training.numbered[:1].assign(self_influence=0.0, mark="")

    def grouped(self, view: View) -> View:
        """Return a view that groups by some column, or by "" if none is fit for it.

        By default not by the model's classes: few ask whether whole classes helped.
        """
        names = sorted(self.training.groupings, key=lambda name: name == self.targets.label)
        return view if view.group_by in names else view.replace(group_by=(*names, "")[0])

    def listed(self, view: View, name: str) -> pd.DataFrame:
        """Return the table of training samples in a section, by position, in the order of it.

        ``"copies"`` are all but the first of each group of duplicates; ``""`` are all samples.

        Raises
        ------
        ValueError
            If this is no such section.
        """
        match name:
            case "helpful" | "harmful":
                return self.top(view, largest=name == "helpful")
            case "ranking":
                return self.ranking(view)
            case "marked":
                return self.marked().drop_duplicates("position").set_index("position")
            case "duplicates" | "copies":
                table = self.duplicates().set_index(SAMPLE)
                return table[table["group"].duplicated()] if name == "copies" else table
            case "":
                return self.training.metadata
        raise ValueError(f"There are no samples to mark in {name!r:.60}.")

    def alike(self, view: View) -> pd.DataFrame:
        """Return the k training samples most like one: the cosine of their features, largest first.

        By position; column ``cosine``, the mean over checkpoints.
        """
        one = self.training.features_of(view.sample)
        (cosines,) = compute(td.score(self.features, one, "grad_cos").data[:, 0])
        others = pd.Series(cosines, name="cosine").drop(view.sample).dropna()
        return others.nlargest(view.k).to_frame()

    # --------------------------------------------------------------------------------- targets

    def top(self, view: View, *, largest: bool = True) -> pd.DataFrame:
        """Return the k training samples that helped or harmed a target most.

        By position; columns: ``sample``, the position; ``score``; ``spread``, half of its interval;
        the coords of the sample. Fewer rows than k if the condition of the view selects fewer.
        """
        scores, spread = self._scores(view.target)
        selected = pd.Series(scores)[self._mask(view)].dropna()
        ranked = selected.nlargest(view.k) if largest else selected.nsmallest(view.k)
        position = ranked.index.to_numpy()
        table = pd.DataFrame({SAMPLE: position, "score": ranked, "spread": spread[position]})
        coords = self.training.metadata.drop(columns=list(table), errors="ignore")
        return table.join(coords)

    def words(self, view: View, position: np.ndarray) -> xr.DataArray:
        """Return the scores of the tokens of some training samples for one target.

        (sample, token), with the coord ``text``; they add up to the scores of the samples.
        """
        assert self._words is not None
        known, target = self.setting, self.targets.features_of(view.target)
        of = self.training.contents.samples.isel({SAMPLE: position})
        lazy = self._words(known.features, target, of=of, estimator=known.estimator)
        scores: xr.DataArray
        (scores,) = compute(lazy.isel({TARGET: 0}))
        return scores

    def groups(self, view: View) -> pd.DataFrame:
        """Return what groups of training samples did to a target, the most helpful first.

        Columns: the coord that the view groups by; ``samples``, how many; ``score`` and ``spread``,
        the sum of scores and half of its interval, NaN for fewer than five checkpoints. Only
        samples that the condition of the view selects are counted. Where all are, and checkpoints
        of halves tell, ``score`` is the effect in units of the output, and ``sum`` is what else was
        there, see :func:`tables.with_bounds`.
        """
        by, scores, mask = view.group_by, self.scores(view).astype(np.float64), self._mask(view)
        table = pd.DataFrame({by: self.training.metadata[by], "score": scores})[mask]
        sums = table.groupby(by).agg(score=("score", "sum"), samples=("score", "size"))
        # 1. What is computed for many targets at once. The last block has the rest, too, since
        # effects need many targets.
        block = min(view.target, max(len(self.targets.metadata) - _TARGETS_TOGETHER, 0))
        block //= _TARGETS_TOGETHER
        # The mask as bytes, which `lru_cache` can compare.
        found = self._bounds(by, mask.tobytes(), block) if mask.any() else None
        # 2. One target of these.
        of_target = found and found.isel({TARGET: view.target - block * _TARGETS_TOGETHER})
        gone = self.training.only_of(by, self.targets, [view.target])
        sums = tables.with_bounds(sums, of_target, gone)
        return sums.sort_values("score", ascending=False, kind="stable").reset_index()

    def _bounds_of(self, by: str, mask: bytes, block: int) -> xr.Dataset | None:
        """Return the effects of groups on a block of targets, or sums, with bounds if they can be.

        Nearly all of the time goes into sums of features, which are the same for all targets.
        """
        scorer, chosen = self.setting, np.flatnonzero(np.frombuffer(mask, bool))
        is_whole = len(chosen) == len(self.training.metadata)
        start, n = block * _TARGETS_TOGETHER, len(self.targets.metadata)
        stop = n if n - start < 2 * _TARGETS_TOGETHER else start + _TARGETS_TOGETHER
        targets = self.targets.features.isel({SAMPLE: slice(start, stop)})
        if is_whole:
            with suppress(ValueError):
                return scorer.groups(targets, by, effect=True, level=LEVEL)[["effect", "upper"]]
        if not self.has_intervals:
            return None
        scorer = scorer if is_whole else scorer.at(chosen)
        return scorer.groups(targets, by, level=LEVEL)[["score", "upper"]]

    @property
    def has_credit(self) -> bool:
        """Whether it can be known what groups of training samples did to many targets."""
        return (self.has_grade or self._has_shares) and bool(self.training.groupings)

    def credit(self, view: View) -> pd.DataFrame:
        """Return what groups did to the targets that a view selects, the most helpful first.

        Columns as of :meth:`groups`: with checkpoints of halves, ``score`` is the effect on the
        mean loss. Else, it is the group's share of all scores, whose error is not known.
        """
        # What does not change the answer is as by default, so that one answer serves all such
        # views.
        return self._credits(view.replace(page="targets", first=0, sort="", ascending=False))

    def _credited(self, view: View) -> pd.DataFrame:
        scorer, by = self.setting, view.group_by
        selected = np.sort(self.targets.selected(view).index)
        selected = selected[self.targets.numbers.iloc[selected, -1].notna()]
        targets = self.targets.features.isel({SAMPLE: selected})
        # 1. Effects on the loss, unless no group has one: those of whole classes are not known.
        counts = self.training.metadata[by].value_counts().rename("samples").to_frame()
        found, gone = None, self.training.only_of(by, self.targets, selected)
        if len(gone) < len(counts):
            try:
                found = scorer.groups(targets, by, effect=True, metric="loss", level=LEVEL)
            except ValueError:
                if not self._has_shares:
                    raise
        # 2. Shares, where there are no effects, and for the groups that have none.
        table = counts.assign(score=np.nan)
        if (found is None or gone) and self._has_shares:
            table["score"] = scorer.groups(targets, by, share=True).to_series()
        table = tables.with_bounds(table, found and found.isel({TARGET: 0}), gone)
        is_loss = found is not None  # groups are the better, the lower it is with them
        table = table if is_loss else table.dropna(subset="score")
        return table.sort_values("score", ascending=is_loss, kind="stable").reset_index()

    def grade(self) -> xr.Dataset:
        """Return how well scores predict checkpoints that were left out; computed once."""
        if self.known_grade is None:
            known, targets = self.setting, self.targets.features
            self.known_grade = td.evaluate.cross_validate(known.features, targets, known.estimator)
        return self.known_grade

    def scores(self, view: View) -> np.ndarray:
        """Return the scores of all training samples for a target, (sample,)."""
        return self._scores(view.target)[0]

    def _scored(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the scores of one target, (sample,), and their spread.

        All that the page of a target shows is taken from them.
        """
        scores, spread = self.setting.scores(self.targets.features_of(position))
        return scores[:, 0].copy(), spread[:, 0].copy()

    def _mask(self, view: View) -> np.ndarray:
        """Return which training samples meet a condition, which may name the target's ``score``."""
        if not view.where:  # without a copy of the table
            return np.ones(len(self.training.metadata), bool)
        table = self._table(view).assign(score=self.scores(view))
        return condition_mask(table, view.where, self.targets.one(view.target))

    def targets_of(self, view: View) -> pd.DataFrame:
        """Return the targets that a training sample helped most and harmed most, best first.

        Columns: the columns of the table of targets, ``score`` and ``spread``, see
        :meth:`Scorer.scores`. At most 2 k rows.
        """
        self.training.one(view.sample)
        scorer, targets, k = self.setting, self.targets.features, view.k
        scores = scorer.scores_of(view.sample, targets)
        table = self.targets.whole.assign(score=scores).dropna(subset="score")
        table = table.sort_values("score", ascending=False, kind="stable")
        table = table if len(table) <= 2 * k else pd.concat([table[:k], table[-k:]])
        if table.empty:
            return table
        # Errors of the rows that are shown only: they need the scores of each checkpoint.
        shown = targets.isel({SAMPLE: table.index.to_numpy()})
        _, spread = scorer.at([view.sample]).scores(shown)
        return table.assign(spread=spread[0])
