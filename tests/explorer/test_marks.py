"""Marks: each mark is there once, and exactly the marked samples are dropped."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trakdask as td
from trakdask.explorer import marks as module
from trakdask.explorer.marks import KINDS, Marks
from trakdask.files import Folder
from trakdask.storage.lock import lock


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return a store of ten samples without labels."""
    features = td.testing.simulate_features(n_samples=10, proj_dim=4, chunks=4)
    td.save(features, tmp_path / "train.zarr", progress=False)
    return tmp_path / "train.zarr"


def pairs(marks: Marks) -> list[tuple[object, str]]:
    table = marks.table()
    return list(zip(table["sample"].tolist(), table["mark"].tolist(), strict=True))


def test_mark__is_in_the_file_once_with_its_label_and_note(tmp_path: Path) -> None:
    marks = Marks(tmp_path / "train.marks.parquet")
    marks.mark([3, 1, 3], "duplicate", note="of 8")
    marks.mark(np.array([1, 5]), "duplicate")
    marks.mark(1, "wrong label", label="<b>4</b>")
    table = pd.read_parquet(marks.path)
    assert list(table.columns) == ["sample", "mark", "label", "note"]
    assert table.values.tolist() == [
        [3, "duplicate", "", "of 8"], [1, "duplicate", "", "of 8"],
        [5, "duplicate", "", ""], [1, "wrong label", "<b>4</b>", ""],
    ]  # fmt: skip
    assert table["sample"].dtype == np.int64
    pd.testing.assert_frame_equal(marks.table(), table)
    assert marks.samples("duplicate").tolist() == [3, 1, 5]
    assert marks.samples("remove").tolist() == []
    assert [path.name for path in tmp_path.iterdir()] == ["train.marks.parquet"]


@pytest.mark.parametrize("samples", [[3, 1, 3], ["b", "a", "b"]])
def test_table__of_the_former_version(tmp_path: Path, samples: list[Any]) -> None:
    former = pd.DataFrame({"sample": samples, "mark": "remove", "who": ["", "Ada", "Bob"]})
    former["time"] = pd.Timestamp.now("UTC")
    former.attrs = {"source": "a", "samples": 4}
    former.to_parquet(tmp_path / "m.parquet", index=False)
    marks = Marks(tmp_path / "m.parquet")
    assert marks.table().values.tolist() == [[x, "remove", "", ""] for x in samples[:2]]
    assert marks.table().attrs == former.attrs
    assert marks.mark(samples[1:], "remove", note="seen") == 2
    assert marks.unmark(samples[0], "remove") == 1
    assert pd.read_parquet(marks.path).values.tolist() == [[samples[1], "remove", "", "seen"]]


def test_undo__leaves_what_another_process_has_changed_since(tmp_path: Path) -> None:
    ada, bob = (Marks(tmp_path / "m.parquet") for _ in range(2))
    ada.mark([1, 2], "remove")
    bob.mark(1, "remove", note="kept")
    assert ada.undo() == 1
    assert ada.table().values.tolist() == [[1, "remove", "", "kept"]]
    bob.unmark(1, "remove")
    ada.mark(1, "remove")
    assert bob.undo() == 0
    assert pairs(bob) == [(1, "remove")]


def test_mark__samples_known_by_text_after_numbers_are_taken_back(tmp_path: Path) -> None:
    marks = Marks(tmp_path / "m.parquet")
    assert marks.mark([], "remove") == 0
    assert not Path(marks.path).exists()
    marks.mark(2, "remove")
    assert marks.undo() == 1
    assert pairs(marks) == []  # nothing says any more that samples are numbers
    marks.mark(["<b>a</b>", "ü"], "remove")
    marks.mark(np.array(["c"], dtype=object), "remove")
    marks.mark(np.array(["d"], dtype=np.dtypes.StringDType()), "remove")
    assert Marks(tmp_path / "m.parquet").samples("remove").tolist() == ["<b>a</b>", "ü", "c", "d"]


