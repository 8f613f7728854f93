"""What gradients and projections share: axes of parameters, and buffers that threads reuse.

A gradient of a linear layer is a matrix, and the sum of the products of such matrices over samples
is close to a Kronecker product of one small matrix per axis. Its eigenvectors are therefore those
of the small matrices, which have a few hundred columns where the whole sum would have as many as
there are parameters.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

Shapes = Mapping[str, tuple[int, ...]]

LONGEST_AXIS = 4096
"""A longer axis, such as a vocabulary, keeps its coordinates: eigenvectors cost d³."""

LONGEST_BLOCK = 1024
"""Coordinates that share eigenvectors, at most.

Turning costs as many products as a block has coordinates. With these blocks, features of a layer of
GPT-2 take 1.5 times as long as random columns, and with whole axes 2.0 times as long
(``2026-11-30-featurizing-blocks.txt``, ``-featurizing.txt``). Shorter blocks cut what belongs
together: MNIST lost 0.013 with its pixels in blocks of 256 (``2026-11-30-blocks.txt``).
"""

VECTORS = "biases and norms"
"""The group of all parameters with less than two axes."""

_CPU = torch.device("cpu")

Rotations = dict[str, dict[int, list[Tensor]]]
"""The matrices of the blocks of each axis that has some, by parameter."""


class Turning(NamedTuple):
    """Which axes get the coordinates of eigenvectors, and how many coordinates these mix."""

    kept: Mapping[str, int]
    """By matrix, the axis that keeps its coordinates, which is mostly that of outputs."""
    block: int | None = None
    """The longest part of an axis that has eigenvectors of its own; None for whole axes."""


def axes_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the lengths of a parameter's axes: of a kernel, out, in, and all places together.

    Examples
    --------
    >>> axes_of((32, 16, 3, 3)), axes_of((10, 64)), axes_of((10,))
    ((32, 16, 9), (10, 64), (10,))
    """
    return (*shape[:2], math.prod(shape[2:])) if len(shape) > 2 else shape


def factors_of(shapes: Shapes, turning: Turning) -> Iterator[tuple[str, int, slice, slice]]:
    """Return, for every block with eigenvectors, its parameter, axis, coordinates and place.

    The place says where its matrix is, row by row, among the matrices of all blocks. Biases and
    other vectors have none: the matrix of their only axis would have a column for every element.

    Examples
    --------
    >>> [*factors_of({"weight": (2, 3), "bias": (2,)}, Turning({"weight": 0}, 2))]
    [('weight', 1, slice(0, 1, None), slice(0, 1, None)),
     ('weight', 1, slice(1, 3, None), slice(1, 5, None))]
    """
    start = 0
    for name, shape in shapes.items():
        lengths = axes_of(shape)
        for axis, length in enumerate(lengths):
            is_turned = 1 < length <= LONGEST_AXIS and axis != turning.kept.get(name)
            if len(lengths) < 2 or not is_turned:
                continue
            # Blocks as equal as can be, so that queries, keys and values of GPT-2 stay apart.
            n_blocks = -(-length // (turning.block or length))
            edges = [length * i // n_blocks for i in range(n_blocks + 1)]
            for first, last in pairwise(edges):
                yield name, axis, slice(first, last), slice(start, start + (last - first) ** 2)
                start += (last - first) ** 2


def group_of(name: str, shapes: Shapes) -> str:
    """Return the group of a parameter that shares its weight: few biases say much by themselves."""
    return name if len(shapes[name]) > 1 else VECTORS


def groups_of(shapes: Shapes) -> dict[str, list[str]]:
    """Return the parameters of each group: a matrix alone, and all vectors together.

    Examples
    --------
    >>> groups_of({"0.weight": (2, 3), "0.bias": (2,), "1.weight": (2,)})
    {'0.weight': ['0.weight'], 'biases and norms': ['0.bias', '1.weight']}
    """
    groups: dict[str, list[str]] = {}
    for name in shapes:
        groups.setdefault(group_of(name, shapes), []).append(name)
    return groups


def places_of(shapes: Shapes) -> dict[str, slice]:
    """Return the place of every parameter among the elements of all."""
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()]).tolist()
    starts = [0, *ends[:-1]]
    return {name: slice(*ends) for name, *ends in zip(shapes, starts, ends, strict=True)}


def rotations(
    eigenvectors: np.ndarray, shapes: Shapes, device: torch.device, turning: Turning
) -> Rotations:
    """Return the matrices of the blocks of each axis by parameter."""
    matrices: Rotations = {name: {} for name in shapes}
    for name, axis, columns, place in factors_of(shapes, turning):
        length = columns.stop - columns.start
        matrix = torch.tensor(eigenvectors[place], device=device).view(length, length)
        matrices[name].setdefault(axis, []).append(matrix)
    return matrices


def turned(value: Tensor, blocks: Sequence[Tensor]) -> Tensor:
    """Return the last axis of a tensor in the coordinates of the columns of its blocks.

    Cost: 2 flops for each element and each column of its block.
    """
    parts = value.split([len(block) for block in blocks], -1)
    products = [part @ block.to(value.dtype) for part, block in zip(parts, blocks, strict=True)]
    return torch.cat(products, -1) if len(products) > 1 else products[0]


def rotated(
    gradient: Tensor, shape: tuple[int, ...], matrices: Mapping[int, Sequence[Tensor]]
) -> Tensor:
    """Return gradients of a parameter, (n, numel), in the coordinates of its axes."""
    value = gradient.reshape(len(gradient), *axes_of(shape))
    for axis, blocks in matrices.items():
        value = turned(value.movedim(axis + 1, -1), blocks).movedim(-1, axis + 1)
    return value.reshape(len(gradient), -1)


@cache
def float64_device(device: torch.device) -> torch.device:
    """Return where the float64 numbers of a device are: there, or on the CPU if it has none.

    Apple's GPUs have none, nor have some of Intel's, which show it when they compute.
    """
    try:
        return torch.ones(1, device=device).double().device
    except (TypeError, RuntimeError):
        return _CPU


def in_float64(tensor: Tensor) -> Tensor:
    """Return a tensor in float64, on its device or, if that has none, on the CPU."""
    return tensor.to(float64_device(tensor.device)).double()


class Scratch(threading.local):
    """Named buffers that a thread reuses, because new memory costs page faults.

    Each grows to the largest request. There is one for each dtype, too: a view of other numbers
    would be an alias that nobody sees. Other devices than the CPU get new memory, which torch keeps
    for all threads together.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], list[Tensor]] = {}

    def take(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device = _CPU
    ) -> Tensor:
        """Return a contiguous buffer, with undefined content, until the next call by this name."""
        n = math.prod(shape)
        buffer = self.take_out(name, n, dtype, device)
        self.put_back(name, buffer)
        return buffer[:n].view(*shape)

    def take_out(self, name: str, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer of at least this length, which belongs to the caller."""
        kept = self._buffers.get((name, dtype)) if device.type == "cpu" else None
        if kept and len(buffer := kept.pop()) >= length:
            return buffer
        # A tensor created in inference mode could not be modified outside of it later.
        with torch.inference_mode(False):
            return torch.empty(length, dtype=dtype, device=device)

    def put_back(self, name: str, buffer: Tensor) -> None:
        """Keep a buffer, one of three, for the next call by this name."""
        if buffer.device.type != "cpu":
            return
        kept = self._buffers.setdefault((name, buffer.dtype), [])
        kept.append(buffer)
        del kept[:-3]  # the first and the last block of a parameter wait beside the one in work
