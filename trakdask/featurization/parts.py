"""Build lazy features of the parts of samples: of their tokens, or of groups of modules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import dask.array as da
import numpy as np
import xarray as xr
from dask.base import tokenize

from trakdask.checks import shown
from trakdask.featurization.failures import OnError
from trakdask.featurization.graphs import Inputs, lazy_products
from trakdask.featurization.lazy import Gradients, Prepared, lazy_dataset, prepare
from trakdask.featurization.partition import Partition, groups_of_parameters
from trakdask.featurization.precision import DType
from trakdask.models.model import Model
from trakdask.models.tasks import TrakTask
from trakdask.models.tokens import require_layers_of_tokens
from trakdask.projection import Projector
from trakdask.variables import CHECKPOINT, MODULE, PROJ_DIM, SAMPLE, TOKEN

__all__ = ["PartProducts", "Parts", "Text", "featurize_parts", "part_products"]

Parts = Literal["token"] | Sequence[str] | Mapping[str, str | Sequence[str]]
Text = Callable[[int], str] | Sequence[str]

_TEXT_DTYPE = np.dtypes.StringDType()


def featurize_parts(
    samples: xr.Dataset,
    model: Model,
    *,
    parts: Parts,
    projector: Projector | None = None,
    text: Text | None = None,
    gradients: Gradients = "auto",
    batch_size: int | Literal["auto"] = "auto",
    dtype: DType | None = None,
    device: str = "auto",
    on_error: OnError = "raise",
) -> xr.Dataset:
    """Compute what each part of a sample contributes to the feature of the sample.

    Parts are the tokens of a sequence, or groups of modules. The features of the parts of a sample
    add up to the feature that :func:`featurize` computes for it with the same projector, so their
    scores add up to its score. If scores for a few targets are all you need, :func:`score_parts`
    computes them without these features, at a fraction of the cost.

    Parameters
    ----------
    samples, model, projector, batch_size, dtype, device, on_error
        As in :func:`featurize`.
    parts
        ``"token"``: one part per token. Or groups of modules: a mapping from names to names or
        globs of parameters, such as ``{"mlp": "*.mlp.*"}``, or a list of words, such as ``["attn",
        "mlp"]``, each of which stands for the parameters whose names contain it. Parameters of no
        group are the part ``"others"``.
    text
        For tokens: the text of a token id, as a function (``tokenizer.decode``) or a list of all
        texts. It becomes a coord.
    gradients
        As in :func:`featurize`, for groups of modules. Tokens take ``"auto"``.

    Returns
    -------
    Lazy Dataset as :func:`featurize` returns it, except that ``feature`` is (sample, token,
    proj_dim, checkpoint) or (sample, module, proj_dim, checkpoint). ``output`` and ``out_to_loss``
    are those of whole samples. Coords: ``module``, the names of the groups; or the token ids
    (sample, token), under the name of the variable that they come from, and ``text`` (sample,
    token), both lazy.

    Raises
    ------
    TypeError, ValueError
        As :func:`featurize`; if parts share a parameter, or select none; if a layer looks at
        several tokens at once (``nn.MultiheadAttention``, convolutions, recurrent layers,
        normalization over samples), or a parameter belongs to no layer of its own.
    BlockError
        When computed, as :func:`featurize`; also if a layer gets something else than one value per
        token, or the terms of the tokens do not add up to the gradient.

    Notes
    -----
    The gradient of a linear layer is Σ_t δ_t x_tᵀ: x_t is what it took at token t, and δ_t the
    derivative of f with respect to what it returned there. A token's feature is the projection of
    its terms in all layers, x being that of the token itself. So it contains the effect that the
    weights have at this token on everything predicted later, and not only on the next token:
    ``td.tasks.CausalLM(position=...)`` divides f by predicted tokens instead. Padding has features
    of zero.

    Cost of tokens: one forward and backward pass of the sequence, but a projection for each of its
    tokens. Memory: tokens × proj_dim × 4 bytes for each sample of a block, so use small blocks,
    such as ``samples.chunk(sample=16)``. Groups of modules cost as much as :func:`featurize`, and
    the memory of as many features. Sums differ from whole features by rounding: of float32, and of
    the projector (a relative 1e-4 with its default arithmetic).

    Examples
    --------
    >>> import numpy as np, torch, trakdask as td
    >>> net = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9))
    >>> model = td.Model(net, task=td.tasks.CausalLM(inputs="input_ids", positional=True))
    >>> samples = td.from_arrays({"input_ids": np.array([[1, 2, 3], [4, 5, 6]])})
    >>> tokens = td.featurize_parts(samples, model, parts="token", projector=td.Identity())
    >>> dict(tokens.feature.sizes)
    {'sample': 2, 'token': 3, 'proj_dim': 81, 'checkpoint': 1}
    >>> whole = td.featurize(samples, model, projector=td.Identity())
    >>> bool(np.allclose(tokens.feature.sum("token"), whole.feature, atol=1e-6))
    True
    """
    if _is_token(parts):
        _require_auto(gradients)
    dividing = _Dividing(parts, text)
    features = lazy_dataset(
        samples,
        model,
        projector=projector,
        gradients=gradients,
        batch_size=batch_size,
        dtype=dtype,
        device=device,
        on_error=on_error,
        divide=dividing,
    )
    return features.assign_coords(dividing.coords(samples, model))


@dataclass(frozen=True)
class PartProducts:
    """Samples divided into parts, whose features can be multiplied without being computed.

    Parameters
    ----------
    made
        What the graph is built from.
    like
        A Dataset as :func:`featurize_parts` would return it, with zeros as ``feature``.
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
    batch_size: int | Literal["auto"],
    dtype: DType | None,
    device: str,
    on_error: OnError,
) -> PartProducts:
    """Divide samples into parts, as :func:`featurize_parts` does, but compute no features."""
    dividing = _Dividing(parts, text)
    made = prepare(
        samples,
        model,
        projector=projector,
        gradients="auto",
        batch_size=batch_size,
        dtype=dtype,
        device=device,
        on_error=on_error,
        divide=dividing,
        multiplies=True,
    )
    job, rows = made.job, next(iter(made.inputs.values())).chunks[0]
    assert job.partition is not None
    width, n = job.projector.width(job.row_map.n_rows), len(job.model.checkpoints)
    shape = (sum(rows), job.partition.size, width, n)
    zeros = da.zeros(shape, dtype=np.float32, chunks=(rows, -1, -1, 1))
    dims = (SAMPLE, job.partition.dim, PROJ_DIM, CHECKPOINT)
    like = xr.Dataset({"feature": (dims, zeros)}, coords=made.coords, attrs=made.attrs)
    return PartProducts(made, like.assign_coords(dividing.coords(samples, model)))


