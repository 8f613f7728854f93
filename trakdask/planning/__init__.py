"""The cost of computing features, before all of it is paid: bytes, operations, memory, time."""

from trakdask.planning.fits import PlannedFit
from trakdask.planning.pilot import Pilot
from trakdask.planning.plans import Plan, plan
from trakdask.planning.projections import PlannedProjection

__all__ = ["Pilot", "Plan", "PlannedFit", "PlannedProjection", "plan"]
