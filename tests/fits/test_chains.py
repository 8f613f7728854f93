"""Every chain of steps is one linear map, whose two directions are each other's adjoint."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

import trakdask as td
from trakdask.projection import Projector, RowMap
from trakdask.projection.fitted import Components, Curvature, Fitted, SecondMoments
from trakdask.projection.maps import Maps
from trakdask.tensors import factors_of, rotated

SHAPES = {"conv": (3, 2, 2, 2), "weight": (4, 6), "bias": (4,), "scale": ()}
N_ELEMENTS = sum(math.prod(shape) for shape in SHAPES.values())
PROJECTORS = [
    td.Identity(), td.SJLT(9), td.Rademacher(9), td.Mask(20), td.Mask(20, then=td.SJLT(9)),
]  # fmt: skip


def chain(
    first: str, projector: Projector, has_components: bool, rng: np.random.Generator
) -> tuple[Fitted, dict[str, np.ndarray]]:
    """Return a chain of steps and made-up arrays of one checkpoint."""
    steps: list[object] = []
    arrays: dict[str, np.ndarray] = {}
    scale = rng.uniform(0.5, 2, N_ELEMENTS).astype("f4")
    if first == "moments":
        steps, arrays = [SecondMoments()], {"moment_scale": scale}
    if first.startswith("curvature"):
        n = 5 if first.endswith("leading") else 0
        step = Curvature(1.0, 0.5, n, block=2 if first.startswith("curvature, blocks") else None)
        factors = [*factors_of(SHAPES, step.turning)]
        vectors = np.empty(factors[-1][-1].stop, "f4")
        for _, _, columns, place in factors:
            length = columns.stop - columns.start
            vectors[place] = np.linalg.qr(rng.standard_normal((length, length)))[0].ravel()
        steps = [step]
        arrays = {
            "curvature_eigenvectors": vectors,
            "curvature_scale": scale,
            "curvature_leading": np.sort(rng.permutation(N_ELEMENTS)[:n]),
        }
    steps.append(projector)
    rows = RowMap.from_shapes(SHAPES, alignment=projector.row_alignment)
    width = Fitted(tuple(steps)).bind(rows).width(rows.n_rows)
    if has_components:
        steps.append(Components(3))
        arrays["principal_components"] = rng.standard_normal((width, 3)).astype("f4")
    return Fitted(tuple(steps)), arrays


@given(
    first=st.sampled_from(
        ["", "moments", "curvature", "curvature, leading", "curvature, blocks, leading"]
    ),
    projector=st.sampled_from(PROJECTORS),
    components=st.booleans(),
    seed=st.integers(0, 2**16),
    checkpoint=st.integers(0, 2**32 - 1),
    n_vectors=st.integers(1, 2),
)
def test_back__is_the_adjoint(
    first: str, projector: Projector, seed: int, checkpoint: int, components: bool, n_vectors: int
) -> None:
    """⟨φ(g), v⟩ = ⟨g, φᵀ(v)⟩, with gradients in parameters' coordinates on the right."""
    rng = np.random.default_rng(seed)
    fitted, arrays = chain(first, projector, components, rng)
    rows = RowMap.from_shapes(SHAPES, alignment=projector.row_alignment)
    maps = Maps(fitted.bind(rows), rows, checkpoint, arrays, torch.device("cpu"))
    gradients = {
        name: torch.from_numpy(rng.standard_normal((4, math.prod(shape))).astype("f4"))
        for name, shape in SHAPES.items()
    }
    stream = maps.open(4)
    for name, gradient in gradients.items():
        turned = rotated(gradient, SHAPES[name], (maps.rotations or {}).get(name, {}))
        stream(name, turned.clone())
    feature = stream.result().double().numpy()
    v = rng.standard_normal((n_vectors, feature.shape[1])).astype("f4")
    back = maps.back(torch.from_numpy(v)).double().numpy()
    flat = np.zeros((4, rows.n_rows))
    for name, gradient in gradients.items():
        flat[:, rows.offset(name) : rows.offset(name) + rows.size(name)] = gradient.numpy()
    inside = [np.arange(rows.offset(n), rows.offset(n) + rows.size(n)) for n in rows.names]
    places = np.concatenate(inside)
    size = np.linalg.norm(flat) * np.linalg.norm(back[:, places])
    np.testing.assert_allclose(feature @ v.T, flat[:, places] @ back[:, places].T, atol=2e-4 * size)


def test_spec__of_every_chain_is_json_that_makes_it_again() -> None:
    rng = np.random.default_rng(0)
    for first, projector in itertools.product(["", "moments", "curvature, leading"], PROJECTORS):
        for has_components in (False, True):
            fitted, _ = chain(first, projector, has_components, rng)
            again = Fitted.from_spec(json.loads(json.dumps(fitted.spec())))
            assert again.steps == fitted.steps
