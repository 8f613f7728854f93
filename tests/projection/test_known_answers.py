"""Known answers: random words at a few addresses, and what every kind of matrix makes of them.

``known_answers.json`` is for whoever implements the definition anew.
``python -m tests.projection.test_known_answers`` writes it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.projection.reference import philox4x32, signs, words
from trakdask.projection import SJLT, Projector, Rademacher, RowMap
from trakdask.projection.philox import fill_words

PATH = Path(__file__).with_name("known_answers.json")

Record = dict[str, Any]

RANDOM123 = [
    ([0, 0, 0, 0], [0, 0], "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ([2**32 - 1] * 4, [2**32 - 1] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]
SEEDS = [(0, 0), (0x123456789ABCDEF0, 7), (2**64 - 1, 2**32 - 1)]  # with checkpoints
# Rows on both sides of those at which an index no longer fits 32 bits: 2**32, 2**36 and 2**39.
ROWS = [0, 77, 2**32 + 5, 2**36 + 19, 2**39 - 1, 2**39 + 355, 2**47 - 1]
COLUMNS = [0, 1, 2, 999, 63, 7, 2**32 - 1]


def hexadecimal(numbers: list[int]) -> str:
    return " ".join(f"{number:08x}" for number in numbers)


def sign(four: list[int], row: int) -> Record:
    bit = (four[row // 32 % 4] >> row % 32) % 2
    return {"bit": bit, "sign": 1 - 2 * bit}


def buckets(four: list[int], row: int) -> Record:
    """Make four nonzeros, for two numbers of buckets."""
    names = {f"buckets_of_{p}": [word * p // 2**32 for word in four] for p in (4096, 1000)}
    return names | {"signs": [1 - 2 * (word % 2) for word in four]}


def mask_key(four: list[int], row: int) -> Record:
    low, high = four[:2] if row % 2 == 0 else four[2:]
    return {"key": f"{low + high * 2**32:016x}"}


# Name, rows of a counter, columns, and what is made of the four words.
STREAMS: list[tuple[str, int, int, Callable[[list[int], int], Record]]] = [
    ("rademacher", 128, 2**32, sign),
    ("sjlt", 1, 16, buckets),  # column: the number of the nonzero divided by 4
    ("mask", 2, 1, mask_key),
    ("kronecker left", 128, 2**16, sign),
    ("kronecker right", 128, 2**16, sign),
]


def record(stream: int, seed: int, checkpoint: int, row: int, column: int) -> Record:
    name, rows_per_counter, n_columns, make = STREAMS[stream]
    index, column = row // rows_per_counter, column % n_columns
    four = words(stream, index, column, seed, checkpoint).tolist()
    address = {"seed": f"{seed:016x}", "checkpoint": checkpoint, "row": row, "column": column}
    return {"stream": stream, "name": name, **address, "index": index,
            "words": hexadecimal(four), **make(four, row)}  # fmt: skip


def as_text() -> str:
    """Return JSON with one record per line."""
    vectors = [
        {"counter": hexadecimal(counter), "key": hexadecimal(key), "words": answer}
        for counter, key, answer in RANDOM123
    ]
    cells = list(zip(ROWS, COLUMNS, strict=True))
    addresses = itertools.product(range(len(STREAMS)), SEEDS, cells)
    records = [record(stream, *seed, *cell) for stream, seed, cell in addresses]
    parts = [
        f' "{name}": [\n' + ",\n".join(f"  {json.dumps(line)}" for line in lines) + "\n ]"
        for name, lines in (("random123", vectors), ("records", records))
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    PATH.write_text(as_text())

RECORDS: list[Record] = json.loads(PATH.read_text())["records"]


def recorded(name: str) -> list[Record]:
    return [answer for answer in RECORDS if answer["name"] == name and answer["column"] < 2**10]


def seed_of(answer: Record) -> int:
    return int(answer["seed"], 16)


# ------------------------------------------------------------------------------------- random words


def test_reference__has_the_answers_of_random123_and_of_the_file() -> None:
    for counter, key, answer in RANDOM123:
        assert hexadecimal(philox4x32(tuple(counter), tuple(key)).tolist()) == answer
    assert PATH.read_text() == as_text()


def test_fill_words__known_answers(backend: str) -> None:
    for answer in RECORDS:
        # Inside a grid, where there is room: neighbours must not move the words.
        before = [min(1, answer[name]) for name in ("column", "index")]
        grid = np.empty((before[0] + 1, before[1] + 1, 2), np.uint64)
        fill_words(
            grid,
            answer["index"] - before[1],
            answer["column"] - before[0],
            seed=seed_of(answer),
            checkpoint=answer["checkpoint"],
            stream=answer["stream"],
        )
        four = [int(pair) >> shift & 0xFFFFFFFF for pair in grid[-1, -1] for shift in (0, 32)]
        assert hexadecimal(four) == answer["words"], answer


DIGESTS = {
    SEEDS[0]: "194ec9b24bff7ded6efb45cdc1afed7f4533e93ec50b428f89ac84bf8d2d8ac7",
    SEEDS[1]: "c9bf4bf7a13bf510588112934cbb98eef000b2a65499fd2567b62e42a23f70c3",
}


@pytest.mark.parametrize(("seed", "checkpoint"), DIGESTS)
def test_fill_words__sha256_of_512_columns(seed: int, checkpoint: int, backend: str) -> None:
    grid = np.empty((512, 32, 2), np.uint64)
    fill_words(grid, 0, 0, seed=seed, checkpoint=checkpoint, stream=0)
    assert hashlib.sha256(grid.tobytes()).hexdigest() == DIGESTS[seed, checkpoint]
    bits = np.unpackbits(grid.view(np.uint8).reshape(512, -1), axis=1, bitorder="little")
    expected = signs(0, 4096, 0, 512, seed=seed, checkpoint=checkpoint)
    assert (expected == (1 - 2.0 * bits.T)).all()


@pytest.mark.parametrize("index", [0, 2**32 - 3, 2**40 - 9])  # where an index needs a second word
@pytest.mark.parametrize("shape", [(3, 7), (2, 40_000), (700, 90)])  # small, long and wide grids
def test_fill_words__is_the_reference(shape: tuple[int, int], index: int, backend: str) -> None:
    out = np.empty((*shape, 2), np.uint64)
    seed, checkpoint, stream, column = 2**64 - 2, 2**32 - 1, 5, 2**32 - 1000
    fill_words(out, index, column, seed=seed, checkpoint=checkpoint, stream=stream)
    indices = np.arange(index, index + shape[1])
    columns = np.arange(column, column + shape[0])[:, None]
    expected = words(stream, indices, columns, seed, checkpoint)
    assert (out.view(np.uint32) == np.moveaxis(expected, 0, -1)).all()


# ------------------------------------------------------------------ rows of the matrices themselves


def matrix_row(projector: Projector, answer: Record, shape: tuple[int, ...]) -> list[float]:
    """Project the unit vector of the recorded row, without scaling."""
    start, position = answer["row"] // 16384 * 16384, answer["row"] % 16384
    row_map = RowMap.from_shapes({"before": (start,), "here": shape}, alignment=512)
    block = torch.zeros(1, position + 1)
    block[0, position] = 1
    out = torch.zeros(1, projector.width(row_map.n_rows), dtype=torch.float64)
    projector.bind(row_map).project_block(block, start, answer["checkpoint"], out)
    return out[0].tolist()


def test_rademacher__known_answers() -> None:
    for answer in recorded("rademacher"):
        projector = Rademacher(answer["column"] + 1, seed_of(answer))
        found = matrix_row(projector, answer, (answer["row"] % 16384 + 1,))
        assert found[answer["column"]] == answer["sign"], answer


@pytest.mark.parametrize("n_buckets", [4096, 1000])
def test_sjlt__known_answers(n_buckets: int) -> None:
    for answer in recorded("sjlt"):
        sums = np.zeros(n_buckets)
        np.add.at(sums, answer[f"buckets_of_{n_buckets}"], answer["signs"])
        for factor, sparsity in ((1, 4 * answer["column"] + 4), (-1, 4 * answer["column"])):
            if sparsity:
                projector = SJLT(n_buckets, sparsity, seed_of(answer))
                row = matrix_row(projector, answer, (answer["row"] % 16384 + 1,))
                sums -= factor * np.array(row)
        assert not sums.any(), answer
