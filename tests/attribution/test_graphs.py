"""Graphs of queries: no task grows with the number of blocks, and stored blocks do not move."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import dask
import dask.array as da
import numpy as np
import pytest
import torch
import xarray as xr
from dask.base import collections_to_expr
from dask.callbacks import Callback
from distributed import Client

import trakdask as td
from tests.laziness import raise_if_dask_computes
from tests.stored_arrays import ShapeOfArray, as_stored, stored
from trakdask.arrays.graphs import reader
from trakdask.testing import simulate_features

P, C, ROWS = 4, 5, 64


def metadata(n: int) -> dict[str, tuple[str, np.ndarray]]:
    sources = np.array(["web", "books", "code"], np.dtypes.StringDType())
    return {
        "label": ("sample", np.arange(n) % 5),
        "source": ("sample", sources[np.arange(n) % 3]),
        "day": ("sample", np.arange(n).astype("datetime64[s]").astype("datetime64[ns]")),
        "size": ("sample", np.linspace(0, 1, n)),
        "some": ("sample", np.where(np.arange(n) % 200 < 50, np.arange(n) % 7, np.nan)),
    }


def simulated(n: int) -> xr.Dataset:
    return simulate_features(n, P, C, chunks=ROWS).assign_coords(metadata(n))


def read(n: int) -> xr.Dataset:
    """Features whose arrays look as if they were in a store."""
    arrays = {"feature": ((n, P, C), (ROWS, P, 1)), "output": ((n, C), (ROWS, 1))}
    arrays["out_to_loss"] = arrays["output"]
    template = simulated(n)
    data = {
        name: template[name].copy(data=stored(ShapeOfArray(*shape), chunks))
        for name, (shape, chunks) in arrays.items()
    }
    return template.assign(data)


TRAK = td.Trak(damping=0.03)


Query = Callable[[xr.Dataset, xr.Dataset], xr.Dataset | xr.DataArray]


def scores(features: xr.Dataset, targets: xr.Dataset) -> xr.DataArray:
    return td.score(features, targets, TRAK)


def queries_of(estimator: Any) -> dict[str, Query]:
    return {
        "score": lambda f, t: td.score(f, t, estimator),
        "group_score": lambda f, t: td.group_score(f, t, estimator, by="source"),
        "intervals": lambda f, t: td.score(f, t, estimator, level=0.9),
        "intervals, groups": lambda f, t: td.group_score(f, t, estimator, by="source", level=0.9),
    }


def recall(f: torch.Tensor, coords: xr.Dataset) -> torch.Tensor:
    return torch.sigmoid(f[torch.tensor(coords.label.values < 3)]).mean()


LAZY: dict[str, Query] = {
    **queries_of(TRAK),
    **{
        f"{name}, {kind}": query
        for kind in ("relatif", "grad_cos")
        for name, query in queries_of(kind).items()
    },
    "gram": lambda f, _: td.gram(f),
    "gram, weights": lambda f, _: td.gram(f, weights=f.out_to_loss),
    "score, each checkpoint": lambda f, t: td.score(f, t, "soft", average=False),
    "score, few targets": lambda f, t: scores(f, t.isel(sample=slice(3))),
    "score, rows": lambda f, t: scores(f, t).isel(sample=slice(10, 20)),
    "metric": lambda _, t: td.combine(t, metric=recall).feature,
    "metric of groups": lambda f, t: td.group_score(f, t, TRAK, by="source", metric=recall),
    "some groups": lambda f, t: td.group_score(f, t, "soft", by="some"),
    "top_k": lambda f, t: td.top_k(scores(f, t), 3),
    "top_k, mask": lambda f, t: td.top_k(scores(f, t), 3, where=f.label == 1),
    "top_k, tile mask": lambda f, t: td.top_k(
        scores(f, t), 3, where=lambda tile: tile.label == tile.target_label
    ),
    "top_k, mask of pairs": lambda f, t: td.top_k(
        scores(f, t), 3, where=np.ones((f.sizes["sample"], t.sizes["sample"]), bool)
    ),
    "top_k of intervals": lambda f, t: td.top_k(td.score(f, t, TRAK, level=0.9), 3),
    "top_k of bounds": lambda f, t: td.top_k(td.score(f, t, level=0.9), 3, rank_by="lower"),
    "intervals, kept": lambda f, t: td.score(f, t, TRAK, q=0.1, level=0.9),
    "self_influence": lambda f, _: td.self_influence(f, TRAK),
    "intervals, self-influence": lambda f, _: td.self_influence(f, TRAK, level=0.9),
    "damping": lambda f, _: td.damping(f, estimator="trak"),
    "damping, completeness": lambda f, _: td.damping(f, td.Trak(damping="completeness")),
}


def tasks(result: xr.Dataset | xr.DataArray) -> dict[Any, Any]:
    """Return the tasks that a scheduler makes of what a client sends it."""
    variables = result.variables.values() if isinstance(result, xr.Dataset) else [result.variable]
    lazy = [each.data for each in variables if isinstance(each.data, da.Array)]
    sent = cloudpickle.dumps(collections_to_expr(lazy).optimize())
    return dict(pickle.loads(sent).__dask_graph__())


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", LAZY)
def test_tasks__do_not_grow_with_the_number_of_blocks(name: str) -> None:
    largest = []
    for n_blocks in (8, 72):  # a node of a tree sums eight
        with raise_if_dask_computes():
            lazy = LAZY[name](read(n_blocks * ROWS), simulated(3))
        # A coord is one task, and all blocks take rows of its result.
        blocks = {key: task for key, task in tasks(lazy).items() if "column-" not in str(key)}
        sizes = {key: len(cloudpickle.dumps(task)) for key, task in blocks.items()}
        largest.append(max(sizes.items(), key=lambda item: item[1]))
    (_, before), (key, after) = largest
    assert after <= before + 256, f"{key} has {after} bytes, with fewer blocks {before}"


VALUES = simulate_features(200, P, C, chunks=50).assign_coords(metadata(200))
VALUES = VALUES.compute(scheduler="synchronous")  # workers import this module too
TARGETS = simulate_features(60, P, C, chunks=60, seed=1).assign_coords(metadata(60))
UNEVEN = (50, 3, 47, 60, 1, 39)


def answers(features: xr.Dataset) -> dict[str, xr.DataArray | xr.Dataset]:
    asked = {name: query for name, query in LAZY.items() if "damping" not in name}
    return {name: query(features, TARGETS) for name, query in asked.items()}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_results__same_bits_whoever_reads_the_blocks(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a task reads several blocks, as it does where there are very many."""
    monkeypatch.setattr("trakdask.arrays.gram.ROWS_PER_DIM", 1)
    monkeypatch.setattr("trakdask.arrays.blocks._MOST_GROUPS", 1)
    chunks = {"sample": UNEVEN}
    shared = answers(VALUES.map(lambda x: x.chunk(chunks)))
    reading = answers(as_stored(VALUES, UNEVEN))
    # One by threads, the other by a cluster.
    shared = {name: each.compute(scheduler="threads") for name, each in shared.items()}
    for name, each in zip(
        reading, client.gather(client.compute(list(reading.values()))), strict=True
    ):
        xr.testing.assert_identical(each.drop_attrs(), shared[name].drop_attrs())


