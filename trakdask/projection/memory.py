"""Buffers that threads reuse, and checks that a projection fits before anything is allocated."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from trakdask.projection.protocol import Projector

_FEATURE_BYTES = 4  # float32
_SUM_BYTES = 8 + 4  # float64 while summing, float32 as a result


class Scratch(threading.local):
    """Named buffers that a thread reuses between blocks, because new memory costs page faults.

    Each grows to the largest request.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a contiguous buffer of this shape; its content is undefined."""
        # By dtype, too: a view of other numbers would be an alias that nobody sees.
        n = math.prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < n:
            # A tensor created in inference mode could not be modified outside of it later.
            with torch.inference_mode(False):
                buffer = self._buffers[name, dtype] = torch.empty(n, dtype=dtype)
        return buffer[:n].view(*shape)


def require_block_fits(projector: Projector, n_rows: int, n_samples: int, limit: float) -> None:
    """Reject a block of samples whose features cannot fit in ``limit`` bytes.

    This counts the float32 features of the block, the sums of a micro-batch of one sample, and the
    buffers of the projector.

    Raises
    ------
    ValueError
        If they cannot fit; the message says how many bytes they would take.
    """
    # The buffers of a projector that takes all rows grow with the micro-batch, which can shrink.
    buffers = 0 if projector.takes_all_rows else projector.cost(n_rows).buffer_bytes
    width = projector.width(n_rows)
    needed = _FEATURE_BYTES * n_samples * width + _SUM_BYTES * width + buffers
    _require_fit(projector, width, n_samples, needed, limit)


def require_sums_fit(
    projector: Projector, n_rows: int, n_samples: int, device: torch.device
) -> None:
    """Reject a micro-batch whose sums cannot fit in the memory of a device.

    Raises
    ------
    ValueError
        If they cannot fit; the message says how many bytes they would take.
    """
    if device.type == "cuda":
        limit = int(torch.cuda.get_device_properties(device).total_memory)
    else:
        # Without psutil, since projections also run on machines that have only torch and numpy.
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    width = projector.width(n_rows)
    _require_fit(projector, width, n_samples, _SUM_BYTES * n_samples * width, limit)


def _require_fit(
    projector: Projector, width: int, n_samples: int, needed: int, limit: float
) -> None:
    if needed > limit:
        raise ValueError(
            f"expected features that fit in {limit / 2**30:.1f} GiB of memory, got "
            f"{needed / 2**30:.1f} GiB ({needed} bytes) for {n_samples} samples with {width} "
            f"columns each, by {projector}; try td.SJLT(proj_dim=2048), or fewer samples per "
            "block: samples.chunk(sample=...)"
        )
