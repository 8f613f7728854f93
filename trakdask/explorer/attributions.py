"""What the pages are made of: questions to scores, contents of samples, marks, new targets."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import pandas as pd
import xarray as xr
from distributed import Client

from trakdask.explorer.marks import Marks
from trakdask.explorer.new_targets import TargetMaker, appended
from trakdask.explorer.questions import Questions
from trakdask.explorer.samples import Samples
from trakdask.variables import SAMPLE

__all__ = ["Attributions"]


@dataclass(frozen=True, eq=False)
class Attributions:
    """Attributions that can be looked at.

    It is a value, which several users share. Only what was computed for one of them, such as the
    eigenvectors of the gram matrix, is kept for the others.

    Parameters
    ----------
    questions
        Answers about features and targets.
    samples, target_samples
        How training samples and targets are shown.
    marks
        What people say about training samples; None if nobody is asked.
    maker
        Makes new targets; None without a model.
    client
        The client that was active when the explorer was made.
    """

    questions: Questions
    samples: Samples
    target_samples: Samples
    marks: Marks | None = None
    maker: TargetMaker | None = None
    client: Client | None = None

    @property
    def features(self) -> xr.Dataset:
        """Features of the training samples."""
        return self.questions.features

    @property
    def targets(self) -> xr.Dataset:
        """Features of the targets, new ones at the end."""
        return self.questions.targets.features

    def with_target(self, features: xr.Dataset, html: str) -> Self:
        """Return these and one more target; what was computed for the others is kept."""
        position = int(self.targets.sizes[SAMPLE])
        return dataclasses.replace(
            self,
            questions=self.questions.with_targets(appended(self.targets, features)),
            target_samples=self.target_samples.with_added(position, html),
        )

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Make the client that was active when the explorer was made that of this thread."""
        is_usable = self.client is not None and self.client.status == "running"
        with self.client.as_current() if self.client and is_usable else nullcontext():
            yield

    @cached_property
    def sample_ids(self) -> np.ndarray:
        """What each training sample is called in the marks, (sample,)."""
        assert self.marks is not None
        return self.marks.ids(self.features)

    def marked(self) -> pd.DataFrame:
        """Return all marks with the ``position`` of their samples; absent samples are left out.

        Of samples that share a label, each has its marks. There are none if none are kept.
        """
        if self.marks is None:
            return pd.DataFrame({SAMPLE: [], "mark": [], "position": []})
        table = self.marks.table()
        index = pd.Index(self.sample_ids)
        positions = index.isin(table[SAMPLE]).nonzero()[0]
        if not len(positions):  # pandas does not merge labels of one kind with none of another
            return table.iloc[:0].assign(position=[])
        places = pd.DataFrame({SAMPLE: index[positions], "position": positions})
        return table.merge(places, on=SAMPLE)
