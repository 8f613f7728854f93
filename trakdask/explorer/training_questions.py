"""Questions to training samples alone: which there are, and their values."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import dask.array as da
import numpy as np
import pandas as pd
import xarray as xr

import trakdask as td
from trakdask import arrays
from trakdask.attribution.duplicates import find_duplicates
from trakdask.attribution.estimators import EstimatorLike, GradDot, named, resolve
from trakdask.attribution.gauss_newton import Trak
from trakdask.attribution.grams import with_decomposition
from trakdask.attribution.operands import solver
from trakdask.attribution.protocol import Estimator, GramEstimator
from trakdask.explorer import tables
from trakdask.explorer.computing import compute, persist, released_if_failed
from trakdask.explorer.conditions import condition_mask
from trakdask.explorer.marks import Marks
from trakdask.explorer.view import View
from trakdask.variables import DERIVED, LOSS_GRADIENT, SAMPLE, checkpoint_names, lazy_features

_MOST_GROUPS = 1000


@dataclass(frozen=True, eq=False)
class Setting:
    """How scores are made, and features with their gram matrix and eigenvectors in memory."""

    features: xr.Dataset
    estimator: Estimator


class TrainingQuestions:
    """Answers about training samples; :class:`Questions` describes the arguments."""

    def __init__(
        self,
        features: xr.Dataset,
        estimator: EstimatorLike,
        classifier: tables.Classifier | None,
        marks: Marks | None,
    ) -> None:
        self.features, self.marks = features, marks
        self.training = tables.SampleTable(features, features, classifier)
        if not isinstance(estimator, Estimator):
            estimator = named(features, estimator)
        self.estimator: Estimator = estimator
        # In functions that copies share.
        self._prepared = lru_cache(1)(lambda: _prepared(features, estimator))
        self.duplicates = lru_cache(1)(  # by the first checkpoint
            lambda: find_duplicates(lazy_features(features)["feature"].data[:, :, 0], compute)
        )
        self.influences = lru_cache(1)(
            lambda: compute(_self_influence(self.setting, self.setting.features).data)[0]
        )

    @property
    def metadata(self) -> pd.DataFrame:
        """The coords of the training samples, by position."""
        return self.training.metadata

    @cached_property
    def groupings(self) -> list[str]:
        """The coords with 2 to 1,000 values, each of two training samples or more on average."""
        return tables.few_values(self.metadata, _MOST_GROUPS)

    @cached_property
    def sample_ids(self) -> np.ndarray:
        """The name of each training sample in the marks, (sample,)."""
        assert self.marks is not None
        return self.marks.ids(self.features)

    def marked(self) -> pd.DataFrame:
        """Return all marks with the ``position`` of their samples; none if none are kept.

        Marks of absent samples are left out. Samples that share a label share its marks.
        """
        if self.marks is None:
            return pd.DataFrame({SAMPLE: [], "mark": [], "position": []})
        table, names = self.marks.table(), pd.Series(self.sample_ids, name=SAMPLE)
        names = names[names.isin(table[SAMPLE])]
        places = names.rename_axis("position").reset_index()
        # As objects, because pandas merges no numbers with texts.
        return table.astype({SAMPLE: object}).merge(places.astype({SAMPLE: object}), on=SAMPLE)

    def mark_texts(self) -> pd.Series[str]:
        """Return the marks that each training sample has, as one text."""
        table = self.marked().sort_values("mark")
        texts = table.groupby("position")["mark"].agg(", ".join)
        return texts.reindex(self.metadata.index, fill_value="").astype(object)

    @cached_property
    def checkpoints(self) -> list[str]:
        """The names of the checkpoints."""
        return checkpoint_names(self.features)

    @property
    def setting(self) -> Setting:
        """How scores are made; it is computed the first time that it is asked for."""
        if released_if_failed(self._prepared().features):
            self._prepared.cache_clear()
        return self._prepared()

    def sample(self, view: View) -> pd.Series:
        """Return the coords of a training sample, its output, loss and self-influence."""
        row = self.training.row(view.sample, "training sample")
        one = self.setting.features.isel({SAMPLE: [view.sample]})
        (influence,) = compute(_self_influence(self.setting, one).data)
        row["self_influence"] = influence[0]
        return row

    def order(self, view: View) -> str:
        """Return the number by which a view sorts training samples; "" for their order."""
        return self.training.loss if view.order == "loss" else view.order

    def ranking(self, view: View) -> pd.DataFrame:
        """Return the training samples that a view selects, in its order, largest first."""
        table, name = self.metadata.iloc[self.selected(view)], self.order(view)
        if not name:
            return table
        is_influence = name == "self_influence"
        values = self.influences() if is_influence else self.training.numbers[name].to_numpy()
        table = table.assign(**{name: values[table.index]})
        key = np.abs if name == "Q" else None
        return table.sort_values(name, ascending=False, kind="stable", key=key)

    def selected(self, view: View) -> np.ndarray:
        """Return the positions of the training samples that meet the condition of a view."""
        return np.flatnonzero(condition_mask(self._table(view), view.where))

    def facets(self, view: View) -> dict[str, tuple[pd.Series[int], int]]:
        """Return how many of the training samples that a view selects have which metadata."""
        table, names = self._table(view), self.groupings
        if self.marks is not None and (texts := self.mark_texts()).any():
            table, names = table.assign(mark=texts), [*names, "mark"]
        return tables.facets(table, names, view.where)

    def _table(self, view: View) -> pd.DataFrame:
        """Return the columns that the condition of a view on training samples may name."""
        named = {*re.findall(r"\w+", view.where)} - {*self.metadata}
        more: dict[str, Any] = {
            **self.training.numbers,
            "self_influence": lambda _: self.influences(),
            "mark": lambda _: self.mark_texts(),
        }
        return self.metadata.assign(**{name: more[name] for name in more if name in named})

    @property
    def first_row(self) -> pd.DataFrame:
        """One row with the columns that a condition on training samples may name."""
        numbers = [*self.training.numbers, "self_influence"]
        more: dict[str, Any] = {**dict.fromkeys(numbers, 0.0), "mark": ""}
        return self.metadata[:1].assign(**{n: x for n, x in more.items() if n not in self.metadata})

    def alike(self, view: View) -> pd.DataFrame:
        """Return the k training samples most like one: the cosine of their features, largest first.

        By position; column ``cosine``, the mean over checkpoints.
        """
        features = self.setting.features
        one = features.isel({SAMPLE: [view.sample]})
        top = td.top_k(td.score(features, one, "grad_cos"), min(view.k + 1, len(self.metadata)))
        position, cosine = compute(top["position"].data[0], top["score"].data[0])
        table = pd.DataFrame({"cosine": cosine}, index=position)
        return table.drop(index=[view.sample, -1], errors="ignore")[: view.k]


def _prepared(features: xr.Dataset, estimator: Estimator) -> Setting:
    """Return the setting of an estimator: p² numbers per checkpoint are computed, and λ."""
    if not isinstance(estimator, GramEstimator):
        return Setting(features, estimator)
    features = lazy_features(features)
    features = with_decomposition(features, estimator.resolved(features).of_sums())
    wanted = {*DERIVED, "output", "out_to_loss"} - {LOSS_GRADIENT}
    names = [name for name in features if name in wanted]
    kept = zip(names, persist(*(features[name].data for name in names)), strict=True)
    features = features.assign({name: features[name].copy(data=data) for name, data in kept})
    (chosen,) = compute(td.damping(features, estimator))
    return Setting(features, estimator.with_damping(chosen))


def _self_influence(setting: Setting, features: xr.Dataset) -> xr.DataArray:
    """Return the lazy self-influence of some samples, under the gram matrix of all."""
    estimator = setting.estimator
    if estimator.norms or not estimator.pooled:  # for these there is no self-influence
        estimator = Trak(estimator.damping) if isinstance(estimator, GramEstimator) else GradDot()
    return td.self_influence(features, estimator)


def scores_of_sample(setting: Setting, targets: xr.Dataset, position: int) -> da.Array:
    """Return the scores of one training sample for all targets, (target,).

    With a gram matrix the sample's side is solved, one vector, instead of all targets'.
    """
    sample = setting.features.isel({SAMPLE: [position]})
    if not isinstance(setting.estimator, GramEstimator):
        return td.score(sample, targets, setting.estimator).data[0]
    features, one = lazy_features(setting.features), lazy_features(sample)
    solved = solver(features, resolve(features, setting.estimator))
    rows = lazy_features(targets)["feature"].data
    products = arrays.score.score(rows, solved.vectors(one), None)[:, 0]
    scores = products * solved.weight(one).mean(axis=1)[0]
    return scores
