"""After every operation xarray shows the store as trakdask does; the oracle is numpy."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import zarr

import trakdask as td
from tests.storage.integers import NAMES, VALUES, gram, save
from tests.storage.integers import features as integers
from trakdask.variables import DERIVED

N, BLOCK = 70, 20
DAYS = np.datetime64("2026-01-01", "ns") + np.arange(N) * np.timedelta64(1, "D")
A, Z = slice(0, 50), slice(50, N)

pytestmark = pytest.mark.filterwarnings(
    "ignore:expected no unfinished append", "ignore:Consolidated metadata is currently"
)


def features(rows: slice, columns: tuple[int, ...]) -> xr.Dataset:
    ds = integers(rows, [NAMES[c] for c in columns], block=BLOCK)
    number = ds.number.values
    return ds.assign_coords(
        day=("sample", DAYS[rows]),
        text=("sample", [f"é{i}" for i in number]),
        clean=("sample", number % 3 == 0),
        share=("sample", np.where(number % 4 == 0, np.nan, number / 7)),
        epoch=("checkpoint", 10 * np.array(columns)),
    ).assign(error=xr.full_like(ds.output, "", np.dtypes.StringDType()))


Operation = Callable[[Path, dict[str, str]], object]


def saving(rows: slice, columns: tuple[int, ...], **options: str) -> Operation:
    return lambda path, dtype: save(features(rows, columns), path, **dtype, **options)


OPERATIONS: dict[str, Operation] = {
    "save": saving(A, (0,)),
    "save again": saving(A, (0,)),
    "append samples": saving(Z, (0,), append_dim="sample"),
    "append a checkpoint, to some": saving(A, (1,), append_dim="checkpoint"),
    "append a checkpoint": saving(Z, (1,), append_dim="checkpoint"),
    "calibrate": lambda path, _: td.calibrate(path),
    "drop": lambda path, _: td.drop(path, where=lambda ds: ds.number % 7 == 3),
    "assign": lambda path, _: td.assign_coords(
        path, {"text": np.arange(N), "new": td.open(path, dropped=True).day.values}
    ),
    "drop more": lambda path, _: td.drop(path, where=lambda ds: ds.number < 30),
    "verify": lambda path, _: td.verify(path, checksums=True, repair=True),
    "other sums": lambda path, dtype: save(
        features(A, (0, 1)).drop_vars("text"), path, estimator="soft", **dtype
    ),
}


REWRITTEN = ("save", "append samples", "assign", "other sums")
"""Operations after which consolidated metadata is rewritten: kills at every write do it, too."""


@pytest.mark.parametrize("dtype", [{}, {"dtype": "float16"}])
def test_open_zarr__shows_what_open_shows_after_every_operation(
    tmp_path: Path, dtype: dict[str, str]
) -> None:
    path = tmp_path / "f.zarr"
    for name, operation in OPERATIONS.items():
        operation(path, dtype)
        ours, whole, theirs = td.open(path), td.open(path, dropped=True), xr.open_zarr(path)
        xr.testing.assert_identical(
            theirs.compute(), xr.open_zarr(path, consolidated=False).compute()
        )
        if dtype:
            feature = theirs.feature.astype("f4") * theirs["scale"].astype("f4")
            theirs = theirs.assign(feature=feature).drop_vars("scale")
        reset = whole.reset_coords().compute()
        for variable in theirs.reset_coords().data_vars:
            known = (ours if variable in DERIVED else reset)[variable].values
            if theirs[variable].attrs.get("triangle") == "upper":
                known = np.tril(known.T).T  # of the two first axes, the part above the diagonal
            np.testing.assert_array_equal(known, theirs[variable], str(variable))
        assert {*ours.coords} | {"dropped"} == {*theirs.coords} | {"dropped"}
        shown = {*ours.variables} | {*whole.variables}
        assert shown - {*theirs.variables} <= {"dropped"}
        x = VALUES[ours.number.values][..., : ours.sizes["checkpoint"]]
        np.testing.assert_array_equal(ours.feature, x)
        if ours.gram.attrs["gram_weights"] == "1":
            np.testing.assert_array_equal(ours.gram, gram(x))
        assert ours.gram.attrs["n_samples"] == ours.damping.attrs["n_samples"] == len(x)
        if name in REWRITTEN and not dtype:
            require_same_without_consolidated_metadata(path)


def require_same_without_consolidated_metadata(path: Path) -> None:
    """Tools may rewrite them, or take them away."""
    before, plain = td.open(path, dropped=True).load(), xr.open_zarr(path).load()
    kept = (path / "zarr.json").read_text()
    zarr.consolidate_metadata(path)
    assert td.open(path, dropped=True).load().identical(before)
    assert xr.open_zarr(path).load().identical(plain)
    foreign = {"kind": "inline", "must_understand": False, "metadata": {}}
    (path / "zarr.json").write_text(
        json.dumps({**json.loads(kept), "consolidated_metadata": foreign})
    )
    assert td.open(path, dropped=True).load().identical(before)
    (path / "zarr.json").write_text(kept)


def test_many_coords__none_is_looked_at_for_each_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """xarray looks at all coords to make a DataArray of one: 2,000 of them took minutes."""
    made, make = [], xr.Dataset._construct_dataarray
    monkeypatch.setattr(
        xr.Dataset, "_construct_dataarray", lambda ds, name: [made.append(name), make(ds, name)][1]
    )
    counts = []
    for n in (0, 30):
        features = td.testing.simulate_features(n_samples=8, proj_dim=4)
        coords = {f"c{i}": ("sample", np.arange(8)) for i in range(n)}
        made.clear()
        td.save(features.assign_coords(coords), tmp_path / f"{n}.zarr", progress=False)
        counts.append(len(made))
    assert counts[0] == counts[1]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("task", ["classification", "one margin", "regression", "one checkpoint"])
def test_seven_lines_of_the_page_give_the_scores(task: str, tmp_path: Path, monkeypatch) -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "store_format.md"
    (lines,) = re.findall(r"```python\n(train, targets.*?)```", page.read_text("utf-8"), re.DOTALL)
    assert len(lines.splitlines()) == 7
    train, asked = (
        td.testing.simulate_features(n, 5, 1 if task == "one checkpoint" else 3, chunks=30, seed=n)
        for n in (120, 7)
    )
    # As sure of every sample, Q itself is their weight; else its root, or a power between.
    flatter = 0.4 + train.out_to_loss / 1000
    train = train.assign(out_to_loss=flatter if task == "one margin" else train.out_to_loss**4)
    train, asked = (ds.assign_attrs(default_estimator="soft") for ds in (train, asked))
    if task == "regression":
        train, asked = (ds.assign_attrs(loss_kind="squared error") for ds in (train, asked))
        train = train.assign(out_to_loss=train.out_to_loss - 0.5)
    td.save(train.isel(sample=slice(90)), tmp_path / "train.zarr", progress=False)
    rest = train.isel(sample=slice(90, None)).assign_attrs(source="later")
    td.save(rest, tmp_path / "train.zarr", append_dim="sample", progress=False)
    td.save(asked, tmp_path / "targets.zarr", estimator=None, progress=False)
    monkeypatch.chdir(tmp_path)
    values = {"np": np, "xr": xr}
    exec(lines, values)
    opened = td.open("train.zarr")
    expected = td.score(opened, td.open("targets.zarr"))
    np.testing.assert_allclose(values["scores"], expected, rtol=1e-4, atol=1e-5)
    assert 0.5 <= opened.damping.attrs["score_power"] <= 1
    assert (opened.damping.attrs["score_power"] == 1) == (task in ("one margin", "regression"))
