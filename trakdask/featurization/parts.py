"""The parts of samples, their tokens or groups of modules, whose features are multiplied."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import dask.array as da
import numpy as np
import torch
import xarray as xr
from dask.base import tokenize

from trakdask.checks import shown
from trakdask.featurization.graphs import Inputs, lazy_products
from trakdask.featurization.job import DType, OnError, Partition
from trakdask.featurization.lazy import Prepared, prepare
from trakdask.models.hook_plan import require_layers_of_tokens
from trakdask.models.model import Model
from trakdask.models.modules import select_parameters
from trakdask.models.tasks import TrakTask
from trakdask.projection import Projector
from trakdask.variables import CHECKPOINT, MODULE, PROJ_DIM, SAMPLE, TOKEN

__all__ = ["PartProducts", "Parts", "Text", "part_products"]

Parts = Literal["token"] | Sequence[str] | Mapping[str, str | Sequence[str]]
Text = Callable[[int], str] | Sequence[str]

_OTHERS = "others"
"""Name of the part with the parameters that no given part has."""
_TEXT_DTYPE = np.dtypes.StringDType()


@dataclass(frozen=True)
class PartProducts:
    """Samples divided into parts, whose features can be multiplied without being computed.

    Parameters
    ----------
    made
        What the graph is built from.
    like
        A Dataset with the coords and attrs of features of the parts, with zeros as ``feature``.
    """

    made: Prepared
    like: xr.Dataset

    def arrays(self, vectors: da.Array) -> dict[str, da.Array]:
        """Return products with vectors and more, see :func:`lazy_products`."""
        return lazy_products(self.made.job, self.made.inputs, self.made.token, vectors)


def part_products(
    samples: xr.Dataset,
    model: Model,
    *,
    parts: Parts,
    projector: Projector,
    text: Text | None,
    dtype: DType | None,
    on_error: OnError,
) -> PartProducts:
    """Divide samples into parts."""
    if text is not None and not _is_token(parts):
        raise ValueError(
            f"expected text= with parts='token' only, got it with parts={shown(parts)}; try "
            "leaving text out"
        )
    made = prepare(
        samples,
        model,
        projector=projector,
        gradients="auto",
        batch_size="auto",
        dtype=dtype,
        device="auto",
        on_error=on_error,
        divide=functools.partial(_partition, parts),
    )
    job, rows = made.job, next(iter(made.inputs.values())).chunks[0]
    assert job.partition is not None
    width, n = job.projector.width(job.row_map.n_rows), len(job.model.checkpoints)
    shape = (sum(rows), job.partition.size, width, n)
    zeros = da.zeros(shape, dtype=np.float32, chunks=(rows, -1, -1, 1))
    dims = (SAMPLE, job.partition.dim, PROJ_DIM, CHECKPOINT)
    like = xr.Dataset({"feature": (dims, zeros)}, coords=made.coords, attrs=made.attrs)
    if job.partition.names:
        coords: Any = {MODULE: (MODULE, np.array(job.partition.names, dtype=object))}
    else:
        coords = _token_coords(samples, model, text)
    return PartProducts(made, like.assign_coords(coords))


def _is_token(parts: object) -> bool:
    return isinstance(parts, str) and parts == TOKEN


def _partition(parts: Parts, model: Model, inputs: Inputs) -> Partition:
    if _is_token(parts):
        return _tokens(model, inputs)
    groups, names = _groups_of_parameters(model.meta_module(), tuple(model.shapes), parts)
    return Partition(MODULE, len(names), groups, tuple(names))


def _tokens(model: Model, inputs: Inputs) -> Partition:
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
    samples: xr.Dataset, model: Model, text: Text | None
) -> dict[str, tuple[tuple[str, str], da.Array]]:
    """Return ids and texts of tokens, if the first input of the model holds ids."""
    names = getattr(model.task, "variables", None) or tuple(map(str, samples.data_vars))
    name = str(names[0])
    ids = samples[name].variable
    is_ids = ids.ndim == 2 and ids.dtype.kind in "iu"
    if not is_ids:
        if text is not None:
            raise ValueError(
                f"expected token ids (sample, token) for text=, got {name!r} of {ids.dtype} over "
                f"{ids.dims}; try leaving text out, and assign_coords(text=...)"
            )
        return {}
    data = da.asarray(ids.data)
    coords = {name: ((SAMPLE, TOKEN), data)}
    if text is not None:
        coords["text"] = ((SAMPLE, TOKEN), _texts(data, text))
    return coords


def _texts(ids: da.Array, text: Text) -> da.Array:
    if not callable(text) and (isinstance(text, str) or not isinstance(text, Sequence)):
        raise TypeError(
            f"expected text as a function of a token id, or a list of all texts, got {shown(text)};"
            " try text=tokenizer.decode"
        )
    texts: da.Array = da.map_blocks(
        functools.partial(_text_of, text=text), ids,
        dtype=_TEXT_DTYPE, meta=np.empty((0, 0), _TEXT_DTYPE),
        name=f"text-{tokenize(ids.name, text)}",
    )  # fmt: skip
    return texts


def _text_of(ids: np.ndarray, text: Text) -> np.ndarray:
    different, place = np.unique(ids, return_inverse=True)
    words = [_one_text(int(number), text) for number in different]
    return np.array(words, _TEXT_DTYPE)[place.reshape(ids.shape)]


def _one_text(number: int, text: Text) -> str:
    try:
        word = text(number) if callable(text) else text[number] if number >= 0 else None
    except IndexError:
        word = None
    if not isinstance(word, str):
        raise ValueError(
            f"expected text= to give the text of token {number}, got {shown(word)}; try "
            "text=tokenizer.decode"
        )
    return word


def _groups_of_parameters(
    module: torch.nn.Module, names: Sequence[str], parts: Any
) -> tuple[dict[str, int], list[str]]:
    """Return the number of the part of each parameter, and the names of the parts.

    Parameters
    ----------
    module
        The model.
    names
        The selected parameters.
    parts
        A mapping from the name of a part to a name or glob of parameters, or several of these; or a
        list of words, each of which stands for all parameters whose names contain it.

    Raises
    ------
    TypeError, ValueError
        If it is none of these, if a part selects nothing, or if two parts share a parameter.
    """
    groups: dict[str, int] = {}
    titles = _patterns(parts)
    for number, (title, patterns) in enumerate(titles.items()):
        for name in set(select_parameters(module, patterns)) & set(names):
            if name in groups:
                raise ValueError(
                    f"expected each parameter in one part, got {name!r} in {title!r} and in "
                    f"{list(titles)[groups[name]]!r}; try globs that exclude each other"
                )
            groups[name] = number
        if number not in groups.values():
            raise ValueError(
                f"expected parameters of the model in each part, got {title!r}: {patterns}, which "
                f"selects none of those that are differentiated; try globs of {list(names)[:4]}"
            )
    rest = {name: len(titles) for name in names if name not in groups}
    return groups | rest, [*titles, *([_OTHERS] if rest else [])]


def _patterns(parts: Any) -> dict[str, list[str]]:
    remedy = "try parts='token', parts=['attn', 'mlp'], or parts={'mlp': '*.mlp.*'}"
    if isinstance(parts, str) or not isinstance(parts, Sequence | Mapping):
        raise ValueError(
            f"expected parts='token', a list or a mapping, got {shown(parts)}; {remedy}"
        )
    named = parts if isinstance(parts, Mapping) else {word: f"*{word}*" for word in parts}
    patterns = {n: [p] if isinstance(p, str) else p for n, p in named.items()}
    words: list[Any] = [
        *patterns,
        *(p for each in patterns.values() if isinstance(each, list) for p in each),
    ]
    if not patterns or not all(isinstance(each, list) and each for each in patterns.values()):
        raise ValueError(f"expected names or globs for each part, got {shown(parts)}; {remedy}")
    if not all(isinstance(word, str) and word for word in words) or _OTHERS in patterns:
        raise ValueError(
            f"expected names of parts as text, none of them {_OTHERS!r} or empty, got "
            f"{shown(parts)}; {remedy}"
        )
    return patterns
