"""The cost of computing features, before all of it is paid: bytes, operations, memory, time."""

from trakdask.planning.pilot import Pilot
from trakdask.planning.plans import Plan, plan

__all__ = ["Pilot", "Plan", "plan"]
