"""Count the operations of the passes through a model, on tensors without data."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from trakdask.models.tasks import Batch, Forward, Task

__all__ = ["Input", "count_operations"]

Input = tuple[tuple[int, ...], np.dtype]
"""Shape and dtype of one sample."""

_log = logging.getLogger(__name__)


def count_operations(
    module: torch.nn.Module, task: Task, names: Iterable[str], inputs: Mapping[str, Input]
) -> int | None:
    """Return the operations of one forward and one backward pass of a single sample.

    Only matrix products, convolutions and attention are counted, as in torch's own counter; a
    multiplication and an addition are two operations. The result is None if the model depends on
    values of its input, because the tensors used here have no values.

    Parameters
    ----------
    module
        The architecture; its weights do not matter.
    task
        The task whose output is differentiated.
    names
        Parameters to differentiate by.
    inputs
        Shape and dtype of each variable of a sample that the task reads.
    """
    try:
        copied = copy.deepcopy((module, task))  # they may store tensors
        with torch.random.fork_rng(devices=[]), FakeTensorMode(allow_non_fake_inputs=True):
            return _counted(*copied, names, inputs)
    except Exception as err:  # models may fail in any way without values
        _log.info("the operations of the model cannot be counted: %s", err)
        return None


def _counted(
    module: torch.nn.Module, task: Task, names: Iterable[str], inputs: Mapping[str, Input]
) -> int:
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    empty = {name: torch.empty_like(tensor, device="cpu") for name, tensor in tensors.items()}
    selected = {name: empty[name].requires_grad_() for name in names}
    batch = Batch(
        {
            name: torch.empty((1, *shape), dtype=torch.from_numpy(np.empty(0, dtype)).dtype)
            for name, (shape, dtype) in inputs.items()
        }
    )
    with torch.enable_grad(), FlopCounterMode(display=False) as counter:
        output = task.output(Forward(module, empty, {}), batch)
        torch.autograd.grad(output.sum(), list(selected.values()), allow_unused=True)
    return int(counter.get_total_flops())
