"""From gradients to features: tensors are split into the row blocks that projectors take."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from trakdask.projection.acceleration import count_elements, on_gpu
from trakdask.projection.protocol import Projector
from trakdask.projection.rows import ROW_BLOCK, RowMap
from trakdask.tensors import Scratch, float64_device

_PROBE_STEP = 512
_scratch = Scratch()


class ProjectionStream:
    """Project gradients tensor by tensor, in any order, without storing the flat gradient.

    Tensors, or consecutive parts of one, are split at the global grid of 16384 rows. An incomplete
    block stays in a buffer until adjacent tensors have filled it. In the order of the row map, the
    result has the bits of one flat vector; another order can change the last bit of the float64
    sums. On a CPU, samples that are zero in a block, as most are in the rows of an embedding, are
    left out of its product. On a GPU, no call synchronises before the result is read.

    Parameters
    ----------
    projector
        The map.
    row_map
        Rows of the tensors, aligned as the projector requires.
    n_samples
        Number of samples B of every gradient.
    checkpoint
        Checkpoint id in [0, 2**32).
    device
        Device of the gradients and of the result, any of torch. All are meant to give the bits of a
        CPU. If CuPy is installed, CUDA kernels are meant to project them on an NVIDIA GPU. (They
        have not run on one yet.)

    Notes
    -----
    Memory: B * 8 * width bytes, with B rounded up to a multiple of 16 where the projector takes so
    many samples at a time, and B * 65536 bytes for each incomplete block (one, in the order of
    the row map or its reverse), in addition to the buffers of the projector.

    Examples
    --------
    >>> from trakdask.projection import Identity
    >>> rows = RowMap.from_shapes({"weight": (2, 3), "bias": (2,)}, alignment=1)
    >>> stream = ProjectionStream(Identity(), rows, n_samples=4, checkpoint=0)
    >>> stream.add("bias", torch.zeros(4, 2))
    >>> stream.add("weight", torch.ones(4, 2, 3))
    >>> stream.result().sum().item()
    24.0
    """

    def __init__(
        self,
        projector: Projector,
        row_map: RowMap,
        n_samples: int,
        checkpoint: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self._projector = projector = projector.bind(row_map)
        self._row_map = row_map
        self._checkpoint = checkpoint
        self._selected = selected = projector.selected_rows(checkpoint)
        # The same rows twice: numpy searches in them, and torch selects with them, on the device.
        self._chosen = None if selected is None else torch.tensor(selected, device=device)
        self._n_rows = row_map.n_rows if selected is None else len(selected)
        self._block = max(1, self._n_rows) if projector.takes_all_rows else ROW_BLOCK
        self._missing = self._rows_of_blocks()
        self._waiting: dict[int, Tensor] = {}
        self._next = dict.fromkeys(row_map.names, 0)  # the first element that is still missing
        self._n_samples, self._device = n_samples, torch.device(device)
        self._on_gpu = on_gpu(torch.empty(0, device=device))
        self._width = projector.width(row_map.n_rows)
        # Samples in tiles, whose sums have the samples side by side.
        of_tile = None if self._on_gpu else projector.sample_tile()
        self._tile = of_tile or max(1, n_samples)
        self._is_tiled = of_tile is not None
        self._sums = self._zeros(n_samples)

    def add(self, name: str, gradient: Tensor, first: int | None = None) -> None:
        """Project the gradient of a parameter, or of some of its elements.

        Parameters
        ----------
        name
            A name of the row map; each element is added once.
        gradient
            Shape (B, numel) or (B, *shape), any float dtype. It is read before the call returns.
        first
            Index of the first element, if the gradient is only a part, (B, n), of the whole; all
            elements before it must have been added. None for the whole.

        Raises
        ------
        ValueError
            If the name, the shape or ``first`` is not one of those expected.
        """
        # 1. It is the gradient that comes next.
        n_samples, begin, n = self._n_samples, first or 0, math.prod(gradient.shape[1:])
        missing = self._row_map.size(name) - self._next[name]
        fits = self._next[name] == begin and (n == missing or (first is not None and n < missing))
        if not fits or len(gradient) != n_samples:
            raise ValueError(
                f"expected gradients of {n_samples} samples, each element once, in order, got "
                f"{name!r} from element {begin} on, of shape {tuple(gradient.shape)}; try the "
                f"{missing} elements that are missing, from {self._next[name]} on"
            )
        self._next[name] += n
        # 2. Selected rows are renumbered: this part has start to stop among them.
        flat, offset = gradient.detach().reshape(n_samples, n), self._row_map.offset(name) + begin
        start, stop = offset, offset + n
        if self._selected is not None and self._chosen is not None:
            start, stop = np.searchsorted(self._selected, (start, stop)).tolist()
            flat = flat[:, self._chosen[start:stop] - offset]
        # 3. A GPU takes many blocks at once; a CPU one by one, while it is in a cache.
        for row, last in _cut(start, stop, self._block, runs=self._on_gpu):
            self._add_rows(row, flat[:, row - start : last - start])

    def __call__(self, name: str, gradient: Tensor, first: int | None = None, /) -> None:
        """Do the same as :meth:`add`, as a sink of gradients does."""
        self.add(name, gradient, first)

    def buffer_for(self, name: str, first: int) -> Tensor | None:
        """Return where the next elements of a gradient can be written, which spares a copy.

        Parameters
        ----------
        name
            A name of the row map.
        first
            Index of the first element that is still missing.

        Returns
        -------
        A view of the buffer of a row block, (B, n), float32, for the elements from ``first`` up to
        the end of the block or of the parameter. It, or its first columns, must be passed to
        :meth:`add` next. None on a GPU, and if only some rows are projected.
        """
        # Selected elements do not lie side by side, and a GPU takes whole blocks without a buffer.
        if self._selected is not None or self._on_gpu:
            return None
        start, size = self._row_map.offset(name) + first, self._row_map.size(name)
        block, position = divmod(start, self._block)
        return self._buffer(block)[:, position : position + size - first]

    def result(self) -> Tensor:
        """Return the features: shape (B, width), float32, scaled.

        Raises
        ------
        ValueError
            If gradients of the row map are missing.
        """
        if missing := [n for n, end in self._next.items() if end < self._row_map.size(n)]:
            total = len(self._row_map.names)
            raise ValueError(
                f"expected the gradients of all {total} parameters, got {total - len(missing)}; "
                f"try stream.add({missing[0]!r}, gradient) next"
            )
        shape, scale = (self._n_samples, self._width), self._projector.scale(self._row_map.n_rows)
        features = torch.empty(shape, device=self._sums[0].device)
        for sums, rows in zip(self._sums, features.split(self._tile), strict=True):
            torch.mul(sums, scale, out=rows)
        return features.to(self._device)

    def _length(self, block: int) -> int:
        """Return the number of rows of a block; the last one may be short."""
        return min(self._block, self._n_rows - block * self._block)

    def _rows_of_blocks(self) -> dict[int, int]:
        """Return the number of rows of parameters in each block; padding between them never comes.

        Only the rows that are projected count.
        """
        starts = np.array(self._row_map.offsets)
        stops = starts + [self._row_map.size(name) for name in self._row_map.names]
        if self._selected is not None:
            starts, stops = (np.searchsorted(self._selected, edges) for edges in (starts, stops))
        counts: dict[int, int] = defaultdict(int)
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            for row, last in _cut(start, stop, self._block, runs=False):
                counts[row // self._block] += last - row
        return counts

    def _add_rows(self, first: int, part: Tensor) -> None:
        """Project the rows of whole blocks at once, and others when their block is full."""
        block, position = divmod(first, self._block)
        length = self._length(block)
        if part.shape[1] >= length and block not in self._waiting:
            self._project(part, first)
            return
        whole = self._buffer(block)
        place = whole[:, position : position + part.shape[1]]
        if part.data_ptr() != place.data_ptr():  # else it was written to what buffer_for returned
            place.copy_(part)
        self._missing[block] -= part.shape[1]
        if not self._missing[block]:
            self._project(whole, block * self._block)
            flat = self._waiting.pop(block)
            if self._block <= ROW_BLOCK:  # a projector that takes all rows needs far more
                _scratch.put_back("waiting", flat)

    def _buffer(self, block: int) -> Tensor:
        """Return the buffer of an incomplete block, (B, rows)."""
        shape = self._n_samples, self._length(block)
        if block not in self._waiting:
            size, device = math.prod(shape), self._device
            self._waiting[block] = _scratch.take_out("waiting", size, torch.float32, device)
            if self._missing[block] < shape[1]:  # padding between parameters is zero
                self._waiting[block].zero_()
        return self._waiting[block][: math.prod(shape)].view(shape)

    def _zeros(self, n_samples: int) -> list[Tensor]:
        """Return sums of some samples, (tile, width) each, in the layout of the projector."""
        tiles = []
        for first in range(0, max(n_samples, 1), self._tile):
            shape = (self._width, self._tile) if self._is_tiled else (self._tile, self._width)
            device = float64_device(self._device)
            sums = torch.zeros(shape, dtype=torch.float64, device=device)
            tiles.append((sums.T if self._is_tiled else sums)[: n_samples - first])
        return tiles

    def _project(self, block: Tensor, row_offset: int) -> None:
        """Add the product of complete blocks to the sums: here a gradient meets its projector."""
        count_elements(block.numel())
        # Looking for zeros would wait for the GPU.
        if self._on_gpu or (samples := _nonzero_samples(block)) is None:
            self._add_product(block, row_offset, self._sums)
        elif len(samples):
            # Sums that begin with 0 are exactly the products, so that adding these has the bits of
            # adding in place.
            products = self._zeros(len(samples))
            self._add_product(block[samples], row_offset, products)
            for i, sample in enumerate(samples.tolist()):
                sums = self._sums[sample // self._tile][sample % self._tile]
                sums += products[i // self._tile][i % self._tile]

    def _add_product(self, block: Tensor, row_offset: int, tiles: list[Tensor]) -> None:
        for part, sums in zip(block.split(self._tile), tiles, strict=True):
            self._projector.project_rows(part, row_offset, self._checkpoint, sums)


def _nonzero_samples(block: Tensor) -> Tensor | None:
    """Return the samples that are not zero in a block; None if these are most of them."""
    # A few elements reveal that a gradient is dense, which saves reading all of it.
    is_nonzero = block[:, ::_PROBE_STEP].any(1)
    if bool(is_nonzero.all()):
        return None
    unknown = (~is_nonzero).nonzero()[:, 0]
    is_nonzero[unknown] = block[unknown].any(1)
    samples = is_nonzero.nonzero()[:, 0]
    # A copy of most samples would take longer than products of zeros.
    return samples if 2 * len(samples) <= len(block) else None


def _cut(start: int, stop: int, size: int, *, runs: bool) -> Iterator[tuple[int, int]]:
    """Split rows at the grid of blocks; with ``runs``, complete adjacent blocks stay together."""
    while start < stop:
        block = start // size
        n = (stop - start) // size if runs and start == block * size else 1
        end = min(stop, (block + max(n, 1)) * size)
        yield start, end
        start = end


def project(
    projector: Projector, gradients: Mapping[str, Tensor], row_map: RowMap, checkpoint: int
) -> Tensor:
    """Project per-sample gradients that are all in memory.

    Parameters
    ----------
    projector
        The map.
    gradients
        Gradient per name of ``row_map``, each (B, numel) or (B, *shape), any float dtype.
    row_map
        Rows of the tensors.
    checkpoint
        Checkpoint id in [0, 2**32).

    Returns
    -------
    Features, shape (B, width), float32, scaled.

    Examples
    --------
    >>> from trakdask.projection import Rademacher
    >>> rows = RowMap.from_shapes({"weight": (5, 7)}, alignment=512)
    >>> project(Rademacher(proj_dim=3), {"weight": torch.zeros(2, 5, 7)}, rows, checkpoint=0).shape
    torch.Size([2, 3])
    """
    first = gradients[row_map.names[0]]
    stream = ProjectionStream(projector, row_map, len(first), checkpoint, first.device)
    for name in row_map.names:
        stream.add(name, gradients[name])
    return stream.result()
