"""``td.explore``: attributions as pages in a browser or a notebook."""

from __future__ import annotations

import dataclasses
import functools
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

import trakdask as td
from trakdask.attribution.estimators import (
    DEFAULT_ESTIMATOR,
    DEFAULT_POWER,
    Damping,
    Estimator,
    LearningRates,
    Power,
    gather_options,
)
from trakdask.checks import shown
from trakdask.execution.scheduling import active_client
from trakdask.explorer.marks import Marks
from trakdask.explorer.new_targets import NewTarget, TargetMaker, appended, target_maker
from trakdask.explorer.questions import Questions, Words
from trakdask.explorer.samples import Samples
from trakdask.explorer.state import View
from trakdask.models.model import Model
from trakdask.plots.images import Normalize
from trakdask.provenance import require_comparable
from trakdask.variables import SAMPLE, validate

__all__ = ["Explorer", "explore"]

_NEEDED = ["feature", "output", "out_to_loss"]


@dataclass(frozen=True, eq=False)
class Explorer:
    """Attributions that can be looked at in a browser; see :func:`trakdask.explore`.

    It is a value: each call of ``app()`` makes an app with a state of its own. Only what was
    computed for one user, such as the factor of the gram matrix, is kept for the others.
    """

    questions: Questions
    samples: xr.Dataset | None
    target_samples: xr.Dataset | None
    marks: Marks | None
    estimator: Estimator
    learning_rates: LearningRates | None
    text: Callable[[int], str] | None
    normalize: Normalize | None
    cmap: str
    client: Client | None
    maker: TargetMaker | None = None
    added: tuple[str, ...] = ()
    """Contents, as escaped HTML, of the targets that were added to those of the store."""

    @property
    def features(self) -> xr.Dataset:
        """Features of the training samples."""
        return self.questions.features

    @property
    def targets(self) -> xr.Dataset:
        """Features of the targets, new ones at the end."""
        return self.questions.targets.features

    def with_target(self, target: NewTarget) -> Explorer:
        """Return an explorer of one more target; what was computed for the others is kept."""
        targets = appended(self.targets, target.features)
        return dataclasses.replace(
            self, questions=self.questions.with_targets(targets), added=(*self.added, target.html)
        )

    def is_new(self, target: int) -> bool:
        """Return whether a target was added to those of the store."""
        return 0 <= target - self._n_stored < len(self.added)

    @property
    def _n_stored(self) -> int:
        return int(self.targets.sizes[SAMPLE]) - len(self.added)

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

    def samples_html(self, positions: Sequence[int], *, brief: bool = False) -> list[str]:
        """Return the contents of some training samples as escaped HTML."""
        return self._shown(self.samples).html(positions, brief=brief)

    def target_samples_html(self, positions: Sequence[int], *, brief: bool = False) -> list[str]:
        """Return the contents of some targets as escaped HTML."""
        stored = [position for position in positions if not self.is_new(position)]
        contents = iter(self._shown(self.target_samples).html(stored, brief=brief))
        return [
            self.added[position - self._n_stored] if self.is_new(position) else next(contents)
            for position in positions
        ]

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
    marks: Marks | str | os.PathLike[str] | None = None,
    estimator: Estimator = DEFAULT_ESTIMATOR,
    power: Power = DEFAULT_POWER,
    damping: Damping = "auto",
    calibrate: xr.Dataset | None = None,
    learning_rates: LearningRates | None = None,
    text: Callable[[int], str] | None = None,
    normalize: Normalize | None = None,
    cmap: str = "gray_r",
    model: Model | None = None,
    tokenizer: Callable[[str], Any] | None = None,
    preprocess: Callable[[Any], Any] | None = None,
) -> Explorer:
    """Look at attributions in a browser or in a notebook.

    The pages: a table of all targets; one target, with the training samples that helped and harmed
    it most, sums by group and the curve by which λ was chosen; one training sample, with the
    targets that it helped and harmed; and all training samples, by self-influence, by groups
    against targets, and what is duplicated.

    Parameters
    ----------
    features, targets
        Features of the training samples and of the samples to explain, as :func:`open` returns
        them, with their outputs.
    samples, target_samples
        The samples that they are the features of, in the same order. From their variables images
        and texts are shown, of the few samples that are on a page.
    marks
        What people say about training samples, which pages then have buttons for:
        ``td.Marks.beside("train.zarr")``, or the path of another file for samples with labels.
    estimator, power, damping, calibrate, learning_rates
        As in :func:`score`. A page can change estimator, λ and checkpoints.
    text
        The text of a token id, such as ``tokenizer.decode``, where samples are token ids. With
        ``samples`` and a ``model`` that :func:`score_parts` can divide, the words of the samples
        that helped and harmed a target are coloured by their scores.
    normalize, cmap
        Of images: mean and standard deviation that they were normalized with, and the colour map
        of grey ones; as in :func:`trakdask.plots.gallery`.
    model
        The model that the features are of: then a page takes a text or an image of your own as a
        target. It is featurized with the projector and the precision of the features, kept in that
        tab of the browser, and written nowhere. Needs one of the next two, or both for a model of
        pairs; or else ``samples`` and ``text``, for the words of samples.
    tokenizer
        From a text to the inputs of the model: a mapping, as tokenizers of transformers return it,
        or the token ids; of one sample, without a dimension of samples.
    preprocess
        From an image, a ``PIL.Image.Image`` in RGB, to the input of the model, such as a transform
        of torchvision: an array or tensor of one sample, or a mapping of several.

    Returns
    -------
    An :class:`~trakdask.explorer.Explorer`. A notebook in which ``panel.extension()`` was called
    shows it. ``serve()`` shows it to browsers, ``save_html(path, view)`` writes one view to a file
    that needs no server, and ``app()`` is a Panel app.

    Raises
    ------
    ImportError
        If Panel is missing: install ``trakdask[explore]``.
    StoreMismatchError
        If features and targets were made differently, or not by this model.
    TypeError, ValueError
        If features or targets lack an array, samples are others than those of the features, or an
        option does not make sense.

    Notes
    -----
    Lazy: a page computes what it shows, on the dask client that is active when this is called or
    else on threads, and the next click gives up what still runs. Scores of all samples and targets
    never exist. The first click under an estimator computes its gram matrix and eigenvectors,
    unless they are those of the store; they stay in memory, p² numbers per checkpoint, for the last
    four settings. Each click after that reads the features once. Self-influence of all samples
    takes 2 p² flops per sample and checkpoint, once per setting.

    Examples
    --------
    >>> import trakdask as td
    >>> features = td.testing.simulate_features(n_samples=60, proj_dim=4)
    >>> explorer = td.explore(features, features.isel(sample=slice(8)))
    >>> view = td.explorer.View(target=3, k=2)
    >>> explorer.questions.top(view)[["sample", "label"]].shape
    (2, 2)
    """
    if importlib.util.find_spec("panel") is None:
        raise ImportError(
            "expected Panel for the explorer, got no package of that name; try pip install "
            "'trakdask[explore]'"
        )
    validate(features, _NEEDED, what="features")
    validate(targets, _NEEDED, what="targets")
    require_comparable(features, targets)
    gather_options(features, estimator, power, damping, calibrate, None, learning_rates)
    _require_samples(samples, features, "samples")
    _require_samples(target_samples, targets, "target_samples")
    if text is not None and not callable(text):
        raise TypeError(
            f"expected text as a function of a token id, got {shown(text)}; try "
            "text=tokenizer.decode"
        )
    known = samples if samples is not None else target_samples
    has_words = samples is not None and text is not None
    maker = target_maker(features, model, tokenizer, preprocess, known, has_words=has_words)
    kept = marks if marks is None or isinstance(marks, Marks) else Marks(marks)
    if kept is not None:
        kept.ids(features)  # now, rather than when somebody opens a page
    questions = Questions(
        features, targets,
        estimator=estimator, power=power, damping=damping, calibrate=calibrate,
        learning_rates=learning_rates, words=_words_of(features, samples, model, text),
    )  # fmt: skip
    return Explorer(
        questions, samples, target_samples, kept, estimator, learning_rates, text, normalize, cmap,
        active_client(), maker,
    )  # fmt: skip


