"""The steps of a projector at one checkpoint: from gradients to features, and back.

Each step is a linear map. A stream applies them one after the other to gradients, and ``back``
applies their transposes to vectors in the opposite order, which is the adjoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from trakdask.projection.axes import Rotations, places_of, rotated, rotations
from trakdask.projection.fitted import Fitted
from trakdask.projection.protocol import RowMap
from trakdask.projection.stream import ProjectionStream


class Stream(Protocol):
    """Takes the gradients of a micro-batch, parameter by parameter, and makes rows of them."""

    def __call__(self, name: str, gradient: Tensor, first: int | None = None, /) -> None:
        """Receive a parameter's gradient, or, in order, a slice that starts at ``first``."""

    def result(self) -> Tensor:
        """Return a row per sample, once all gradients have been received."""


class Maps:
    """The steps of a projector at one checkpoint, in both directions.

    ``rotations`` are the coordinates in which streams expect gradients. They are not applied by the
    streams, because engines rotate the two sides of a product, which costs far less than rotating
    the product.

    Parameters
    ----------
    fitted
        The projector, bound to the row map.
    row_map
        Rows of the parameters.
    checkpoint
        Checkpoint id in [0, 2**32).
    arrays
        What was fitted to this checkpoint, without its axis.
    device
        Device of gradients and features.
    """

    def __init__(
        self,
        fitted: Fitted,
        row_map: RowMap,
        checkpoint: int,
        arrays: Mapping[str, np.ndarray],
        device: torch.device,
    ) -> None:
        shapes = dict(zip(row_map.names, row_map.shapes, strict=True))
        self.projector, self.row_map = fitted.projector, row_map
        self.checkpoint, self.device = checkpoint, device
        by_use = {use: arrays[v] for use, v in fitted.variables.items() if v in arrays}
        self.rotations: Rotations | None = None
        if "eigenvectors" in by_use:
            self.rotations = rotations(by_use["eigenvectors"], shapes, device)
        self.factors: dict[str, Tensor] = {}
        if "scale" in by_use:
            flat = torch.tensor(by_use["scale"], device=device)
            self.factors = {name: flat[place] for name, place in places_of(shapes).items()}
        leading = by_use.get("leading", np.empty(0, np.int64))
        # Coordinates are numbered without the padding between parameters that rows have.
        edges = np.cumsum([0, *map(row_map.size, row_map.names)])
        owners = np.searchsorted(edges, leading, side="right") - 1
        self.leading_rows = leading - edges[owners] + np.array(row_map.offsets)[owners]
        self.components: Tensor | None = None
        if "components" in by_use:
            self.components = torch.tensor(by_use["components"], device=device).float()

    def open(self, n_samples: int) -> Stream:
        """Return a stream that makes features of the gradients of some samples."""
        sketch = ProjectionStream(
            self.projector, self.row_map, n_samples, self.checkpoint, self.device
        )
        is_random = not self.factors and self.components is None
        return sketch if is_random else _FittedStream(self, sketch, n_samples)

    def back(self, vectors: Tensor) -> Tensor:
        """Multiply the matrix of all steps from the other side; see ``Projector.back_project``.

        Vectors are features' rows, (m, width), float32, on the CPU. The result is (m, n_rows), with
        the gradients of :attr:`row_map` in the coordinates of the parameters.
        """
        if self.components is not None:
            vectors = vectors @ self.components.T
        n_leading = len(self.leading_rows)
        rows = self.projector.back_project(self.row_map, self.checkpoint, vectors[:, n_leading:])
        # The sketch took these rows as zeros; here they get the leading columns.
        rows[:, torch.from_numpy(self.leading_rows)] = vectors[:, :n_leading].to(rows.dtype)
        for name, factor in self.factors.items():
            start = self.row_map.offset(name)
            place = slice(start, start + len(factor))
            matrices = (self.rotations or {}).get(name, {})
            transposed = {axis: matrix.T for axis, matrix in matrices.items()}
            rows[:, place] = rotated(rows[:, place] * factor, self.row_map.shape(name), transposed)
        return rows


class _FittedStream:
    """Scales gradients, keeps leading elements, projects the others, and reduces the features."""

    def __init__(self, maps: Maps, sketch: ProjectionStream, n_samples: int) -> None:
        self._maps, self._sketch = maps, sketch
        self._columns = np.argsort(maps.leading_rows)
        self._rows = maps.leading_rows[self._columns]
        self._leading = torch.zeros(n_samples, len(self._rows), device=maps.device)

    def __call__(self, name: str, gradient: Tensor, first: int | None = None, /) -> None:
        start = first or 0
        if name in self._maps.factors:
            factor = self._maps.factors[name][start : start + gradient.shape[1]]
            gradient = gradient * factor.to(gradient.dtype)
        if len(self._rows):
            start += self._maps.row_map.offset(name)
            here = slice(*np.searchsorted(self._rows, (start, start + gradient.shape[1])))
            columns = torch.from_numpy(self._columns[here])
            places = torch.from_numpy(self._rows[here] - start)
            self._leading[:, columns] = gradient[:, places].to(self._leading.dtype)
            gradient[:, places] = 0  # in place: a scaled gradient belongs to nobody else
        self._sketch.add(name, gradient, first)

    def result(self) -> Tensor:
        feature = torch.cat([self._leading, self._sketch.result()], 1)
        if self._maps.components is None:
            return feature
        with torch.autocast(feature.device.type, enabled=False):  # features are float32
            return feature @ self._maps.components
