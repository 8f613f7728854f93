"""Appended samples and checkpoints: as if all had been saved at once, and nothing read twice.

The oracle is one Dataset with everything in it; features are small integers, so that sums are
exact and equal to the bit however they are cut.
"""

from __future__ import annotations

import dask
import dask.array as da
import numpy as np
import pytest
import xarray as xr

import trakdask as td
from trakdask.testing import raise_if_dask_computes, simulate_features

NAMES = ("c0", "c1", "c2")


def whole() -> xr.Dataset:
    ds = simulate_features(n_samples=60, proj_dim=6, n_checkpoints=3, chunks=16)
    ds = ds.compute(scheduler="synchronous")  # at import, on workers too
    rng = np.random.default_rng(0)
    integers = rng.integers(-4, 5, ds.feature.shape).astype("f4")
    return ds.assign(feature=(ds.feature.dims, integers))


WHOLE = whole()
READ: list[str] = []
"""Sources whose blocks were computed."""


def part(rows: slice, checkpoints: tuple[str, ...], source: str, chunks: int = 16) -> xr.Dataset:
    """Return lazy features of some rows and checkpoints, as featurize would make them."""
    positions = [NAMES.index(name) for name in checkpoints]
    ds = WHOLE.isel(sample=rows, checkpoint=positions)

    def read(block: np.ndarray) -> np.ndarray:
        if block.size:
            READ.append(source)
        return block

    feature = da.map_blocks(
        read, da.from_array(ds.feature.values, chunks=(chunks, -1, 1)), dtype="f4",
        meta=np.empty((0, 0, 0), "f4"), name="feature-" + dask.base.tokenize(source, checkpoints),
    )  # fmt: skip
    others = {
        name: (("sample", "checkpoint"), da.from_array(ds[name].values, chunks=(chunks, 1)))
        for name in ("output", "out_to_loss")
    }
    attrs = {
        "source": source,
        "checkpoints": {name: name for name in checkpoints},
        "checkpoint_ids": {name: NAMES.index(name) for name in checkpoints},
    }
    data = {"feature": (("sample", "proj_dim", "checkpoint"), feature), **others}
    return ds.assign(data).assign_attrs(attrs)


A, B = slice(0, 40), slice(40, 60)


def save(features: xr.Dataset, store: object, **options: object) -> xr.Dataset:
    READ.clear()
    return td.save(features, store, progress=False, **options)


def assert_whole(opened: xr.Dataset, rows: slice = slice(None), n_checkpoints: int = 3) -> None:
    expected = WHOLE.isel(sample=rows, checkpoint=slice(0, n_checkpoints))
    for name in ("feature", "output", "out_to_loss", "label", "checkpoint"):
        np.testing.assert_array_equal(opened[name], expected[name])
        assert opened[name].dims == expected[name].dims
    x = expected.feature.values.astype("f8")
    np.testing.assert_array_equal(opened.gram, np.einsum("npc,nqc->pqc", x, x))
    assert opened.gram.attrs["n_samples"] == x.shape[0]


@pytest.fixture
def store(tmp_path):
    """Hold the first samples at the first two checkpoints."""
    path = tmp_path / "f.zarr"
    assert_whole(save(part(A, NAMES[:2], "a"), path), A, 2)
    return path


def test_append__samples(store) -> None:
    opened = save(part(B, NAMES[:2], "b"), store, append_dim="sample")
    assert set(READ) == {"b"}
    assert_whole(opened, n_checkpoints=2)
    assert opened.feature.chunks[0] == (16, 16, 16, 12)
    assert opened.attrs["source"] == "a + b"
    assert td.verify(store, checksums=True).empty


def test_append__checkpoint(store) -> None:
    opened = save(part(A, NAMES[2:], "a"), store, append_dim="checkpoint")
    assert_whole(opened, A)
    assert list(opened.attrs["checkpoints"]) == list(NAMES)
    assert td.verify(store, checksums=True).empty


def test_append__of_all_checkpoints_only_the_new_are_computed(store) -> None:
    for _ in range(2):
        opened = save(part(A, NAMES, "a"), store, append_dim="checkpoint")
        assert_whole(opened, A)
    assert READ == ["a"]  # to compare


