"""The contents of samples as HTML; all text from data is escaped."""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from html import escape

import numpy as np
import xarray as xr

from trakdask.explorer.computing import compute
from trakdask.plots.galleries import as_colours, grey_limits
from trakdask.samples.token_texts import Text, token_texts
from trakdask.variables import SAMPLE

_LEAST_SIDE = 4
"""Arrays with fewer rows or columns are no images."""

_MOST_CHARACTERS = 2000
_MOST_NUMBERS = 12
_NO_TEXT = ("mask", "label", "position", "type", "padding", "segment", "length", "attention")
"""Parts of the names of integer vectors that are no token ids."""

_BRIEF = ("image", "text", "tokens", "numbers")
"""Kinds of variables. The first of them that a sample has is shown in brief."""


@dataclass(frozen=True, eq=False)
class Contents:
    """Contents as HTML, by position.

    Parameters
    ----------
    samples
        The samples that were featurized; empty if they are not at hand.
    text
        The text of a token id, as in :func:`trakdask.explore`.
    inputs
        The names of the variables that the model reads, the text before others; empty if it is not
        at hand.
    normalize
        Mean and standard deviation that images were normalized with.
    cmap
        Colour map of grey images.
    added
        Contents of samples that were added after these, as escaped HTML, by position.
    """

    samples: xr.Dataset = field(default_factory=xr.Dataset)
    text: Text | None = None
    inputs: Sequence[str] = ()
    normalize: tuple[float | Sequence[float], float | Sequence[float]] | None = None
    cmap: str = "gray_r"
    added: Mapping[int, str] = field(default_factory=dict)

    def html(self, positions: Sequence[int], *, brief: bool = False) -> list[str]:
        """Return the content of some samples as escaped HTML, "" where there is nothing to show.

        ``brief`` leaves out everything but the first image or text. Reads these samples only.
        """
        # 1. Which variables show something.
        names = [str(n) for n, v in self.samples.data_vars.items() if v.dims[:1] == (SAMPLE,)]
        kinds = {name: self._kind(name) for name in names}
        if brief:
            ranked = sorted(names, key=lambda name: _BRIEF.index(kinds[name]))
            names = [name for name in ranked[:1] if kinds[name] != "numbers"]
        elif "tokens" in kinds.values():  # whose masks are no content
            names = [n for n in names if kinds[n] != "numbers" or "mask" not in n.lower()]
        # 2. Those of the samples that are stored, beside the contents that were added.
        html, stored = dict(self.added), [i for i in positions if i not in self.added]
        if names and stored:
            chosen = self.samples[names].isel({SAMPLE: np.asarray(stored)})
            values = compute(*(chosen[name].variable.data for name in names))
            columns = [self._contents(n, kinds[n], x) for n, x in zip(names, values, strict=True)]
            html |= zip(stored, map("".join, zip(*columns, strict=True)), strict=True)
        return [html.get(i, "") for i in positions]

    def _kind(self, name: str) -> str:
        """Return how a variable is shown; from its shape and dtype, without reading it."""
        variable = self.samples[name].variable
        shape, kind = variable.shape[1:], variable.dtype.kind
        sides = [size for size in shape if size >= _LEAST_SIDE]
        # Grey, or with one or three channels, which come first or last.
        is_image = len(shape) == 2 or (len(shape) == 3 and {shape[0], shape[-1]} & {1, 3})
        if is_image and len(sides) == 2 and kind in "fiub":
            return "image"
        if kind in "TUO":
            return "text"
        return "tokens" if name in self._token_ids else "numbers"

    @cached_property
    def _token_ids(self) -> list[str]:
        """The variables of token ids: integer vectors that the model, or their name, says to be."""
        if self.text is None:
            return []
        vectors = [
            str(name)
            for name, variable in self.samples.data_vars.items()
            if variable.ndim == 2 and variable.dtype.kind in "iu"
            if not any(word in str(name).lower() for word in _NO_TEXT)
        ]
        named = [name for name in vectors if name.endswith("input_ids")]
        # By the usual name, else by the model. Without either, any vector of integers may be text.
        return named or [name for name in self.inputs if name in vectors][:1] or vectors

    def _contents(self, name: str, kind: str, values: np.ndarray) -> list[str]:
        if kind == "image":
            colours = as_colours(list(values), self.normalize)
            # The same for all images of a list, so that dark ones stay dark.
            limits = grey_limits(colours) or (0.0, 1.0)
            urls = [data_url(image, self.cmap, *limits) for image in colours]
            return [f'<img src="{url}" alt="image of the sample">' for url in urls]
        texts = None
        if kind == "text":
            lists = (list, tuple, np.ndarray)
            texts = [" ".join(map(str, x)) if isinstance(x, lists) else str(x) for x in values]
        is_known = name.endswith("input_ids") or name in self.inputs
        if kind == "tokens" and (is_known or (values > 1).any()):  # else it is a mask
            with suppress(Exception):  # what a tokenizer cannot decode is no text
                texts = ["".join(token_texts(self.text)(row)) for row in values.tolist()]
        if texts is None:
            rows = np.asarray(values).reshape(len(values), -1)
            more = f", … ({rows.shape[1]:,} numbers)" if rows.shape[1] > _MOST_NUMBERS else ""
            texts = [", ".join(f"{x:.4g}" for x in row[:_MOST_NUMBERS]) + more for row in rows]
            return [f'<p class="numbers">{escape(f"{name}: {text}")}</p>' for text in texts]
        most = _MOST_CHARACTERS
        texts = [text if len(text) <= most else f"{text[:most]}…" for text in texts]
        return [f'<p class="text">{escape(text)}</p>' for text in texts]


NO_CONTENTS = Contents()


def data_url(image: np.ndarray, cmap: str = "gray", low: float = 0, high: float = 1) -> str:
    """Return an image, (h, w) between limits or (h, w, 3) between 0 and 1, as a PNG in a URL."""
    from matplotlib.image import imsave  # optional dependency

    buffer = io.BytesIO()
    # An image of one grey has no range.
    high = high if high > low else low + 1
    imsave(buffer, np.nan_to_num(image), format="png", cmap=cmap, vmin=low, vmax=high)
    return f"data:image/png;base64,{b64encode(buffer.getvalue()).decode()}"
