"""Arrow files against pyarrow, which reads them whole."""

from __future__ import annotations

import json
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pytest

from trakdask.samples.dataframe_source import from_dataframe

TABLE = pa.table({"x": np.arange(20), "lang": [["de", "en"][i % 2] for i in range(20)]})
VARIABLES = {"x": "x"}


def write(path: Path, kind: str = "stream", rows: int = 6, table: pa.Table = TABLE) -> Path:
    make = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
    with make(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


@pytest.mark.parametrize("kind", ["stream", "file"])
@pytest.mark.parametrize("chunks", [1, 7, 100])
def test_file_rows__arrow(kind: str, chunks: int, tmp_path: Path) -> None:
    write(tmp_path / "a.arrow", kind, table=TABLE.slice(0, 13))
    write(tmp_path / "b.arrow", kind, table=TABLE.slice(13))
    found = from_dataframe(tmp_path, variables=VARIABLES, coords=["lang"], chunks=chunks)
    assert found.x.values.tolist() == list(range(20))
    assert found.lang.values.tolist() == TABLE["lang"].to_pylist()
    assert found.isel(sample=slice(11, 15)).x.values.tolist() == [11, 12, 13, 14]


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_file_rows__arrow_at_a_url(kind: str, tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(str(write(tmp_path / "a.arrow", kind)), "/arrow/a.arrow")
    url = "memory://arrow/a.arrow"
    found = from_dataframe(url, variables=VARIABLES, coords=["lang"], chunks=7)
    # On one thread: this file system gives all readers of a file the same position in it.
    assert found.x.compute(scheduler="synchronous").values.tolist() == list(range(20))
    assert found.lang.values.tolist() == TABLE["lang"].to_pylist()


def test_file_rows__saved_dataset_says_which_files_and_in_which_order(tmp_path: Path) -> None:
    for name, part in (("data-1", TABLE.slice(0, 5)), ("data-0", TABLE.slice(5))):
        write(tmp_path / f"{name}.arrow", table=part)
    write(tmp_path / "left-over.arrow")
    state = {"_data_files": [{"filename": "data-1.arrow"}, {"filename": "data-0.arrow"}]}
    (tmp_path / "state.json").write_text(json.dumps(state))
    found = from_dataframe(tmp_path, variables=VARIABLES, chunks=7)
    assert found.x.values.tolist() == list(range(20))
    (tmp_path / "data-0.arrow").unlink()
    with pytest.raises(FileNotFoundError, match=r"data-0\.arrow"):
        from_dataframe(tmp_path, variables=VARIABLES)


def test_file_rows__categories_that_differ_between_files(tmp_path: Path) -> None:
    for name, values in (("a", ["x", "y"]), ("b", ["y", "z"])):
        table = pa.table({"x": [1, 2], "kind": pa.array(values).dictionary_encode()})
        write(tmp_path / f"{name}.arrow", table=table)
    found = from_dataframe(tmp_path, variables=VARIABLES, coords={"of": "kind"})
    assert found["of"].values.tolist() == ["x", "y", "y", "z"]
