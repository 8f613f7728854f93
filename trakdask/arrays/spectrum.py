"""The eigendecomposition of gram matrices, which solves for every damping; and solving with it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
import numpy.typing as npt
from dask.base import tokenize

from trakdask.arrays.block_arguments import coarse_groups, read_in_task
from trakdask.arrays.blocks import Block, Blocks, flat, product_dtype
from trakdask.arrays.decomposition import Inverse, Matrix, Spectrum, decompose
from trakdask.arrays.solve import require_finite, without_trace
from trakdask.arrays.triangular import solve_in_place

__all__ = [
    "closed_form_damping",
    "eigenvectors",
    "from_eigenvectors",
    "inverse",
    "leverage",
    "mean_trace",
    "solve",
    "spectrum",
]


def mean_trace(gram: da.Array, n_sample: int, labels: Sequence[str]) -> da.Array:
    """Return tr(K_c)/n, (checkpoint,) float64, lazy: the unit of relative damping.

    Computing it raises a ValueError that names the checkpoint, if K is all 0.

    Examples
    --------
    >>> mean_trace(da.ones((2, 2, 1), chunks=(2, 2, 1)), 4, ["c0"]).compute().tolist()
    [0.5]
    """
    result: da.Array = da.map_blocks(
        _mean_trace,
        gram,
        n_sample,
        tuple(labels),
        drop_axis=(0, 1),
        name="mean-trace-" + tokenize(gram.name, n_sample, labels),
        dtype=np.float64,
        meta=np.empty((0,), np.float64),
    )
    return result


def _mean_trace(
    gram: Block, n_sample: int, labels: tuple[str, ...], *, block_id: tuple[int, ...]
) -> Block:
    if not (trace := np.trace(gram[:, :, 0], dtype=np.float64)):
        raise ValueError(without_trace(labels[block_id[-1]]))
    return np.array([trace / n_sample])


def spectrum(
    gram: da.Array,
    loss_gradient: da.Array | None,
    n_sample: int,
    labels: Sequence[str],
    *,
    n_component: int | None = None,
) -> da.Array:
    """Decompose the Gram matrix of every checkpoint, once for all λ.

    Parameters
    ----------
    gram
        K, (proj_dim, proj_dim, checkpoint), float, chunks (p, p, 1), symmetric.
    loss_gradient
        r_c = Σ_z mean_c[ g_c(z) ] φ_c(z), (proj_dim, checkpoint), chunks (p, 1). Without it the
        result is for :func:`inverse` only.
    n_sample
        Samples that both are sums over.
    labels
        The checkpoints' names, for errors.
    n_component
        Of :func:`trakdask.arrays.decomposition.component_count`; None for p.

    Returns
    -------
    (checkpoint,) lazy, one :class:`Spectrum` per chunk, for :func:`inverse` and for
    :mod:`trakdask.arrays.damping`.

    Raises
    ------
    ValueError
        At compute time, if ``gram`` is not finite; names the checkpoint.

    Notes
    -----
    Cost: that of :func:`trakdask.arrays.decomposition.decompose`, and 32 p² bytes in a task whose
    result has 8 p² bytes. Eigenvalues that rounding made negative count as 0.
    """
    loss = [None, None] if loss_gradient is None else [loss_gradient, "pc"]
    result: da.Array = da.blockwise(
        functools.partial(_spectrum, n_sample=n_sample, n_component=n_component),
        "c",
        gram,
        "pqc",
        *loss,
        _labels(labels),
        "c",
        concatenate=False,
        align_arrays=False,
        name="spectrum-" + tokenize(gram.name, loss_gradient, n_sample, labels, n_component),
        dtype=object,
        meta=np.empty((0,), object),
    )
    return result


def _spectrum(
    gram: Blocks,
    loss_gradient: Blocks | None,
    label: Block,
    *,
    n_sample: int,
    n_component: int | None,
) -> Spectrum:
    (block,) = flat(gram)
    name = str(label[0])
    require_finite(block, name)
    matrix = block[:, :, 0].astype(np.float64, copy=False)
    values, vectors = decompose(matrix, n_component or len(matrix))
    total, mean = _total(len(matrix), loss_gradient), float(np.trace(matrix)) / n_sample
    return Spectrum(values, vectors, vectors.T @ total, total, mean, name)


def _total(proj_dim: int, loss_gradient: Blocks | None) -> npt.NDArray[np.float64]:
    """Return r, NaN if it is not given."""
    if loss_gradient is None:
        return np.full(proj_dim, np.nan)
    (r,) = flat(loss_gradient)
    total: npt.NDArray[np.float64] = r[:, 0].astype(np.float64)
    return total


def eigenvectors(
    spectrum: da.Array, proj_dim: int, n_component: int | None = None
) -> tuple[da.Array, da.Array]:
    """Return the eigenvalues and eigenvectors of a spectrum, as :func:`from_eigenvectors` takes.

    Examples
    --------
    >>> k = spectrum(da.eye(2, chunks=2)[:, :, None], None, 1, ["c0"])
    >>> values, vectors = eigenvectors(k, 2)
    >>> values.compute()[:, 0].tolist(), vectors.shape
    ([1.0, 1.0], (2, 2, 1))
    """
    shared: dict[str, Any] = {"align_arrays": False, "dtype": np.float64}
    token = tokenize(spectrum.name, proj_dim, n_component := n_component or proj_dim)
    values = da.blockwise(
        _values, "kc", spectrum, "c", new_axes={"k": n_component},
        name=f"eigenvalues-{token}", meta=np.empty((0, 0)), **shared,
    )  # fmt: skip
    vectors = da.blockwise(
        _vectors, "pkc", spectrum, "c", new_axes={"p": proj_dim, "k": n_component},
        name=f"eigenvectors-{token}", meta=np.empty((0, 0, 0)), **shared,
    )  # fmt: skip
    return values, vectors


def _values(spectrum: Spectrum) -> Block:
    return spectrum.values[:, None]


def _vectors(spectrum: Spectrum) -> Block:
    return spectrum.vectors[:, :, None]


def from_eigenvectors(
    values: da.Array,
    vectors: da.Array,
    loss_gradient: da.Array | None,
    n_sample: int,
    labels: Sequence[str],
) -> da.Array:
    """Return what :func:`spectrum` returns, from eigenvalues and eigenvectors that are known.

    Parameters
    ----------
    values
        (component, checkpoint) float64, chunks (k, 1).
    vectors
        (proj_dim, component, checkpoint) float, chunks (p, k, 1).
    loss_gradient, n_sample, labels
        As in :func:`spectrum`; without ``loss_gradient`` the result is for :func:`inverse` only.

    Notes
    -----
    Cost: 2 p² flops per checkpoint, for ``loss_gradient``.
    """
    loss = [None, None] if loss_gradient is None else [loss_gradient, "pc"]
    result: da.Array = da.blockwise(
        functools.partial(_from_eigenvectors, n_sample=n_sample),
        "c",
        values,
        "kc",
        vectors,
        "pkc",
        *loss,
        _labels(labels),
        "c",
        concatenate=False,
        align_arrays=False,
        name="known-spectrum-" + tokenize(values.name, vectors.name, loss[0], n_sample, labels),
        dtype=object,
        meta=np.empty((0,), object),
    )
    return result


def _from_eigenvectors(
    values: Blocks, vectors: Blocks, loss_gradient: Blocks | None, label: Block, *, n_sample: int
) -> Spectrum:
    ((s,), (v,)) = flat(values), flat(vectors)
    s, v = s[:, 0], v[:, :, 0]
    total, mean = _total(len(v), loss_gradient), float(s.sum()) / n_sample
    return Spectrum(s, v, v.T @ total, total, mean, str(label[0]))


def _labels(labels: Sequence[str]) -> da.Array:
    texts = np.array(list(labels), dtype=object)
    array: da.Array = da.from_array(
        texts, chunks=1, name="checkpoint-names-" + tokenize(list(labels))
    )
    return array


def closed_form_damping(spectrum: da.Array, factor: float) -> da.Array:
    """Return :func:`trakdask.arrays.solve.closed_form_damping`, from the eigenvalues of K.

    Examples
    --------
    >>> k = spectrum(da.ones((2, 2, 1), chunks=(2, 2, 1)), da.ones((2, 1)), 4, ["c0"])
    >>> round(float(closed_form_damping(k, factor=0.5)[0]), 12)
    1.0
    """
    result: da.Array = da.map_blocks(
        functools.partial(_closed_form, factor=factor),
        spectrum,
        name="spectral-closed-form-" + tokenize(spectrum.name, factor),
        dtype=np.float64,
        meta=np.empty((0,), np.float64),
    )
    return result


def _closed_form(spectrum: Spectrum, factor: float) -> Block:
    trace = float(spectrum.values.sum())
    if not trace:
        raise ValueError(without_trace(spectrum.label))
    return np.array([factor * float(np.square(spectrum.values).sum()) / trace])


def inverse(spectrum: da.Array, damping: da.Array) -> da.Array:
    """Return (K_c + λ_c I)⁻¹, for :func:`solve`, without a factorization.

    Parameters
    ----------
    spectrum
        Of :func:`spectrum`.
    damping
        λ, (checkpoint,), chunks of 1.

    Returns
    -------
    (checkpoint,) lazy, one :class:`trakdask.arrays.decomposition.Inverse` per chunk.

    Raises
    ------
    numpy.linalg.LinAlgError
        At compute time, if K_c + λ_c I is singular; names the checkpoint.
    """
    result: da.Array = da.blockwise(
        _inverse, "c", spectrum, "c", damping.rechunk(1, method="tasks"), "c",
        concatenate=True, align_arrays=False, dtype=object, meta=np.empty((0,), object),
        name="inverse-" + tokenize(spectrum.name, damping.name),
    )  # fmt: skip
    return result


def _inverse(spectrum: Spectrum, damping: Block) -> Inverse:
    is_whole = len(spectrum.vectors) == len(spectrum.values)
    smallest = float(spectrum.values.min()) if is_whole else 0.0
    # What rounding left of an eigenvalue 0 is no number to divide by.
    least = np.finfo(np.float64).eps * spectrum.values.max(initial=0)
    if not smallest + float(damping[0]) > least:
        raise np.linalg.LinAlgError(
            f"expected K + λI to be positive definite, got one of checkpoint {spectrum.label!r} "
            f"that is not in float64 (λ = {float(damping[0]):.3g}, smallest eigenvalue of K = "
            f"{smallest:.3g}); try a larger damping"
        )
    return spectrum.inverse(damping)


class _Factor(NamedTuple):
    """(K + λI)⁻¹ of one checkpoint, by the lower Cholesky factor of K + λI."""

    lower: Matrix

    def solve(self, rows: Block) -> Matrix:
        """Return (K + λI)⁻¹ of each row."""
        solved = rows.astype(np.float64, order="C", copy=True)
        solve_in_place(self.lower, solved)
        return solved

    def forms(self, rows: Block) -> Matrix:
        """Return φᵀ (K + λI)⁻¹ φ of each row."""
        return np.asarray(np.einsum("sp,sp->s", rows, self.solve(rows)))


def solve(inverse: da.Array, target: da.Array) -> da.Array:
    """Return w_c(t) = (K_c + λ_c I)⁻¹ φ_c(t) for the targets.

    Parameters
    ----------
    inverse
        Of :func:`inverse`, or the factors of :func:`trakdask.arrays.solve.cholesky`.
    target
        Features of the targets, (target, proj_dim, checkpoint), float, chunks (rows, p, 1).

    Returns
    -------
    (target, proj_dim, checkpoint) float32 (float64 if the targets are), lazy, in the chunks of
    ``target``, so that computing some of the targets reads only their blocks.

    Notes
    -----
    Cost in float64, per target and checkpoint: 2 p² flops with factors, 4 p k with k eigenvectors;
    and 16 p bytes in addition to the inputs. A NaN in a target's feature makes that target NaN, and
    no other.

    Examples
    --------
    >>> f = da.from_array(np.array([[2.0, 0.0], [0.0, 4.0]])[:, :, None], chunks=(2, 2, 1))
    >>> t = da.ones((1, 2, 1), chunks=(1, 2, 1), dtype="float32")
    >>> solve(f, t).compute()[:, :, 0].tolist()
    [[0.25, 0.0625]]
    """
    dtype = product_dtype(target)
    # concatenate=False passes a factor itself; concatenating its one block would copy p² numbers.
    solved: da.Array = da.blockwise(
        _solve_block, "tpc", target, "tpc", inverse, "pqc" if inverse.ndim == 3 else "c",
        concatenate=False, align_arrays=False, dtype=dtype, meta=np.empty((0, 0, 0), dtype),
        name="solve-" + tokenize(inverse.name, target.name),
    )  # fmt: skip
    return solved


def _solve_block(target: Blocks, inverse: Any) -> Block:
    (phi,) = flat(target)
    solved = _inverse_of(inverse).solve(phi[:, :, 0])
    return solved.astype(product_dtype(phi), copy=False).reshape(phi.shape)


def _inverse_of(block: Any) -> Inverse | _Factor:
    if isinstance(block, Inverse):
        return block
    (lower,) = flat(block)
    return _Factor(lower[:, :, 0])


def leverage(inverse: da.Array, feature: da.Array) -> da.Array:
    """Return φ_c(z)ᵀ (K_c + λ_c I)⁻¹ φ_c(z) of every sample.

    Parameters
    ----------
    inverse, feature
        As in :func:`solve`.

    Returns
    -------
    (sample, checkpoint) float64, lazy, in the chunks of ``feature``, or of several of its blocks
    where more than 4096 are read from a store.

    Notes
    -----
    Cost: 2 p² flops per sample and checkpoint, as for the Gram matrix, and 16 p bytes per sample of
    a block in addition to the block. The n × n hat matrix is never formed.

    Examples
    --------
    >>> f = da.from_array(np.array([[2.0, 0.0], [0.0, 4.0]])[:, :, None], chunks=(2, 2, 1))
    >>> leverage(f, da.ones((1, 2, 1), chunks=(1, 2, 1))).compute().tolist()
    [[0.3125]]
    """
    groups = coarse_groups(feature.numblocks[0])
    result: da.Array = da.blockwise(
        _leverage_block, "sc",
        *(read_in_task(feature, groups=groups, by_checkpoint=True) or (feature, "spc")),
        inverse, "pqc" if inverse.ndim == 3 else "c",
        concatenate=False, align_arrays=False, dtype=np.float64, meta=np.empty((0, 0), np.float64),
        name="leverage-" + tokenize(inverse.name, feature.name),
    )  # fmt: skip
    return result


def _leverage_block(feature: Blocks, inverse: Any) -> Block:
    forms = _inverse_of(inverse).forms
    return np.concatenate([forms(phi[:, :, 0]) for phi in flat(feature)])[:, None]
