"""How often the host waits for a device and copies to it, counted on one that stands for it."""

from __future__ import annotations

from collections import Counter

import pytest
import xarray as xr

import trakdask as td
from tests import fakegpu
from tests.devices.cases import case

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")

N_BLOCKS = 6


def counted(samples: xr.Dataset, model: td.Model) -> Counter[str]:
    """Featurize, and return what the device was asked for."""
    lazy = td.featurize(samples, model, td.SJLT(64), device="fakegpu", gradients="hooks")
    fakegpu.counts()
    lazy.compute(scheduler="sync")
    return fakegpu.counts()


@pytest.mark.parametrize(
    ("name", "n_reads"),
    [
        *((name, 2) for name in ("perceptron", "convolutions", "LSTM", "GPT-2")),
        ("transformer", 5),  # three of them find out whether it ignores padding, once per block
        ("DistilBERT", 4),  # two of them are its own, by which it looks at its mask
    ],
)
def test_features__wait_for_the_device_rarely(name: str, n_reads: int, fake_gpu: None) -> None:
    """A device that is asked for a number stops. A block of one micro-batch has its spot check."""
    samples, model = case(name)
    many = xr.concat([samples] * (N_BLOCKS // 2), "sample")
    first, few, most = (counted(each, model) for each in (many, samples, many))
    per_block = {what: (most[what] - few[what]) / (N_BLOCKS - 2) for what in most}
    assert first["reads"] < 8 * N_BLOCKS
    assert per_block["reads"] <= n_reads
    assert per_block["copies to host"] <= 6  # the features, f, q and what checks compare


def test_weights__are_copied_once(fake_gpu: None) -> None:
    samples, model = case("DistilBERT", 2)
    states = [model.forward(checkpoint) for checkpoint in model.checkpoints]
    weights = sum(t.nbytes for state in states for t in state.parameters.values())
    many = xr.concat([samples] * (N_BLOCKS // 2), "sample")
    first, again = (counted(many, model)["bytes to device"] for _ in range(2))
    assert weights <= first < 1.2 * weights
    assert again < 0.2 * weights


def test_fits__are_copied_once(fake_gpu: None) -> None:
    samples, model = case("perceptron", 2)
    many = xr.concat([samples] * (N_BLOCKS // 2), "sample")
    options = {"device": "fakegpu", "gradients": "hooks"}
    projector = td.fit(
        many, model, 16, curvature=True, sketch=td.SJLT(256), progress=False, **options
    )
    first, again = (bytes_there(td.featurize(many, model, projector, **options)) for _ in range(2))
    fitted = sum(array.nbytes for array in projector.arrays.values())
    assert again < 0.2 * fitted < first
    expected = td.featurize(many, model, projector, device="cpu").feature
    found = td.featurize(many, model, projector, **options).feature
    xr.testing.assert_allclose(found.compute(), expected.compute(), rtol=1e-4, atol=1e-4)


def bytes_there(lazy: xr.Dataset) -> int:
    """Compute features, and return how many bytes were copied to the device for them."""
    fakegpu.counts()
    lazy.compute(scheduler="sync")
    return fakegpu.counts()["bytes to device"]
