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
import zarr

import trakdask as td
from trakdask.attribution.estimators import Weights
from trakdask.attribution.grams import stored_matrix
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
    assert opened.feature.chunks[0] == (16, 16, 8, 16, 4)
    assert opened.attrs["source"] == opened.gram.attrs["source"] == "a + b"
    assert opened.attrs["layout"]["samples"] == 60
    assert opened.attrs["saved"]["runs"] == 2
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
    assert READ == []


def test_append__checkpoint_of_samples_in_two_pieces(store) -> None:
    save(part(B, NAMES[:2], "b"), store, append_dim="sample")
    with pytest.warns(td.UnfinishedAppendWarning, match=r"'b' have no features of .*\['c2'\]"):
        opened = save(part(A, NAMES[2:], "a"), store, append_dim="checkpoint")
    assert_whole(opened, n_checkpoints=2)  # as it was before
    with pytest.raises(td.IncompleteFeaturesError, match=r"for td.drop.*\['c2'\]"):
        td.drop(store, where=lambda ds: ds.label == 1)
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


def test_append__kept_sums_are_used_by_score(store) -> None:
    opened = save(part(B, NAMES[:2], "b"), store, append_dim="sample")
    assert stored_matrix(opened, "gram", Weights()) is not None


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
    assert "loss_gradient" not in grown  # its weights are means over checkpoints
    assert "gram" in grown


def test_append__is_resumed(store) -> None:
    features = part(B, NAMES[:2], "b")

    def fail(block: np.ndarray) -> np.ndarray:
        raise OSError("not today")

    data = features.out_to_loss.data.map_blocks(fail, dtype="f4", meta=np.empty((0, 0), "f4"))
    broken = features.assign(out_to_loss=(("sample", "checkpoint"), data))
    with pytest.raises(OSError, match="not today"):
        save(broken, store, append_dim="sample")
    with pytest.warns(td.UnfinishedAppendWarning, match=r"'b' .* 0 of 6 blocks.*append_dim=\.\.\."):
        assert_whole(td.open(store), A, 2)
    for edit in (
        lambda: td.drop(store, where=lambda ds: ds.label == 1),
        lambda: td.assign_coords(store, {"label": np.zeros(40)}),
    ):
        with pytest.raises(
            td.IncompleteFeaturesError, match=r"0 of 6 blocks.*to finish it, or delete"
        ):
            edit()
    with pytest.raises(td.IncompleteFeaturesError, match=r"0 of 6 blocks .*'b' .*first, or delete"):
        save(part(slice(20, 40), NAMES[:2], "c"), store, append_dim="sample")
    assert td.verify(store, checksums=True).empty
    assert_whole(save(features, store, append_dim="sample"), n_checkpoints=2)
    assert (store / "parts/1").exists()
    assert not (store / "parts/2").exists()


def test_append__killed_while_the_piece_was_made(store) -> None:
    """A piece without its arrays is not there; the next takes its place."""
    group = zarr.open_group(store, mode="r+").create_group("parts")
    group.create_group("1")
    (store / "parts/1/records").mkdir()
    (store / "parts/1/records/unfinished").touch()
    with pytest.warns(td.UnfinishedAppendWarning, match="no blocks yet"):
        assert_whole(td.open(store), A, 2)
    assert_whole(save(part(B, NAMES[:2], "b"), store, append_dim="sample"), n_checkpoints=2)


def test_append__killed_before_its_mark_was_whole(store) -> None:
    """A file that is half written is no content: what was complete is still shown."""
    (store / "parts/1/records").mkdir(parents=True)
    (store / f"parts/1/records/unfinished.{32 * 'a'}.partial").touch()
    with pytest.warns(td.UnfinishedAppendWarning, match="no blocks yet"):
        assert_whole(td.open(store), A, 2)
    found = td.verify(store).set_index("path").found
    assert "half written" in found[f"parts/1/records/unfinished.{32 * 'a'}.partial"]
    assert "before its first block" in found["parts/1"]
    with pytest.warns(td.UnfinishedAppendWarning):
        assert td.drop(store, where=lambda ds: ds.label == 1).sizes["sample"] == 20
    assert list(td.verify(store, repair=True).path) == ["parts/1"]  # the drop swept the file
    assert not (store / "parts/1").exists()
    assert td.verify(store, checksums=True).empty
    assert save(part(B, NAMES[:2], "b"), store, append_dim="sample").sizes["sample"] == 40


def test_append__lost_block_of_a_finished_one_is_not_taken_for_unfinished(store) -> None:
    """Samples do not vanish with a warning: only what never was complete is left out."""
    save(part(B, NAMES[:2], "b"), store, append_dim="sample")
    next(store.glob("parts/1/records/*/*/0.json")).unlink()
    with pytest.raises(td.IncompleteFeaturesError, match=r"13 of 14 blocks .*parts/1"):
        td.open(store)
    assert_whole(save(part(B, NAMES[:2], "b"), store, append_dim="sample"), n_checkpoints=2)


def test_append__to_nothing_is_a_new_store(tmp_path) -> None:
    assert_whole(save(part(A, NAMES[:2], "a"), tmp_path / "g", append_dim="sample"), A, 2)


@pytest.mark.parametrize(
    ("features", "append_dim", "words"),
    [
        (part(B, NAMES[:2], "b").assign_attrs(task="other"), "sample", "differ in task"),
        (part(B, NAMES[:1], "b"), "sample", "differ in checkpoints"),
        (part(B, NAMES[2:], "b"), "checkpoint", "differ in source"),
        (part(A, NAMES[2:], "a", chunks=20), "checkpoint", r"differ in layout\['block'\]"),
        (part(A, NAMES[:2], "a", chunks=20), "sample", "or the same to go on with them"),
        (
            part(B, NAMES[:2], "b").isel(proj_dim=slice(3)),
            "sample",
            "expected features with proj_dim 6.*got 3",
        ),
        (
            part(A, NAMES, "a").assign_attrs(checkpoints=dict.fromkeys(NAMES, "other")),
            "checkpoint",
            r"differ in checkpoints\['c0'\]: expected .*, got 'other'",
        ),
        (part(B, NAMES[:2], "b"), None, r"differ in source.*append_dim='sample'"),
        (
            part(B, NAMES[:2], "b").rename(label="mark"),
            "sample",
            r"drop_vars\(\['mark'\]\), features.assign_coords\(label=",
        ),
        (
            part(B, NAMES[:2], "b").drop_vars("label"),
            "sample",
            r"got \[\]; try features.assign_coords\(label=",
        ),
    ],
)
def test_append__what_does_not_fit_is_refused(store, features, append_dim, words) -> None:
    with pytest.raises(td.StoreMismatchError, match=words):
        save(features, store, append_dim=append_dim)
    assert_whole(td.open(store), A, 2)


def test_append__bad_dim(store) -> None:
    with pytest.raises(ValueError, match=r"expected append_dim.*got 'proj_dim'"):
        save(part(B, NAMES[:2], "b"), store, append_dim="proj_dim")


def test_verify__names_files_of_pieces(store) -> None:
    save(part(B, NAMES[:2], "b"), store, append_dim="sample")
    chunk = store / "parts/1/feature/c.1.0.0"
    chunk.write_bytes(chunk.read_bytes()[:-1])
    (fault,) = td.verify(store, repair=True).to_dict("records")
    assert fault["path"] == "parts/1/feature/c.1.0.0"
    assert_whole(save(part(B, NAMES[:2], "b"), store, append_dim="sample"), n_checkpoints=2)
    assert READ == ["b"]
