"""Known answers: random words at a few addresses, and what every kind of matrix makes of them.

``known_answers.json`` is for whoever implements the definition anew. Here Python integers compute
it again; ``python tests/projection/test_known_answers.py`` writes it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tests.projection.reference import philox4x32
from trakdask.projection import (
    SJLT,
    Kronecker,
    Mask,
    Projector,
    Rademacher,
    RowMap,
    project,
)
from trakdask.projection.philox import fill_words, split_seed

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


# ------------------------------------------------------------------ the oracle: integers of Python


def philox(counter: list[int], key: list[int]) -> list[int]:
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        low0, low1 = p0 % 2**32, p1 % 2**32
        c = [(p1 >> 32) ^ c[1] ^ k[0], low1, (p0 >> 32) ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def hexadecimal(words: list[int]) -> str:
    return " ".join(f"{word:08x}" for word in words)


def sign(words: list[int], row: int) -> Record:
    bit = (words[row // 32 % 4] >> row % 32) % 2
    return {"bit": bit, "sign": 1 - 2 * bit}


def nonzeros(words: list[int], row: int) -> Record:
    """Make four nonzeros, for two numbers of buckets."""
    buckets = {f"buckets_of_{p}": [word * p // 2**32 for word in words] for p in (4096, 1000)}
    return buckets | {"signs": [1 - 2 * (word % 2) for word in words]}


def mask_key(words: list[int], row: int) -> Record:
    low, high = words[:2] if row % 2 == 0 else words[2:]
    return {"key": f"{low + high * 2**32:016x}"}


class Stream(NamedTuple):
    name: str
    rows_per_counter: int
    n_columns: int
    make: Callable[[list[int], int], Record]


STREAMS = [
    Stream("rademacher", 128, 2**32, sign),
    Stream("sjlt", 1, 16, nonzeros),  # column: the number of the nonzero divided by 4
    Stream("mask", 2, 1, mask_key),
    Stream("kronecker left", 128, 2**16, sign),
    Stream("kronecker right", 128, 2**16, sign),
]


def record(number: int, seed: int, checkpoint: int, row: int, column: int) -> Record:
    stream = STREAMS[number]
    index, column = row // stream.rows_per_counter, column % stream.n_columns
    counter = [index % 2**32, column, checkpoint, index // 2**32 + number * 2**16]
    words = philox(counter, [seed % 2**32, seed // 2**32])
    address = {"seed": f"{seed:016x}", "checkpoint": checkpoint, "row": row, "column": column}
    made = stream.make(words, row)
    return {"stream": number, "name": stream.name, **address, "index": index,
            "words": hexadecimal(words), **made}  # fmt: skip


def all_answers() -> dict[str, list[Record]]:
    vectors = [
        {"counter": hexadecimal(counter), "key": hexadecimal(key), "words": words}
        for counter, key, words in RANDOM123
    ]
    cells = list(zip(ROWS, COLUMNS, strict=True))
    addresses = itertools.product(range(len(STREAMS)), SEEDS, cells)
    records = [record(number, *seed, *cell) for number, seed, cell in addresses]
    return {"random123": vectors, "records": records}


def as_text(answers: dict[str, list[Record]]) -> str:
    """Return JSON with one record per line."""
    parts = [
        f' "{name}": [\n' + ",\n".join(f"  {json.dumps(line)}" for line in lines) + "\n ]"
        for name, lines in answers.items()
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    PATH.write_text(as_text(all_answers()))

ANSWERS: dict[str, list[Record]] = json.loads(PATH.read_text())
RECORDS = ANSWERS["records"]


def test_philox__random123_known_answers() -> None:
    for vector in ANSWERS["random123"]:
        counter, key = (
            [int(word, 16) for word in vector[name].split()] for name in ("counter", "key")
        )
        assert hexadecimal(philox(counter, key)) == vector["words"]
        assert hexadecimal(philox4x32(tuple(counter), tuple(key)).tolist()) == vector["words"]


def test_known_answers__are_those_of_the_definition() -> None:
    assert PATH.read_text() == as_text(all_answers())
    assert {answer["stream"] for answer in RECORDS} == set(range(5))


def test_philox4x32__known_answers() -> None:
    for answer in RECORDS:
        index, high = answer["index"], answer["stream"] << 16
        counter = (index % 2**32, answer["column"], answer["checkpoint"], index >> 32 | high)
        words = philox4x32(counter, split_seed(int(answer["seed"], 16)))
        assert hexadecimal(words.tolist()) == answer["words"], answer


@pytest.mark.parametrize("numba", ["0", "1"])
def test_fill_words__known_answers(numba: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAKDASK_NUMBA", numba)
    for answer in RECORDS:
        # Inside a grid, where there is room: neighbours must not move the words.
        before = [min(1, answer[name]) for name in ("column", "index")]
        grid = np.empty((before[0] + 1, before[1] + 1, 2), np.uint64)
        fill_words(
            grid,
            answer["index"] - before[1],
            answer["column"] - before[0],
            seed=int(answer["seed"], 16),
            checkpoint=answer["checkpoint"],
            stream=answer["stream"],
        )
        words = [int(pair) >> shift & 0xFFFFFFFF for pair in grid[-1, -1] for shift in (0, 32)]
        assert hexadecimal(words) == answer["words"], answer


# ------------------------------------------------------------------ rows of the matrices themselves


def matrix_row(projector: Projector, answer: Record, shape: tuple[int, ...]) -> list[float]:
    """Project the unit vector of the recorded row, without scaling."""
    start, position = answer["row"] // 16384 * 16384, answer["row"] % 16384
    shapes = {"before": (start,), "here": shape}
    row_map = RowMap.from_shapes(shapes, alignment=512)
    block = torch.zeros(1, position + 1)
    block[0, position] = 1
    out = torch.zeros(1, projector.width(row_map.n_rows), dtype=torch.float64)
    projector.bind(row_map).project_block(block, start, answer["checkpoint"], out)
    return out[0].tolist()


def recorded(name: str) -> list[Record]:
    return [answer for answer in RECORDS if answer["name"] == name and answer["column"] < 2**10]


def seed_of(answer: Record) -> int:
    return int(answer["seed"], 16)


def test_rademacher__known_answers() -> None:
    for answer in recorded("rademacher"):
        projector = Rademacher(answer["column"] + 1, seed_of(answer))
        found = matrix_row(projector, answer, (answer["row"] % 16384 + 1,))
        assert found[answer["column"]] == answer["sign"], answer


@pytest.mark.parametrize("n_buckets", [4096, 1000])
def test_sjlt__known_answers(n_buckets: int) -> None:
    for answer in recorded("sjlt"):
        sums = [0.0] * n_buckets
        for bucket, value in zip(answer[f"buckets_of_{n_buckets}"], answer["signs"], strict=True):
            sums[bucket] += value
        for factor, sparsity in ((1, 4 * answer["column"] + 4), (-1, 4 * answer["column"])):
            if sparsity:
                projector = SJLT(n_buckets, sparsity, seed_of(answer))
                row = matrix_row(projector, answer, (answer["row"] % 16384 + 1,))
                sums = [total - factor * value for total, value in zip(sums, row, strict=True)]
        assert not any(sums), answer


@pytest.mark.parametrize(("name", "other"), [("kronecker left", 4), ("kronecker right", 3)])
def test_kronecker__known_answers(name: str, other: int) -> None:
    for answer in recorded(name):
        n, width, seed = answer["row"] % 16384 + 1, answer["column"] + 1, seed_of(answer)
        sides, shape = ((width, 1), (n, 1)) if other == 4 else ((1, width), (1, n))
        found = matrix_row(Kronecker(*sides, seed), answer, shape)
        start = answer["row"] // 16384 * 16384
        factor = record(other, seed, answer["checkpoint"], start, 0)["sign"]
        assert found[answer["column"]] == answer["sign"] * factor, answer


@pytest.mark.parametrize(("seed", "checkpoint"), SEEDS)
def test_mask__order_of_the_keys(seed: int, checkpoint: int) -> None:
    keys = [record(2, seed, checkpoint, row, 0)["key"] for row in range(100)]
    row_map = RowMap.from_shapes({"flat": (100,)}, alignment=1)
    rows = torch.arange(100.0)[None]
    found = project(Mask(100, seed=seed), {"flat": rows}, row_map, checkpoint)
    assert found[0].tolist() == sorted(range(100), key=keys.__getitem__)
