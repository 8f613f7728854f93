"""Keep some coordinates of a gradient as columns of their own, and sketch the others."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trakdask.checks import shown
from trakdask.projection.protocol import Identity, Projector, RowMap
from trakdask.projection.stream import ProjectionStream


def n_leading(projector: Projector, n_parameters: int) -> int:
    """Return how many columns keep a coordinate: half of ``proj_dim``; none of the whole gradient.

    Raises
    ------
    ValueError
        If the number of columns of the projector is not its own to choose.
    """
    if isinstance(projector, Identity):
        return 0
    if "proj_dim" not in {field.name for field in fields(projector)}:
        raise ValueError(
            f"expected a projector with proj_dim for a model with curvature, got {shown(projector)}"
            "; try td.SJLT(proj_dim=2048)"
        )
    return min(projector.width(n_parameters) // 2, n_parameters)


def _split(
    projector: Projector, row_map: RowMap, leading: np.ndarray
) -> tuple[np.ndarray, Projector]:
    """Return the rows of the coordinates that are kept, and the projector of the others."""
    n_kept = n_leading(projector, row_map.n_parameters)
    changes: dict[str, Any] = {}
    if n_kept:
        changes["proj_dim"] = projector.width(row_map.n_rows) - n_kept
    # Coordinates are numbered without the padding between parameters that rows have.
    edges, kept = np.cumsum([0, *map(row_map.size, row_map.names)]), leading[:n_kept]
    owners = np.searchsorted(edges, kept, side="right") - 1
    return kept - edges[owners] + np.array(row_map.offsets)[owners], replace(projector, **changes)


class LeadingStream:
    """Project gradients as :class:`ProjectionStream` does, but keep the leading coordinates.

    The first half of the features are the leading coordinates as they are, and the others are the
    projection of the gradient without these.

    Parameters
    ----------
    projector, row_map, n_samples, checkpoint, device
        As for :class:`ProjectionStream`; the features are as wide as those of the projector.
    leading
        Coordinates in descending order of importance, (rank,), at least as many as are kept.
    """

    def __init__(
        self,
        projector: Projector,
        row_map: RowMap,
        n_samples: int,
        checkpoint: int,
        device: torch.device,
        leading: np.ndarray,
    ) -> None:
        rows, rest = _split(projector, row_map, leading)
        self._columns = np.argsort(rows)
        self._rows = rows[self._columns]
        self._row_map = row_map
        self._rest = ProjectionStream(rest, row_map, n_samples, checkpoint, device)
        self._kept = torch.zeros(n_samples, len(rows), device=device)

    def __call__(self, name: str, gradient: Tensor, first: int | None = None, /) -> None:
        """Project the gradient of a parameter, (B, n), as a sink; it is changed in place."""
        start = self._row_map.offset(name) + (first or 0)
        here = slice(*np.searchsorted(self._rows, (start, start + gradient.shape[1])))
        columns = torch.from_numpy(self._columns[here])
        places = torch.from_numpy(self._rows[here] - start)
        self._kept[:, columns] = gradient[:, places].to(self._kept.dtype)
        gradient[:, places] = 0
        self._rest.add(name, gradient, first)

    def result(self) -> Tensor:
        """Return the features, (B, width) float32."""
        return torch.cat([self._kept, self._rest.result()], 1)


def back_project_leading(
    projector: Projector, row_map: RowMap, checkpoint: int, vectors: Tensor, leading: np.ndarray
) -> Tensor:
    """Return what ``back_project`` of the projector does, for features of a LeadingStream."""
    rows, rest = _split(projector, row_map, leading)
    found = rest.bind(row_map).back_project(row_map, checkpoint, vectors[:, len(rows) :])
    # The rows of kept elements meet zeros in the sketch; here they are those of their columns.
    found[:, torch.from_numpy(rows)] = vectors[:, : len(rows)]
    return found
