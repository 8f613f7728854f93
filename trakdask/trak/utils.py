"""Helpers that scripts import from the TRAK package, and its test of an installation."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trakdask.featurization.devices import free_bytes
from trakdask.trak.projectors import NoOpProjector, chunk_sizes, flattened
from trakdask.trak.score_computers import product
from trakdask.trak.traker import TRAKer

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def parameters_to_vector(parameters: Iterable[Tensor]) -> Tensor:
    """Return all elements of some tensors, one tensor after the other, as one vector.

    Examples
    --------
    >>> parameters_to_vector([torch.ones(2, 2), torch.zeros(1)]).tolist()
    [1.0, 1.0, 1.0, 1.0, 0.0]
    """
    return torch.cat([parameter.reshape(-1) for parameter in parameters])


def get_num_params(model: torch.nn.Module) -> int:
    """Return the number of elements of all parameters of a model; a shared tensor counts once.

    Examples
    --------
    >>> get_num_params(torch.nn.Linear(3, 2))
    8
    """
    return sum(parameter.numel() for parameter in model.parameters())


def is_not_buffer(ind: int | str, params_dict: Mapping[int | str, str] | Sequence[str]) -> bool:
    """Return whether ``params_dict[ind]`` is no name of one of BatchNorm's buffers."""
    name = params_dict[ind]  # type: ignore[index]
    return not any(buffer in name for buffer in _BUFFERS)


def vectorize(
    g: Mapping[str, Tensor], arr: Tensor | None = None, device: str | torch.device = "cuda"
) -> Tensor:
    """Flatten per-sample gradients into one row per sample.

    Parameters
    ----------
    g
        Gradient per parameter name, each of shape (batch, *parameter shape), in the order in which
        they are laid out.
    arr
        Tensor of shape (batch, elements) to fill; by default a new one.
    device
        Device of a new tensor. In the original it has the dtype of the first gradient, so a later
        gradient of a wider dtype can overflow to infinity; here its dtype can represent all of
        them.

    Returns
    -------
    Tensor of shape (batch, elements).

    Examples
    --------
    >>> gradients = {"weight": torch.ones(2, 3, 1), "scale": torch.zeros(2)}
    >>> vectorize(gradients, device="cpu").tolist()
    [[1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0]]
    """
    flat = flattened(g)
    if arr is None:
        return flat.to(device)
    # A buffer may be wider than the gradients; its last columns stay.
    arr[:, : flat.shape[1]] = flat
    return arr


def get_output_memory(features: Tensor, target_grads: Tensor, target_dtype: torch.dtype) -> int:
    """Return the bytes of ``features @ target_grads.T`` in a dtype."""
    return len(features) * len(target_grads) * target_dtype.itemsize


def get_free_memory(device: torch.device | str) -> int:
    """Return the bytes that can still be allocated on a device.

    The original counts only memory that torch has reserved but not used. That is nearly always too
    little, so its :func:`get_matrix_mult` computes block by block without need.
    """
    return free_bytes(torch.device(device))


def get_matrix_mult_standard(
    features: Tensor, target_grads: Tensor, target_dtype: torch.dtype
) -> Tensor:
    """Return ``features @ target_grads.T`` in a dtype, computed at once.

    float16 inputs on a CPU are multiplied in float32, whose sums do not overflow, at no extra cost.
    """
    return product(features, target_grads).to(target_dtype)


def get_matrix_mult_blockwise(
    features: Tensor, target_grads: Tensor, target_dtype: torch.dtype, bs: int
) -> Tensor:
    """Return ``features @ target_grads.T`` in host memory, computed block by block.

    Parameters
    ----------
    features, target_grads
        Shapes (n, p) and (m, p); not copied as a whole.
    target_dtype
        Dtype of the result.
    bs
        Rows of a block of either matrix. (In the original blocks are no larger than the smaller
        matrix, so a single target leads to a million blocks of one row.)

    Notes
    -----
    Blocks are multiplied on the device of ``features``. If that is the CPU, they are multiplied on
    the GPU that CUDA has, if there is one.
    """
    on_cuda = features.device.type == "cpu" and torch.cuda.is_available()
    device = torch.device("cuda") if on_cuda else features.device
    result = torch.empty(len(features), len(target_grads), dtype=target_dtype)
    for first in range(0, len(target_grads), bs):
        # The targets in the outer loop, since there are fewer of them: each is moved to the device
        # once.
        targets = target_grads[first : first + bs].to(device)
        for start in range(0, len(features), bs):
            rows = features[start : start + bs].to(device)
            result[start : start + bs, first : first + bs] = product(rows, targets)
    return result


