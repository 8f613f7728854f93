from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import pytest

from trakdask.projection.philox import (
    STREAM_RADEMACHER,
    CounterGrid,
    philox4x32,
    rademacher_bits,
    split_seed,
)

SEEDS = [(0, 0), (0x123456789ABCDEF0, 7)]


def philox_by_hand(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 on Python integers, one counter at a time."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        low0, low1 = p0 & 0xFFFFFFFF, p1 & 0xFFFFFFFF
        c = [(p1 >> 32) ^ c[1] ^ k[0], low1, (p0 >> 32) ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def bit_by_hand(row: int, column: int, seed: int, checkpoint: int) -> int:
    block = row >> 7
    counter = [block & 0xFFFFFFFF, column, checkpoint, block >> 32]
    words = philox_by_hand(counter, [seed & 0xFFFFFFFF, seed >> 32])
    return (words[(row >> 5) & 3] >> (row & 31)) & 1


def packed(n_cols: int, row_block: int, n_blocks: int, **address: int) -> npt.NDArray[np.uint8]:
    words = np.empty((n_cols, n_blocks, 2), np.uint64)
    col_start = address.pop("col_start", 0)
    CounterGrid(words.size).fill_words(
        words, row_block, col_start, stream=STREAM_RADEMACHER, **address
    )
    return words.view(np.uint8).reshape(n_cols, -1)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox4x32__random123_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: str
) -> None:
    assert " ".join(f"{word:08x}" for word in philox4x32(counter, key)) == expected


@pytest.mark.parametrize(
    ("seed", "checkpoint", "row", "column", "expected"),
    [
        (*SEEDS[0], 0, 1, "6ad0c5ec ea236249 73a459f5 074944b3"),
        (*SEEDS[0], 128, 0, "f8e4cca4 5cb200db b1a574eb 097eff67"),
        (*SEEDS[0], 2**39 + 256, 4095, "f93b21d2 bf9512f3 ff382dc4 3bcd7093"),
        (*SEEDS[1], 0, 0, "e2aedaf7 2b74fe69 9b175b0c ade5d4db"),
        (*SEEDS[1], 0, 1, "121a7117 a53519ac ed701ab2 ded51813"),
        (*SEEDS[1], 128, 0, "1fdc6a16 328be767 bff8c872 9cbcc4fd"),
        (*SEEDS[1], 2**39 + 256, 4095, "ad007f00 e7bd5dad 7773b5a8 008341db"),
    ],
)
def test_philox4x32__words_of_the_definition(
    seed: int, checkpoint: int, row: int, column: int, expected: str
) -> None:
    block = row >> 7
    counter = (block & 0xFFFFFFFF, column, checkpoint, block >> 32)
    words = philox4x32(counter, split_seed(seed))
    assert " ".join(f"{word:08x}" for word in words) == expected
    fast = packed(1, block, 1, col_start=column, seed=seed, checkpoint=checkpoint)
    assert " ".join(f"{word:08x}" for word in fast.view(np.uint32)[0]) == expected


@pytest.mark.parametrize(
    ("seed", "checkpoint", "expected"),
    [
        (*SEEDS[0], "a063 27bc c652 458e b937 58f0 f547 f052"),
        (*SEEDS[1], "fa0e f058 eb8f 3405 e425 992f a4d9 9712"),
    ],
)
def test_rademacher_bits__first_corner(seed: int, checkpoint: int, expected: str) -> None:
    bits = rademacher_bits(0, 8, 0, 16, seed=seed, checkpoint=checkpoint)
    rows = [int("".join(map(str, bits[:, row])), 2) for row in range(8)]
    assert " ".join(f"{row:04x}" for row in rows) == expected


@pytest.mark.parametrize(
    ("seed", "checkpoint", "digest", "n_ones"),
    [
        (*SEEDS[0], "194ec9b24bff7ded6efb45cdc1afed7f4533e93ec50b428f89ac84bf8d2d8ac7", 1048308),
        (*SEEDS[1], "c9bf4bf7a13bf510588112934cbb98eef000b2a65499fd2567b62e42a23f70c3", 1046626),
    ],
)
def test_rademacher_bits__sha256_of_the_definition(
    seed: int, checkpoint: int, digest: str, n_ones: int
) -> None:
    bits = rademacher_bits(0, 4096, 0, 512, seed=seed, checkpoint=checkpoint)
    bytes_ = np.packbits(bits, axis=1, bitorder="little")
    assert int(bits.sum()) == n_ones
    assert hashlib.sha256(bytes_.tobytes()).hexdigest() == digest
    fast = packed(512, 0, 32, seed=seed, checkpoint=checkpoint)
    assert hashlib.sha256(fast.tobytes()).hexdigest() == digest


@pytest.mark.parametrize("row_start", [0, 77, 2**39 + 300, 2**47 - 200])
def test_rademacher_bits__one_bit_at_a_time(row_start: int) -> None:
    seed, checkpoint, column = 2**64 - 3, 2**32 - 1, 2**32 - 2
    bits = rademacher_bits(row_start, 200, column, 2, seed=seed, checkpoint=checkpoint)
    assert bits.shape == (2, 200)
    assert bits.dtype == np.uint8
    for row in range(0, 200, 23):
        for i in range(2):
            expected = bit_by_hand(row_start + row, column + i, seed, checkpoint)
            assert bits[i, row] == expected


@pytest.mark.parametrize("row_block", [0, 5, 2**32 - 2, 2**40 - 3])
def test_fill_words__is_the_reference(row_block: int) -> None:
    # From 2**32 - 2 the low counter word wraps inside the window.
    address = {"seed": 2**63 + 11, "checkpoint": 2**32 - 5}
    fast = packed(3, row_block, 3, col_start=9, **address)
    bits = rademacher_bits(row_block * 128, 3 * 128, 9, 3, **address)
    np.testing.assert_array_equal(np.unpackbits(fast, axis=1, bitorder="little"), bits)


def test_fill_words__buffers_carry_nothing_over() -> None:
    grid = CounterGrid(64)
    large, small = np.empty((8, 8, 2), np.uint64), np.empty((2, 3, 2), np.uint64)
    grid.fill_words(large, 0, 0, seed=1, checkpoint=1, stream=5)
    grid.fill_words(small, 7, 4, seed=2, checkpoint=3, stream=STREAM_RADEMACHER)
    expected = packed(2, 7, 3, col_start=4, seed=2, checkpoint=3)
    np.testing.assert_array_equal(small.view(np.uint8).reshape(2, -1), expected)
