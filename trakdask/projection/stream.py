"""Gradients in, features out: tensors are cut into the row blocks that projectors take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from trakdask.projection.protocol import Projector, check_integer
from trakdask.projection.rows import ROW_BLOCK, RowMap


class ProjectionStream:
    """Project gradients tensor by tensor, in any order, without ever holding the flat gradient.

    Tensors are cut at the global grid of 16384 rows; what is left of one waits in a buffer until
    its neighbours have filled the block. In the order of the row map the result is bitwise that of
    one flat vector; another order can change the last bit of the float64 sums.

    Parameters
    ----------
    projector
        The map.
    row_map
        Rows of the tensors; its alignment must be a multiple of the projector's.
    n_samples
        Number of samples B of every gradient.
    checkpoint
        Checkpoint id in [0, 2**32).
    device
        Device of the gradients and of the result.

    Raises
    ------
    TypeError, ValueError
        If the row map does not suit the projector, or a number is outside its range.

    Notes
    -----
    Memory: B * 8 * width bytes, and B * 65536 for each block that waits (one, in the order of the
    row map or its reverse), beside the projector's own.

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
        check_integer("checkpoint", checkpoint, 0, 2**32, "checkpoint=0")
        check_integer("n_samples", n_samples, 1, 2**31, "n_samples=len(batch)")
        _check_alignment(projector, row_map)
        self._projector = projector = projector.bind(row_map)
        self._row_map = row_map
        self._checkpoint = checkpoint
        self._selected = projector.selected_rows(checkpoint)
        self._n_rows = row_map.n_rows if self._selected is None else len(self._selected)
        self._spans = dict(zip(row_map.names, self._all_spans(), strict=True))
        self._missing = _rows_of_shared_blocks(self._spans.values(), self._n_rows)
        self._waiting: dict[int, Tensor] = {}
        self._names = dict.fromkeys(row_map.names)
        width = projector.width(row_map.n_rows)
        self._sums = torch.zeros(n_samples, width, dtype=torch.float64, device=device)

    def add(self, name: str, gradient: Tensor) -> None:
        """Project the gradient of a parameter.

        Parameters
        ----------
        name
            A name of the row map; each is added once.
        gradient
            Shape (B, numel) or (B, *shape), any float dtype. Read before the call returns.

        Raises
        ------
        TypeError
            If the gradient is not of a float dtype.
        ValueError
            If name, shape or device is not an expected one.
        """
        flat = self._checked(name, gradient)
        start, stop = self._spans[name]
        if self._selected is not None:
            rows = torch.from_numpy(self._selected[start:stop] - self._row_map.offset(name))
            flat = flat[:, rows.to(flat.device)]
        for first, last in _cut(start, stop):
            self._take(first, flat[:, first - start : last - start])
        del self._names[name]

    def result(self) -> Tensor:
        """Return the features: shape (B, width), float32, scaled.

        Raises
        ------
        ValueError
            If gradients of the row map are missing.
        """
        if missing := list(self._names):
            total = len(self._row_map.names)
            raise ValueError(
                f"{total - len(missing)} of {total} gradients were added; the result "
                f"needs all of them. Call stream.add({missing[0]!r}, gradient) next."
            )
        return (self._sums * self._projector.scale(self._row_map.n_rows)).float()

    def _all_spans(self) -> list[tuple[int, int]]:
        """Return [start, stop) of every parameter among the rows that are projected."""
        starts = np.array(self._row_map.offsets)
        stops = starts + [self._row_map.size(name) for name in self._row_map.names]
        if self._selected is not None:
            starts, stops = (np.searchsorted(self._selected, edges) for edges in (starts, stops))
        return list(zip(starts.tolist(), stops.tolist(), strict=True))

    def _checked(self, name: str, gradient: Tensor) -> Tensor:
        if name not in self._names:
            why = "was added before" if name in self._row_map.names else "is not in the row map"
            raise ValueError(
                f"gradient {name!r} {why}; still needed are {list(self._names)[:4]}. Add the "
                "gradient of every name of row_map.names once."
            )
        n_samples, shape = len(self._sums), self._row_map.shape(name)
        size = self._row_map.size(name)
        if tuple(gradient.shape) not in {(n_samples, size), (n_samples, *shape)}:
            raise ValueError(
                f"the gradient of {name!r} has shape {tuple(gradient.shape)}; it must be "
                f"{(n_samples, *shape)}. Pass one gradient per sample, samples first."
            )
        if not gradient.is_floating_point():
            raise TypeError(
                f"the gradient of {name!r} has dtype {gradient.dtype}; it must be a float dtype. "
                "Use gradient.float()."
            )
        if gradient.device.type != self._sums.device.type:
            raise ValueError(
                f"the gradient of {name!r} is on {gradient.device}; the stream needs it on "
                f"{self._sums.device}. Use ProjectionStream(..., device=gradient.device)."
            )
        return gradient.detach().reshape(n_samples, size)

    def _take(self, first: int, part: Tensor) -> None:
        """Project rows of one block at once, or when the block is full."""
        block, position = divmod(first, ROW_BLOCK)
        if block not in self._missing:
            self._project(part, first)
            return
        if block not in self._waiting:
            length = min(ROW_BLOCK, self._n_rows - block * ROW_BLOCK)
            # Rows that no parameter has are zeros.
            self._waiting[block] = self._sums.new_zeros(len(part), length, dtype=torch.float32)
        self._waiting[block][:, position : position + part.shape[1]].copy_(part)
        self._missing[block] -= part.shape[1]
        if not self._missing[block]:
            self._project(self._waiting.pop(block), block * ROW_BLOCK)

    def _project(self, block: Tensor, row_offset: int) -> None:
        self._projector.project_block(block, row_offset, self._checkpoint, self._sums)


