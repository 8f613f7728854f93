"""``td.explore``: attributions as pages in a browser or a notebook."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import xarray as xr

import trakdask as td
from trakdask.attribution.estimators import EstimatorLike, resolve
from trakdask.checks import shown
from trakdask.explorer.contents import Contents
from trakdask.explorer.marks import Marks
from trakdask.explorer.new_targets import target_maker
from trakdask.explorer.pages import document
from trakdask.explorer.questions import Questions
from trakdask.explorer.view import View
from trakdask.files import Folder, location
from trakdask.provenance import require_comparable
from trakdask.samples.token_texts import Text, token_texts
from trakdask.variables import SAMPLE, ordered, require_alike, validate

if TYPE_CHECKING:
    from trakdask.models.model import Model

_NEEDED = ["feature", "out_to_loss"]


class Explorer(Questions):
    """Attributions that can be looked at in a browser; see :func:`trakdask.explore`.

    Each call of ``app()`` makes an app with its own state.
    """

    def __repr__(self) -> str:
        n, m = (side.features.sizes[SAMPLE] for side in (self.training, self.targets))
        return f"<trakdask.Explorer: {n} training samples, {m} targets; .serve() starts a server>"

    def app(self, view: View | str | None = None) -> Any:
        """Return a Panel app for one session of a browser, at a view or at the view of its URL."""
        from trakdask.explorer.app import Session  # optional dependency

        return Session(self, None if view is None else self.checked(view))

    def checked(self, view: View | str) -> View:
        """Return a view as it is, or that of the text of an address, if it has no errors."""
        if isinstance(view, View):
            return view
        if (found := self.view(view)).errors:
            problems = "; ".join(f"{name}: {text}" for name, text in found.errors.items())
            raise ValueError(f"in the view {view!r:.200}: {problems}")
        return found

    def serve(
        self, *, host: str = "127.0.0.1", port: int = 0, announce: Callable[[str], object] = print
    ) -> None:
        """Serve the explorer to browsers until Ctrl-C, or the end of the process.

        The address contains a new random token of 192 bits. A request without it is refused with
        the status 403: pages, the websocket and static files alike. Everybody who has the address
        sees all that the explorer shows, and may mark samples. Each browser tab has its own state.

        Parameters
        ----------
        host
            Address of this machine to listen at. By default only this machine can connect; with
            ``"0.0.0.0"`` every machine of the network can, over plain HTTP.
        port
            Port to listen at; 0 takes a free one.
        announce
            Is given the address, once the server listens.

        Raises
        ------
        TypeError, ValueError
            If the port is no port.
        OSError
            If this machine has no such address, or the port is taken.
        """
        from trakdask.explorer.app import server  # optional dependency

        listening, url = server(self.app, host=host, port=port)
        announce(url)
        listening.start()
        try:
            listening.io_loop.start()
        except KeyboardInterrupt:
            listening.stop()

    def save_html(self, path: str | os.PathLike[str], view: View | str = "") -> None:
        """Write one view to an HTML file that needs no server, with the settings of its scores.

        Parameters
        ----------
        path
            Path or URL of the file, which is written whole or not at all.
        view
            The part of the explorer's address after the question mark, such as
            ``"page=target&target=3"``; by default the table of targets.

        Raises
        ------
        ValueError
            If the path names a folder, or the view cannot be understood.
        OSError
            If the file cannot be written.
        """
        folder, _, name = location(path).rpartition("/")
        if os.path.isdir(f"{folder}/{name}"):
            raise ValueError(f"expected a file, got the folder {str(path)!r}; try 'view.html'")
        # The folder of "/view.html" is an empty text.
        Folder.at(folder or "/").write(name, document(self, self.checked(view)).encode())

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        import panel  # optional dependency

        if panel.extension._loaded:
            return self.app(View())._repr_mimebundle_(include, exclude)
        return {
            "text/plain": "trakdask explorer. To see it here, run `import panel; "
            "panel.extension()` in a cell, and then this cell again. Without a network: "
            "`panel.extension(inline=True)`."
        }


def explore(
    features: xr.Dataset,
    targets: xr.Dataset,
    *,
    samples: xr.Dataset | None = None,
    target_samples: xr.Dataset | None = None,
    marks: Marks | str | os.PathLike[str] | None = None,
    estimator: EstimatorLike = "auto",
    text: Text | None = None,
    normalize: tuple[float | Sequence[float], float | Sequence[float]] | None = None,
    cmap: str = "gray_r",
    model: Model | None = None,
    tokenizer: Callable[[str], Any] | None = None,
    preprocess: Callable[[Any], Any] | None = None,
) -> Explorer:
    """Look at attributions in a browser or in a notebook.

    The pages: a table of all targets; one target, with the training samples that helped and harmed
    it most, and what groups of them did; one training sample, with the targets that it helped and
    harmed; all training samples, by loss or self-influence, and duplicates; and the marks of
    samples.

    Parameters
    ----------
    features, targets
        Features of the training samples and of the samples to explain, as :func:`open` returns
        them, with their outputs.
    samples, target_samples
        The samples of these features, in the same order. Their variables are shown as images and
        texts, and only the few samples of a page are read.
    marks
        The marks of training samples. Pages then have buttons to mark samples:
        ``Marks.beside("train.zarr")``, or the path of another file for samples with labels.
    estimator
        As in :func:`score`.
    text
        The text of a token id, where samples are token ids: a function (``tokenizer.decode``), the
        tokenizer, or a list of all texts, as in :func:`score_parts`. Token ids are the variable
        ``input_ids``, or the first of the model's ``inputs``, or else vectors of integers that are
        no masks, labels or positions. With ``samples`` and a
        ``model`` that :func:`score_parts` can divide, the words of the samples that helped and
        harmed a target are coloured by their scores.
    normalize, cmap
        Mean and standard deviation with which images were normalized, and the colour map of grey
        images; as in :func:`trakdask.plots.gallery`.
    model
        The model of the features: then a page takes a text or an image of your own as a
        target. It is featurized with the projector and the precision of the features, kept in that
        tab of the browser, and written nowhere. Needs one of the next two, or both for a model of
        pairs; or else ``samples`` and ``text``, for the words of samples, or a classifier and the
        samples of either kind, for the classes that it predicts where it is wrong.
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
        If features or targets lack an array, the samples do not belong to the features, or an
        option does not make sense.

    Notes
    -----
    Lazy: a page computes its own answers, on the dask client that is active when this is called or
    else on threads, and the next click gives up a computation that still runs. Scores of all
    samples and targets never exist. The first click computes the gram matrix of the estimator and
    its eigenvectors, unless the store has them; they stay in memory, p² numbers per checkpoint.
    Each click after that reads the features once. Self-influence of all samples takes 2 p² flops
    per sample and checkpoint, once.

    Examples
    --------
    >>> import trakdask as td
    >>> features = td.testing.simulate_features(n_samples=60, proj_dim=4)
    >>> explorer = td.explore(features, features.isel(sample=slice(8)))
    >>> explorer
    <trakdask.Explorer: 60 training samples, 8 targets; .serve() starts a server>
    """
    if importlib.util.find_spec("panel") is None:
        raise ImportError(
            "expected Panel for the explorer, got no package of that name; try pip install "
            "'trakdask[explore]'"
        )
    # 1. Whatever does not go together is an error here, and not on some page.
    validate(features, _NEEDED, what="features")
    validate(targets, _NEEDED, what="targets")
    require_comparable(features, targets)
    features, targets = ordered(features), ordered(targets)
    resolve(features, estimator)
    # An empty Dataset where there are none, which is false.
    samples = _checked(samples, features, "samples")
    target_samples = _checked(target_samples, targets, "target_samples")
    # 2. What pages can show: the contents of samples, their words, and targets on the spot.
    if text is not None:
        token_texts(text)  # which checks it, rather than a page
    has_words, known = bool(samples) and text is not None, samples or target_samples
    maker = target_maker(features, model, tokenizer, preprocess, known, has_words=has_words)
    if marks is not None:
        marks = marks if isinstance(marks, Marks) else Marks(marks)
    task = getattr(model, "task", None)
    inputs = (getattr(task, "text", ""), *getattr(task, "inputs", ()))
    train, shown = (Contents(x, text, inputs, normalize, cmap) for x in (samples, target_samples))
    return Explorer(
        features, targets, estimator, contents=(train, shown),
        words=_words_of(features, samples, model, text), marks=marks, maker=maker,
    )  # fmt: skip


def _words_of(
    features: xr.Dataset, samples: xr.Dataset, model: Model | None, text: Text | None
) -> Callable[..., xr.DataArray] | None:
    """Return the scores of tokens as a function; None where samples cannot be divided into them."""
    if not samples or model is None or text is None:
        return None
    words, first = partial(td.score_parts, model=model, text=text), {SAMPLE: [0]}
    try:
        # Lazy: of one sample, only the checks run.
        words(features, features.isel(first), of=samples.isel(first), estimator="grad_dot")
    except (TypeError, ValueError):
        return None
    return words


def _checked(samples: xr.Dataset | None, features: xr.Dataset, name: str) -> xr.Dataset:
    """Return the samples of features, in the same number and with the same labels, or nothing."""
    if samples is None:
        return xr.Dataset()
    if not isinstance(samples, xr.Dataset) or SAMPLE not in samples.dims:
        raise TypeError(
            f"expected {name} as an xarray.Dataset with the dimension {SAMPLE!r}, got "
            f"{shown(samples)} ({type(samples).__name__}); try the samples given to td.featurize"
        )
    require_alike(samples[SAMPLE].reset_coords(drop=True), features, what=name)
    return samples
