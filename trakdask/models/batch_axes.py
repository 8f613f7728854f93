"""Tensors of a layer's call as one entry per sample."""

from __future__ import annotations

from torch import Tensor


def is_by_token(value: Tensor, axis: int | None, n_samples: int, n_tokens: int) -> bool:
    """Return whether a tensor that a layer took or returned has a value for each token."""
    return by_sample(value, axis, n_samples).shape[:2] == (n_samples, n_tokens)


def by_sample(value: Tensor, axis: int | None, n_samples: int) -> Tensor:
    """Return a tensor of a call, (samples, ...); one that all samples share is expanded."""
    if axis is not None:
        return batch_first(value, axis, n_samples)
    alone = value if value.shape[:1] == (1,) else value[None]
    return alone.expand(n_samples, *alone.shape[1:])


def batch_first(value: Tensor, axis: int, n_samples: int) -> Tensor:
    """Return a tensor with one entry per sample along its first axis.

    Models flatten batch and positions into one axis, for example in front of experts.

    Examples
    --------
    >>> import torch
    >>> batch_first(torch.zeros(6, 4), 0, 2).shape, batch_first(torch.zeros(4, 2), 1, 2).shape
    (torch.Size([2, 3, 4]), torch.Size([2, 4]))
    """
    if value.shape[axis] != n_samples:
        value = split_axis(value, axis, n_samples)
    return value.movedim(axis, 0) if axis else value


def split_axis(value: Tensor, axis: int, n_samples: int) -> Tensor:
    """Split the batch axis into two: the samples, and the rows of each sample, mostly one."""
    if value.shape[axis] % n_samples:
        raise RuntimeError(
            f"expected as many rows of a layer's input or output for every sample, got "
            f"{value.shape[axis]} for {n_samples} samples; try gradients='vmap', or 'loop'"
        )
    split: Tensor = value.unflatten(axis, (n_samples, -1))
    return split