CHANGES = st.tuples(
    st.sampled_from(["mark", "unmark", "undo"]),
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from(KINDS),
    st.fixed_dictionaries({}, optional=dict.fromkeys(("label", "note"), st.sampled_from("ab"))),
)


@given(st.lists(CHANGES, max_size=12))
def test_marks__are_a_mapping_with_undo(tmp_path_factory, changes) -> None:
    """The oracle is a dict from a sample and its mark to texts, and a stack of such dicts."""
    marks = Marks(tmp_path_factory.mktemp("marks") / "m.parquet")
    expected: dict[tuple[int, str], dict[str, str]] = {}
    stack: list[dict[tuple[int, str], dict[str, str]]] = []
    for kind, samples, mark, texts in changes:
        before, keys = expected, dict.fromkeys((sample, mark) for sample in samples)
        if kind == "mark":
            empty = {"label": "", "note": ""}
            expected = before | {key: before.get(key, empty) | texts for key in keys}
        elif kind == "unmark":
            expected = {key: before[key] for key in before if key not in keys}
        elif stack:
            expected = stack.pop()
        if kind != "undo" and expected != before:
            stack.append(before)
        arguments = () if kind == "undo" else (samples, mark)
        count = getattr(marks, kind)(*arguments, **(texts if kind == "mark" else {}))
        assert count == sum(before.get(k) != expected.get(k) for k in {*before, *expected})
        rows = marks.table().set_index(["sample", "mark"]).to_dict("index")
        assert rows == expected


def full_disk(*_: object) -> None:
    raise OSError(28, "no space left")


def test_mark__that_cannot_be_written_changes_nothing(tmp_path: Path, monkeypatch) -> None:
    marks = Marks(tmp_path / "m.parquet")
    marks.mark(1, "remove")
    monkeypatch.setattr(module.Folder, "write", full_disk)
    with pytest.raises(OSError, match=r"m\.parquet.*no space left"):
        marks.mark(2, "remove")
    monkeypatch.undo()
    assert pairs(marks) == [(1, "remove")]
    assert marks.undo() == 1  # the mark that failed is no change to be undone
    assert pairs(marks) == []