def get_matrix_mult(
    features: Tensor,
    target_grads: Tensor,
    target_dtype: torch.dtype | None = None,
    batch_size: int = 8096,
    use_blockwise: bool = False,
) -> Tensor:
    """Return ``features @ target_grads.T``, block by block where it would not fit on the GPU.

    Parameters
    ----------
    features, target_grads
        Shapes (n, p) and (m, p).
    target_dtype
        Dtype of the result; by default as ``features``.
    batch_size
        Rows of a block.
    use_blockwise
        Whether to compute block by block in any case.

    Returns
    -------
    Tensor of shape (n, m), on the device of ``features``, or in host memory if computed in blocks.

    Examples
    --------
    >>> get_matrix_mult(torch.eye(2), torch.ones(1, 2)).tolist()
    [[1.0], [1.0]]
    """
    dtype = target_dtype or features.dtype
    # In host memory the result was asked for as a whole in any case.
    fits = features.device.type == "cpu" or (
        get_output_memory(features, target_grads, dtype) < get_free_memory(features.device)
    )
    if fits and not use_blockwise:
        return get_matrix_mult_standard(features, target_grads, dtype)
    return get_matrix_mult_blockwise(features, target_grads, dtype, batch_size)


def get_parameter_chunk_sizes(model: torch.nn.Module, batch_size: int) -> tuple[int, list[int]]:
    """Return how many parameters ``fast_jl`` can project at once, and chunks of that size.

    Parameters
    ----------
    model
        The model, whose parameters are assigned to chunks in their order.
    batch_size
        Samples that are projected at once.

    Returns
    -------
    The largest chunk that ``fast_jl`` can address, (2³² − 1) // ``batch_size``, and the sizes of
    the chunks. A larger parameter is split into several chunks; the original puts an empty chunk
    before it, and fails later.

    Examples
    --------
    >>> get_parameter_chunk_sizes(torch.nn.Linear(3, 2), batch_size=32)
    (134217727, [8])
    """
    return chunk_sizes([parameter.numel() for parameter in model.parameters()], batch_size)


def test_install(use_fast_jl: bool = True) -> None:  # noqa: PT028 (not a test of pytest)
    """Run a tiny attribution and print whether it worked.

    Parameters
    ----------
    use_fast_jl
        Whether to run it on the GPU with the ``fast_jl`` projection. Without a CUDA device the CPU
        is tested instead, and a second line says so; the original raises an error there, even
        with ``use_fast_jl=False``.

    Examples
    --------
    >>> test_install(use_fast_jl=False)
    TRAK is installed correctly!
    """
    on_gpu = use_fast_jl and torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    batch = (torch.randn(20, 256, device=device), torch.randint(2, (20,), device=device))
    model = torch.nn.Linear(256, 2, bias=False).to(device)
    with tempfile.TemporaryDirectory() as folder:
        options: Any = {"save_dir": folder, "device": device, "proj_dim": 512, "logging_level": 100}
        projector = None if on_gpu else NoOpProjector()
        traker = TRAKer(model, "image_classification", 20, projector=projector, **options)
        traker.load_checkpoint(model.state_dict(), model_id=0)
        traker.featurize(batch, num_samples=20)
    print(f"TRAK {'and fast_jl are' if on_gpu else 'is'} installed correctly!")
    if use_fast_jl and not on_gpu:
        print("fast_jl was not tested: there is no CUDA device.")
