"""Features that another program computed, as a Dataset that can be scored, saved and explored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import dask.array as da
import numpy as np
import pandas as pd
import xarray as xr

from trakdask._version import __version__
from trakdask.arrays.graphs import plain
from trakdask.checks import shown
from trakdask.provenance import as_text
from trakdask.samples.array_source import data_of, lazy_variable
from trakdask.samples.coords import normalise_coord, normalise_coords, require_order
from trakdask.samples.datasets import source_of
from trakdask.samples.sources import block_size, joined_rows
from trakdask.variables import (
    CHECKPOINT,
    PROJ_DIM,
    SAMPLE,
    VARIABLES,
    aligned,
    coords_along,
    validate,
)


def from_features(
    feature: Any,
    made_by: str,
    *,
    output: Any = None,
    out_to_loss: Any = None,
    coords: Mapping[str, Any] | None = None,
    chunks: int | Literal["auto"] = "auto",
) -> xr.Dataset:
    """Make a Dataset of features that another program computed, of any kind.

    They may be embeddings, counts of words, leaves of trees, activations, or gradients. Everything
    that takes the result of :func:`featurize` takes them, too. Call it once for the training
    samples, and once for the targets.

    Parameters
    ----------
    feature
        (sample, proj_dim), or (sample, proj_dim, checkpoint) if there are several models: a numpy
        array or memory map, a torch tensor, a dask or zarr array, or a DataArray with dimensions of
        these names, whose coords are kept. Integers and bools become float32 or float64.
    made_by
        Their origin, in words of yours, with all that changes their meaning, such as the name and
        version of a model. Features can be combined only if they say the same.
    output
        The scalar f that a model gave each sample, (sample,) or (sample, checkpoint), if there is
        one. Without it, λ is by ``"trace"``, and nothing can be asked for that needs it.
    out_to_loss
        Q = -∂loss/∂f of each sample, likewise: 1 - p for a classification, y - f for a squared
        error. It is the weight of a sample in :class:`Trak`. 1 by default.
    coords
        Metadata, as in :func:`from_arrays`.
    chunks
        Samples per block. ``"auto"``: 512, or as many as have 16 MB if that leaves four blocks for
        each thread, and at least 64.

    Returns
    -------
    Lazy Dataset with ``feature``, ``out_to_loss`` and, if there is one, ``output``, in blocks of
    ``chunks`` samples and one checkpoint. ``attrs["source"]`` identifies the content; set it if
    lazy arrays have another name in each process, so that :func:`save` can go on.

    Raises
    ------
    TypeError, ValueError
        If an array has other dimensions, is sparse, or holds no numbers; if sizes or labels of
        checkpoints differ; if ``made_by`` is no text; and as :func:`from_arrays` does of coords.

    Notes
    -----
    Nothing is computed, except lazy coords of a DataArray. Arrays in memory are hashed once, and
    files are read by tasks, as in :func:`from_arrays`.

    λ is by ``"trace"`` unless you ask for another rule, since the others were measured on
    gradients. A score φ(z)ᵀ (K + λ)⁻¹ φ(t) of features that know no labels says how much z counts
    in a ridge regression at t, whatever z is called. For a classifier, multiply scores by the sign
    of ``2 * (scores.label == scores.target_label) - 1``.

    Examples
    --------
    >>> import numpy as np, trakdask as td
    >>> words = np.array([[1, 0, 2], [0, 3, 0], [1, 1, 0]])
    >>> made_by = "counts of 3 words"
    >>> train = td.from_features(words, made_by, coords={"source": ["web", "book", "web"]})
    >>> targets = td.from_features(np.array([[0, 1, 0]]), made_by)
    >>> td.group_score(train, targets, by="source").round(2).values.tolist()
    [[0.2], [0.05]]
    """
    if not isinstance(made_by, str) or not made_by:
        raise TypeError(
            f"expected made_by as text, got {shown(made_by)}; try made_by='embeddings of model 3'"
        )
    size = block_size(chunks)
    if chunks == "auto":
        named = isinstance(feature, xr.DataArray)
        shape = tuple(map(feature.sizes.get, (SAMPLE, PROJ_DIM))) if named else np.shape(feature)
        size = joined_rows(shape[0] or 0, 4 * (shape[1] or 1)) if len(shape) > 1 else size
    asked = {"feature": feature, "output": output, "out_to_loss": out_to_loss}
    arrays = {name: _labelled(name, a, size) for name, a in asked.items() if a is not None}
    arrays = {name: aligned(a, arrays["feature"], what=name) for name, a in arrays.items()}
    # 1. Their identity, before blocks and dtypes give dask's arrays other names.
    source = source_of(xr.Dataset({name: a.variable for name, a in arrays.items()}), ())
    for name, array in arrays.items():
        chunks_of = {SAMPLE: size, PROJ_DIM: -1, CHECKPOINT: 1}
        floating = array.variable.astype(np.result_type(array.dtype, np.float32))
        blocks = floating.chunk({dim: chunks_of[str(dim)] for dim in array.dims})
        arrays[name] = array.copy(data=plain(blocks.data))  # DataArray.chunk would make coords lazy
    # 2. What is missing: Q = 1, and coords.
    first = arrays["feature"]
    if out_to_loss is None:
        arrays["out_to_loss"] = xr.ones_like(first.sum(PROJ_DIM))
    n = first.sizes[SAMPLE]
    known = {str(name): v.compute() for name, v in coords_along(first, SAMPLE).items()}
    metadata = normalise_coords(known, n) | normalise_coords(coords, n)
    # 3. Attrs that features of gradients have, too. ``made_by`` is what tells features apart, since
    # nothing is known of any weights.
    names = list(map(str, first[CHECKPOINT].values))
    attrs = {
        "made_by": made_by,
        "projector": {"kind": "computed elsewhere", "proj_dim": first.sizes[PROJ_DIM]},
        "checkpoints": dict(zip(names, names, strict=True)),
        "checkpoint_ids": dict.fromkeys(names, 0),  # no random matrix depends on them
        "parameters": {},
        "task": "unknown",
        "source": source,
        "default_damping": "trace",
        "trakdask_version": __version__,
    }
    ds = xr.Dataset(
        {name: VARIABLES[name].holding(a.data) for name, a in arrays.items()},
        {name: (SAMPLE, values) for name, values in metadata.items()}
        | {CHECKPOINT: normalise_coord(CHECKPOINT, names, len(names))},
        as_text(attrs),
    )
    validate(ds, arrays, what="features")
    return ds


def _labelled(name: str, array: Any, size: int) -> xr.DataArray:
    """Return a lazy array with the dimensions of the variable of this name, in their order."""
    dims = VARIABLES[name].dims
    if isinstance(array, pd.Series):
        require_order(name, array.index)
    named = isinstance(array, xr.DataArray)
    if named:
        array = array.transpose(*(dim for dim in dims if dim in array.dims))
    data = data_of(array) if named else array
    # Not in blocks yet if it is lazy, because blocks of other sizes would be made of all
    # checkpoints first.
    lazy = lazy_variable(name, data, None if isinstance(data, da.Array) else size)
    if named:
        labelled = array.copy(data=lazy.data)
    else:
        if lazy.ndim not in (len(dims), len(dims) - 1):
            raise ValueError(
                f"expected {name} with the axes {dims[:-1]}, or {dims}, got the shape "
                f"{lazy.shape}; try {name}.reshape{(lazy.shape[0], -1)[: len(dims) - 1]}"
            )
        labelled = xr.DataArray(lazy.data, dims=dims[: lazy.ndim])
    labelled.attrs.update(lazy.attrs)
    return labelled if CHECKPOINT in labelled.dims else labelled.expand_dims(CHECKPOINT, axis=-1)
