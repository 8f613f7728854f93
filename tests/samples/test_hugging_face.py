"""Datasets of Hugging Face against their own ``__getitem__``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from distributed import Client

from trakdask.samples.dataframe_source import from_dataframe

datasets = pytest.importorskip("datasets")

TOKENS = [[i + 1] * (1 + i % 3) for i in range(11)]
VARIABLES = {"input_ids": "input_ids"}


@pytest.fixture(autouse=True)
def quiet() -> None:
    datasets.disable_progress_bars()


def dataset() -> object:
    """More than 64 KiB, which Arrow gives to pickle as buffers."""
    columns = {
        "input_ids": TOKENS,
        "label": [i % 2 for i in range(11)],
        "lang": [10_000 * "en"] * 11,
    }
    return datasets.Dataset.from_dict(columns)


def check(found: object, given: object) -> None:
    rows = [row + [0] * (4 - len(row)) for row in given["input_ids"]]
    np.testing.assert_array_equal(found.input_ids, rows)
    assert found.label.values.tolist() == list(given["label"])


def read(source: object, **options: object) -> object:
    return from_dataframe(
        source, variables=VARIABLES, coords=["label"], max_length=4, chunks=4, **options
    )


def test_dataset_rows__in_memory_selected_and_shuffled() -> None:
    for given in (dataset(), dataset().select([3, 1, 7]), dataset().shuffle(seed=0)):
        check(read(given), given)
    assert read(dataset()).attrs["source"] == read(dataset()).attrs["source"]
    assert read(dataset()).attrs["source"] != read(dataset().select(range(10))).attrs["source"]


def test_dataset_rows__saved_to_disk(tmp_path: Path) -> None:
    dataset().save_to_disk(tmp_path / "saved", num_shards=3)
    check(read(tmp_path / "saved"), dataset())
    loaded = datasets.load_from_disk(tmp_path / "saved")
    check(read(loaded.with_format("torch").filter(lambda row: row["label"] == 0)), dataset()[::2])
    datasets.DatasetDict(train=dataset()).save_to_disk(tmp_path / "splits")
    with pytest.raises(ValueError, match=r"one split, got '.*splits'.*splits/train'"):
        read(tmp_path / "splits")


def test_dataset_rows__array_features() -> None:
    values = np.arange(24, dtype="f4").reshape(4, 2, 3)
    features = datasets.Features(x=datasets.Array2D((2, 3), "float32"))
    given = datasets.Dataset.from_dict({"x": values}, features=features)
    np.testing.assert_array_equal(from_dataframe(given, variables={"x": "x"}).x, values)


def test_dataset_rows__refused() -> None:
    with pytest.raises(TypeError, match=r"got DatasetDict; try .*\['train'\]"):
        read(datasets.DatasetDict(train=dataset()))
    with pytest.raises(TypeError, match=r"got IterableDataset; try .*path"):
        read(dataset().to_iterable_dataset())
    with pytest.raises(ValueError, match=r"transform.*dataset\.map"):
        read(dataset().with_transform(lambda rows: rows))
    with pytest.raises(ValueError, match=r"got 'tokens'.*try one of"):
        from_dataframe(dataset(), variables={"x": "tokens"})


@pytest.mark.slow
def test_dataset_rows__read_by_worker_processes(process_client: Client, tmp_path: Path) -> None:
    dataset().save_to_disk(tmp_path / "saved")
    for given in (dataset(), datasets.load_from_disk(tmp_path / "saved")):
        check(process_client.compute(read(given)).result(), dataset())
