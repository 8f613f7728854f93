"""A projector of trakdask with the interface of the TRAK package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from trakdask.projection import ProjectionStream, Projector, RowMap
from trakdask.trak.projector_base import AbstractProjector, Gradients, device_of

__all__ = ["StreamProjector"]


class StreamProjector(AbstractProjector):
    """Multiply with the scaled matrix of a trakdask projector, such as ``td.SJLT``.

    Parameters
    ----------
    projector
        The projector; ``TRAKer(projector=td.SJLT(...))`` wraps it in this class.
    shapes
        Shape of each parameter, in the order of the gradients.
    device
        Device of the gradients.

    Notes
    -----
    The result is that of :func:`trakdask.featurize` for the checkpoint id ``model_id``. It is not
    divided by the square root of the number of parameters, because the matrix is already scaled.
    """

    def __init__(
        self,
        projector: Projector,
        shapes: Mapping[str, Sequence[int]],
        device: str | torch.device = "cpu",
    ) -> None:
        self.row_map = RowMap.from_shapes(shapes, alignment=projector.row_alignment)
        self.projector = projector
        spec = projector.spec()
        super().__init__(
            grad_dim=self.row_map.n_parameters,
            proj_dim=projector.width(self.row_map.n_rows),
            seed=spec.get("seed", 0),
            proj_type=f"trakdask {spec['kind']}",
            device=device,
        )

    def project(self, grads: Gradients, model_id: int) -> Tensor:
        """Return the projection, (batch, proj_dim) float32."""
        names = self.row_map.names
        if isinstance(grads, Tensor):
            parts = grads.split([self.row_map.size(name) for name in names], dim=1)
            grads = dict(zip(names, parts, strict=True))
        stream = self.stream(len(grads[names[0]]), model_id, device_of(grads))
        for name in names:
            stream.add(name, grads[name])
        return stream.result()

    def stream(self, n_samples: int, model_id: int, device: torch.device) -> ProjectionStream:
        """Return a stream that takes gradients parameter by parameter and projects them."""
        return ProjectionStream(self.projector, self.row_map, n_samples, int(model_id), device)
