"""The results of a model for a sample must not depend on other samples.

Features are properties of single samples. With a model or a task that mixes the samples of a batch
(by a softmax over the batch axis, by subtracting the mean of the batch, by batch statistics), they
would depend on the batch size, so such a model is rejected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from trakdask.models.tasks import Batch, Forward, Task, task_spec
from trakdask.models.tasks.protocol import SampleError, rejecting_later
from trakdask.torch_internals import Watching, fake_tensor_mode

_answers: WeakKeyDictionary[torch.nn.Module, dict[Hashable, Any]] = WeakKeyDictionary()


def once_per_task(
    purpose: str, forward: Forward, task: Task, batch: Batch, also: Any, find: Callable[[], Any]
) -> Any:
    """Return an answer about a module as a task uses it, which is found out once.

    Threads have a module each, but all models of one ``build`` share it, whatever their tasks. So
    the key is all that decides how the module is called: the class of the task and its settings,
    and the variables of the batch. The class is compared itself and not by name alone, because a
    notebook may define it again. Neither shapes nor weights belong to it: the axes of the samples,
    and whether values are read, are taken to be the same for all; the checks of every block notice
    if they are not.
    """
    variables = tuple((name, value.ndim) for name, value in batch.items())
    kind = type(getattr(task, "modelout", task))
    key = purpose, kind, task_spec(task), variables, also
    # By module and weakly: an answer goes with its module, and no module is kept alive.
    answers = _answers.setdefault(forward.module, {})
    if key not in answers:
        answers[key] = find()
    return answers[key]


def reads_values(forward: Forward, task: Task, batch: Batch) -> bool:
    """Return whether the model branches on values of its input.

    The samples of a batch would then share a branch. Such a model cannot run on tensors without
    values; this is tried once, unless a pass with values shows that none is read. (Some models
    read values only to skip work, and not where there are none.)
    """

    def find() -> bool:
        # Whatever error a pass raises, it is safe to assume that values are read.
        two, watch = repeated(batch, 2), Watching(_refuse_values)
        with suppress(Exception), torch.no_grad(), torch.random.fork_rng([]), _NoArrays(), watch:
            task.output(forward, two)
            return False
        with suppress(Exception), fake_tensor_mode() as mode, torch.no_grad():
            fake = Batch({name: mode.from_tensor(value) for name, value in two.items()})
            task.output(forward, fake)
            return False
        return True

    return bool(once_per_task("reads values", forward, task, batch, None, find))


def _refuse_values(func: Any, args: Any, kwargs: Any) -> None:
    """Raise an error where a tensor's values leave it, or decide on the shape of another one."""
    if _STEERING.intersection(func.tags):
        raise RuntimeError(f"{func} can steer the next steps of a model")