def test_append__checkpoint_of_samples_in_two_pieces(store) -> None:
    save(part(B, NAMES[:2], "b"), store, append_dim="sample")
    with pytest.warns(td.errors.UnfinishedAppendWarning, match=r"checkpoints \['c2'\]"):
        opened = save(part(A, NAMES[2:], "a"), store, append_dim="checkpoint")
    assert_whole(opened, n_checkpoints=2)  # as it was before
    with pytest.raises(td.errors.IncompleteFeaturesError, match=r"\['c2'\]"):
        save(part(slice(0, 20), NAMES[:2], "c"), store, append_dim="sample")
    opened = save(part(B, NAMES[2:], "b"), store, append_dim="checkpoint")
    assert_whole(opened)
    targets = part(slice(0, 10), NAMES, "targets")
    expected = td.score(WHOLE.assign_attrs(targets.attrs | {"source": "all"}), targets)
    with raise_if_dask_computes():
        scores = td.score(opened, targets)
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-6)


def test_append__checkpoints_in_another_order(store) -> None:
    opened = save(part(B, ("c1", "c0"), "b"), store, append_dim="sample")
    assert_whole(opened, n_checkpoints=2)


def test_append__soft_sums(tmp_path) -> None:
    options = {"estimator": "soft", "power": 0.5}
    save(part(A, NAMES, "a"), tmp_path / "f.zarr", **options)
    opened = save(part(B, NAMES, "b"), tmp_path / "f.zarr", append_dim="sample", **options)
    at_once = save(part(slice(0, 60), NAMES, "all"), tmp_path / "g.zarr", **options)
    for name in ("gram", "loss_gradient"):
        np.testing.assert_allclose(opened[name], at_once[name], rtol=1e-5, atol=1e-5)
    grown = save(part(A, NAMES[:2], "a"), tmp_path / "h.zarr", **options)
    assert "loss_gradient" in grown
    grown = save(part(A, NAMES, "a"), tmp_path / "h.zarr", append_dim="checkpoint", **options)
    at_once = save(part(A, NAMES, "a"), tmp_path / "i.zarr", **options)
    for name in ("gram", "loss_gradient"):  # whose weights are means over checkpoints
        np.testing.assert_allclose(grown[name], at_once[name], rtol=1e-5, atol=1e-5)


def test_append__to_nothing_is_a_new_store(tmp_path) -> None:
    assert_whole(save(part(A, NAMES[:2], "a"), tmp_path / "g", append_dim="sample"), A, 2)


@pytest.mark.parametrize(
    ("features", "append_dim", "words"),
    [
        (part(B, NAMES[:2], "b").assign_attrs(task="other"), "sample", "differ in task"),
        (part(B, NAMES[:1], "b"), "sample", "differ in checkpoints"),
        (part(B, NAMES[2:], "b"), "checkpoint", "differ in source"),
        (
            part(B, NAMES[:2], "b").isel(proj_dim=slice(3)),
            "sample",
            "proj_dim 6.*got 3",
        ),
        (
            part(A, NAMES, "a").assign_attrs(checkpoints=dict.fromkeys(NAMES, "other")),
            "checkpoint",
            r"differ in checkpoints\['c0'\]: expected .*, got 'other'",
        ),
        (part(B, NAMES[:2], "b"), None, r"differ in source.*append_dim='sample'"),
        (part(A, NAMES, "a"), None, "differ in checkpoints"),
        (
            part(B, NAMES[:2], "b").rename(label="mark"),
            "sample",
            r"drop_vars\(\['mark'\]\), features.assign_coords\(label=",
        ),
        (
            part(B, NAMES[:2], "b").drop_vars("label"),
            "sample",
            r"got {}; try features.assign_coords\(label=",
        ),
    ],
)
def test_append__what_does_not_fit_is_refused(store, features, append_dim, words) -> None:
    with pytest.raises(td.errors.StoreMismatchError, match=words):
        save(features, store, append_dim=append_dim)
    assert_whole(td.open(store), A, 2)


def fail(block: np.ndarray) -> np.ndarray:
    raise OSError("not today")


def broken(features: xr.Dataset) -> xr.Dataset:
    """Return features whose second block fails."""
    first = features.isel(sample=slice(0, 16))
    rest = features.isel(sample=slice(16, None))
    data = rest.output.data.map_blocks(fail, dtype="f4", meta=np.empty((0, 0), "f4"))
    rest = rest.assign(output=(("sample", "checkpoint"), data))
    return xr.concat(
        [first, rest], "sample", data_vars="all", coords="minimal", compat="override",
        combine_attrs="override",
    )  # fmt: skip


