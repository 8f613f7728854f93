"""In what precision a model runs, wherever its tasks run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

__all__ = ["DType", "Precision"]

DType = Literal["float64", "float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Precision:
    """Settings of torch that change gradients: tasks must run under those of the caller.

    Parameters
    ----------
    dtype
        What weights and inputs are cast to; None to leave them as they are.
    autocast
        The dtype of ``torch.autocast``, for GPUs or else for the CPU; None where it is off. Tasks
        run under it on whatever device they run.
    matmul
        ``torch.get_float32_matmul_precision()``: "highest" is float32, others allow TF32 or
        bfloat16 inside of float32 products.
    """

    dtype: DType | None
    autocast: str | None
    matmul: str

    @classmethod
    def here(cls, dtype: DType | None) -> Precision:
        """Return the settings under which the caller runs."""
        autocast = None
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                autocast = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
        return cls(dtype, autocast, torch.get_float32_matmul_precision())

    def attrs(self) -> dict[str, str]:
        """Return how to tell of it in ``attrs``."""
        return {
            "dtype": self.dtype or "as given",
            "autocast": self.autocast or "off",
            "float32_matmul_precision": self.matmul,
        }

    @contextmanager
    def applied(self, device: str = "cpu") -> Iterator[None]:
        """Run under these settings, on a type of device."""
        before = torch.get_float32_matmul_precision()
        if before != self.matmul:  # a setting of the process: touched only where it must be
            torch.set_float32_matmul_precision(self.matmul)
        dtype = getattr(torch, self.autocast) if self.autocast else None
        try:
            with torch.autocast(device, dtype=dtype, enabled=self.autocast is not None):
                yield
        finally:
            if before != self.matmul:
                torch.set_float32_matmul_precision(before)