def test_mark__waits_no_longer_than_ten_seconds(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE_S", 0.05)
    marks = Marks(tmp_path / "m.parquet")
    with (
        lock(Folder(str(tmp_path)), "mark samples", name="m.parquet.lock"),
        pytest.raises(td.errors.StoreBusyError, match=r"m\.parquet"),
    ):
        marks.mark(1, "remove")
    assert marks.mark(1, "remove") == 1


def test_where__drops_what_is_marked_also_after_an_earlier_drop(store: Path) -> None:
    outputs = td.open(store).output.values
    marks = Marks.beside(store)
    assert marks.path == str(store.parent / "train.marks.parquet")
    marks.mark(marks.ids(td.open(store))[[2, 5]], "remove")
    left = td.drop(store, where=marks.where("remove"))
    np.testing.assert_array_equal(left.output, np.delete(outputs, [2, 5], axis=0))
    again = Marks.beside(store)
    again.mark(again.ids(left)[[0, 2, 7]], "remove")  # rows 0, 3 and 9 of the store
    assert again.samples("remove").tolist() == [2, 5, 0, 3, 9]
    left = td.drop(store, where=again.where("remove"))
    np.testing.assert_array_equal(left.output, np.delete(outputs, [0, 2, 3, 5, 9], axis=0))
    every = td.open(store, dropped=True)
    assert every.dropped.values[again.samples("remove")].all()
    assert marks.ids(every).tolist() == marks.ids(every.load()).tolist() == list(range(10))
    same = td.drop(store, where=again.where("remove"))
    assert same.sizes["sample"] == 5


def test_where__by_labels_in_any_order_and_selection(tmp_path: Path) -> None:
    names = np.array(list("abcdefgh"), dtype=object)
    features = td.testing.simulate_features(n_samples=8, proj_dim=4)
    features = features.assign_coords(sample=("sample", names))
    store = tmp_path / "train.zarr"
    saved = td.save(features, store, progress=False)
    marks = Marks.beside(store)
    marks.mark(marks.ids(saved.isel(sample=[6, 1])), "wrong label")
    assert marks.samples("wrong label").tolist() == ["g", "b"]
    mask = marks.where("wrong label")(features.isel(sample=slice(None, None, -1)))
    assert mask.dims == ("sample",)
    assert names[::-1][mask.values].tolist() == ["g", "b"]
    left = td.drop(store, where=marks.where("wrong label"))
    assert left["sample"].values.tolist() == list("acdefh")


def rebuilt(store: Path, source: str, order: Any) -> None:
    shutil.rmtree(store)
    features = td.testing.simulate_features(n_samples=12, proj_dim=4, chunks=4).isel(sample=order)
    td.save(features.chunk(sample=4).assign_attrs(source=source), store, progress=False)


def test_where__of_a_store_that_was_made_again(store: Path) -> None:
    rebuilt(store, "a", slice(10))
    marks = Marks.beside(store)
    marks.mark([2, 5], "remove")
    rebuilt(store, "a", slice(10))
    assert Marks.beside(store).ids(td.open(store)).tolist() == list(range(10))
    rebuilt(store, "b", slice(None, None, -1))
    again = Marks.beside(store)
    for call in (
        lambda: td.drop(store, where=again.where("remove")),
        lambda: again.ids(td.open(store)),
        lambda: again.mark([3], "remove"),
    ):
        with pytest.raises(ValueError, match=r"'source': 'b.*'source': 'a"):
            call()
    assert td.open(store).sizes["sample"] == 12
    rebuilt(store, "a", slice(9))  # of a source that the user has named, but fewer
    with pytest.raises(ValueError, match=r"'samples': 9.*'samples': 10"):
        Marks.beside(store).ids(td.open(store))


def test_where__after_samples_were_appended(store: Path) -> None:
    Marks.beside(store).mark([2, 5], "remove")
    more = td.testing.simulate_features(n_samples=4, proj_dim=4, chunks=4, seed=7)
    td.save(more, store, append_dim="sample", progress=False)
    assert Marks.beside(store).mark([13], "remove") == 1
    assert td.drop(store, where=Marks.beside(store).where("remove")).sizes["sample"] == 11


OF_OTHERS = pd.DataFrame({"price": [1]}).to_parquet()


@pytest.mark.parametrize("content", [b"", b"PAR1", b"text that is no parquet" * 9, OF_OTHERS])
def test_table__of_a_file_that_is_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.parquet"
    path.write_bytes(content)
    for call in (Marks(path).table, lambda: Marks(path).mark(1, "remove")):
        with pytest.raises(ValueError, match=r"m\.parquet"):
            call()
    assert path.read_bytes() == content


def test_marks__of_a_store_at_a_url() -> None:
    store = f"memory://{uuid4().hex}/train.zarr"
    features = td.testing.simulate_features(n_samples=10, proj_dim=4)
    opened = td.save(features, store, progress=False)
    marks = Marks.beside(store)
    assert marks.path == store.replace("train.zarr", "train.marks.parquet")
    assert marks.mark(marks.ids(opened)[[7, 2]], "remove") == 2
    assert td.drop(store, where=marks.where("remove")).sizes["sample"] == 8


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:botocore")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:moto")
def test_marks__on_s3_are_made_by_several_at_once(s3: dict[str, object]) -> None:
    fs, path = Folder("s3://marks", s3)._fs()
    fs.mkdir(path)
    marks = Marks("s3://marks/m.parquet", storage_options=s3)
    makers = [Marks(marks.path, storage_options=s3) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        done = pool.map(lambda i: makers[i].mark([i, 100 + i], "remove"), range(3))
        assert list(done) == [2] * 3
    assert sorted(marks.table()["sample"]) == [0, 1, 2, 100, 101, 102]
    assert Folder("s3://marks", s3).files() == {"m.parquet"}
