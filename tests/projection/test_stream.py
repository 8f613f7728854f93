"""How gradients reach a projector is invisible: batches, tensors, parts, order, layout, threads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.projection.reference import mask_order, normal, project_blocks, project_flat
from trakdask.projection import (
    ROW_BLOCK,
    SJLT,
    Identity,
    Mask,
    ProjectionStream,
    Projector,
    Rademacher,
    RowMap,
    project,
)

SMALL = Rademacher(proj_dim=12, seed=3)
PROJECTORS = [SMALL, SJLT(12, 3), Mask(9000), Mask(9000, SMALL), Identity()]
every_kind = pytest.mark.parametrize("projector", PROJECTORS, ids=str)

SHAPES = {
    "a": (3, 100),
    "b": (60, 1000),
    "scalar": (),
    "none": (0, 4),
    "c": (16384,),
    "e": (7, 100),
}


@every_kind
@pytest.mark.parametrize("cuts", [(1, 2), (5, 37, 69)])
def test_project__batches_are_invisible(
    projector: Projector, cuts: tuple[int, ...], backend: str
) -> None:
    flat = normal(70, 17000)
    parts = [project_flat(projector, flat[a:b]) for a, b in itertools.pairwise([0, *cuts, 70])]
    assert torch.equal(torch.cat(parts), project_flat(projector, flat))


@every_kind
@settings(max_examples=15)
@given(data=st.data())
def test_stream__order_parts_and_buffers_are_invisible(
    projector: Projector, data: st.DataObject
) -> None:
    gradients = {name: normal(2, math.prod(shape)) for name, shape in SHAPES.items()}
    row_map = RowMap.from_shapes(SHAPES, alignment=projector.row_alignment)
    stream, names = ProjectionStream(projector, row_map, 2, 4), list(SHAPES)
    order = data.draw(st.permutations(names))
    for name in order:
        gradient, size = gradients[name], row_map.size(name)
        cuts = data.draw(st.lists(st.integers(0, size), max_size=3))
        for start, stop in itertools.pairwise([0, *sorted(cuts), size]):
            while start < stop:
                part = gradient[:, start:stop]
                buffer = stream.buffer_for(name, start) if data.draw(st.booleans()) else None
                if buffer is not None:
                    assert buffer.shape[1] <= size - start
                    part = buffer[:, : stop - start].copy_(part[:, : buffer.shape[1]])
                stream(name, part, start)
                start += part.shape[1]
        if not size:
            stream.add(name, gradient)
    found, expected = stream.result(), project(projector, gradients, row_map, 4)
    # In another order, the last bit of a float64 sum may differ.
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert order != names or torch.equal(found, expected)
    with pytest.raises(ValueError, match="each element once"):
        stream.add("a", gradients["a"])


@every_kind
@settings(max_examples=12)
@given(data=st.data())
def test_project__blocks_of_zeros_are_left_out(projector: Projector, data: st.DataObject) -> None:
    flat = normal(5, 2 * ROW_BLOCK + 100)
    starts = st.sampled_from(range(0, flat.shape[1], ROW_BLOCK))
    for sample, start in data.draw(st.lists(st.tuples(st.integers(0, 4), starts), max_size=15)):
        flat[sample, start : start + ROW_BLOCK - data.draw(st.sampled_from([0, 1]))] = 0
    bound = projector.bind(RowMap.from_shapes({"flat": (flat.shape[1],)}, alignment=512))
    selected = bound.selected_rows(4)
    rows = flat if selected is None else flat[:, torch.tensor(selected)]
    expected = (project_blocks(bound, rows) * bound.scale(flat.shape[1])).float()
    assert torch.equal(project_flat(projector, flat), expected)


@every_kind
@pytest.mark.parametrize(("place", "bad"), [(0, math.nan), (-1, math.inf), (-1, -math.inf)])
def test_project__sample_that_is_not_finite_is_nan(
    projector: Projector, place: int, bad: float, backend: str
) -> None:
    flat = normal(40, 20_001)
    clean, read = project_flat(projector, flat), range(20_001)
    if isinstance(projector, Mask):
        read = mask_order(20_001, 0, 4)
        flat[0, read[9000]] = bad  # not selected
        read = read[:9000]
    flat[2, read[place]] = bad
    found, others = project_flat(projector, flat), torch.arange(40) != 2
    assert found[2].isnan().all()
    assert torch.equal(found[others], clean[others])


LAYOUTS = {
    "strided": lambda block: block.repeat_interleave(3, dim=1)[:, ::3],
    "inside": lambda block: torch.cat([block] * 3, dim=1)[:, block.shape[1] : 2 * block.shape[1]],
    "transposed": lambda block: block.T.contiguous().T,
    "with history": lambda block: block.clone().requires_grad_(),
    "float64": lambda block: block.double(),
}


@every_kind
@pytest.mark.parametrize("layout", LAYOUTS)
def test_project__layout_is_invisible(projector: Projector, layout: str, backend: str) -> None:
    arranged: Callable[[Tensor], Tensor] = LAYOUTS[layout]
    for n_samples in (1, 9):
        flat = normal(n_samples, 17_000)
        expected = project_flat(projector, flat)
        with torch.inference_mode(layout == "inside"):
            assert torch.equal(project_flat(projector, arranged(flat)), expected)
        assert torch.equal(project_flat(projector, flat), expected)


@pytest.mark.parametrize("projector", [SMALL, SJLT(12, 3)], ids=str)
def test_project__threads_do_not_share_buffers(projector: Projector, backend: str) -> None:
    blocks = [normal(6, n_rows) for n_rows in (300, 5000, 129, 2048) * 3]
    expected, before = [project_flat(projector, block) for block in blocks], torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda block: project_flat(projector, block), blocks))
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, found, expected))


# ------------------------------------------------------------------------------- rows and mistakes
