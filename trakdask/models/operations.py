"""How many operations the passes through a model take, counted on tensors without data."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor
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

    Those of products, convolutions and attention, as torch counts them: a multiplication and an
    addition are two. None where the model looks at values, of which there are none here.

    Parameters
    ----------
    module
        The architecture; its weights do not matter.
    task
        Whose output is differentiated.
    names
        Parameters to differentiate by.
    inputs
        What a sample is made of, by the names that the task reads.
    """
    try:
        copied = copy.deepcopy((module, task))  # they may keep tensors
        with torch.random.fork_rng(devices=[]), FakeTensorMode(allow_non_fake_inputs=True):
            return _counted(*copied, names, inputs)
    except Exception as err:  # whatever a model does with values that are not there
        _log.info("operations of the model cannot be counted: %s", err)
        return None


def _counted(
    module: torch.nn.Module, task: Task, names: Iterable[str], inputs: Mapping[str, Input]
) -> int:
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    empty = {name: torch.empty_like(tensor, device="cpu") for name, tensor in tensors.items()}
    selected = {name: empty[name].requires_grad_() for name in names}
    batch = Batch({name: _sample(*given) for name, given in inputs.items()})
    with torch.enable_grad(), FlopCounterMode(display=False) as counter:
        output = task.output(Forward(module, empty, {}), batch)
        torch.autograd.grad(output.sum(), list(selected.values()), allow_unused=True)
    return int(counter.get_total_flops())


def _sample(shape: tuple[int, ...], dtype: np.dtype) -> Tensor:
    return torch.empty((1, *shape), dtype=torch.from_numpy(np.empty(0, dtype)).dtype)
