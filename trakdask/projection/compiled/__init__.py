"""Kernels compiled by numba; imported only by :func:`trakdask.projection.acceleration.compiled`."""
