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


class _Split:
    """Which coordinates are kept, by parameter, and the projector of the others."""

    def __init__(self, projector: Projector, row_map: RowMap, leading: np.ndarray) -> None:
        self.n_kept = n_leading(projector, row_map.n_parameters)
        changes: dict[str, Any] = {}
        if self.n_kept:
            changes["proj_dim"] = projector.width(row_map.n_rows) - self.n_kept
        self.rest = replace(projector, **changes)
        kept = leading[: self.n_kept]
        # Coordinates are numbered without the padding between parameters that rows have.
        edges = np.cumsum([0, *(row_map.size(name) for name in row_map.names)])
        owners = np.searchsorted(edges, kept, side="right") - 1
        self.columns: dict[str, Tensor] = {}
        self.elements: dict[str, Tensor] = {}
        for i, name in enumerate(row_map.names):
            columns = np.flatnonzero(owners == i)
            self.columns[name] = torch.from_numpy(columns)
            self.elements[name] = torch.from_numpy(kept[columns] - edges[i])


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
        self._split = split = _Split(projector, row_map, leading)
        self._rest = ProjectionStream(split.rest, row_map, n_samples, checkpoint, device)
        self._kept = torch.zeros(n_samples, split.n_kept, device=device)

    def __call__(self, name: str, gradient: Tensor, first: int | None = None, /) -> None:
        """Project the gradient of a parameter, (B, n), as a sink; it is changed in place."""
        places = self._split.elements[name] - (first or 0)
        here = (places >= 0) & (places < gradient.shape[1])
        places, columns = places[here], self._split.columns[name][here]
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
    split = _Split(projector, row_map, leading)
    kept, sketched = vectors[:, : split.n_kept], vectors[:, split.n_kept :]
    rows = split.rest.bind(row_map).back_project(row_map, checkpoint, sketched)
    for name in row_map.names:
        # The rows of kept elements meet zeros in the sketch; here they are those of their columns.
        rows[:, row_map.offset(name) + split.elements[name]] = kept[:, split.columns[name]]
    return rows
