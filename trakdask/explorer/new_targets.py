"""Targets on the spot: a text that somebody types, or an image that is uploaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

import trakdask as td
from trakdask.checks import is_tensor, shown
from trakdask.explorer.computing import compute
from trakdask.explorer.contents import data_url
from trakdask.provenance import require_comparable
from trakdask.variables import SAMPLE, checkpoint_names

if TYPE_CHECKING:
    from PIL.Image import Image

_ARRAYS = ("feature", "output", "out_to_loss")

MOST_BYTES = 10 * 2**20
"""The largest size of an uploaded file."""

_MOST_PIXELS = 50_000_000
"""The largest size of an uploaded image, which takes three bytes for each in memory."""

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")

_MOST_CHARACTERS, _SHOWN_PIXELS = 100_000, 256


@dataclass(frozen=True, eq=False)
class TargetMaker:
    """The model of a store: it makes targets of texts and images as the store's were made.

    Parameters
    ----------
    model
        The model of the store.
    features
        The training samples' features: their projector, checkpoints and precision are used.
    tokenizer, preprocess
        See :func:`trakdask.explore`.
    """

    model: td.Model
    features: xr.Dataset
    tokenizer: Callable[[Any], Any] | None
    preprocess: Callable[[Any], Any] | None

    @property
    def numbers(self) -> list[str]:
        """The variables of the task that are typed as numbers, such as the label."""
        others = getattr(self.model.task, "variables", ())[1:]  # of a task that does not say it
        return list(getattr(self.model.task, "number_variables", others))

    @property
    def takes_content(self) -> bool:
        """Whether somebody can give it a text or an image."""
        return self.tokenizer is not None or self.preprocess is not None

    @property
    def finds_class(self) -> bool:
        """Whether the class may be left out: then it is the one that the model predicts."""
        return isinstance(self.model.task, td.tasks.Classification)

    def target(self, content: Mapping[str, Any]) -> tuple[xr.Dataset, str]:
        """Return a target of a text or an image that somebody gave.

        Parameters
        ----------
        content
            ``"text"``; ``"image"``, the bytes of its file; and :attr:`numbers` by name.

        Returns
        -------
        Its features in memory, with the numbers that were typed as coords; its content as HTML.

        Raises
        ------
        ValueError, TypeError
            If there is no text or image, it cannot be understood, a number is missing, or there is
            no such class.
        StoreMismatchError
            If the features are not made as the training samples' features.
        """
        variables, html = self._content(content)
        # 1. Numbers, each alone or several with commas between them.
        typed: dict[str, Any] = {}
        for name in self.numbers:
            if not (text := content.get(name, "").strip()):
                continue
            try:
                values = np.array([float(number) for number in text.split(",")])
            except ValueError:
                # Fails the next check, which has the message.
                values = np.array(np.nan)
            if not (np.abs(values) < 2**53).all():  # above, not all integers are floats
                raise ValueError(f"The {name} must be a number, not {text!r:.60}.")
            whole = values.astype(np.int64) if (values == np.trunc(values)).all() else values
            typed[name] = whole if "," in text else whole[0]
        # 2. A class that was left out is the one that the model predicts.
        arrays = {n: x[None] for n, x in variables.items()}
        if self.finds_class and arrays:
            name, p = self.numbers[0], self.probabilities(td.from_arrays(arrays))[0]
            label = typed.setdefault(name, p.argmax())
            if label.ndim or label not in range(len(p)):
                most = len(p) - 1
                raise ValueError(f"The {name} must be a whole number from 0 to {most}.")
        # 3. Its features.
        arrays |= {n: x[None] for n, x in typed.items()}
        # Single numbers become metadata, which pages show; tasks read coords, too.
        coords = {name: arrays.pop(name) for name, x in typed.items() if not x.ndim}
        samples = td.from_arrays(arrays, coords=coords)
        lazy = td.featurize(samples, self.model, like=self.features)[list(_ARRAYS)]
        return compute(lazy)[0], html

    def probabilities(self, samples: xr.Dataset) -> np.ndarray:
        """Return the probabilities of a classifier, the mean over checkpoints, (sample, class)."""
        import torch  # a second, which pages without a model need not wait

        task: Any = self.model.task
        (chosen,) = compute(samples[[n for n in getattr(task, "inputs", ()) if n in samples]])
        arrays = {str(n): _array(str(n), x.values) for n, x in chosen.data_vars.items()}
        batch = td.tasks.Batch({n: torch.as_tensor(x) for n, x in arrays.items()})
        # The checkpoints that scores are of: features may be a selection.
        known, names = self.model.checkpoints, checkpoint_names(self.features)
        with torch.no_grad():
            logits = [task.logits(self.model.forward(c), batch) for c in known if c.name in names]
        return torch.stack(logits).softmax(-1).mean(0).numpy()

    def _content(self, content: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], str]:
        """Return the variables of the task, without a dimension of samples, and the content."""
        variables: dict[str, Any] = {}
        html = ""
        if self.preprocess is not None:
            if not content.get("image"):
                raise ValueError("Choose the file of an image.")
            image = decoded_image(content["image"])
            name = str(getattr(self.model.task, "image", "image"))
            # A copy for the function of the user, which may change it; the thumbnail, too, is made
            # in place.
            variables |= _by_name(self.preprocess(image.copy()), name, "preprocess")
            image.thumbnail((_SHOWN_PIXELS, _SHOWN_PIXELS))
            url = data_url(np.asarray(image) / 255)
            html += f'<img src="{url}" alt="the image that was uploaded">'
        if self.tokenizer is not None:
            text = content.get("text", "")
            if not 0 < len(text.strip()) <= _MOST_CHARACTERS:
                raise ValueError(f"Write a text of 1 to {_MOST_CHARACTERS:,} characters.")
            (name, *_) = getattr(self.model.task, "inputs", ("text",))
            variables |= _by_name(self.tokenizer(text), name, "tokenizer")
            html += f'<p class="text">{escape(text)}</p>'
        used = getattr(self.model.task, "variables", None) or tuple(variables)
        return {n: _array(n, value) for n, value in variables.items() if n in used}, html


def decoded_image(content: bytes) -> Image:
    """Return an image in RGB, the way up it was taken, from its file.

    The number of pixels is read from the head of the file, before any of them is decoded.

    Raises
    ------
    ValueError
        If the file is larger than 10 MB, or no image, or damaged, or has more than 50 million
        pixels.
    """
    from PIL import Image, ImageOps  # optional dependency, of matplotlib

    try:
        with Image.open(BytesIO(content), formats=_FORMATS) as image:
            width, height = image.size
            if width * height <= _MOST_PIXELS and len(content) <= MOST_BYTES:
                return ImageOps.exif_transpose(image).convert("RGB")
            pixels = f"{width:,} × {height:,}"
    except Image.DecompressionBombError:
        pixels = "too many"
    except (OSError, SyntaxError, ValueError, EOFError) as err:
        raise ValueError(
            f"This file cannot be read as an image. It may be one of {', '.join(_FORMATS)}."
        ) from err
    raise ValueError(
        f"This image is too large: {len(content) / 1e6:.1f} MB, {pixels} pixels. It may have up to "
        f"{MOST_BYTES // 2**20} MB and {_MOST_PIXELS:,} pixels."
    )


def target_maker(
    features: xr.Dataset,
    model: td.Model | None,
    tokenizer: Callable[[Any], Any] | None,
    preprocess: Callable[[Any], Any] | None,
    samples: xr.Dataset,
    *,
    has_words: bool,
) -> TargetMaker | None:
    """Return the maker of new targets, which may be there for classes or words alone; or None.

    Raises
    ------
    TypeError, ValueError
        If arguments do not go together.
    StoreMismatchError
        If the features were made with another model.
    """
    given = {"tokenizer": tokenizer, "preprocess": preprocess}
    asked = {name: function for name, function in given.items() if function is not None}
    for name, function in asked.items():
        if not callable(function):
            raise TypeError(
                f"expected {name} as a function of a text or an image, got {shown(function)}; try "
                f"{name}=lambda text: ..."
            )
    if model is None:
        if asked:
            raise ValueError(
                f"expected a model beside {[*asked]}, got none; try model=td.Model(...)"
            )
        return None
    from trakdask.featurization.preparation import projector_of  # with torch, as the model is

    if not isinstance(model, td.Model):
        raise TypeError(
            f"expected model as a td.Model, got {shown(model)}; try td.Model(build, ...)"
        )
    is_classifier = bool(samples) and isinstance(model.task, td.tasks.Classification)
    if not asked and not is_classifier and not has_words:
        raise ValueError(
            "expected a tokenizer or a preprocess beside the model, got neither; try "
            "preprocess=transform, a function of an image of PIL, or tokenizer=tokenizer"
        )
    if samples:
        model = model.for_variables({str(n): x.ndim for n, x in samples.variables.items()})
    projector_of(features)
    # Features as the model would make them, if only their attrs: so the comparison is that of any
    # two features.
    as_model = features.isel({SAMPLE: slice(0)}).assign_attrs(model.spec())
    require_comparable(features, as_model, name="the model's")
    return TargetMaker(model, features, tokenizer, preprocess)


def _by_name(result: Any, name: str, function: str) -> dict[str, Any]:
    """Return the result of a function by the names of variables; an array gets the one name."""
    if result is None:
        raise TypeError(f"expected an array from {function}, got None; try returning it")
    return {str(n): x for n, x in result.items()} if isinstance(result, Mapping) else {name: result}


def _array(name: str, value: Any) -> np.ndarray:
    array = np.asarray(value.detach().cpu() if is_tensor(value) else value)
    if array.dtype.kind not in "fiub":
        raise TypeError(
            f"expected numbers in {name!r}, got {shown(value)}; try returning an array of them"
        )
    return array.astype(np.float32) if array.dtype == np.float64 else array
