"""What once failed on a device, or waited for it too often."""

from __future__ import annotations

import dask
import pytest
import torch
import xarray as xr

import trakdask as td
from tests import fakegpu
from tests.devices.cases import case, numbers
from trakdask.featurization.devices import free_bytes
from trakdask.trak import utils

OF_THE_MODEL = {"DistilBERT": 2}
"""Reads by the code of transformers, for a sample and for the batch."""


@pytest.mark.parametrize("name", ["perceptron", "convolutions", "LSTM", "GPT-2", "DistilBERT"])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
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
    samples = numbers(8, "clip", seed=1)
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
