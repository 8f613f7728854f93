"""Random words: known answers, and the reference, also at addresses that need a second word."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.projection.reference import nonzeros, philox4x32, signs, words
from trakdask.projection import SJLT, Projector, Rademacher, RowMap
from trakdask.projection.philox import fill_words

KNOWN = json.loads(Path(__file__).with_name("known_answers.json").read_text())
"""Answers of Random123, and words and entries of all matrices, for whoever implements them anew."""


def hexadecimal(numbers: Iterable[int]) -> str:
    return " ".join(f"{number:08x}" for number in numbers)


def test_words__known_answers(backend: str) -> None:
    for answer in KNOWN["random123"]:
        counter, key = ([int(word, 16) for word in answer[n].split()] for n in ("counter", "key"))
        assert hexadecimal(philox4x32(tuple(counter), tuple(key)).tolist()) == answer["words"]
    for answer in KNOWN["records"]:
        seed, found = int(answer["seed"], 16), np.empty((1, 1, 2), np.uint64)
        address = {name: answer[name] for name in ("index", "column", "checkpoint", "stream")}
        fill_words(found, **address, seed=seed)
        four = words(**address, seed=seed).tolist()
        assert hexadecimal(four) == hexadecimal(found.view(np.uint32)[0, 0]) == answer["words"]


@pytest.mark.parametrize(
    ("shape", "index"),  # small, long and wide grids, also where an index needs a second word
    [((3, 7), 0), ((3, 7), 2**40 - 9), ((2, 40_000), 2**32 - 3), ((700, 90), 2**32 - 3)],
)
def test_fill_words__is_the_reference(shape: tuple[int, int], index: int, backend: str) -> None:
    out = np.empty((*shape, 2), np.uint64)
    seed, checkpoint, stream, column = 2**64 - 2, 2**32 - 1, 5, 2**32 - 1000
    fill_words(out, index, column, seed=seed, checkpoint=checkpoint, stream=stream)
    indices = np.arange(index, index + shape[1])
    columns = np.arange(column, column + shape[0])[:, None]
    expected = words(stream, indices, columns, seed, checkpoint)
    assert (out.view(np.uint32) == np.moveaxis(expected, 0, -1)).all()


@pytest.mark.parametrize("row", [2**32, 2**39, 2**47 - 2**14])
@pytest.mark.parametrize("projector", [Rademacher(9, 5), SJLT(9, 6, 5)], ids=str)
def test_project_block__rows_far_down(projector: Projector, row: int, backend: str) -> None:
    """Rows of the matrix itself, by the gradients that are 1 in one row."""
    bound = projector.bind(RowMap.from_shapes({"before": (row,), "here": (140, 1)}, alignment=512))
    found = torch.zeros(140, 9, dtype=torch.float64)
    bound.project_block(torch.eye(140), row, 2**32 - 1, found)
    address = {"seed": 5, "checkpoint": 2**32 - 1}
    expected = signs(row, 140, 0, 9, **address)
    if isinstance(projector, SJLT):
        columns, values = nonzeros(projector, row, 140, 2**32 - 1)
        expected = np.zeros((140, 9))
        np.add.at(expected, (np.arange(140)[:, None], columns), values)
    np.testing.assert_array_equal(found, expected)
