"""What takes gradients does so on the device of its features, and finds what a CPU finds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

import trakdask as td
from tests import fakegpu
from tests.devices.cases import case, images, tokens
from tests.trak._models import built
from tests.trak._models import images as batches
from trakdask.projection.fitted import Fitted
from trakdask.trak import TRAKer

# A warning about λ, of which a few samples say little.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

QUIET = {"progress": False}


def gram(samples: xr.Dataset, model: td.Model, projector: Fitted) -> np.ndarray:
    """Return products of features of the CPU: the axes of a fit may turn, and products stay."""
    features = td.featurize(samples, model, projector, device="cpu").feature.compute()
    return np.einsum("icp,jcp->cij", *[features.transpose("sample", "checkpoint", ...).values] * 2)


FITS: dict[str, Callable[..., Fitted]] = {
    "curvature": lambda s, m, **o: td.fits.curvature(s, m, **o).then(td.Identity()),
    "fit": lambda s, m, **o: td.fit(s, m, 4, curvature=True, sketch=td.SJLT(64), **QUIET, **o),
}


def require_same_fit(kind: str, name: str, device: str) -> None:
    samples, model = case(name, 2)
    found, expected = (FITS[kind](samples, model, device=d) for d in (device, "cpu"))
    products = [gram(samples, model, fitted) for fitted in (found, expected)]
    np.testing.assert_allclose(*products, rtol=1e-3, atol=1e-3 * abs(products[1]).max())


@pytest.mark.parametrize(
    ("kind", "name"),
    [("curvature", "convolutions"), *(("fit", name) for name in ("convolutions", "LSTM", "GPT-2"))],
)
def test_fits__are_those_of_the_cpu(kind: str, name: str, device: str) -> None:
    require_same_fit(kind, name, device)


def test_fits__need_no_float64_on_the_device(no_float64: str) -> None:
    require_same_fit("fit", "convolutions", no_float64)


def test_features__of_a_fit_by_moments(device: str) -> None:
    samples, model = case("convolutions")
    weights = model.forward(model.checkpoints[0]).parameters
    fitted = td.fits.second_moments(model, [{n: t.abs() for n, t in weights.items()}])
    found, expected = (
        td.featurize(samples, model, fitted.then(td.Identity()), device=d).feature.compute()
        for d in (device, "cpu")
    )
    assert np.linalg.norm(found - expected) < 1e-5 * np.linalg.norm(expected)


@pytest.fixture
def was_used(fake_gpu: None) -> Callable[[], bool]:
    """Return what says whether the fake GPU was used since it was last asked."""
    return lambda: fakegpu.counts()["operators"] > 0


@pytest.mark.parametrize("parts", ["token", {"inside": "transformer.h.*"}])
def test_score_parts__takes_the_device_of_the_features(
    parts: Any, was_used: Callable[[], bool]
) -> None:
    samples, model = case("GPT-2", 2)
    found = []
    for device in ("fakegpu", "cpu"):
        options = {"projector": td.SJLT(64), "device": device}
        features = td.featurize(samples, model, **options).compute()
        targets = td.featurize(tokens(2, seed=1), model, **options).compute()
        was_used()
        words = td.score_parts(features, targets, model, td.Trak(), of=samples, parts=parts)
        found.append(words.compute())
        assert was_used() == (device == "fakegpu")
    np.testing.assert_allclose(*found, rtol=1e-3, atol=1e-4 * abs(found[1]).max().item())


def test_explorer__takes_the_device_of_the_features(was_used: Callable[[], bool]) -> None:
    samples, model = case("transformer")
    features = td.featurize(samples, model, td.SJLT(64), device="fakegpu").compute()

    def tokenizer(text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) % 40 for c in text], "attention_mask": [1] * len(text)}

    options = {"estimator": td.Trak(damping=0.1), "model": model, "tokenizer": tokenizer}
    explorer = td.explore(features, features, samples=samples, **options)
    was_used()
    made, _ = explorer.maker.target({"text": "seventy", "label": "1"})
    assert was_used()
    assert np.isfinite(made.feature).all()


def test_attribute__takes_all_gradients_by_its_options(
    was_used: Callable[[], bool], tmp_path: Path
) -> None:
    samples, model = case("convolutions", 2)
    options = {"proj_dim": 4, "curvature": False, "dtype": "float64", **QUIET}
    scores = []
    for device in ("cpu", "fakegpu"):
        ask = partial(td.attribute, samples, images(2, seed=1), model, tmp_path / device)
        was_used()
        scores.append(ask(device=device, **options).compute())
        assert was_used() == (device == "fakegpu")
        stored = td.open(tmp_path / device)
        assert (stored.attrs["device"], stored.attrs["dtype"]) == (device, "float64")
    np.testing.assert_allclose(*scores, rtol=1e-3, atol=1e-4 * abs(scores[0]).max().item())


def test_traker__scores_as_on_the_cpu(device: str, tmp_path: Path) -> None:
    scores = []  # of 12 samples in 8 columns, whose gram matrix has an inverse without λ
    for d in (device, "cpu"):
        options = {"save_dir": tmp_path / d, "train_set_size": 12, "projector": td.SJLT(8)}
        traker = TRAKer(
            built("normed").to(d), "image_classification", device=d, logging_level=100, **options
        )
        batch = [tensor.to(d) for tensor in batches(12)]
        states = {i: built("normed", seed=i).state_dict() for i in (0, 1)}
        for i, state in states.items():
            traker.load_checkpoint(state, model_id=i)
            traker.featurize(batch, num_samples=12)
        traker.finalize_features()
        for i, state in states.items():
            traker.start_scoring_checkpoint("some", state, i, num_targets=4)
            traker.score([tensor[:4] for tensor in batch], num_samples=4)
        scores.append(traker.finalize_scores("some"))
    # Two steps of float16, and what float32 loses where large terms cancel.
    np.testing.assert_allclose(*scores, rtol=1e-3, atol=2**-16 * np.abs(scores[1]).max())
