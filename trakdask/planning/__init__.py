"""What a computation will take: bytes, operations, tasks and time, before it runs."""

from trakdask.planning.plans import plan

__all__ = ["plan"]
