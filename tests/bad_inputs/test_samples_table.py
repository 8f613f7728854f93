"""Bad inputs of the functions that make samples: from_arrays, from_torch, from_dataframe."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import xarray as xr
from scipy import sparse
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import trakdask as td
from tests.bad_inputs.bad_input import BadInput, one_test

X = np.zeros((4, 2), np.float32)
HIDDEN = np.ma.array(X, mask=[[0, 0], [0, 0], [0, 1], [0, 0]])
TWO = xr.DataArray(
    np.zeros((4, 2, 2)), {"checkpoint": ["a", "b"]}, ("sample", "proj_dim", "checkpoint")
)
NAMED = xr.DataArray(X, {"name": ("sample", [*"abcd"])}, ("sample", "proj_dim"))
ITEMS = [(np.zeros(2), 1)] * 4
UTC = datetime.UTC
SHUFFLED = pd.DataFrame({"label": [0, 1, 2, 3]}, index=[2, 0, 3, 1])
TIMES = pd.DataFrame({
    "day": pd.to_datetime(["2020-01-01"] * 3), "zone": pd.to_datetime(["2020-01-01"] * 3, utc=True),
    "took": pd.to_timedelta([1, 2, 3], "D"), "month": pd.period_range("2020-01", periods=3, freq="M"),
    "kind": pd.Categorical(["a", "b", "a"]), "y": [0.5, 1.0, 2.0],
})  # fmt: skip
FRAME = pd.DataFrame({"x": [1.0, 2.0, 3.0], "text": ["a", "b", "c"], "day": [1, 2, 3]})


def arrays(**arrays: Any) -> Callable[[Path], object]:
    return lambda _: td.from_arrays(arrays)


def coord(values: Any, name: Any = "c") -> Callable[[Path], object]:
    return lambda _: td.from_arrays({"x": X}, coords={name: values})


def dataset(given: Any, names: Any = ("x", "y"), **options: Any) -> Callable[[Path], object]:
    return lambda _: td.from_torch(given, names=names, **options)


def computed(given: Any, **options: Any) -> Callable[[Path], object]:
    names = options.pop("names", ("x", "y"))
    return lambda _: td.from_torch(given, names=names, **options).compute(scheduler="sync")


def table(source: Any, variables: Any = {"x": "x"}, **options: Any) -> Callable[[Path], object]:  # noqa: B006
    def call(folder: Path) -> object:
        given = source(folder) if callable(source) else source
        return td.from_dataframe(given, variables=variables, **options).compute(scheduler="sync")

    return call


RAGGED = pd.DataFrame({"tokens": [[1], [2]], "two": [[1], [2, 3]], "day": [1, 2]})


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        yield 1


class Broken(list):
    """Items as of a list, of which the third cannot be read."""

    def __getitem__(self, index: Any) -> Any:
        if index == 2:
            raise KeyError("img_2.png")
        return super().__getitem__(index)


def unpicklable() -> Any:
    class Open(list):
        def __reduce__(self) -> Any:
            raise TypeError("cannot pickle an open file")

    return Open(ITEMS)


def written(folder: Path, frame: pd.DataFrame | None = None) -> str:
    path = folder / "table.parquet"
    frame = FRAME if frame is None else frame
    pq.write_table(pa.Table.from_pandas(frame), path)
    return str(path)


def truncated(folder: Path) -> str:
    path = Path(written(folder))
    path.write_bytes(path.read_bytes()[:-20])
    return str(path)


@functools.cache
def unknown_chunks() -> Any:
    x = da.arange(10, chunks=5)
    return x[x > 3]


def features(feature: Any, **options: Any) -> Callable[[Path], object]:
    return lambda _: td.from_features(feature, "words", **options)


A, T, D, F = "from_arrays", "from_torch", "from_dataframe", "features"

ROWS = [
    BadInput(A, "a list", lambda _: td.from_arrays([X]), TypeError, ["list"]),
    BadInput(A, "no samples", arrays(x=X[:0]), ValueError, ["'x'"]),
    BadInput(A, "other lengths", arrays(x=X, y=X[:3]), ValueError, ["'y'", "{'sample': 4}", "{'sample': 3}"]),
    BadInput(A, "a coord of other samples", lambda _: td.from_arrays({"x": X}, coords={"day": [1, 2, 3]}), ValueError, ["'day'", "(3,)", "4 samples"]),
    BadInput(A, "a coord of one number", lambda _: td.from_arrays({"x": X}, coords={"day": 3}), TypeError, ["'day'", "got 3", "one value for each"]),
    BadInput(A, "a coord named as a variable", lambda _: td.from_arrays({"x": X}, coords={"x": [1, 2, 3, 4]}), ValueError, ["'x'", "'my_x'"]),
    BadInput(A, "a number", arrays(x=3.5), TypeError, ["'x'", "float"]),
    BadInput(A, "text", arrays(x=["a", "b"]), TypeError, ["'x'", "<U1"]),
    BadInput(A, "objects", arrays(x=np.array([{}, 1])), TypeError, ["'x'", "object"]),
    BadInput(A, "masked", arrays(x=HIDDEN), ValueError, ["'x'", "sample 2"]),
    BadInput(A, "masked, lazy", arrays(x=da.from_array(HIDDEN)), ValueError, ["'x'"]),
    BadInput(A, "unknown chunks", arrays(x=unknown_chunks()), ValueError, ["compute_chunk"]),
    BadInput(A, "reserved name", arrays(sample=X), ValueError, ["'sample'"]),
    *[BadInput("from_torch", f"nested keys, {kind}", lambda _, value=value: td.from_torch([{"inputs": value}] * 4, names=["inputs"]), TypeError, ["'inputs'", "a name for each nested key"]) for kind, value in (("a mapping", {"ids": [1, 2]}), ("a list of them", [{"ids": 1}]))],
    BadInput(A, "name no str", lambda _: td.from_arrays({3: X}), TypeError, ["3", "int", "str"]),
    *[BadInput(A, f"chunks {chunks!r}", lambda _, chunks=chunks: td.from_arrays({"x": X}, chunks=chunks), ValueError if chunks == 0 else TypeError, ["chunks", repr(chunks), "chunks=512"]) for chunks in (0, 2.5)],
    BadInput(A, "coords a list", lambda _: td.from_arrays({"x": X}, coords=[1]), TypeError, ["list"]),
    BadInput(A, "coord of kinds", coord([1, "a", 2, 3]), TypeError, ["'c'", "'int', 'str'"]),
    BadInput(A, "coord missing", coord(["a", None, "b", "c"]), ValueError, ["'c'", "sample 1"]),
    BadInput(A, "coord lazy", coord(da.zeros(4)), TypeError, ["'c'"]),
    BadInput(A, "coord reserved", coord(range(4), "target"), ValueError, ["'target'"]),
    BadInput(A, "coord columns", lambda _: td.from_arrays({"x": X}, coords=pd.DataFrame(np.ones((4, 2)), columns=["a", "a"])), ValueError, ["'a'"]),
    BadInput(A, "coords shuffled", lambda _: td.from_arrays({"x": X}, coords=SHUFFLED), ValueError, ["'label'", "0 to 3", "[2, 0, 3, 1]", "reset_index(drop=True)", ".loc[range(4)]"]),
    *[BadInput(A, f"coord a {type(values).__name__}", coord(values), TypeError, ["'c'", "in the order", "a list"]) for values in ({1: "a", 0: "b", 2: "c", 3: "d"}, "abcd")],
    *[BadInput(F, f"{name} a shuffled Series", features(X, **{name: SHUFFLED.label / 2}), ValueError, [name, "[2, 0, 3, 1]", "reset_index"]) for name in ("output", "out_to_loss")],
    BadInput(F, "output of other samples", features(X, output=SHUFFLED.label.rename_axis("sample").to_xarray()), ValueError, ["output", "[2, 0, 3, 1]"]),
    BadInput(F, "output in another order", features(NAMED, output=NAMED[::-1, 0]), ValueError, ["output", "'name'", "which have a", "got d"]),
    BadInput(A, "date before nanoseconds", coord([datetime.date(2020, 1, 1), *[datetime.date(1066, 10, 14)] * 3]), ValueError, ["'c'", "1677-09-21", "1066-10-14", "sample 1", "astype(str)"]),
    BadInput(A, "time zones", coord([datetime.datetime(2020, 1, 1, tzinfo=zone) for zone in (UTC, UTC, datetime.timezone(datetime.timedelta(hours=1)), UTC)]), TypeError, ["'c'", "time zone", "utc=True"]),
    BadInput(A, "periods", coord(pd.period_range("2020", periods=4, freq="M")), TypeError, ["'c'", "'Period'", "astype(str)"]),
    BadInput(A, "coords no field", lambda _: td.from_arrays({"x": X}, coords=["y"]), ValueError, ["'y'", "['x']"]),
    # ---------------------------------------------------------------------------------- from_torch
    BadInput(T, "DataLoader", dataset(DataLoader(TensorDataset(torch.ones(4, 2)), 2), "x"), TypeError, ["DataLoader"]),
    BadInput(T, "iterable", dataset(Stream(), "x"), TypeError, ["Stream"]),
    BadInput(T, "unpicklable", dataset(unpicklable()), TypeError, ["pickled"]),
    BadInput(T, "no names", dataset(ITEMS, ()), ValueError, ["names=()"]),
    BadInput(T, "names too few", dataset(ITEMS, "x"), ValueError, ["sample 0", "1 fields", "got 2"]),
    BadInput(T, "no key", dataset([{"imagex": 1}], "image"), ValueError, ["'image'", "['imagex']"]),
    BadInput(T, "huge integer", dataset([(2**70, 1)]), ValueError, ["'x'", "sample 0"]),
    BadInput(T, "other shape", computed([*ITEMS, (np.zeros(3), 1)]), ValueError, ["'x'", "(3,)", "sample 4"]),
    BadInput(T, "collate_fn of no batch", dataset(ITEMS, collate_fn=lambda items: items[0]), ValueError, ["collate_fn", "'x'", "(2,)", "sample 0"]),
    BadInput(T, "collate_fn fails", dataset(ITEMS, collate_fn=lambda items: items[7]), RuntimeError, ["collate_fn", "sample 0", "IndexError"]),
    BadInput(T, "other dtype", computed([*ITEMS, (np.zeros(2), 1.5)]), ValueError, ["'y'", "int64", "float32", "sample 4"]),
    BadInput(T, "unreadable", computed(Broken(ITEMS)), RuntimeError, ["sample 2", "img_2.png"]),
    # ------------------------------------------------------------------------------ from_dataframe
    BadInput(D, "a number", table(3), TypeError, ["int", "parquet"]),
    BadInput(D, "nothing there", table(lambda f: f / "no.parquet"), FileNotFoundError, ["no.parquet"]),
    BadInput(D, "empty folder", table(lambda f: f), FileNotFoundError, ["matches none"]),
    BadInput(D, "truncated", table(truncated), ValueError, ["table.parquet"]),
    BadInput(D, "unknown scheme", table("foo://bucket/x.parquet"), ValueError, ["foo"]),
    *[BadInput(F, f"{array.ndim} axes", features(array), ValueError, ["feature", str(array.shape), f"reshape{remedy}"]) for array, remedy in ((X[:, 0], (4, -1)), (X[:, None, None], (4, -1)))],
    BadInput(F, "no columns", features(X[:, :0]), ValueError, ["one or more columns", "got none"]),
    BadInput(F, "output of two axes too many", features(X, output=X[:, :, None]), ValueError, ["output", "reshape(4,)"]),
    BadInput(F, "sparse", features(sparse.csr_array(X)), TypeError, ["'feature'", "csr_array", "toarray()"]),
    BadInput(F, "complex", features(X * 1j), ValueError, ["'feature'", "complex"]),
    BadInput(F, "text, lazy", features(da.from_array(X.astype("U1"))), TypeError, ["'feature'", "<U1"]),
    BadInput(F, "masked, lazy", features(da.from_array(HIDDEN)), ValueError, ["'feature'", "without a mask"]),
    BadInput(F, "fewer outputs", features(X, output=[1.0, 2.0]), ValueError, ["output", "'sample': 4", "'sample': 2"]),
    BadInput(F, "other dimensions", features(TWO.rename(proj_dim="width")), ValueError, ["'width'"]),
    BadInput(D, "variables empty", table(FRAME, {}), TypeError, ["variables={}"]),
    BadInput(D, "no column", table(FRAME, {"x": "xs"}), ValueError, ["'xs'", "['x', 'text', 'day']"]),
    BadInput(D, "jagged", table(pd.DataFrame({"x": [[1, 2], [1]]})), ValueError, ["'x'", "sample 1", "got 1"]),
    BadInput(D, "missing in a file", table(lambda f: written(f, pd.DataFrame({"x": [1, None]}, dtype="Int64"))), ValueError, ["'x'", "sample 1"]),
    BadInput(D, "truncate a word", table(RAGGED, {"x": "two"}, max_length=1, truncate="no"), TypeError, ["truncate", "'no'", "True"]),
    BadInput(D, "too long", table(RAGGED, {"x": "two"}, max_length=1), ValueError, ["'x'", "sample 1", "2"]),
    *[BadInput(D, f"{name} among numbers", table(TIMES, {"x": ["y", name]}), TypeError, ["'x'", f"column {name!r}", "days", f"coords=[{name!r}]"]) for name in ("day", "took")],
    BadInput(D, "times alone", table(TIMES, {"x": "day"}), TypeError, ["'x'", "datetime64", "column 'day'"]),
    BadInput(D, "periods", table(TIMES, {"x": ["y", "month"]}), TypeError, ["'x'", "start_time"]),
    BadInput(D, "categories among numbers", table(TIMES, {"x": ["kind", "y"]}), TypeError, ["'x'", "column 'kind'", "np.unique"]),
]  # fmt: skip

test_bad_input = one_test(ROWS)
