"""A random subset of the gradient's entries, alone or followed by another projection."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from trakdask.checks import shown
from trakdask.projection.identity import Identity
from trakdask.projection.philox import STREAM_MASK, fill_words
from trakdask.projection.protocol import Cost, Projector, allowed
from trakdask.projection.rows import RowMap

# A row has a key of 64 bits, and a counter makes 128. Keys are drawn a megabyte at a time.
_ROWS_PER_COUNTER = 2
_COUNTERS_PER_BATCH = 1 << 16
_BATCH_BYTES = 3 * 2**20
_BYTES_PER_SELECTED_ROW = 40


@dataclass(frozen=True)
class Mask(Projector):
    """Select a random subset of the gradient's entries, and optionally project it.

    Exactly ``keep`` rows are drawn without replacement, independently for every checkpoint; other
    rows are never read. Without ``then``, a feature is a selected entry times
    ``(n_rows / keep)**0.5``, and a smaller ``keep`` is a prefix of a larger one, up to that factor.
    Another projector is applied to the gradient of ``keep`` entries, and its features are
    multiplied by the same factor.

    Parameters
    ----------
    keep
        Number of entries, in [1, 2**47), at most as many as the gradient has.
    then
        Projector of the selected entries, which is no other mask.
    seed
        Integer in [0, 2**64); ``then`` may have the same one.

    Raises
    ------
    TypeError, ValueError
        If an argument has another type, or is out of range.

    Notes
    -----
    Definition: the key of a row is a 64-bit number, drawn in stream 2 of
    ``trakdask.projection.philox``:

    .. code-block:: text

        i   = row >> 1
        w   = Philox4x32-10((i & 0xffffffff, 0, checkpoint, (i >> 32) | 2 << 16), key of the seed)
        key = w[2 * (row & 1)] | w[2 * (row & 1) + 1] << 32

    The rows with the smallest keys are selected; among equal keys, the lower row comes first.
    Without ``then``, columns are in the order of keys; ``then`` sees selected rows in row order.

    Variance of φ·φ' without ``then``, with x_i = g_i g'_i and n rows:
    n (n - keep) / (keep (n - 1)) (Σ x_i² - (Σ x_i)²/n). It is the variance of a dense projection to
    ``keep`` columns for gradients that are spread over all rows, but increases to n / keep - 1 for
    a gradient with a single nonzero row.

    Exactness: keys are integers; selected entries are only rounded to float32. A sample becomes NaN
    only if one of its selected entries is not finite.
    Cost: selecting rows takes one pass over all keys, and memory for ``keep`` of them; the rows of
    the last few checkpoints are cached.

    References
    ----------
    Hu et al. 2025, "GraSS: Scalable Data Attribution with Gradient Sparsification and Sparse
    Projection", which is a mask before a sparse projection.

    Examples
    --------
    >>> from trakdask.projection import Rademacher
    >>> Mask(keep=65536).width(n_rows=10**7)
    65536
    >>> Mask(keep=65536, then=Rademacher(proj_dim=512)).width(n_rows=10**7)
    512
    """

    kind: ClassVar[str] = "mask"

    keep: int = field(metadata=allowed(range(1, 2**47), 65536))
    then: Projector = field(default_factory=Identity)
    seed: int = field(default=0, metadata=allowed(range(2**64), 0))
    _n_rows: int | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = "try then=td.SJLT(proj_dim=2048)"
        if not isinstance(self.then, Projector):
            raise TypeError(f"expected then to be a projector, got {shown(self.then)}; {remedy}")
        if isinstance(self.then, Mask) or self.then.takes_all_rows:
            raise TypeError(
                "expected then to be a projector that can follow a mask, got "
                f"{self.then}, which needs all rows; {remedy}"
            )

    def width(self, n_rows: int) -> int:
        """Return the width of ``then`` for ``keep`` rows: ``keep`` for a mask alone."""
        return self.then.width(self.keep)

    def scale(self, n_rows: int) -> float:
        """Return ``(n_rows / keep)**0.5`` times the scale of ``then``."""
        return float((n_rows / self.keep) ** 0.5) * self.then.scale(self.keep)

    def cost(self, n_rows: int) -> Cost:
        """Return the cost of projecting gradients of ``n_rows`` elements.

        The 64 bits per row of the keys are drawn once per checkpoint.
        """
        self._check_rows(n_rows)
        then = self.then.cost(self.keep)
        typical, worst = then.product_error
        lost = n_rows / self.keep - 1
        return Cost(
            operations=then.operations,
            random_bits=64 * n_rows + then.random_bits,
            buffer_bytes=_BATCH_BYTES + _BYTES_PER_SELECTED_ROW * self.keep + then.buffer_bytes,
            rounding_error=then.rounding_error,
            product_error=(
                (lost / n_rows + typical**2) ** 0.5,
                # A single nonzero row is either selected and scaled by n_rows / keep, or lost.
                ((1 + lost) * (1 + worst**2) - 1) ** 0.5,
            ),
        )

    def bind(self, row_map: RowMap) -> Self:
        """Return the projector for the rows of a row map.

        Raises
        ------
        ValueError
            If there are fewer rows than ``keep``.
        """
        self._check_rows(row_map.n_rows)
        bound = replace(self, then=self.then.bind(self._kept_rows()))
        object.__setattr__(bound, "_n_rows", row_map.n_rows)
        return bound

    def selected_rows(self, checkpoint: int) -> np.ndarray:
        """Return the selected rows, ascending; read-only."""
        return self._selected(checkpoint)[0]

    def sample_tile(self) -> int | None:
        """Return how many samples the other projector is fastest for; see ``Projector``."""
        return self.then.sample_tile()

    def project_block(self, block: Tensor, row_offset: int, checkpoint: int, out: Tensor) -> None:
        """Add the projection of one block of selected rows to ``out``; see ``Projector``."""
        if not isinstance(self.then, Identity):
            self.then.project_block(block, row_offset, checkpoint, out)
            return
        ranks = self._selected(checkpoint)[1][row_offset : row_offset + block.shape[1]]
        values = block.float().to(out.device)
        # Each rank comes once, so the order of additions cannot change a bit.
        out.index_add_(1, torch.from_numpy(ranks).to(out.device), values.double())
        out.masked_fill_(~torch.isfinite(values).all(1, keepdim=True), torch.nan)

    def project_rows(self, rows: Tensor, row_offset: int, checkpoint: int, out: Tensor) -> None:
        """Add the projection of consecutive blocks of selected rows; see ``Projector``."""
        if isinstance(self.then, Identity):
            super().project_rows(rows, row_offset, checkpoint, out)
        else:
            self.then.project_rows(rows, row_offset, checkpoint, out)

    def multiply_vectors(self, row_map: RowMap, checkpoint: int, vectors: Tensor) -> Tensor:
        """Return the product with the matrix from the other side; see ``Projector``."""
        # Also of a projector that is not bound, which knows no number of rows.
        rows, ranks = select_rows(row_map.n_rows, self.keep, self.seed, checkpoint)
        if isinstance(self.then, Identity):  # columns are in the order of keys, not of rows
            values = vectors[:, torch.from_numpy(ranks)]
        else:
            values = self.then.multiply_vectors(self._kept_rows(), checkpoint, vectors)
        out = vectors.new_zeros(len(vectors), row_map.n_rows)
        out[:, torch.tensor(rows)] = values
        return out

    def require_back_projection(self) -> None:
        """Check that the matrix of ``then`` can be multiplied from both sides."""
        self.then.require_back_projection()

    def _kept_rows(self) -> RowMap:
        return RowMap.from_shapes({"kept": (self.keep,)}, alignment=self.then.row_alignment)

    def _selected(self, checkpoint: int) -> tuple[np.ndarray, np.ndarray]:
        assert self._n_rows is not None, "bind comes first"
        return select_rows(self._n_rows, self.keep, self.seed, checkpoint)

    def _check_rows(self, n_rows: int) -> None:
        if self.keep > n_rows:
            raise ValueError(
                f"expected keep to be at most the {n_rows} elements of a gradient, got "
                f"{self.keep}; try keep={n_rows}"
            )


@lru_cache(maxsize=8)
def select_rows(
    n_rows: int, keep: int, seed: int, checkpoint: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows that a mask selects, and the order of their keys.

    Parameters
    ----------
    n_rows
        Number of rows.
    keep
        Number of rows to select, at most ``n_rows``.
    seed, checkpoint
        Address of the keys.

    Returns
    -------
    The selected rows, ascending, read-only; and the rank of each one's key among them.

    Notes
    -----
    Cost: 64 random bits per row, about 3 MB, and 40 bytes per selected row.
    """
    # 1. Six standard deviations more, so that one pass over the keys nearly always suffices.
    expected, rows = keep + 6 * math.isqrt(keep) + 16, np.empty(0, np.int64)
    while len(rows) < keep:
        # Keys are uniform: this bound lets about ``expected`` rows pass.
        largest = min((expected << 64) // n_rows, 2**64 - 1)
        rows, keys = _rows_up_to(largest, n_rows, seed, checkpoint)
        expected *= 2
    # 2. Candidates are in the order of rows: a stable sort puts the lower of equal keys first.
    by_key = rows[np.argsort(keys, kind="stable")[:keep]]
    ranks = np.argsort(by_key)
    rows = by_key[ranks]
    rows.flags.writeable = False
    return rows, ranks


def _rows_up_to(
    largest: int, n_rows: int, seed: int, checkpoint: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows with keys of at most ``largest``, ascending, and their keys."""
    rows, small_keys = [], []
    n_counters = -(-n_rows // _ROWS_PER_COUNTER)
    words = np.empty((1, min(n_counters, _COUNTERS_PER_BATCH), 2), np.uint64)
    for index in range(0, n_counters, _COUNTERS_PER_BATCH):
        fill_words(words, index, 0, seed=seed, checkpoint=checkpoint, stream=STREAM_MASK)
        first = index * _ROWS_PER_COUNTER
        keys = words.reshape(-1)[: n_rows - first]
        small = np.flatnonzero(keys <= np.uint64(largest))
        rows.append(small + first)
        small_keys.append(keys[small])
    return np.concatenate(rows), np.concatenate(small_keys)
