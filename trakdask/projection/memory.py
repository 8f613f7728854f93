"""Check that the arrays of a projection fit in memory before any of them is allocated."""

from __future__ import annotations

import os

import torch

from trakdask.projection.protocol import Projector

__all__ = ["require_block_fits", "require_fit", "require_sums_fit"]

_FEATURE_BYTES = 4  # float32
_SUM_BYTES = 8 + 4  # float64 while summing, float32 as a result
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


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
    require_fit(projector, n_rows, n_samples, needed, limit)


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
    needed = _SUM_BYTES * n_samples * projector.width(n_rows)
    require_fit(projector, n_rows, n_samples, needed, limit)


def require_fit(
    projector: Projector, n_rows: int, n_samples: int, needed: int, limit: float
) -> None:
    """Reject features that need more bytes than are available.

    Parameters
    ----------
    projector, n_rows, n_samples
        The projector and the sizes that determine the features, for the message.
    needed, limit
        Bytes that these samples need, and bytes of memory.

    Raises
    ------
    ValueError
        If ``needed`` is above ``limit``.

    Examples
    --------
    >>> from trakdask.projection import Rademacher
    >>> require_fit(Rademacher(2**31), 10**6, 1, 12 * 2**31, 2**30)
    Traceback (most recent call last):
    ValueError: expected features that fit in 1.0 GiB of memory, got 24.0 GiB ...
    """
    if needed <= limit:
        return
    samples = f"{n_samples} sample{'s' * (n_samples != 1)}"
    raise ValueError(
        f"expected features that fit in {_readable(limit)} of memory, got {_readable(needed)} "
        f"({needed} bytes) for {samples} with {projector.width(n_rows)} columns each, by "
        f"{projector}; try td.SJLT(proj_dim=2048), or fewer samples per block: "
        "samples.chunk(sample=...)"
    )


def _readable(n_bytes: float) -> str:
    for unit in _UNITS[:-1]:
        if n_bytes < 1024:
            return f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} {_UNITS[-1]}"
