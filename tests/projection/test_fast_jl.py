"""The calls of the extension fast_jl, by a stand-in: its calls are the calls of traker 0.3.2."""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from trakdask.projection import FastJL, RowMap, project

SHAPES = {"a": (30, 600), "b": (7,), "c": (3, 5)}


@functools.lru_cache(maxsize=1)
def matrix(n_rows: int, width: int, seed: int, num_sms: int) -> Tensor:
    """Return signs that depend on the same numbers as the signs of fast_jl."""
    generator = torch.Generator().manual_seed(seed * 1000 + num_sms)
    return torch.randint(0, 2, (n_rows, width), generator=generator).float() * 2 - 1


def stand_in_for_fast_jl(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Stand in for the extension, and take tensors of the CPU for tensors of a GPU; list calls."""
    seen: list[tuple[str, Any]] = []

    def stand_in(name: str, size: int) -> Any:
        def run(rows: Tensor, width: int, seed: int, num_sms: int) -> Tensor:
            assert rows.shape[0] == size
            assert rows.is_contiguous()
            assert rows.dtype == torch.float32
            seen.append((name, (rows.shape, width, seed, num_sms)))
            return rows @ matrix(rows.shape[1], width, seed, num_sms)

        return run

    module = ModuleType("fast_jl")
    for size in (8, 16, 32):
        for entries in ("rademacher", "normal"):
            name = f"project_{entries}_{size}"
            setattr(module, name, stand_in(name, size))
    monkeypatch.setitem(sys.modules, "fast_jl", module)
    monkeypatch.setattr(FastJL, "_require_device", lambda self, block: None)
    return seen


@pytest.mark.parametrize(
    ("n_samples", "sizes", "entries"),
    [(8, [8], "rademacher"), (9, [16], "normal"), (70, [32, 32, 8], "rademacher")],
)
def test_project__all_rows_at_once_in_padded_batches(
    n_samples: int, sizes: list[int], entries: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = stand_in_for_fast_jl(monkeypatch)
    generator = torch.Generator().manual_seed(0)
    gradients = {
        name: torch.randint(-9, 10, (n_samples, *shape), generator=generator).float()
        for name, shape in SHAPES.items()
    }
    gradients["a"][-1, 3] = torch.inf
    projector = FastJL(512, seed=3, entries=entries, num_sms=132)
    found = project(projector, gradients, RowMap.from_shapes(SHAPES, alignment=1), 2)
    flat = torch.cat([gradient.flatten(1) for gradient in gradients.values()], 1)[:-1]
    expected = flat.double() @ matrix(18022, 512, 20003, 132).double() * 512**-0.5
    assert torch.equal(found[:-1], expected.float())
    assert found[-1].isnan().all()
    places = [((size, 18022), 512, 20003, 132) for size in sizes]
    names = [f"project_{entries}_{size}" for size in sizes]
    assert calls == list(zip(names, places, strict=True))
