"""Tables of training samples and targets: their metadata, and the model's predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from trakdask.explorer.computing import compute
from trakdask.explorer.contents import NO_CONTENTS, Contents
from trakdask.explorer.view import View, condition_mask, is_name, joined, without
from trakdask.variables import CHECKPOINT, OUTPUT, SAMPLE, coords_along

_MOST_GROUPS = 1000
_MOST_VALUES, _MOST_CLASSES = 12, 40
"""How many values of a column are listed with their counts, and how many classes in a table."""

_MOST_UNSURE = 256
"""How many samples the model is asked about; their labels are the least likely."""

_NEW = "new"
"""The coord that is true for the targets that were added on the spot."""

_ARRAYS = ("feature", "output", "out_to_loss")
_PREDICTIONS = ["predicted", "probability"]

_LOSSES: Mapping[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "cross-entropy": lambda output, q: np.logaddexp(0, -output),
    "weighted cross-entropy": lambda output, q: np.logaddexp(0, -output) * q * (1 + np.exp(output)),
    "squared error": lambda output, q: q**2 / 2,
    "minus output": lambda output, q: -output,
}
"""The loss of samples by what tasks say of it. A margin has the cross-entropy, which is
log(1 + exp(-output)), times its weight, Q/(1 - p), if it has one."""


@dataclass(eq=False)
class SampleTable:
    """Samples, targets or training samples: how they look, and the table of them.

    Parameters
    ----------
    features
        Their features, with outputs and Q.
    training
        The training samples' features; their labels say which classes there are.
    what
        What one of them is called.
    contents
        How they are shown.
    classifier
        Returns the probabilities of all classes for some samples, (sample, class); None for a model
        that is not at hand, or no classifier.
    """

    features: xr.Dataset
    training: xr.Dataset
    what: str
    contents: Contents = NO_CONTENTS
    classifier: Callable[[xr.Dataset], np.ndarray] | None = None

    def with_one_more(self, new: xr.Dataset, html: str) -> SampleTable:
        """Return these and one more sample, with the coord ``new`` and its content.

        Metadata that it lacks is missing.
        """
        # 1. Metadata, with the new column if this is the first.
        ds, table, new = self.features, self.metadata, new.assign_coords({_NEW: (SAMPLE, [True])})
        table = table if _NEW in table else table.assign(**{_NEW: False})
        # What is missing, by the kind of the column: integers become floats, and texts are empty.
        empty: dict[str, Any] = {"M": np.datetime64("NaT"), "m": np.timedelta64("NaT"), "b": False}
        empty |= dict.fromkeys("iuf", np.nan)
        coords: dict[Any, Any] = {CHECKPOINT: ds[CHECKPOINT]}
        for n in table:
            values = table[n].to_numpy()
            one: Any = new[n].values if n in new else empty.get(values.dtype.kind, "")
            coords[n] = SAMPLE, np.append(values, one)
        # 2. The arrays that scores need.
        both = {n: (ds[n].variable, new[n].variable.astype(ds[n].dtype)) for n in _ARRAYS}
        data = {name: xr.Variable.concat(pair, SAMPLE) for name, pair in both.items()}
        features = xr.Dataset(data, coords, ds.attrs)
        # 3. Its content.
        added = {**self.contents.added, len(self.metadata): html}
        contents = replace(self.contents, added=added)
        return replace(self, features=features, contents=contents)

    @cached_property
    def metadata(self) -> pd.DataFrame:
        """The coords along the samples as columns, loaded, by position."""
        coords = {
            str(name): np.asarray(variable.values)
            for name, variable in coords_along(self.features, SAMPLE).items()
            if variable.dtype.kind != "V"
        }
        return pd.DataFrame(coords, index=pd.RangeIndex(self.features.sizes[SAMPLE]))

    @cached_property
    def groupings(self) -> list[str]:
        """The coords with 2 to 1,000 values, each of two samples or more on average."""
        most, counts = min(_MOST_GROUPS, len(self.metadata) // 2), self.metadata.nunique()
        return counts.index[counts.between(2, most)].tolist()

    @cached_property
    def label(self) -> str:
        """The coord that has the classes of a classifier; "" for other models."""
        name = self._said("label")
        is_number = name in self.metadata and self.metadata[name].dtype.kind in "iuf"
        return name if is_number else ""

    @cached_property
    def whole(self) -> pd.DataFrame:
        """Metadata of all samples, and the model's predictions; see :meth:`selected`."""
        if not self.label:
            return self.numbered
        found = self.predictions(np.arange(len(self.metadata)))[_PREDICTIONS]
        return self.metadata.assign(**found, **self.numbers)

    @cached_property
    def numbered(self) -> pd.DataFrame:
        """Metadata and numbers of all samples."""
        return self.metadata.assign(**self.numbers)

    @cached_property
    def numbers(self) -> pd.DataFrame:
        """Numbers of all samples from the features; the last column is ``loss`` or ``Q``."""
        output, q = self._outputs
        table = pd.DataFrame({"output": output.mean(axis=1)})
        if output.shape[1] > 1:
            table["disagreement"] = np.std(output, axis=1, ddof=1)
        with np.errstate(invalid="ignore"):  # targets that failed
            losses = _LOSSES[self._said("loss_kind")](output, q) if self.loss == "loss" else q
        return table.assign(**{self.loss: losses.mean(axis=1)})

    def _said(self, name: str) -> str:
        """Return what the task says of its loss; nothing for combined targets, which have none."""
        attrs = self.features.attrs
        return "" if "combined" in attrs else str(attrs.get(name, ""))

    @property
    def loss(self) -> str:
        """``"loss"``, or ``"Q"`` where the loss is not known."""
        return "loss" if self._said("loss_kind") in _LOSSES else "Q"

    @property
    def columns(self) -> list[str]:
        """The names of the columns of ``whole``, which is not computed for that."""
        # One checkpoint cannot disagree: the slice leaves out that column.
        numbers = ["output", "disagreement"][: self.features.sizes[CHECKPOINT]]
        return [*self.metadata, *_PREDICTIONS * bool(self.label), *numbers, self.loss]

    @cached_property
    def _outputs(self) -> tuple[np.ndarray, np.ndarray]:
        """Output and Q of all samples, both (sample, checkpoint)."""
        q = self.features["out_to_loss"].data
        # Without outputs, NaN in the same blocks.
        output, q = compute(
            self.features[OUTPUT].data if OUTPUT in self.features else np.nan * q, q
        )
        return np.asarray(output, np.float64), np.asarray(q, np.float64)

    def predictions(self, positions: np.ndarray) -> pd.DataFrame:
        """Return what a classifier makes of some samples.

        Columns: ``label`` and ``p``, its probability, the mean of 1 − Q over checkpoints;
        ``predicted`` and ``probability``, of the class that is predicted, NaN if they are unknown.
        A label with p ≥ ½ is the class that is predicted, and of two classes it is the other one
        below that; of more, only the model knows.
        """
        label = self.metadata[self.label].to_numpy()[positions]
        p = (1 - self._outputs[1]).mean(axis=1)[positions]
        # (2, sample): the class that is predicted, and its probability.
        found = np.where(p >= 0.5, [label, p], np.nan)
        classes = np.unique(self.training.get(self.label, ()))
        if len(classes) == 2:
            is_other = (p < 0.5) & np.isin(label, classes)
            # The sum of both classes less one is the other.
            found[:, is_other] = classes.sum() - label[is_other], 1 - p[is_other]
        elif self.classifier is not None:
            samples, unsure = self.contents.samples, np.argsort(p, kind="stable")[:_MOST_UNSURE]
            is_there = positions[unsure] < samples.sizes.get(SAMPLE, 0)
            unsure = unsure[(p[unsure] < 0.5) & is_there]
            if len(unsure):
                probabilities = self.classifier(samples.isel({SAMPLE: positions[unsure]}))
                found[:, unsure] = probabilities.argmax(axis=1), probabilities.max(axis=1)
        return pd.DataFrame({"label": label, "p": p, **dict(zip(_PREDICTIONS, found, strict=True))})

    def cards(self, table: pd.DataFrame, *, brief: bool = False) -> list[dict[str, Any]]:
        """Return what is shown of the samples whose positions are the index of a table.

        Each has its ``position``, ``content``, ``reading``, a row of :meth:`predictions`, which is
        empty for other models and failed samples, ``facts``, which are its metadata, and ``row`` of
        the table.
        """
        positions = table.index.tolist()
        readings: list[dict[str, Any]] = [{}] * len(table)
        if self.label and positions:
            found = records(self.predictions(np.asarray(positions)))
            readings = [x if np.isfinite(x["p"]) else {} for x in found]
        columns = {
            "content": self.contents.html(positions, brief=brief),
            "reading": readings,
            "facts": records(self.metadata.loc[positions]),
            "row": records(table),
        }
        return records(pd.DataFrame({"position": positions, **columns}))

    def facets(self, view: View) -> dict[str, tuple[pd.Series[int], int]]:
        """Return how many of the targets that a view selects have which metadata."""
        names = [*self.groupings, *(["predicted"] if self.label else [])]
        return facets(searched(self.whole, view.search), names, view.targets_where)

    def wrong_count(self, view: View) -> int:
        """Return how many of the targets that a view selects are not predicted as labelled."""
        if not self.label:
            return 0
        others = without(view.targets_where, "predicted")
        where = joined(others, f"predicted != {self.label}")
        return len(self.selected(view.replace(targets_where=where)))

    @property
    def has_confusion(self) -> bool:
        """Whether there are as many classes as a table can show."""
        is_grouping = self.label in self.groupings
        return is_grouping and self.metadata[self.label].nunique() <= _MOST_CLASSES

    def confusion(self, view: View) -> pd.DataFrame:
        """Return how many of the targets that a view selects have a label (row) and a class.

        The classes that the model predicts are the columns.
        """
        table = self.selected(view).dropna(subset="predicted")
        # Predictions that may be NaN are float, and would be headings such as 3.0.
        return pd.crosstab(table[self.label], table["predicted"].astype(table[self.label].dtype))

    def selected(self, view: View) -> pd.DataFrame:
        """Return the targets that a view searches and filters for, sorted.

        Columns: the coords of the targets; of classifiers ``predicted``, the class with the largest
        mean probability over checkpoints, and this ``probability``, NaN where they are not known;
        ``output``, its mean over checkpoints; ``disagreement``, its standard deviation between
        them; ``loss`` or ``Q``, see :attr:`loss`. Targets are sorted by the size of Q.
        """
        table, name = searched(self.whole, view.search), self.by(view.sort)
        return chosen(table, view.targets_where, name, ascending=view.ascending)

    def by(self, name: str) -> str:
        """Return the column by which to sort: Q in place of a loss that is not known."""
        return self.loss if name == "loss" else name

    def only_of(self, by: str, others: SampleTable, positions: Any) -> list[Any]:
        """Return the groups that have all samples of the class of one of some others."""
        if (label := others.label) not in self.metadata:
            return []
        groups = self.metadata[by].groupby(self.metadata[label])
        # Without such a group no sample of the class is left. Samples without a group count as one.
        is_one = groups.nunique(dropna=False) == 1
        classes = others.metadata[label].iloc[positions]
        return groups.first()[is_one & is_one.index.isin(classes)].tolist()

    def row(self, position: int) -> pd.Series[Any]:
        """Return metadata and numbers of one sample."""
        row = self.one(position).assign(**self.numbers.iloc[position])
        return row.astype(object).iloc[0]  # in which integers are still integers

    def one(self, position: int) -> pd.DataFrame:
        """Return the coords of one sample as a table of one row, if it is there."""
        if not 0 <= position < (n := len(self.metadata)):
            raise ValueError(
                f"There is no {self.what} {position}: they are numbered from 0 to {n - 1}."
            )
        return self.metadata.iloc[[position]]

    def features_of(self, position: int) -> xr.Dataset:
        """Return the features of one sample, if it is there."""
        return self.features.isel({SAMPLE: self.one(position).index})


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a table, in which integers are still integers."""
    return table.astype(object).to_dict("records")  # type: ignore[return-value]


def chosen(table: pd.DataFrame, where: str, name: str, *, ascending: bool = False) -> pd.DataFrame:
    """Return the rows that meet a condition, sorted by a column, if it is there; Q by its size."""
    table = table[condition_mask(table, where)]
    if name not in table:
        return table
    # The sign of Q says in which direction the output is wrong.
    key = np.abs if name == "Q" else None
    return table.sort_values(name, ascending=ascending, kind="stable", key=key)


def with_bounds(table: pd.DataFrame, found: xr.Dataset | None, gone: list[Any]) -> pd.DataFrame:
    """Return a table of groups with half of their intervals, if found, in the column ``spread``.

    Where effects were found, they take the place of the column ``score``, which is then ``sum``.
    They are NaN for the groups that are ``gone``: what models without them make of their class is
    not known.
    """
    if found is None:
        return table.assign(spread=np.nan)
    if "effect" not in found:
        return table.assign(spread=(found["upper"] - found["score"]).to_series())
    effects = found.to_dataframe()[["effect", "upper"]].dropna()
    effects = effects.join(table[["score", "samples"]].rename(columns={"score": "sum"}))
    effects["spread"] = effects.pop("upper") - effects["effect"]
    effects.loc[effects.index.isin(gone), ["effect", "spread"]] = np.nan
    return effects.rename(columns={"effect": "score"})


def searched(table: pd.DataFrame, text: str) -> pd.DataFrame:
    """Return the rows in which some column of texts contains a text, in any case.

    Examples
    --------
    >>> searched(pd.DataFrame({"source": ["Web", "book"]}), "web").index.tolist()
    [0]
    """
    if not text:
        return table
    texts = table.select_dtypes(exclude=["number", "bool", "datetime", "timedelta"]).astype(str)
    return table[texts.apply(lambda x: x.str.contains(text, case=False, regex=False)).any(axis=1)]


def facets(
    table: pd.DataFrame, names: Sequence[str], where: str
) -> dict[str, tuple[pd.Series[int], int]]:
    """Return how many of the rows that meet a condition have which value of some columns.

    By the name of the column, if a condition can name it: the counts of its most frequent values,
    among them missing ones, and how many others it has.
    The terms of the condition that are about a column do not count for this column, so that its
    other values are listed, too.
    """
    listed = {}
    for name in filter(is_name, names):
        chosen = table[name][condition_mask(table, without(where, name))]
        counts = chosen.value_counts(dropna=False)
        most = counts[:_MOST_VALUES]
        if most.index.dtype.kind in "biufM":  # texts stay in the order of their counts
            most = most.sort_index()
        listed[name] = most, len(counts) - len(most)
    return listed
