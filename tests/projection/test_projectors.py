from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.projection.reference import normal, rademacher_bits, small_integers
from trakdask.projection import (
    SJLT,
    Identity,
    Kronecker,
    Mask,
    Projector,
    Rademacher,
)
from trakdask.projection.row_map import ROW_BLOCK, RowMap
from trakdask.projection.stream import ProjectionStream, project

SMALL = Rademacher(proj_dim=12, seed=3)


def project_by_hand(projector: Rademacher, flat: Tensor, checkpoint: int) -> Tensor:
    """Multiply the flat gradient with the whole matrix, in float64."""
    bits = rademacher_bits(
        0, flat.shape[1], 0, projector.proj_dim, seed=projector.seed, checkpoint=checkpoint
    )
    return flat.double() @ torch.from_numpy(1.0 - 2.0 * bits.T) * projector.proj_dim**-0.5


def project_flat(projector: Projector, flat: Tensor, checkpoint: int = 4) -> Tensor:
    rows = RowMap.from_shapes({"flat": flat.shape[1:]}, alignment=512)
    return project(projector, {"flat": flat}, rows, checkpoint)


@pytest.mark.parametrize(("n_samples", "n_rows"), [(1, 1), (3, 127), (2, 16385), (3, 40000)])
@pytest.mark.parametrize("proj_dim", [1, 64, 77])
def test_project__is_the_matrix_product(n_samples: int, n_rows: int, proj_dim: int) -> None:
    projector = Rademacher(proj_dim=proj_dim, seed=2**64 - 1)
    flat = small_integers(n_samples, n_rows)
    found = project_flat(projector, flat, checkpoint=2**32 - 1)
    assert found.dtype == torch.float32
    assert torch.equal(found, project_by_hand(projector, flat, 2**32 - 1).float())


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_project__split_into_aligned_tensors_is_invisible(data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(1, 78), min_size=1, max_size=5, unique=True))
    edges = [0, *(512 * cut for cut in sorted(cuts)), 40000]
    flat = normal(2, 40000)
    gradients = {str(a): flat[:, a:b] for a, b in itertools.pairwise(edges)}
    rows = RowMap.from_shapes({k: v.shape[1:] for k, v in gradients.items()}, alignment=512)
    assert torch.equal(project(SMALL, gradients, rows, 4), project_flat(SMALL, flat))


def test_project__padding_rows_are_zeros() -> None:
    lengths = {"a": 300, "b": 16384 - 100, "c": 5, "d": 512, "e": 33000}
    gradients = {name: normal(2, n) for name, n in lengths.items()}
    rows = RowMap.from_shapes({name: (n,) for name, n in lengths.items()}, alignment=512)
    flat = torch.zeros(2, rows.n_rows)
    for name, gradient in gradients.items():
        flat[:, rows.offset(name) : rows.offset(name) + rows.size(name)] = gradient
    assert torch.equal(project(SMALL, gradients, rows, 4), project_flat(SMALL, flat))


@settings(max_examples=10, deadline=None)
@given(cuts=st.lists(st.integers(1, 10), unique=True, max_size=4))
def test_project__split_into_batches_is_invisible(cuts: list[int]) -> None:
    flat = normal(11, 17000)
    edges = [0, *sorted(cuts), 11]
    parts = [project_flat(SMALL, flat[a:b]) for a, b in itertools.pairwise(edges)]
    assert torch.equal(torch.cat(parts), project_flat(SMALL, flat))


@pytest.mark.parametrize("projector", [SMALL, Identity()])
@pytest.mark.parametrize("row", [0, 20000])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_project__sample_that_is_not_finite_is_nan(
    projector: Projector, row: int, bad: float
) -> None:
    flat = normal(4, 20001)
    clean = project_flat(projector, flat)
    flat[2, row] = bad
    found = project_flat(projector, flat)
    assert found[2].isnan().all()
    assert torch.equal(found[[0, 1, 3]], clean[[0, 1, 3]])