def _cut(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Cut rows at the grid of blocks."""
    while start < stop:
        end = min(stop, (start // ROW_BLOCK + 1) * ROW_BLOCK)
        yield start, end
        start = end


def _rows_of_shared_blocks(spans: Iterable[tuple[int, int]], n_rows: int) -> dict[int, int]:
    """Return how many rows parameters have in each block that no single one of them fills."""
    found: dict[int, int] = {}
    for start, stop in spans:
        for block in {start // ROW_BLOCK, (stop - 1) // ROW_BLOCK} if start < stop else ():
            first, last = block * ROW_BLOCK, min((block + 1) * ROW_BLOCK, n_rows)
            inside = min(stop, last) - max(start, first)
            if inside < last - first:
                found[block] = found.get(block, 0) + inside
    return found


def project(
    projector: Projector, gradients: Mapping[str, Tensor], row_map: RowMap, checkpoint: int
) -> Tensor:
    """Project per-sample gradients that are all at hand.

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

    Raises
    ------
    TypeError, ValueError
        As :class:`ProjectionStream`; also if ``gradients`` has not exactly the names of the map.

    Examples
    --------
    >>> from trakdask.projection import Rademacher
    >>> rows = RowMap.from_shapes({"weight": (5, 7)}, alignment=512)
    >>> project(Rademacher(proj_dim=3), {"weight": torch.zeros(2, 5, 7)}, rows, checkpoint=0).shape
    torch.Size([2, 3])
    """
    if set(gradients) != set(row_map.names):
        odd = sorted(set(gradients) ^ set(row_map.names))
        raise ValueError(
            f"gradients and row map disagree on {odd[:4]}; they must have the same names. "
            "Use RowMap.from_shapes on the parameters that the gradients belong to."
        )
    first = gradients[row_map.names[0]]
    stream = ProjectionStream(projector, row_map, len(first), checkpoint, first.device)
    for name in row_map.names:
        stream.add(name, gradients[name])
    return stream.result()


def _check_alignment(projector: Projector, row_map: RowMap) -> None:
    if row_map.alignment % projector.row_alignment:
        raise ValueError(
            f"the row map is aligned to {row_map.alignment} rows; {projector} needs a multiple of "
            f"{projector.row_alignment}. Use RowMap.from_shapes(shapes, "
            f"alignment={projector.row_alignment})."
        )
