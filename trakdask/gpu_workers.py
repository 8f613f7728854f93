"""Send the tasks that take gradients to the workers of a cluster that have a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # importing distributed takes half a second, and threads do not need it
    from distributed.diagnostics.plugin import SchedulerPlugin

GRADIENTS, ON_CPU = "featurize-", "featurize-cpu-"
"""What the keys of tasks contain that take gradients, and of those that do so on a CPU in any case.

The key of a task that Dask has fused of several has all of their names.
"""


def gradients_to_gpus() -> SchedulerPlugin:
    """Return a plugin for the scheduler, which need not have trakdask: it is sent by value."""
    from distributed.diagnostics.plugin import SchedulerPlugin

    # In a function, because cloudpickle sends a class of a module by its name alone.
    class GradientsToGPUs(SchedulerPlugin):
        name = "trakdask-gradients-to-gpus"
        # Each client registers it, and the first is enough.
        idempotent = True

        def update_graph(self, scheduler: Any, *, tasks: Any, **_: Any) -> None:
            if not any(worker.resources.get("GPU") for worker in scheduler.workers.values()):
                return  # they would wait for one
            # Dask calls this before it schedules the graph, when new tasks are "released". In any
            # other state a task is of an earlier graph, and the scheduler may have placed it.
            for key in tasks:
                task = scheduler.tasks[key]
                if task.state == "released" and GRADIENTS in str(key) and ON_CPU not in str(key):
                    task.resource_restrictions = task.resource_restrictions or {"GPU": 1}

    return GradientsToGPUs()
