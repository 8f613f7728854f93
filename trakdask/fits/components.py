"""Fit the principal components of projected gradients, so that features need few columns."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import dask
import numpy as np
import numpy.typing as npt
import torch
import xarray as xr

from trakdask import arrays
from trakdask.bars import block_bar
from trakdask.checks import require_integer
from trakdask.errors import warn_once
from trakdask.execution import require_memory
from trakdask.featurization.lazy import featurize
from trakdask.featurization.preparation import made_like, model_of, require_model
from trakdask.fits.curvatures import signed
from trakdask.fits.keeping import kept_rows
from trakdask.models.model import Model
from trakdask.projection import SJLT, Projector
from trakdask.projection.companding import encoded, widened
from trakdask.projection.fitted import Components, Fitted
from trakdask.projection.maps import reduced
from trakdask.provenance import as_values
from trakdask.samples.array_source import validate_samples
from trakdask.torch_internals import few_threads
from trakdask.variables import PROJ_DIM, SAMPLE, checkpoint_names

WIDE = SJLT(proj_dim=8192, seed=0)

_LEAST = 1e-10
"""Smaller eigenvalues, as a share of the largest, are rounding of the features."""


def principal_components(
    samples: xr.Dataset,
    model: Model,
    proj_dim: int = 512,
    *,
    projector: Projector | Fitted = WIDE,
    progress: bool = True,
    **options: Any,
) -> Fitted:
    """Fit the directions in which projected gradients differ most: the last step of a projector.

    A random projection treats all directions alike, and adds noise to every product of two
    features that falls only with the root of their number of columns. Gradients of one model have
    most of their length in few directions, though. Features in these directions predict better than
    random ones with several times as many columns, so the store is smaller and queries are faster.

    Parameters
    ----------
    samples
        Training samples, as in :func:`trakdask.featurize`: at least ``proj_dim`` of them, and
        better two or four times as many, drawn at random.
    model
        The model, at all checkpoints that features are to be computed for.
    proj_dim
        Columns of the features: at most as many as there are samples, and columns of the projector.
        If it is more, there are fewer columns, with a warning that has both numbers.
    projector
        The projector that gradients meet first. The wider, the less noise is left;
        :class:`trakdask.Identity` leaves none. Steps that scale gradients may come before it.
    progress
        Show a bar of blocks of samples, over all checkpoints.
    **options
        ``gradients``, ``batch_size``, ``dtype`` and ``device`` of :func:`trakdask.featurize`.

    Returns
    -------
    The projector with one more step, in memory. It holds, and features of it have as variables,

    - ``principal_components`` (sketch_dim, proj_dim, checkpoint) int8: codes q of orthonormal
      columns sign(q) q², each divided by its length, the one with the largest share first;
    - ``principal_shares`` (proj_dim, checkpoint) float64: the part of the squared length of all
      features of these samples that lies in this direction. Its sum says how much ``proj_dim``
      columns keep.

    Raises
    ------
    TypeError, ValueError, BlockError
        As :func:`trakdask.featurize`.

    Notes
    -----
    It is computed at once, since features of training samples and of targets need the same values.
    Cost: one pass over the n samples, and 4 n² w + 9 n³ flops for each checkpoint, with the width w
    of the projector. Memory of the task that decomposes them, one for each checkpoint:
    20 n w + 40 n² bytes; more than any worker has is refused. Each sample that is featurized later
    costs 2 w ``proj_dim`` flops more than its projection.

    Features are equal up to rounding, and not bit by bit, on other processors and in other batches,
    since they are a product of floating-point numbers.

    References
    ----------
    Choe et al. 2024, "What is Your Data Worth to GPT?", whose LoGra starts from principal
    components of each layer; here they are taken of the whole gradient.

    Examples
    --------
    >>> import numpy as np, torch, trakdask as td
    >>> samples = td.from_arrays({"image": np.eye(4, dtype="f4"), "label": np.arange(4) % 3})
    >>> model = td.Model(torch.nn.Linear(4, 3), task="image_classification")
    >>> td.fits.principal_components(samples, model, 3, progress=False)
    Fitted(SJLT(proj_dim=8192, sparsity=4, seed=0), Components(proj_dim=3))
    """
    proj_dim = require_integer("proj_dim", proj_dim, 1, remedy="try proj_dim=512")
    samples = validate_samples(samples)
    require_model(model)
    n_blocks = len(samples.chunksizes[SAMPLE]) * len(model.checkpoints)
    with block_bar("components", n_blocks, show=progress):
        wide = featurize(samples, model, projector, **options)
        return with_components(wide, proj_dim, projector)


def with_components(
    wide: xr.Dataset,
    proj_dim: int,
    projector: Projector | Fitted,
    drawn: tuple[str, np.ndarray] | None = None,
) -> Fitted:
    """Return a projector with the components of its features as one more step.

    ``drawn`` is the source of the samples that these are drawn from, and their places there. With
    it, the projector also has what the components make of these features.
    """
    n_columns = min(proj_dim, wide.sizes[SAMPLE], wide.sizes[PROJ_DIM])
    if n_columns < proj_dim:
        warn_once(
            ("principal_components", proj_dim, n_columns),
            f"expected {proj_dim} columns, as proj_dim says, got {n_columns}: {wide.sizes[SAMPLE]} "
            f"samples and {wide.sizes[PROJ_DIM]} columns of the projector have no more components; "
            "try more samples, or a wider projector=",
        )
    require_memory(
        arrays.memory.principal_components(wide.sizes[SAMPLE], wide.sizes[PROJ_DIM]),
        f"the principal components of {wide.sizes[SAMPLE]} samples",
        f"try fewer samples: some thousand are enough for {n_columns} columns",
    )
    # 1. Output and Q are computed with each block of features, and kept beside them.
    rows = kept_rows(wide.feature.data, wide.output.data, wide.out_to_loss.data)
    # 2. The components, and what they make of these features.
    fitted = Fitted.of(projector)
    n_leading = 0 if fitted.curvature is None else fitted.curvature.leading
    batches = [] if drawn is None else _micro_batches(wide)
    principal = dask.delayed(partial(_principal, n_columns, n_leading, batches))
    by_checkpoint = dask.compute(*map(principal, rows))
    matrices, shares, features = zip(*by_checkpoint, strict=True)
    fit = {"principal_components": np.stack(matrices, -1), "principal_shares": np.stack(shares, -1)}
    step = Components(matrices[0].shape[1])
    fitted = fitted.with_arrays(step, fit, model_of(as_values(wide.attrs)))
    if drawn is None:
        return fitted
    source, places = drawn
    attrs = {**as_values(wide.attrs), "source": source}
    named = zip(checkpoint_names(wide), features, strict=True)
    known = {name: (made_like(attrs, name), places, rows) for name, rows in named}
    return replace(fitted, rows=known)


def _micro_batches(wide: xr.Dataset) -> list[slice]:
    """Return the rows that a task makes features of at once, so that products have equal bits."""
    size, stops = int(wide.attrs["batch_size"]), np.cumsum(wide.chunksizes[SAMPLE]).tolist()
    return [
        slice(i, min(i + size, stop))
        for start, stop in zip([0, *stops], stops, strict=False)
        for i in range(start, stop, size)
    ]


def _principal(
    n_components: int, n_leading: int, batches: list[slice], both: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float64], npt.NDArray[np.float32] | None]:
    """Return codes of the right singular vectors of the largest singular values, and their shares.

    Output and Q stand beside the features x, and beside what the components make of them in some
    batches, which is returned last.

    By the products of samples, X Xᵀ = U diag(s) Uᵀ, since there are fewer samples than columns:
    V = Xᵀ U diag(s)^-½. A direction without any length has the column 0.
    """
    x = both[:, :-2]
    wide = x.astype(np.float64)
    products = wide @ wide.T
    total = products.trace() or 1.0  # of features without any length, all shares are 0
    del wide  # which takes more memory than what follows
    values, vectors = np.linalg.eigh(products)
    values, vectors = values[: -n_components - 1 : -1], vectors[:, : -n_components - 1 : -1]
    is_kept = values > _LEAST * values[0]
    scale = np.where(is_kept, 1 / np.sqrt(np.where(is_kept, values, 1)), 0)
    # Codes of 8 bits quarter what each store of features holds, and turn columns by 1e-2. So single
    # precision, which takes half of the time, is enough for the products before.
    matrix = signed(x.T @ (vectors * scale).astype(np.float32))
    codes, rows = encoded(matrix), None
    if batches:
        components, features = torch.from_numpy(widened(codes)), torch.from_numpy(x)
        leading, sketch = features.tensor_split([n_leading], 1)
        with (
            few_threads()
        ):  # as where blocks are computed: a pool in each of Dask's threads is slow
            parts = [reduced(leading[batch], sketch[batch], components) for batch in batches]
        rows = np.concatenate([torch.cat(parts).numpy(), both[:, -2:]], axis=1)
    return codes, np.where(is_kept, values, 0) / total, rows
