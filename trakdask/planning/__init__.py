"""Estimate the bytes, operations, tasks and time of a computation before it runs."""

from trakdask.planning.plans import plan

__all__ = ["plan"]
