"""The parts of samples, their tokens or groups of modules, whose features are multiplied."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import dask.array as da
import numpy as np
import xarray as xr
from dask.base import tokenize

from trakdask.checks import shown
from trakdask.featurization.graphs import Arrays, Prepared
from trakdask.featurization.job import DType, OnError, Partition
from trakdask.featurization.lazy import prepare
from trakdask.models.layers import require_layers_of_tokens
from trakdask.models.model import Model
from trakdask.models.modules import select_parameters
from trakdask.models.tasks import TrakTask
from trakdask.projection import Projector
from trakdask.variables import CHECKPOINT, MODULE, PROJ_DIM, SAMPLE, TOKEN

Parts = Literal["token"] | Sequence[str] | Mapping[str, str | Sequence[str]]
Text = Callable[[int], str] | Sequence[str]

_OTHERS = "others"
"""Name of the part with the parameters that no given part has."""
_TEXT_DTYPE = np.dtypes.StringDType()


def divide(
    samples: xr.Dataset,
    model: Model,
    *,
    parts: Parts,
    projector: Projector,
    text: Text | None,
    dtype: DType | None,
    on_error: OnError,
) -> tuple[Prepared, xr.Dataset]:
    """Divide samples into parts, whose features can be multiplied without being computed.

    Returns
    -------
    What a graph is built from, and a Dataset with the coords and attrs of features of the parts,
    with zeros as ``feature``.
    """
    by_token = isinstance(parts, str) and parts == TOKEN
    if text is not None and not by_token:
        raise ValueError(
            f"expected text= with parts='token' only, got it with parts={shown(parts)}; try "
            "leaving text out"
        )
    prepared = prepare(
        samples,
        model,
        projector=projector,
        dtype=dtype,
        on_error=on_error,
        divide=_tokens if by_token else functools.partial(_modules, parts),
    )
    job, rows = prepared.job, prepared.rows
    assert job.partition is not None
    width, n = job.projector.width(job.row_map.n_rows), len(job.model.checkpoints)
    shape = (sum(rows), job.partition.size, width, n)
    zeros = da.zeros(shape, dtype=np.float32, chunks=(rows, -1, -1, 1))
    dims = (SAMPLE, job.partition.dim, PROJ_DIM, CHECKPOINT)
    like = xr.Dataset({"feature": (dims, zeros)}, coords=prepared.coords, attrs=prepared.attrs)
    if job.partition.names:
        coords: Any = {MODULE: (MODULE, np.array(job.partition.names, dtype=object))}
    else:
        coords = _token_coords(prepared, text)
    return prepared, like.assign_coords(coords)


def _tokens(model: Model, inputs: Arrays) -> Partition:
    """Divide sequences into tokens."""
    name, first = next(iter(inputs.items()))
    if first.ndim < 2 or first.shape[1] < 1:
        raise ValueError(
            f"expected sequences (sample, token) as the first input, as parts='token' needs, got "
            f"{name!r} of shape {first.shape}; try parts= with names of modules"
        )
    if isinstance(model.task, TrakTask):
        raise ValueError(
            "expected a task that runs batches, as parts='token' needs, got one that runs one "
            "sample at a time; try td.tasks.CausalLM()"
        )
    require_layers_of_tokens(model.meta_module(), tuple(model.shapes))
    return Partition(TOKEN, int(first.shape[1]))


def _token_coords(
    prepared: Prepared, text: Text | None
) -> dict[str, tuple[tuple[str, str], da.Array]]:
    """Return ids and texts of tokens, if the first input of the model holds ids."""
    name, ids = next(iter(prepared.inputs.items()))
    if ids.ndim != 2 or ids.dtype.kind not in "iu":
        if text is None:
            return {}
        raise ValueError(
            f"expected token ids (sample, token) for text=, got {name!r} of {ids.dtype} and shape "
            f"{ids.shape}; try leaving text out, and assign_coords(text=...)"
        )
    coords = {name: ((SAMPLE, TOKEN), ids)}
    if text is None:
        return coords
    if not callable(text) and (isinstance(text, str) or not isinstance(text, Sequence)):
        raise TypeError(
            f"expected text as a function of a token id, or a list of all texts, got {shown(text)};"
            " try text=tokenizer.decode"
        )
    texts: da.Array = da.map_blocks(
        _text_of, ids, text=text,
        dtype=_TEXT_DTYPE, meta=np.empty((0, 0), _TEXT_DTYPE),
        name=f"text-{tokenize(ids.name, text)}",
    )  # fmt: skip
    return coords | {"text": ((SAMPLE, TOKEN), texts)}


def _text_of(ids: np.ndarray, text: Text) -> np.ndarray:
    different, place = np.unique(ids, return_inverse=True)
    words = [text(number) if callable(text) else text[number] for number in different.tolist()]
    for number, word in zip(different.tolist(), words, strict=True):
        if not isinstance(word, str):
            raise ValueError(
                f"expected text= to give the text of token {number}, got {shown(word)}; try "
                "text=tokenizer.decode"
            )
    return np.array(words, _TEXT_DTYPE)[place.reshape(ids.shape)]


def _modules(parts: Any, model: Model, inputs: Arrays) -> Partition:
    """Divide parameters among parts, by globs or words, and those that no part has."""
    names, patterns = tuple(model.shapes), _patterns(parts)
    chosen = {
        title: set(select_parameters(model.meta_module(), globs)) & set(names)
        for title, globs in patterns.items()
    }
    titles = {name: [t for t, inside in chosen.items() if name in inside] for name in names}
    for title, inside in chosen.items():
        if not inside:
            raise ValueError(
                f"expected parameters of the model in each part, got {title!r}: {patterns[title]}, "
                "which selects none of those that are differentiated; try globs of "
                f"{list(names)[:4]}"
            )
    for name, found in titles.items():
        if len(found) > 1:
            raise ValueError(
                f"expected each parameter in one part, got {name!r} in {found[0]!r} and in "
                f"{found[1]!r}; try globs that exclude each other"
            )
    parts = [*patterns, *([_OTHERS] if [] in titles.values() else [])]
    groups = {name: parts.index((found or [_OTHERS])[0]) for name, found in titles.items()}
    return Partition(MODULE, len(parts), groups, tuple(parts))


def _patterns(parts: Any) -> dict[str, str | list[str]]:
    """Return the globs of each part by its name."""
    patterns = {}
    if isinstance(parts, Mapping):
        patterns = dict(parts)
    elif isinstance(parts, Sequence) and not isinstance(parts, str):
        patterns = {word: f"*{word}*" for word in parts}
    are_names = all(isinstance(name, str) and name for name in patterns)
    if not patterns or not are_names or _OTHERS in patterns:
        raise ValueError(
            f"expected parts='token', a list of words, or globs by the names of parts, none of "
            f"which is {_OTHERS!r}, got {shown(parts)}; try parts=['attn', 'mlp'], or "
            "parts={'mlp': '*.mlp.*'}"
        )
    return patterns
