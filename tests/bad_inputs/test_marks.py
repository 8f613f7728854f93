"""Bad inputs of marks of samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import trakdask as td
from tests.bad_inputs.bad_input import BadInput, check, parametrize
from tests.bad_inputs.stores import FEATURES, store_in
from trakdask.explorer import Marks


def mark(samples: Any, label: Any = "remove", who: Any = "") -> Callable[[Path], object]:
    return lambda folder: Marks(folder / "m.parquet", who=who).mark(samples, label)


def beside(store: Any) -> Callable[[Path], object]:
    return lambda folder: Marks.beside(store)


def marked_by_text(folder: Path) -> Marks:
    marks = Marks.beside(store_in(folder))
    marks.mark(["a"], "remove")
    return marks


def drop_marked(folder: Path) -> object:
    marks = marked_by_text(folder)
    return td.drop(marks.store, where=marks.where("remove"))


ROWS = [
    BadInput("Marks", "a folder", lambda folder: Marks(folder), ValueError, ["a file"]),
    BadInput("Marks", "a URL of nothing known", lambda folder: Marks("nowhere://m.parquet"), ValueError, ["nowhere"]),
    BadInput("Marks", "no such folder", lambda folder: Marks(folder / "no" / "m.parquet"), FileNotFoundError, ["no/m.parquet"]),
    BadInput("Marks", "beside a store in no folder", lambda folder: Marks.beside(folder / "no" / "train.zarr"), FileNotFoundError, ["no/train.marks.parquet"]),
    BadInput("Marks", "who is no text", mark([1], who=3), TypeError, ["who", "got 3"]),
    BadInput("Marks", "no such mark", mark([1], "remvoe"), ValueError, ["'remvoe'", "'remove'"]),
    BadInput("Marks", "samples are fractions", mark([1.5]), TypeError, ["got [1.5]"]),
    BadInput("Marks", "samples are a mask", mark([True, False]), TypeError, ["got [True, False]"]),
    BadInput("Marks", "numbers beside text", lambda folder: marked_by_text(folder).mark(7, "remove"), TypeError, ["'a'", "7"]),
    BadInput("Marks", "no such mark to drop", lambda folder: Marks(folder / "m.parquet").where("old"), ValueError, ["'old'"]),
    BadInput("Marks", "features of no store", lambda folder: Marks(folder / "m.parquet").ids(FEATURES), ValueError, ["'sample'", "8 samples"]),
    BadInput("Marks", "features of another store", lambda folder: Marks.beside(store_in(folder)).ids(FEATURES[{"sample": [1, 0, *range(2, 8)]}]), ValueError, ["f.zarr", "8 samples", "assign_coords"]),
    BadInput("drop", "marks of another kind", drop_marked, TypeError, ["'a'"]),
]  # fmt: skip


@parametrize(ROWS)
def test_marks__bad_input(row: BadInput, tmp_path: Path) -> None:
    check(row, tmp_path)