def _is_token(parts: object) -> bool:
    return isinstance(parts, str) and parts == TOKEN


class _Dividing:
    """Divides the samples of a model into parts, and knows the coords of the parts afterwards."""

    def __init__(self, parts: Parts, text: Text | None) -> None:
        self._parts, self._text = parts, text
        self._titles: list[str] = []
        if text is not None and not _is_token(parts):
            raise ValueError(
                f"expected text= with parts='token' only, got it with parts={shown(parts)}; try "
                "leaving text out"
            )

    def __call__(self, model: Model, inputs: Inputs) -> Partition:
        if _is_token(self._parts):
            return _tokens(model, inputs)
        names = tuple(model.shapes)
        groups, self._titles = groups_of_parameters(model.skeleton(), names, self._parts)
        return Partition(MODULE, len(self._titles), groups)

    def coords(self, samples: xr.Dataset, model: Model) -> dict[str, Any]:
        """Return the coords of the parts."""
        if _is_token(self._parts):
            return _token_coords(samples, model, self._text)
        return {MODULE: (MODULE, np.array(self._titles, dtype=object))}


def _require_auto(gradients: object) -> None:
    if gradients != "auto":
        raise ValueError(
            f"expected gradients='auto' with parts='token', which only hooks can see, got "
            f"{gradients!r}; try leaving gradients out"
        )


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
    require_layers_of_tokens(model.skeleton(), tuple(model.shapes))
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
