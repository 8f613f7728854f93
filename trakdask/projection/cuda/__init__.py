"""Projection on NVIDIA GPUs: the kernels of ``kernels/``, compiled at run time through CuPy."""

from __future__ import annotations

from trakdask.projection.cuda.launch import Kernels, kernels_for, launched, missing
from trakdask.projection.cuda.projector import GpuProjector

__all__ = ["GpuProjector", "Kernels", "kernels_for", "launched", "missing"]
