"""Helpers that scripts import from the TRAK package, and its test of an installation."""

from __future__ import annotations

import tempfile

import torch

from trakdask.trak.projectors import NoOpProjector
from trakdask.trak.tensors import (
    get_free_memory,
    get_matrix_mult,
    get_matrix_mult_blockwise,
    get_matrix_mult_standard,
    get_num_params,
    get_output_memory,
    get_parameter_chunk_sizes,
    is_not_buffer,
    parameters_to_vector,
    vectorize,
)
from trakdask.trak.traker import TRAKer

__all__ = [
    "get_free_memory",
    "get_matrix_mult",
    "get_matrix_mult_blockwise",
    "get_matrix_mult_standard",
    "get_num_params",
    "get_output_memory",
    "get_parameter_chunk_sizes",
    "is_not_buffer",
    "parameters_to_vector",
    "test_install",
    "vectorize",
]


def test_install(use_fast_jl: bool = True) -> None:  # noqa: PT028 (not a test of pytest)
    """Run a tiny attribution and print whether it worked.

    Parameters
    ----------
    use_fast_jl
        Whether to run it on the GPU with the ``fast_jl`` projection. Without a CUDA device the CPU
        is tested instead, and the printed line says so; the original raises an error there, even
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
        traker = TRAKer(
            model=model,
            task="image_classification",
            train_set_size=20,
            save_dir=folder,
            device=device,
            projector=None if on_gpu else NoOpProjector(device=device),
            proj_dim=512,
            logging_level=100,
        )
        traker.load_checkpoint(model.state_dict(), model_id=0)
        traker.featurize(batch, num_samples=20)
    if on_gpu:
        print("TRAK and fast_jl are installed correctly!")
    elif use_fast_jl:
        print("TRAK is installed correctly! fast_jl was not tested: there is no CUDA device.")
    else:
        print("TRAK is installed correctly!")
