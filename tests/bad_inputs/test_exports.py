"""Bad inputs of what writes results for others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import trakdask as td
from tests.bad_inputs.bad_input import BadInput, check, parametrize
from tests.bad_inputs.stores import (
    FEATURES,
    file,
    scores,
    store_in,
)


def to_zarr(data: Any = None, at: Any = None, **options: Any) -> Callable[[Path], object]:
    return lambda folder: td.to_zarr(
        scores() if data is None else data, at(folder) if at else folder / "s.zarr", **options
    )


def to_parquet(data: Any = None, at: Any = None, **options: Any) -> Callable[[Path], object]:
    return lambda folder: td.to_parquet(
        scores() if data is None else data, at(folder) if at else folder / "s.pq", **options
    )


def exported_twice(export: Callable[..., None]) -> Callable[[Path], object]:
    def call(folder: Path) -> None:
        for _ in range(2):
            export(scores(), folder / "s")

    return call


def exports(export: Callable[..., Callable[[Path], object]]) -> list[tuple[Any, ...]]:
    """Return what both exports refuse."""
    return [
        ("a page of the web", export(at=lambda _: "http://h/s"), ValueError, ["'http://h/s'"]),
        ("path of a file", export(at=file), NotADirectoryError, ["notes.txt"]),
        ("feature store", export(at=store_in), FileExistsError, ["f.zarr"]),
        ("too large", export(max_bytes=50), ValueError, ["50 B", "184 B"]),
    ]  # fmt: skip


TO_ZARR = [*exports(to_zarr), ("twice", exported_twice(td.to_zarr), FileExistsError, ["overwrite"])]
TO_PARQUET = [
    *(row for row in exports(to_parquet) if row[0] != "too large"),
    ("twice", exported_twice(td.to_parquet), FileExistsError, ["overwrite"]),
    ("too large", to_parquet(max_bytes=50), ValueError, ["50 B"]),
    ("features", to_parquet(FEATURES), ValueError, ["proj_dim"]),
]  # fmt: skip

ROWS = [
    BadInput(function, *row)
    for function, table in {"to_zarr": TO_ZARR, "to_parquet": TO_PARQUET}.items()
    for row in table
]
ROWS.append(
    BadInput("save", "a page of the web", lambda _: td.save(FEATURES, "https://h/s"), ValueError,
             ["'https://h/s'"])
)  # fmt: skip


@parametrize(ROWS)
def test_bad_input(row: BadInput, tmp_path: Path) -> None:
    check(row, tmp_path)