def test_identity__keeps_the_gradient() -> None:
    gradients = {"a": normal(3, 20).view(3, 4, 5), "b": normal(3, 20000).double()}
    rows = RowMap.from_shapes({"a": (4, 5), "b": (20000,)}, alignment=1)
    found = project(Identity(), gradients, rows, 0)
    expected = torch.cat([gradients["a"].flatten(1), gradients["b"].float()], dim=1)
    assert torch.equal(found, expected)


def test_stream__accepts_gradients_that_track_history_and_inference_mode() -> None:
    flat = normal(2, 600)
    expected = project_flat(SMALL, flat)
    assert torch.equal(project_flat(SMALL, flat.clone().requires_grad_()), expected)
    with torch.inference_mode():
        assert torch.equal(project_flat(SMALL, flat.clone()), expected)
    assert torch.equal(project_flat(SMALL, flat), expected)


ALL_KINDS = [SMALL, Identity(), Mask(9000), SJLT(64), Kronecker(4, 4)]


@pytest.mark.parametrize("skipped", [{"a"}, {"b"}, {"a", "c"}, {"a", "b", "c"}], ids=sorted)
@pytest.mark.parametrize("projector", ALL_KINDS, ids=lambda p: p.kind)
def test_skip__is_like_adding_zeros(projector: Projector, skipped: set[str]) -> None:
    sizes = {"a": 300, "b": 40000, "c": 100}
    gradients = {
        name: torch.zeros(2, size) if name in skipped else normal(2, size)
        for name, size in sizes.items()
    }
    shapes = {name: (10, size // 10) for name, size in sizes.items()}
    rows = RowMap.from_shapes(shapes, alignment=projector.row_alignment)
    stream = ProjectionStream(projector, rows, 2, 4)
    for name, gradient in gradients.items():
        if name in skipped:
            stream.skip(name)
        else:
            stream.add(name, gradient)
    assert torch.equal(stream.result(), project(projector, gradients, rows, 4))
    with pytest.raises(ValueError, match="each element once"):
        stream.skip("a")


def stream_of_two() -> ProjectionStream:
    rows = RowMap.from_shapes({"a": (2, 3), "b": (4,)}, alignment=512)
    return ProjectionStream(SMALL, rows, n_samples=2, checkpoint=0)


@settings(max_examples=12, deadline=None)
@given(order=st.permutations(range(6)))
@pytest.mark.parametrize("projector", [SMALL, Identity(), Mask(9000), Mask(9000, then=SMALL)])
def test_add__any_order(projector: Projector, order: list[int]) -> None:
    # Small integers: all sums are exact, so that the order of blocks cannot be seen either.
    lengths = [300, 33000, 1, 16384, 512, 700]
    gradients = {str(i): small_integers(2, n) for i, n in enumerate(lengths)}
    rows = RowMap.from_shapes(
        {name: g.shape[1:] for name, g in gradients.items()}, alignment=projector.row_alignment
    )
    stream = ProjectionStream(projector, rows, 2, 4)
    for i in order:
        stream.add(str(i), gradients[str(i)])
    assert torch.equal(stream.result(), project(projector, gradients, rows, 4))


@settings(max_examples=12, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("projector", [SMALL, Identity(), Mask(9000), Mask(9000, then=SMALL)])
def test_add__parts(projector: Projector, data: st.DataObject) -> None:
    gradients = {"a": normal(2, 300), "b": normal(2, 60000), "c": normal(2, 16384)}
    rows = RowMap.from_shapes(
        {name: g.shape[1:] for name, g in gradients.items()}, alignment=projector.row_alignment
    )
    stream = ProjectionStream(projector, rows, 2, 4)
    for name, gradient in gradients.items():
        size = gradient.shape[1]
        cuts = data.draw(st.lists(st.integers(0, size), max_size=4))
        edges = [0, *sorted(cuts), size]
        for start, stop in itertools.pairwise(edges):
            if stop > start:
                stream.add(name, gradient[:, start:stop], start)
    assert torch.equal(stream.result(), project(projector, gradients, rows, 4))


@pytest.mark.parametrize("projector", ALL_KINDS, ids=lambda p: p.kind)
def test_buffer_for__what_is_written_there_is_as_if_it_were_added(projector: Projector) -> None:
    gradients = {"a": normal(2, 300), "b": normal(2, 60000), "c": normal(2, 16384)}
    shapes = {name: (10, g.shape[1] // 10) for name, g in gradients.items()} | {"c": (16384,)}
    rows = RowMap.from_shapes(shapes, alignment=projector.row_alignment)
    stream = ProjectionStream(projector, rows, 2, 4)
    for name, gradient in gradients.items():
        first = 0
        while first < gradient.shape[1]:
            buffer = stream.buffer_for(name, first)
            n = 1000 if buffer is None else -(-buffer.shape[1] // (1 + first % 2))  # not always all
            part = gradient[:, first : first + n]
            stream(name, part if buffer is None else buffer[:, :n].copy_(part), first)
            first += n
    assert torch.equal(stream.result(), project(projector, gradients, rows, 4))


@settings(max_examples=20, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize(
    "projector", [Rademacher(24), SJLT(24), Mask(9000, then=SMALL), Identity()]
)
def test_add__zeros_are_left_out(projector: Projector, data: st.DataObject) -> None:
    """The same bits as alone, where nothing but zeros is left out."""
    flat = normal(5, 2 * ROW_BLOCK + 100)
    starts = range(0, flat.shape[1], ROW_BLOCK)
    for sample, start in data.draw(
        st.lists(st.tuples(st.integers(0, 4), st.sampled_from(starts)), max_size=15)
    ):
        flat[sample, start : start + ROW_BLOCK - data.draw(st.sampled_from([0, 1]))] = 0
    found = project_flat(projector, flat)
    for sample, alone in enumerate(flat):
        assert torch.equal(found[sample], project_flat(projector, alone[None])[0])
        expected = torch.zeros(1, found.shape[1], dtype=torch.float64)
        bound = projector.bind(RowMap.from_shapes({"flat": alone.shape}, alignment=512))
        selected = bound.selected_rows(4)
        rows = alone if selected is None else alone[torch.tensor(selected)]
        for start in range(0, len(rows), ROW_BLOCK):
            bound.project_block(rows[None, start : start + ROW_BLOCK], start, 4, expected)
        scaled = (expected * bound.scale(flat.shape[1])).float()
        assert torch.equal(found[sample], scaled[0])


def test_stream__row_map_of_another_alignment() -> None:
    rows = RowMap.from_shapes({"a": (3,)}, alignment=1)
    with pytest.raises(ValueError, match=r"multiple of 512.*got 1"):
        ProjectionStream(SMALL, rows, 1, 0)


@pytest.mark.parametrize(
    ("name", "shape", "first"),
    [
        ("c", (2, 4), None),  # no such name
        ("a", (2, 5), None),
        ("a", (3, 6), None),
        ("a", (2, 3), 3),  # before what comes first
        ("a", (2, 7), 0),
        ("done", (2, 4), None),  # once more
        ("half", (2, 4), None),  # what comes first is there
        ("half", (2, 4), 1),
    ],
)
def test_add__refused(name: str, shape: tuple[int, ...], first: int | None) -> None:
    rows = RowMap.from_shapes({"a": (2, 3), "half": (4,), "done": (4,)}, alignment=512)
    stream = ProjectionStream(SMALL, rows, n_samples=2, checkpoint=0)
    stream.add("done", torch.zeros(2, 4))
    stream.add("half", torch.zeros(2, 1), 0)
    with pytest.raises(ValueError, match=f"'{name}'"):
        stream.add(name, torch.zeros(shape), first)
    with pytest.raises(ValueError, match=r"3 parameters, got 1.*'a'"):
        stream.result()


@pytest.mark.parametrize("checkpoint", [-1, 2**32])
def test_stream__checkpoint_out_of_range(checkpoint: int) -> None:
    rows = RowMap.from_shapes({"a": (3,)}, alignment=512)
    with pytest.raises(ValueError, match=r"checkpoint in \[0, 2\*\*32\), got"):
        ProjectionStream(SMALL, rows, 1, checkpoint)
