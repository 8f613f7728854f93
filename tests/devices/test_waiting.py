"""How often the host waits for a device and copies to it, counted on one that stands for it."""

from __future__ import annotations

from dataclasses import replace

import dask
import pytest
import torch
import xarray as xr

import trakdask as td
from tests import fakegpu
from tests.devices.cases import case, numbers
from trakdask.featurization.devices import free_bytes
from trakdask.trak import utils

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")


def test_fits__are_copied_once(fake_gpu: None) -> None:
    samples, model = case("perceptron", 2)
    many = xr.concat([samples] * 3, "sample")
    options = {"device": "fakegpu", "gradients": "hooks"}
    projector = td.fit(
        many, model, 16, curvature=True, sketch=td.SJLT(256), progress=False, **options
    )
    projector = replace(projector, rows={})  # else features come with the fit
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


# --------------------------------------------------------------------- what once failed

OF_THE_MODEL = {"DistilBERT": 2, "transformer": 3}
"""Reads by the code of transformers, for a sample and for the batch; and of torch, of padding."""


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, None) for name in ("perceptron", "convolutions", "LSTM", "GPT-2", "DistilBERT")),
        ("transformer", None),
        *((name, "bfloat16") for name in ("convolutions", "GPT-2")),
    ],
)
def test_featurize__reads_and_copies_of_a_block(
    name: str, dtype: str | None, fake_gpu: None
) -> None:
    """At most three reads, of which one is of several numbers, and no weights after the first."""
    samples, model = case(name)
    many = xr.concat([samples] * 14, "sample").chunk(sample=3)
    options = {"projector": td.SJLT(64), "device": "fakegpu", "gradients": "hooks"}
    blocks = td.featurize(many, model, dtype=dtype, **options).feature.data.blocks
    with dask.config.set(scheduler="sync"):
        dask.compute(*[blocks[i] for i in range(26)])  # tasks look at the first 64 samples
        fakegpu.counts()
        blocks[26].compute()
        found = fakegpu.counts()
    # Features, f and Q; and some numbers at once, which are a read of a check.
    assert found["copies to host"] == 3 + 1
    assert 0 < found["reads"] + 1 <= 3 + OF_THE_MODEL.get(name, 0)
    inputs = sum(many[n].nbytes for n in ("image", "x", "input_ids", "attention_mask") if n in many)
    assert found["bytes to device"] < 2 * inputs + 1000


def test_negatives_of__runs_on_a_device(device: str) -> None:
    samples = numbers(8, seed=1)
    _, model = case("CLIP")
    model = td.Model(model.build, [model.checkpoints[0].source], task="clip")
    found, expected = (
        td.tasks.Clip.negatives_of(model, samples, device=d) for d in (device, "cpu")
    )
    for pair in zip(found.values(), expected.values(), strict=True):
        torch.testing.assert_close(*pair)


def test_get_matrix_mult__blocks_stay_on_the_device_of_the_factors(fake_gpu: None) -> None:
    a, b = torch.randn(7, 4), torch.randn(5, 4)
    fakegpu.counts()
    options = {"batch_size": 3, "use_blockwise": True}
    found = utils.get_matrix_mult(a.to("fakegpu"), b.to("fakegpu"), **options)
    torch.testing.assert_close(found, a @ b.T)
    assert fakegpu.counts()["copies to device"] == 2
    whole = utils.get_matrix_mult(a.to("fakegpu"), b.to("fakegpu"))
    torch.testing.assert_close(whole.cpu(), a @ b.T)
    assert utils.get_free_memory("fakegpu") == pytest.approx(
        free_bytes(torch.device("fakegpu")), rel=0.1
    )