def _words_of(
    features: xr.Dataset,
    samples: xr.Dataset | None,
    model: Model | None,
    text: Callable[[int], str] | None,
) -> Words | None:
    """Return the scores of tokens as a function; None where samples cannot be divided into them."""
    if samples is None or model is None or text is None:
        return None
    words = functools.partial(td.score_parts, model=model, text=text)
    first = {SAMPLE: [0]}
    try:
        words(features, features.isel(first), of=samples.isel(first), estimator="grad_dot")
    except (TypeError, ValueError):
        return None
    return lambda known, target, at, **options: words(
        known, target, of=samples.isel({SAMPLE: at}), **options
    )


def _require_samples(samples: object, features: xr.Dataset, name: str) -> None:
    """Check that there are as many samples as features."""
    if samples is None:
        return
    if not isinstance(samples, xr.Dataset):
        raise TypeError(
            f"expected {name} as an xarray.Dataset, got {shown(samples)} "
            f"({type(samples).__name__}); try what was given to td.featurize"
        )
    if (n := samples.sizes.get(SAMPLE)) != features.sizes[SAMPLE]:
        raise ValueError(
            f"expected {name} of the {features.sizes[SAMPLE]} samples of the features, got "
            f"{dict(samples.sizes) if n is None else n}; try those that were given to "
            "td.featurize, in the same order"
        )
