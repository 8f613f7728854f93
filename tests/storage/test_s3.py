"""The same store on a real server that speaks S3, in this process; what a folder does, it does."""

from __future__ import annotations

import dask
import numpy as np
import pytest
import torch
import xarray as xr

import trakdask as td
from trakdask.files import Folder
from trakdask.storage.lock import lock
from trakdask.testing import simulate_features

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:botocore"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:moto"),
]

FEATURES = simulate_features(n_samples=40, proj_dim=8, chunks=16)


@pytest.fixture
def place(s3: dict[str, object], request: pytest.FixtureRequest) -> Folder:
    bucket = f"s3://bucket-{abs(hash(request.node.name))}"
    fs, path = Folder(bucket, s3)._fs()
    fs.mkdir(path)
    return Folder(f"{bucket}/f.zarr", s3)


def save(place: Folder, **more: object) -> object:
    with dask.config.set(scheduler="threads", num_workers=2):
        return td.save(FEATURES, place.url, storage_options=place.options, progress=False, **more)


def test_s3__keeps_what_a_folder_keeps(place: Folder) -> None:
    options = {"storage_options": place.options}
    opened = save(place)
    np.testing.assert_array_equal(opened.feature, FEATURES.feature)
    before = place.files()
    save(place)
    assert place.files() == before
    assert "lock" not in before
    data = bytearray(place.read("feature/c.1.0.0"))
    data[7] ^= 1
    place.write("feature/c.1.0.0", bytes(data))
    place.remove("feature/c.2.0.1")
    found = td.verify(place.url, checksums=True, repair=True, **options)
    assert sorted(found.path) == ["feature/c.1.0.0", "feature/c.2.0.1"]
    with pytest.raises(td.errors.IncompleteFeaturesError):
        td.open(place.url, **options)
    np.testing.assert_array_equal(save(place).feature, FEATURES.feature)
    more = FEATURES.assign_attrs(source="more")
    opened = td.save(more, place.url, append_dim="sample", progress=False, **options)
    np.testing.assert_array_equal(opened.feature[40:], FEATURES.feature)
    opened = td.drop(place.url, where=lambda ds: ds.label == 1, **options)
    half = td.gram(FEATURES.isel(sample=slice(0, None, 2)))
    np.testing.assert_allclose(opened.gram, 2 * half, rtol=1e-5, atol=1e-4)
    opened = td.assign_coords(place.url, {"name": ["x"] * 80}, **options)
    assert set(opened.name.values) == {"x"}
    theirs = xr.open_zarr(place.url, storage_options=place.options)
    np.testing.assert_array_equal(theirs.feature[40:], FEATURES.feature)
    assert td.verify(place.url, checksums=True, **options).empty


def test_lock__of_s3_is_created_if_absent(place: Folder) -> None:
    place.create("x", b"1")
    with pytest.raises(FileExistsError):
        place.create("x", b"2")
    assert place.read("x") == b"1"
    place.remove("x")
    with lock(place, "td.save"), pytest.raises(td.errors.StoreBusyError, match=r"td\.save, since"):
        save(place)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_attribute__keeps_what_was_fitted_in_s3(place: Folder) -> None:
    x = np.random.default_rng(0).normal(size=(40, 6)).astype("f4")
    samples = td.from_arrays({"image": x, "label": np.arange(40) % 3}, chunks=16)
    model = td.Model(torch.nn.Linear(6, 3), task="image_classification")
    test, options = samples.isel(sample=slice(3)), {"proj_dim": 6, "sketch": td.SJLT(24)}
    with dask.config.set(scheduler="threads", num_workers=2):
        scores = td.attribute(
            samples, test, model, place.url,
            storage_options=place.options, progress=False, **options,
        ).compute()  # fmt: skip
        opened = td.open(place.url, storage_options=place.options)
        again = td.score(opened, td.featurize(test, model, like=opened)).compute()
    np.testing.assert_allclose(again, scores, rtol=1e-4, atol=1e-6)
    assert not Folder(f"{place.url}.fit", place.options).names()
    assert td.verify(place.url, checksums=True, storage_options=place.options).empty
