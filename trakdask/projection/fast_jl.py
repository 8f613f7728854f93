"""Projection with the matrix of the ``fast_jl`` extension, for features that agree with traker."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from trakdask.projection.protocol import Cost, Projector, allowed

_COLUMN_STEP = 512
_BATCHES = (8, 16, 32)
_MOST_ROWS = 2**27  # for 32 samples, more would overflow the extension's 32-bit addresses
_SEED_STEP = 10**4  # per checkpoint, as in traker


@dataclass(frozen=True)
class FastJL(Projector):
    """Project with the matrix of ``fast_jl``, the CUDA extension of the TRAK package.

    Use it to reproduce the features of ``traker.projectors.CudaProjector``, up to a factor.
    Otherwise :class:`~trakdask.projection.rademacher.Rademacher` is the better choice: its matrix
    does not depend on the GPU, and it runs without one.

    Parameters
    ----------
    proj_dim
        Number of feature columns, a multiple of 512.
    seed
        Integer in [0, 2**31). A checkpoint of id i has the seed ``seed + 10_000 * i``, modulo
        2**31, as in TRAK: give the model ``checkpoint_ids=range(n)`` to get TRAK's.
    entries
        ``"rademacher"`` or ``"normal"``.
    num_sms
        Number of streaming multiprocessors of the GPU, on which the matrix depends; by default that
        of this machine's GPU. Projection on a GPU with another number raises an error.

    Raises
    ------
    TypeError, ValueError
        If an argument has another type, or is out of range.

    Notes
    -----
    All rows are projected at once, which takes 4 bytes per sample and parameter on the GPU.
    ``fast_jl`` rounds gradients to float16 (values above 65504 become NaN here, values below 6e-8
    become zero) and takes 8, 16 or 32 samples; smaller batches are padded with zeros. This has not
    run with the extension yet: its calls are the calls of traker 0.3.2, tested with a substitute.

    References
    ----------
    Park et al. 2023, "TRAK: Attributing Model Behavior at Scale", and its package ``fast_jl``.

    Examples
    --------
    >>> FastJL(proj_dim=2048, num_sms=132).width(n_rows=10**6)
    2048
    """

    kind: ClassVar[str] = "fast_jl"
    takes_all_rows: ClassVar[bool] = True

    proj_dim: int = field(default=2048, metadata=allowed(range(_COLUMN_STEP, 2**31), 2048))
    seed: int = field(default=0, metadata=allowed(range(2**31), 0))
    entries: str = field(
        default="rademacher", metadata=allowed(("rademacher", "normal"), "rademacher")
    )
    num_sms: int | None = field(default=None, metadata=allowed(range(1, 2**16), 132))

    def __post_init__(self) -> None:
        # Before fields are checked: the spec has the number that was found, and never None.
        if self.num_sms is None:
            if not torch.cuda.is_available():
                raise ValueError(
                    "expected num_sms, since the matrix of fast_jl depends on the number of "
                    "multiprocessors, got None on a machine without a GPU; try num_sms=132 for an "
                    "H100 SXM"
                )
            object.__setattr__(self, "num_sms", _num_sms(torch.device("cuda")))
        super().__post_init__()
        if self.proj_dim % _COLUMN_STEP:
            raise ValueError(
                f"expected proj_dim to be a multiple of {_COLUMN_STEP}, got {self.proj_dim}; try "
                f"proj_dim={-(-self.proj_dim // _COLUMN_STEP) * _COLUMN_STEP}"
            )

    def cost(self, n_rows: int) -> Cost:
        """Return the cost of projecting gradients of ``n_rows`` elements."""
        return Cost(
            operations=2 * n_rows * self.proj_dim,
            random_bits=n_rows * self.proj_dim * (1 if self.entries == "rademacher" else 16),
            buffer_bytes=512 * 4 * n_rows,
            rounding_error=2.0**-12,  # of float16
            product_error=self._product_error(),
        )

    def project_rows(self, rows: Tensor, row_offset: int, checkpoint: int, out: Tensor) -> None:
        """Add the projection of all rows to ``out``; see ``Projector``."""
        self.project_block(rows, row_offset, checkpoint, out)

    def project_block(self, block: Tensor, row_offset: int, checkpoint: int, out: Tensor) -> None:
        """Add the projection of all rows to ``out``; see ``Projector``.

        Raises
        ------
        ImportError
            If ``fast_jl`` is missing.
        RuntimeError
            If the rows are not on a GPU with ``num_sms`` multiprocessors.
        ValueError
            If there are more rows than ``fast_jl`` can address.
        """
        self._require_device(block)
        if block.shape[1] > _MOST_ROWS:
            raise ValueError(
                "expected gradients of at most 2**27 elements, which fast_jl can address, got "
                f"{block.shape[1]}; try td.Rademacher(proj_dim={self.proj_dim})"
            )
        try:
            import fast_jl  # optional, and built for one machine
        except ImportError as err:
            raise ImportError(
                f"expected the package fast_jl for FastJL, got an import error ({err}); try pip "
                "install 'trakdask[fast-jl]' (it needs nvcc), or td.Rademacher"
            ) from err
        # The extension takes an int32.
        seed = (self.seed + _SEED_STEP * checkpoint) % 2**31
        for first in range(0, len(block), _BATCHES[-1]):
            part = block[first : first + _BATCHES[-1]]
            size = next(size for size in _BATCHES if len(part) <= size)
            project = getattr(fast_jl, f"project_{self.entries}_{size}")
            # The extension takes 8, 16 or 32 samples and nothing else.
            padded = pad(part.float(), (0, 0, 0, size - len(part))).contiguous()
            sums = project(padded, self.proj_dim, seed, self.num_sms)[: len(part)].double()
            # One value that is not finite spoils all columns of its sample, as by other projectors.
            sums.masked_fill_(~sums.isfinite().all(1, keepdim=True), torch.nan)
            out[first : first + len(part)] += sums

    def _require_device(self, block: Tensor) -> None:
        # The matrix depends on the number of multiprocessors: another GPU has another matrix.
        num_sms = _num_sms(block.device) if block.device.type == "cuda" else "none"
        if num_sms != self.num_sms:
            raise RuntimeError(
                f"expected gradients on an NVIDIA GPU with {self.num_sms} multiprocessors, got "
                f"{num_sms} on {block.device}; try the same kind of GPU for all features, or "
                f"td.Rademacher(proj_dim={self.proj_dim})"
            )


def _num_sms(device: torch.device) -> int:
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count)