@pytest.mark.parametrize(
    "name",
    [
        *("gram", "gram, weights", "score", "top_k", "group_score"),
        *("intervals", "top_k of intervals", "intervals, groups"),
    ],
)
def test_stored_blocks__never_leave_their_task(name: str) -> None:
    """Without a stored gram matrix, too: features are read twice, and not held until λ is known."""
    n, p = 1000, 16
    values = simulate_features(n, p, C, chunks=100).assign_coords(metadata(n)).compute()
    targets = simulate_features(3, p, C, chunks=3).assign_coords(metadata(3))
    lazy, sizes = LAZY[name](as_stored(values, 500), targets), []
    with Callback(posttask=lambda key, result, *_: sizes.append(getattr(result, "nbytes", 0))):
        lazy.compute(scheduler="sync")
    # Sums by group with intervals have 6 weights for each sample of the blocks of a task.
    most = 500 * p * 4 if "groups" not in name else n * (C + 2) * 8
    assert max(sizes) < most


def test_persisted_blocks__are_sent_to_no_task(tmp_path: Path) -> None:
    """They may be on several workers, which would send each other features with every query."""
    n, p = 1000, 16
    features = simulate_features(n, p, C, chunks=500).assign_coords(metadata(n))
    opened = td.save(features, tmp_path / "train.zarr", progress=False).persist(scheduler="sync")
    targets, sizes = simulate_features(3, p, C, chunks=3), []
    scored = td.score(opened, targets)
    lazy = scored, td.top_k(scored, 3), td.group_score(opened, targets, by="label")
    with Callback(posttask=lambda key, result, *_: sizes.append(getattr(result, "nbytes", 0))):
        dask.compute(*lazy, scheduler="sync")
    assert max(sizes) < 500 * p * 4
    name, graph = opened.feature.data.name, tasks(lazy[1])
    used = [[key for key in task.dependencies if key[0] == name] for task in graph.values()]
    assert max(map(len, used)) == 1


