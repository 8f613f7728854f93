"""Whether a model gives a sample the same numbers in a batch as it does when the sample is alone.

Features are properties of single samples. A model or a task that mixes the samples of a batch (a
softmax over the batch axis, a batch mean that is subtracted, batch statistics) would give numbers
that change with the batch size, so it is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from trakdask.models.hooks import Remembering
from trakdask.models.tasks import Batch, Forward, Task
from trakdask.models.tasks.protocol import SampleError

__all__ = ["reads_values", "repeated", "require_same_alone", "row_of", "tolerance"]

_known: WeakKeyDictionary[torch.nn.Module, dict[type, bool]] = WeakKeyDictionary()


def reads_values(forward: Forward, task: Task, batch: Batch) -> bool:
    """Tell whether the model decides on values of its input: samples may then share a decision.

    Such a model cannot run on tensors that have no values, which is tried once for each module and
    type of task.
    """
    known = _known.setdefault(forward.module, {})
    if type(task) not in known:
        known[type(task)] = not _runs_without_values(forward, task, repeated(batch, 2))
    return known[type(task)]


def _runs_without_values(forward: Forward, task: Task, batch: Batch) -> bool:
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
            fake = Batch({name: mode.from_tensor(value) for name, value in batch.items()})
            task.output(forward, fake)
    except Exception:  # whatever else is in the way: the values are then compared, which is safe
        return False
    return True


def require_same_alone(
    forward: Forward,
    task: Task,
    batch: Batch,
    output: Tensor,
    out_to_loss: Tensor,
    rows: Iterable[int] | None = None,
) -> None:
    """Check that samples have the f and the Q in a batch that they have alone.

    Parameters
    ----------
    forward, task
        The model at one checkpoint, and what is computed of it.
    batch
        The samples.
    output, out_to_loss
        f and Q of the batch, both (batch,).
    rows
        Which samples to compare; the first and the last unless given. (A cumulative sum over the
        batch leaves the first as it is.)

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
        alone = _alone(forward, task, row_of(batch, row))
        for name, values, expected in zip(
            ("output", "out_to_loss"), (output, out_to_loss), alone, strict=True
        ):
            scale = float(values.detach().abs().nan_to_num(posinf=0).max())
            found = float(values[row])
            if _differ(found, expected, scale, _tolerance_of(forward)):
                text = (
                    f"expected the {name} of sample {{sample}} to be the same alone and in a "
                    f"batch, got {expected:.4g} alone and {found:.4g} in a batch of {size}; "
                    + _advice(forward, task, row_of(batch, row))
                )
                raise SampleError(text, row)


def _alone(forward: Forward, task: Task, one: Batch) -> tuple[float, float]:
    """Return f and Q of a single sample, by one pass if both call the model alike."""
    here = Remembering(
        forward.module, forward.parameters, forward.buffers, forward.checkpoint, forward.dtype
    )
    with torch.no_grad():
        return float(task.output(here, one)[0]), float(task.out_to_loss(here, one)[0])


def _differ(left: float, right: float, scale: float, relative: float) -> bool:
    """Tell whether numbers differ by more than rounding; f may be a difference of large logits."""
    if not (math.isfinite(left) and math.isfinite(right)):
        return math.isfinite(left) != math.isfinite(right)
    floor = 1e-4 if relative <= 1e-3 else relative
    return abs(left - right) > relative * abs(right) + min(floor, 10 * relative * scale)


def _advice(forward: Forward, task: Task, one: Batch) -> str:
    """Say why f and Q may depend on the batch, and what to do about it."""
    state = _random_state(forward)
    first, second = _alone(forward, task, one), _alone(forward, task, one)
    pairs = zip(first, second, strict=True)
    varies = any(a != b and _differ(a, b, abs(b), _tolerance_of(forward)) for a, b in pairs)
    # Two draws of a dropout may agree by chance, so the state of the generator is compared, too.
    if varies or not torch.equal(state, _random_state(forward)):
        return (
            f"the model is random (f of the same sample, twice: {first[0]:.4g}, {second[0]:.4g}); "
            "try a model that draws no random numbers in evaluation mode, such as dropout."
        )
    if reads_values(forward, task, one):
        return (
            "the model decides on values of its input, or mixes the samples of a batch; try "
            "gradients='loop', which runs every sample alone."
        )
    return (
        "the model or the task mixes the samples of a batch; try one without a softmax, mean or "
        "normalisation over the batch axis."
    )


def _random_state(forward: Forward) -> Tensor:
    devices = {tensor.device for tensor in forward.parameters.values()}
    states = [torch.get_rng_state()]
    states += [torch.cuda.get_rng_state(device) for device in devices if device.type == "cuda"]
    return torch.cat(states)


def _tolerance_of(forward: Forward) -> float:
    return max((tolerance(t.dtype, t.device.type) for t in forward.parameters.values()), default=0)


def tolerance(dtype: torch.dtype, device: str) -> float:
    """Return the relative error that rounding may explain, at most 1e-3 in float32 on a CPU."""
    coarse = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    if torch.is_autocast_enabled(device):
        coarse = max(coarse, torch.finfo(torch.get_autocast_dtype(device)).eps)
    if device == "cuda":
        coarse = max(coarse, 2.0**-10)  # of TF32, which torch uses for convolutions by default
    return max(1e-3, 8 * coarse)


def row_of(batch: Batch, row: int) -> Batch:
    """Return a batch of one of the samples."""
    return Batch({name: value[row : row + 1] for name, value in batch.items()})


def repeated(batch: Batch, n: int) -> Batch:
    """Return the first sample n times."""
    return Batch({name: value[:1].expand(n, *value.shape[1:]) for name, value in batch.items()})
