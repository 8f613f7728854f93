"""The oracle: the items of the dataset, one after the other, stacked."""

from __future__ import annotations

import pickle
from collections import Counter, UserDict
from typing import Any

import cloudpickle
import dask
import dask.array as da
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from tests.laziness import raise_if_dask_computes
from tests.waiting import Overlap
from trakdask.samples.torch_source import from_torch

N = 23


class Items(Dataset):
    """Deterministic items of several kinds; counts the reads, and the threads at a time."""

    def __init__(self, n: int = N, kind: str = "tuple") -> None:
        self.n = n
        self.kind = kind
        self.big = np.zeros(10**6)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        image, label = torch.full((3, 2), float(index), requires_grad=True), index % 3
        return {
            "tuple": (image, label),
            "list": [image.detach().numpy(), np.int64(label)],
            "dict": {"label": label, "other": "text", "image": image},
        }[self.kind]


def stacked(n: int = N) -> tuple[np.ndarray, np.ndarray]:
    pairs = [Items(n)[index] for index in range(n)]
    return np.stack([x.detach().numpy() for x, _ in pairs]), np.array([y for _, y in pairs])


def make_items() -> Items:
    return Items()


@pytest.mark.parametrize(
    ("kind", "chunks", "collate"),
    [
        *(("tuple", 1, None), ("list", 5, None), ("dict", 99, None)),
        *(("tuple", 5, default_collate), ("list", 99, default_collate)),
        ("dict", 1, lambda items: UserDict(default_collate(items))),  # as those of transformers
    ],
)
def test_from_torch__values_whatever_the_chunks_and_items(
    kind: str, chunks: int, collate: Any
) -> None:
    names = ("image", "label")
    with raise_if_dask_computes():
        ds = from_torch(
            Items(kind=kind), names=names, coords={"i": range(N)}, chunks=chunks, collate_fn=collate
        )
    images, labels = stacked()
    assert ds.image.chunks == da.core.normalize_chunks((chunks, -1, -1), images.shape)
    np.testing.assert_array_equal(ds.image.values, images)
    np.testing.assert_array_equal(ds.label.values, labels)
    assert (ds.image.dtype, ds.label.dtype) == (np.float32, np.int64)
    assert ds.i.values.tolist() == list(range(N))
    assert not ds.xindexes


def test_from_torch__numbers_single_tensors_and_left_out_fields() -> None:
    x = torch.arange(8.0).reshape(4, 2)
    np.testing.assert_array_equal(from_torch(x, names="x").x.values, x)
    ds = from_torch([(1, "path", 2.5, True)] * 4, names=("a", None, "b", "c"))
    assert [(name, values.dtype.name) for name, values in ds.items()] == [
        ("a", "int64"), ("b", "float32"), ("c", "bool"),
    ]  # fmt: skip


@pytest.mark.parametrize("given", [make_items, lambda: Items(), f"{__name__}:make_items"])
def test_from_torch__callables(given: Any) -> None:
    ds = from_torch(given, names=("image", "label"), chunks=7)
    np.testing.assert_array_equal(ds.image.values, stacked()[0])


def test_from_torch__a_graph_has_the_dataset_once() -> None:
    items = Items()
    ds = from_torch(items, names=("image", "label"), chunks=1)
    graph = dict(ds.image.data.__dask_graph__())
    sent = sum(len(cloudpickle.dumps(task)) for task in graph.values())
    assert sent < items.big.nbytes + 10_000 * len(graph)
    subset = Subset(Items(n=50), [4, 2])
    np.testing.assert_array_equal(
        from_torch(subset, names=("image", "label")).image.values, stacked(50)[0][[4, 2]]
    )


class Holds:
    """A dataset with something large in memory."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return np.full(3, len(self.content) + index, "f4"), index % 2


CONTENTS = {
    "text of pandas": pd.DataFrame({"text": [f"sample {i}" for i in range(20_000)]}),
    "pyarrow": pa.table({"x": np.arange(20_000), "text": [f"sample {i}" for i in range(20_000)]}),
    "text of numpy": np.array([f"sample {i}" for i in range(20_000)], np.dtypes.StringDType()),
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_from_torch__source_survives_a_pickle(content: Any) -> None:
    again = pickle.loads(pickle.dumps(Holds(content)))
    one, two = (from_torch(each, names=("image", "label")) for each in (Holds(content), again))
    assert one.attrs["source"] == two.attrs["source"]


class Counted(Items):
    def __init__(self, n: int = N) -> None:
        super().__init__(n)
        self.reads: Counter[int] = Counter()
        self.overlap = Overlap()

    def __getitem__(self, index: int) -> Any:
        with self.overlap.entered():
            self.reads[index] += 1
            return super().__getitem__(index)


def test_from_torch__one_read_serves_all_variables_one_thread_at_a_time() -> None:
    dataset = Counted()
    ds = from_torch(dataset, names=("image", "label"), chunks=4)
    assert set(dataset.reads) == {0}
    dataset.reads.clear()
    dask.compute(ds, scheduler="threads", num_workers=4)
    assert dataset.reads == dict.fromkeys(range(N), 1)
    assert dataset.overlap.most == 1
    dataset.reads.clear()
    ds.image.isel(sample=slice(8, 12)).compute()
    assert set(dataset.reads) == set(range(8, 12))


def test_from_torch__source_is_the_content() -> None:
    def source(dataset: Any, chunks: int = 4, **options: Any) -> str:
        return from_torch(dataset, names=("x", "y"), chunks=chunks, **options).attrs["source"]

    x, y = torch.arange(6.0), torch.arange(6)
    first = source(TensorDataset(x, y))
    assert first == source(TensorDataset(x.clone(), y.clone()), chunks=2)
    others = [
        source(TensorDataset(x + 1, y)),
        source(TensorDataset(x, y.int())),
        source(lambda: TensorDataset(x, y)),
        source(TensorDataset(x, y), collate_fn=default_collate),
    ]
    assert len({first, *others}) == 5


class Augmented(Items):
    """A random flip."""

    def __getitem__(self, index: int) -> Any:
        self.draws = getattr(self, "draws", 0) + 1
        image, label = super().__getitem__(index)
        return (image if self.draws % 2 else image + 1), label


def test_from_torch__random_items_are_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"another 'image' when item 0 was read again") as caught:
        from_torch(Augmented(), names=("image", "label"))
    assert len(caught) == 1
    assert caught[0].filename == __file__
    from_torch(Augmented(), names=(None, "label"))  # items that are left out may be random
    from_torch([(np.array([np.nan, 1.0]), 1)], names=("x", "y"))


def test_from_torch__fields_that_become_coords() -> None:
    items = [{"x": np.full(2, i), "label": i % 3, "unused": "text"} for i in range(7)]
    ds = from_torch(items, names=["x", "label"], coords=["label"], chunks=3)
    assert list(ds.data_vars) == ["x"]
    assert ds.label.values.tolist() == [0, 1, 2, 0, 1, 2, 0]
    np.testing.assert_array_equal(ds.x, [[i, i] for i in range(7)])
