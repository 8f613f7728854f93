"""``td.explore``: attributions as pages in a browser or a notebook."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xarray as xr
from distributed import Client

from trakdask.attribution.dampings import Damping
from trakdask.attribution.estimators import DEFAULT_ESTIMATOR, DEFAULT_POWER, Estimator
from trakdask.attribution.options import LearningRates
from trakdask.execution.scheduling import active_client
from trakdask.explorer.questions import Questions
from trakdask.explorer.samples import Samples
from trakdask.explorer.state import View
from trakdask.models.model import Model
from trakdask.plots.images import Normalize

__all__ = ["Explorer", "explore"]


@dataclass(frozen=True, eq=False)
class Explorer:
    """Attributions that can be looked at in a browser; see :func:`explore`.

    It is a value: each call of :meth:`app` makes an app with a state of its own. Only what was
    computed for one user, such as the factor of the gram matrix, is kept for the others.
    """

    features: xr.Dataset
    targets: xr.Dataset
    samples: xr.Dataset | None
    target_samples: xr.Dataset | None
    model: Model | None
    marks: Any
    estimator: Estimator
    power: float
    damping: Damping
    calibrate: xr.Dataset | None
    learning_rates: LearningRates | None
    text: Callable[[int], str] | None
    normalize: Normalize | None
    cmap: str
    client: Client | None

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Make the client that was active when the explorer was made that of this thread."""
        is_usable = self.client is not None and self.client.status == "running"
        with self.client.as_current() if self.client and is_usable else nullcontext():
            yield

    @cached_property
    def questions(self) -> Questions:
        """What the pages ask; it knows nothing of them."""
        return Questions(
            self.features, self.targets,
            estimator=self.estimator, power=self.power, damping=self.damping,
            calibrate=self.calibrate, learning_rates=self.learning_rates,
        )  # fmt: skip

    @cached_property
    def sample_ids(self) -> np.ndarray:
        """What each training sample is called in the marks, (sample,)."""
        return np.asarray(self.marks.ids(self.features))

    def samples_html(self, positions: Sequence[int], *, brief: bool = False) -> list[str]:
        """Return the contents of some training samples as escaped HTML."""
        return self._shown(self.samples).html(positions, brief=brief)

    def target_samples_html(self, positions: Sequence[int], *, brief: bool = False) -> list[str]:
        """Return the contents of some targets as escaped HTML."""
        return self._shown(self.target_samples).html(positions, brief=brief)

    def _shown(self, samples: xr.Dataset | None) -> Samples:
        return Samples(samples, self.text, self.normalize, self.cmap)

    def app(self, view: View | None = None) -> Any:
        """Return a Panel app for one session of a browser, at a view or at that of its URL."""
        from trakdask.explorer.app import Session  # optional dependency

        return Session(self, view).panel()

    def serve(self, **options: Any) -> Any:
        """Serve the explorer to browsers; see ``trakdask.explorer.server``."""
        from trakdask.explorer.server import serve  # optional dependency

        return serve(self, **options)

    def save_html(self, path: str | os.PathLike[str], view: View | None = None) -> None:
        """Write one view to an HTML file that needs no server."""
        from trakdask.explorer.static import save_html

        save_html(self, path, view or View())

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        from trakdask.explorer.app import in_notebook  # optional dependency

        return in_notebook(self, include, exclude)


def explore(
    features: xr.Dataset,
    targets: xr.Dataset,
    *,
    samples: xr.Dataset | None = None,
    target_samples: xr.Dataset | None = None,
    model: Model | None = None,
    marks: Any = None,
    estimator: Estimator = DEFAULT_ESTIMATOR,
    power: float = DEFAULT_POWER,
    damping: Damping = "auto",
    calibrate: xr.Dataset | None = None,
    learning_rates: LearningRates | None = None,
    text: Callable[[int], str] | None = None,
    normalize: Normalize | None = None,
    cmap: str = "gray_r",
) -> Explorer:
    """Look at attributions in a browser or a notebook.

    Parameters
    ----------
    features, targets, estimator, power, damping, calibrate
        As in :func:`score`.
    samples, target_samples
        The samples that they are the features of, from which images, texts and rows are shown.
    model
        The model, for targets that are made on the spot.
    marks
        Marks of samples, or the path that they are kept at.
    text
        The text of a token id, such as ``tokenizer.decode``.
    normalize
        Mean and standard deviation that images were normalized with.
    """
    if importlib.util.find_spec("panel") is None:
        raise ImportError(
            "expected Panel for the explorer, got no package of that name; try pip install "
            "'trakdask[explore]'"
        )
    return Explorer(
        features, targets, samples, target_samples, model, marks, estimator, power, damping,
        calibrate, learning_rates, text, normalize, cmap,
        active_client(),
    )  # fmt: skip
