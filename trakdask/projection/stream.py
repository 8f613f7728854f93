"""Gradients in, features out: tensors are cut into the row blocks that projectors take."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from trakdask.projection.protocol import Projector, check_integer
from trakdask.projection.rows import ROW_BLOCK, RowMap


class ProjectionStream:
    """Project gradients tensor by tensor, without ever holding the flat gradient.

    Tensors are cut at the global grid of 16384 rows; what remains of one waits in a buffer for the
    next. The result is bitwise the same as for one flat vector.

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
    Memory: B * (65536 + 8 * width) bytes beside the projector's own.

    Examples
    --------
    >>> from trakdask.projection import Identity
    >>> rows = RowMap.from_shapes({"weight": (2, 3), "bias": (2,)}, alignment=1)
    >>> stream = ProjectionStream(Identity(), rows, n_samples=4, checkpoint=0)
    >>> stream.add("weight", torch.ones(4, 2, 3))
    >>> stream.add("bias", torch.zeros(4, 2))
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
        n_rows = row_map.n_rows if self._selected is None else len(self._selected)
        width = projector.width(row_map.n_rows)
        self._sums = torch.zeros(n_samples, width, dtype=torch.float64, device=device)
        block = (n_samples, min(ROW_BLOCK, n_rows))
        self._pending = torch.empty(block, dtype=torch.float32, device=device)
        self._row = 0
        self._n_added = 0

    def add(self, name: str, gradient: Tensor) -> None:
        """Project the gradient of the next parameter.

        Parameters
        ----------
        name
            The next name of the row map.
        gradient
            Shape (B, numel) or (B, *shape), any float dtype. Read before the call returns.

        Raises
        ------
        TypeError
            If the gradient is not of a float dtype.
        ValueError
            If name, shape or device is not the expected one.
        """
        flat, offset = self._checked(name, gradient), self._row_map.offset(name)
        if self._selected is None:
            self._fill(None, offset - self._row)
        else:
            inside = np.searchsorted(self._selected, [offset, offset + flat.shape[1]])
            rows = torch.from_numpy(self._selected[slice(*inside)] - offset)
            flat = flat[:, rows.to(flat.device)]
        self._fill(flat, flat.shape[1])
        self._n_added += 1
        if self._n_added == len(self._row_map.names):
            self._flush()

    def result(self) -> Tensor:
        """Return the features: shape (B, width), float32, scaled.

        Raises
        ------
        ValueError
            If gradients of the row map are missing.
        """
        missing = self._row_map.names[self._n_added :]
        if missing:
            raise ValueError(
                f"{self._n_added} of {len(self._row_map.names)} gradients were added; the result "
                f"needs all of them. Call stream.add({missing[0]!r}, gradient) next."
            )
        return (self._sums * self._projector.scale(self._row_map.n_rows)).float()

    def _checked(self, name: str, gradient: Tensor) -> Tensor:
        names = self._row_map.names
        expected = names[self._n_added] if self._n_added < len(names) else None
        if name != expected:
            raise ValueError(
                f"gradient {self._n_added} is named {name!r}; the row map needs {expected!r} there."
                " Add gradients in the order of row_map.names, each once."
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

    def _fill(self, source: Tensor | None, n_rows: int) -> None:
        """Advance by ``n_rows`` rows, of ``source`` or of zeros; project each full block."""
        done = 0
        while done < n_rows:
            first = self._row % ROW_BLOCK
            n = min(ROW_BLOCK - first, n_rows - done)
            part = None if source is None else source[:, done : done + n]
            if part is not None and n == ROW_BLOCK:
                self._project(part, self._row)
                self._row += n
            else:
                self._buffer(part, first, n)
            done += n

    def _buffer(self, part: Tensor | None, first: int, n_rows: int) -> None:
        target = self._pending[:, first : first + n_rows]
        if part is None:
            target.zero_()
        else:
            target.copy_(part)
        self._row += n_rows
        if first + n_rows == ROW_BLOCK:
            self._project(self._pending, self._row - ROW_BLOCK)

    def _flush(self) -> None:
        rest = self._row % ROW_BLOCK
        if rest:
            self._project(self._pending[:, :rest], self._row - rest)

    def _project(self, block: Tensor, row_offset: int) -> None:
        self._projector.project_block(block, row_offset, self._checkpoint, self._sums)


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
