"""The steps of a projector at one checkpoint: from gradients to features, and back.

Each step is a linear map. A stream applies them one after the other to gradients, and ``back``
applies their transposes to vectors in the opposite order, which is the adjoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from trakdask.projection.fitted import Fitted
from trakdask.projection.rows import RowMap
from trakdask.projection.stream import ProjectionStream
from trakdask.tensors import Rotations, places_of, rotated, rotations


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
        The values that were fitted to this checkpoint, without its axis.
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
            assert fitted.curvature is not None
            turning = fitted.curvature.turning
            self.rotations = rotations(by_use["eigenvectors"], shapes, device, turning)
        self.factors: dict[str, Tensor] = {}
        leading = by_use.get("leading", np.empty(0, np.int64))
        # Coordinates are numbered without the padding between parameters that rows have.
        edges = np.cumsum([0, *map(row_map.size, row_map.names)])
        owners = np.searchsorted(edges, leading, side="right") - 1
        self.leading_rows = leading - edges[owners] + np.array(row_map.offsets)[owners]
        self.leading_places = self.leading_scale = torch.empty(0)
        if "scale" in by_use:
            flat = torch.tensor(by_use["scale"], device=device)
            self.leading_places = torch.from_numpy(self.leading_rows).to(device)
            self.leading_scale = flat[leading]
            flat[leading] = 0  # the sketch takes them as zeros
            self.factors = {name: flat[place] for name, place in places_of(shapes).items()}
        self.components: Tensor | None = None
        if "components" in by_use:  # shared by all tasks, unless it comes from a read-only buffer
            matrix = np.require(by_use["components"], np.float32, "W")
            self.components = torch.from_numpy(matrix).to(device)

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
        for name, factor in self.factors.items():
            start = self.row_map.offset(name)
            rows[:, start : start + len(factor)] *= factor
        leading = vectors[:, :n_leading] * self.leading_scale
        rows[:, torch.from_numpy(self.leading_rows)] = leading.to(rows.dtype)
        for name, matrices in (self.rotations or {}).items():
            start, shape = self.row_map.offset(name), self.row_map.shape(name)
            place = slice(start, start + math.prod(shape))
            transposed = {axis: [b.T for b in blocks] for axis, blocks in matrices.items()}
            if transposed:  # else it would be copied to itself, which torch refuses for one row
                rows[:, place] = rotated(rows[:, place], shape, transposed)
        return rows


class _FittedStream:
    """Scales gradients, keeps leading elements, projects the others, and reduces the features."""

    def __init__(self, maps: Maps, sketch: ProjectionStream, n_samples: int) -> None:
        self._maps, self._sketch = maps, sketch
        self.buffer_for = sketch.buffer_for  # gradients are scaled where they have been written
        self._leading = torch.zeros(n_samples, len(maps.leading_rows), device=maps.device)

    def __call__(self, name: str, gradient: Tensor, first: int | None = None, /) -> None:
        if name not in self._maps.factors:
            self._sketch.add(name, gradient, first)
            return
        start, n = first or 0, gradient.shape[1]
        self._keep_leading(gradient, self._maps.row_map.offset(name) + start)
        factor = self._maps.factors[name][start : start + n]
        done = 0
        while done < n:  # block by block, each of which stays in a cache until it is projected
            place = self._sketch.buffer_for(name, start + done)
            stop = n if place is None else min(n, done + place.shape[1])
            part = gradient[:, done:stop]
            out = None if place is None else place[:, : stop - done]
            if out is not None and out.data_ptr() == part.data_ptr():
                part = out  # the engine has written it there
            self._sketch.add(name, torch.mul(part, factor[done:stop], out=out), start + done)
            done = stop

    def _keep_leading(self, gradient: Tensor, row: int) -> None:
        maps = self._maps
        here = slice(*np.searchsorted(maps.leading_rows, (row, row + gradient.shape[1])))
        if here.start < here.stop:
            kept = gradient.index_select(1, maps.leading_places[here] - row)
            torch.mul(kept, maps.leading_scale[here], out=self._leading[:, here])

    def result(self) -> Tensor:
        leading, sketch = self._leading, self._sketch.result()
        if (components := self._maps.components) is None:
            return torch.cat([leading, sketch], 1)
        with torch.autocast(sketch.device.type, enabled=False):  # features are float32
            return reduced(leading, sketch, components)


def reduced(leading: Tensor, sketch: Tensor, components: Tensor) -> Tensor:
    """Return what components make of the columns of features: leading coordinates, and others."""
    n = leading.shape[1]
    return torch.addmm(leading @ components[:n], sketch, components[n:])