def interrupted(store, features: xr.Dataset, append_dim: str) -> None:
    with dask.config.set(scheduler="sync"), pytest.raises(OSError, match="not today"):
        save(broken(features), store, append_dim=append_dim)


def test_append__is_resumed(store) -> None:
    features = part(B, NAMES[:2], "b")
    interrupted(store, features, "sample")
    with pytest.warns(td.errors.UnfinishedAppendWarning, match="append_dim='sample'"):
        assert_whole(td.open(store), A, 2)
    xr.testing.assert_identical(
        xr.open_zarr(store).load(), xr.open_zarr(store, consolidated=False).load()
    )
    with pytest.raises(td.errors.IncompleteFeaturesError, match="20 samples"):
        save(part(slice(20, 40), NAMES[:2], "c"), store, append_dim="sample")
    assert_whole(save(features, store, append_dim="sample"), n_checkpoints=2)
    assert td.verify(store, checksums=True).empty


def test_append__is_given_up_for_another(store) -> None:
    """Neither its blocks nor its rows in the last block are taken for those of the other."""
    interrupted(store, part(B, NAMES[:2], "b"), "sample")
    assert "append" in td.verify(store, repair=True).found.item()
    assert_whole(td.open(store), A, 2)
    other = part(slice(0, 20), NAMES[:2], "c")
    opened = save(other, store, append_dim="sample")
    np.testing.assert_array_equal(opened.feature[40:], WHOLE.feature[:20, :, :2])
    interrupted(store, part(A, NAMES[2:], "a"), "checkpoint")
    td.verify(store, repair=True)
    assert td.open(store).sizes == opened.sizes


def test_append__other_changes_need_not_wait_for_it(store) -> None:
    features = part(B, NAMES[:2], "b")
    interrupted(store, features, "sample")
    with pytest.warns(td.errors.UnfinishedAppendWarning):
        left = td.drop(store, where=lambda ds: ds.label == 1)
    assert left.sizes["sample"] == 20
    opened = save(features, store, append_dim="sample")
    assert opened.sizes["sample"] == 40
    x = opened.feature.values.astype("f8")
    np.testing.assert_array_equal(opened.gram, np.einsum("npc,nqc->pqc", x, x))


@pytest.mark.parametrize("block", [0, 2, 3])
def test_append__damaged_blocks_are_computed_from_the_features_that_they_are_of(
    store, block: int
) -> None:
    """Block 2 has rows of both."""
    save(part(B, NAMES[:2], "b"), store, append_dim="sample")
    chunk = store / f"feature/c.{block}.0.0"
    chunk.write_bytes(chunk.read_bytes()[:-1])
    assert td.verify(store).empty  # of bytes, checksums know
    (fault,) = td.verify(store, checksums=True, repair=True).to_dict("records")
    assert (fault["path"], fault["block"]) == (f"feature/c.{block}.0.0", block)
    with pytest.raises(td.errors.IncompleteFeaturesError):
        td.open(store)
    for rows, source in ((A, "a"), (B, "b")):
        with pytest.raises(td.errors.IncompleteFeaturesError):
            td.open(store)
        if (source, block) in {("a", 3), ("b", 0)}:
            continue
        try:
            opened = save(part(rows, NAMES[:2], source), store)
        except td.errors.IncompleteFeaturesError:
            assert (source, block) == ("a", 2)
        else:
            assert_whole(opened, n_checkpoints=2)
            break
    assert_whole(td.open(store), n_checkpoints=2)


def test_append__selections_of_one_source_are_told_apart(tmp_path) -> None:
    whole = part(slice(0, 60), NAMES[:2], "all")
    path = tmp_path / "f.zarr"
    first, second = (whole.isel(sample=rows) for rows in (slice(0, 20), slice(20, 40)))
    save(first, path)
    for _ in range(2):
        opened = save(second, path, append_dim="sample")
        np.testing.assert_array_equal(opened.feature, WHOLE.feature[:40, :, :2])
    with pytest.raises(td.errors.StoreMismatchError):
        save(whole.isel(sample=slice(40, 60)), path)