QUERIES: dict[str, Query] = {
    "top_k": lambda f, t: td.top_k(td.score(f, t), 3),
    "top_k of one target": lambda f, t: td.top_k(td.score(f, t).isel(target=0), 3),
    "top_k, text": lambda f, t: td.top_k(td.score(f, t), 3, where="label == 1"),
    "top_k, text of pairs": lambda f, t: td.top_k(td.score(f, t), 3, where="label == target_label"),
    "score": td.score,
    "group_score": lambda f, t: td.group_score(f, t, by="label"),
}


def sent(lazy: xr.Dataset | xr.DataArray) -> int:
    """Return the bytes of the graphs that ``compute`` gives to a scheduler."""
    sizes = []

    def schedule(graph: Any, keys: Any, **_: object) -> Any:
        sizes.append(len(cloudpickle.dumps(graph)))
        return dask.get(graph, keys)

    lazy.compute(scheduler=schedule)
    return sum(sizes)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[int, xr.Dataset]:
    """Features of few and of many samples, in two blocks."""
    folder, opened = tmp_path_factory.mktemp("stores"), {}
    for n in (2_000, 20_000):
        features = simulate_features(n, P, C, chunks=n // 2).assign_coords(metadata(n))
        opened[n] = td.save(features, folder / f"{n}.zarr", progress=False)
    return opened


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", QUERIES)
def test_queries__send_no_coords_that_they_do_not_name(
    name: str, stores: dict[int, xr.Dataset]
) -> None:
    of_all, of_named = [], []
    for features in stores.values():
        targets = simulate_features(2, P, C, chunks=2)
        of_all.append(sent(QUERIES[name](features, targets)))
        named = features.drop_vars(["source", "day", "size", "some"])
        of_named.append(sent(QUERIES[name](named, targets)))
    growth, expected = of_all[1] - of_all[0], of_named[1] - of_named[0]
    assert growth <= expected + 256
    if "pairs" not in name:  # their tasks compare the labels
        # 18,000 labels have 144,000 bytes. With dask-array, each checkpoint gets packed numbers.
        assert growth <= 40_000


@pytest.mark.filterwarnings("ignore:outputs of the training rows")
@pytest.mark.parametrize("chunks", [60, 7])
@pytest.mark.parametrize(
    ("estimator", "n_reads"), [("grad_dot", 1), (TRAK, 2), (td.Soft(damping="completeness"), 3)]
)
def test_score__reads_stored_blocks_as_rarely_as_it_can(
    estimator: Any, n_reads: int, chunks: int
) -> None:
    """For the scores; before, for gram matrices; and between, for totals, which choose λ."""
    features = as_stored(VALUES, UNEVEN)
    source = reader(features.feature.data).__self__
    targets = TARGETS.map(lambda x: x.chunk(sample=chunks))
    td.score(features, targets, estimator).compute(scheduler="sync")
    assert len(source.reads) == len(UNEVEN) * C
    assert max(source.reads.values()) <= n_reads