class _NoArrays(TorchFunctionMode):
    """Raise an error where a tensor becomes an array or a list, which is no operation of torch."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func in _CONVERSIONS:
            raise RuntimeError(f"{func} can steer the next steps of a model")
        return func(*args, **(kwargs or {}))


_STEERING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_CONVERSIONS = {Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.untyped_storage}


def require_same_alone(
    forward: Forward,
    task: Task,
    batch: Batch,
    output: Tensor,
    out_to_loss: Tensor,
    rows: Iterable[int] | None = None,
) -> None:
    """Check that f and Q of samples are the same in a batch as for each sample alone.

    Parameters
    ----------
    forward, task
        The model at one checkpoint, and its task.
    batch
        The samples.
    output, out_to_loss
        f and Q of the batch, both (batch,).
    rows
        Which samples to compare; by default the first and the last. (The first one alone would not
        reveal a cumulative sum over the batch.)

    Raises
    ------
    SampleError
        If f or Q differs by more than rounding can explain.

    Notes
    -----
    Cost: one pass without gradients for each sample that is compared.
    """
    size = len(output)
    if size == 1:
        return
    for row in sorted({0, size - 1}) if rows is None else rows:
        # One pass, if both call the model in the same way.
        once, one = forward.caching(), row_of(batch, row)
        with rejecting_later():
            alone = task.output(once, one)[0], task.out_to_loss(once, one)[0]
        require_close(forward, row, (output, out_to_loss), alone)


def require_close(
    forward: Forward,
    row: int,
    in_batch: tuple[Tensor, Tensor],
    alone: tuple[Tensor, Tensor],
    least: float = 0.0,
) -> None:
    """Check f and Q of one sample.

    Parameters
    ----------
    forward
        The model.
    row
        Place of the sample in the batch.
    in_batch, alone
        f and Q of the batch, and of the sample alone.
    least
        As in :func:`allowed_error`.

    Raises
    ------
    SampleError
        If one of them differs by more than rounding can explain.
    """
    allowed = allowed_error(forward.parameters.values(), least)
    numbers = [  # which are read at once, since each read waits for the device
        number.detach()
        for values, expected in zip(in_batch, alone, strict=True)
        for number in (values[row], expected, values.abs().nan_to_num(posinf=0).max())
    ]
    found = torch.stack(numbers).view(2, 3).tolist()
    for name, (value, expected, scale) in zip(("output", "out_to_loss"), found, strict=True):
        if least and not math.isfinite(value):
            return  # the sample fails, and says why
        # The second term is for outputs near zero: f is a difference of logits, and rounding errors
        # are relative to these. The largest f of the batch stands for their size; ten times, as
        # logits may be larger than any difference of them. In float32 the term does not exceed
        # 1e-4, so that Q, which is at most 1 and tiny for samples that are learned, is compared at
        # all. In coarser numbers, where 1e-4 is less than one rounding of a number near 1, it may
        # be larger.
        floor = 1e-4 if allowed <= 1e-3 else allowed
        differs = abs(value - expected) > allowed * abs(expected) + min(floor, 10 * allowed * scale)
        if not (math.isfinite(value) and math.isfinite(expected)):
            differs = math.isfinite(value) != math.isfinite(expected)
        if differs:
            text = (
                f"expected the {name} of sample {{sample}} to be the same alone and in a batch, "
                f"got {expected:.4g} alone and {value:.4g} in a batch of {len(in_batch[0])}: the "
                "model "
                "is random, mixes the samples of a batch, or branches on values of its input; try "
                "a model without dropout, without a softmax, mean or normalisation over the batch "
                "axis, or, if it branches, try gradients='loop', which runs every sample alone"
            )
            raise SampleError(text, row)


def tolerance(dtype: torch.dtype, device: str) -> float:
    """Return the relative error that rounding can explain: 1e-3 in float32 on a CPU.

    Mixing samples changes f and Q by whole percents. Kernels for other batch sizes add in another
    order. Deep models turn that into relative errors of about 1e-4 in float32, so 1e-3 lies between
    both; it is the same in float64, where mistakes are no smaller. In coarser numbers the error is
    a few units of the last digit: 8 of them.
    """
    coarse = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    if torch.is_autocast_enabled(device):
        coarse = max(coarse, torch.finfo(torch.get_autocast_dtype(device)).eps)
    if device != "cpu":
        coarse = max(coarse, 2.0**-10)  # of TF32, which torch uses for convolutions by default
    return max(1e-3, 8 * coarse)


def allowed_error(tensors: Iterable[Tensor], least: float = 0.0) -> float:
    """Return the largest :func:`tolerance` of some tensors.

    Parameters
    ----------
    tensors
        Parameters or gradients, of one precision or several.
    least
        For a single sample of a batch: the relative error that is allowed at least.
    """
    kinds = {(tensor.dtype, tensor.device.type) for tensor in tensors}
    allowed = max((tolerance(*kind) for kind in kinds), default=0.0)
    # The error of a single sample may be a few times the error of a sum, in which errors cancel. In
    # float32, `least` is larger than this; in half precision it is smaller.
    return max(least, 4 * allowed) if least else allowed


def row_of(batch: Batch, row: int) -> Batch:
    """Return a batch of one of the samples."""
    return Batch({name: value[row : row + 1] for name, value in batch.items()})


def repeated(batch: Batch, n: int) -> Batch:
    """Return the first sample n times."""
    return Batch({name: value[:1].expand(n, *value.shape[1:]) for name, value in batch.items()})
