"""Run a model in the same precision wherever its tasks run."""

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
    """Settings of torch that affect gradients, to be applied in tasks as in the caller.

    Parameters
    ----------
    dtype
        The dtype to which weights and inputs are cast; None to leave them unchanged.
    autocast
        The dtype of ``torch.autocast``, for GPUs or else for the CPU; None if it is off. It applies
        on any device that tasks run on.
    matmul
        ``torch.get_float32_matmul_precision()``: "highest" is float32, others allow TF32 or
        bfloat16 inside float32 products.
    """

    dtype: DType | None
    autocast: str | None
    matmul: str

    @classmethod
    def here(cls, dtype: DType | None) -> Precision:
        """Return the settings that are active in the caller."""
        autocast = None
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                autocast = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
        return cls(dtype, autocast, torch.get_float32_matmul_precision())

    def attrs(self) -> dict[str, str]:
        """Return the settings as they are recorded in ``attrs``."""
        return {
            "dtype": self.dtype or "as given",
            "autocast": self.autocast or "off",
            "float32_matmul_precision": self.matmul,
        }

    @contextmanager
    def applied(self, device: str = "cpu") -> Iterator[None]:
        """Apply these settings on a type of device while the ``with`` body runs."""
        before = torch.get_float32_matmul_precision()
        # This is a setting of the whole process, so it is changed only if necessary.
        if before != self.matmul:
            torch.set_float32_matmul_precision(self.matmul)
        dtype = getattr(torch, self.autocast) if self.autocast else None
        try:
            with torch.autocast(device, dtype=dtype, enabled=self.autocast is not None):
                yield
        finally:
            if before != self.matmul:
                torch.set_float32_matmul_precision(before)
