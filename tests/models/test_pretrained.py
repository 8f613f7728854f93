"""Real pretrained weights from a package: a face network of MTCNN (Zhang et al. 2016)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from torch import Tensor, nn

import trakdask as td

# Never imported: its pins forbid the torch that is tested here, and only its files are needed.
SPEC = importlib.util.find_spec("facenet_pytorch")
pytestmark = pytest.mark.skipif(SPEC is None, reason="facenet-pytorch brings the weights")


class ONet(nn.Module):
    """The output network: is there a face, where is it, where are its eyes, nose and mouth?"""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.prelu1 = nn.Conv2d(3, 32, 3), nn.PReLU(32)
        self.conv2, self.prelu2 = nn.Conv2d(32, 64, 3), nn.PReLU(64)
        self.conv3, self.prelu3 = nn.Conv2d(64, 64, 3), nn.PReLU(64)
        self.conv4, self.prelu4 = nn.Conv2d(64, 128, 2), nn.PReLU(128)
        self.dense5, self.prelu5 = nn.Linear(1152, 256), nn.PReLU(256)
        self.dense6_1, self.dense6_2 = nn.Linear(256, 2), nn.Linear(256, 4)
        self.dense6_3 = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(self.prelu1(self.conv1(x)), 3, 2, ceil_mode=True)
        x = nn.functional.max_pool2d(self.prelu2(self.conv2(x)), 3, 2, ceil_mode=True)
        x = nn.functional.max_pool2d(self.prelu3(self.conv3(x)), 2, 2, ceil_mode=True)
        x = self.prelu4(self.conv4(x)).permute(0, 3, 2, 1)
        return self.dense6_1(self.prelu5(self.dense5(x.flatten(1))))


def model() -> td.Model:
    return td.Model(ONet, [Path(SPEC.origin).parent / "data" / "onet.pt"])


def samples(n: int = 4) -> xr.Dataset:
    coarse = np.random.default_rng(0).standard_normal((n, 3, 6, 6)).astype("f4")
    image = coarse.repeat(8, 2).repeat(8, 3)
    return td.from_arrays({"image": image}, coords={"label": np.arange(n) % 2}, chunks=3)


def test_featurize__pretrained_weights_by_every_engine() -> None:
    found = {
        engine: td.featurize(
            samples(), model(), projector=td.Identity(), gradients=engine, dtype="float64"
        ).compute()
        for engine in ("hooks", "vmap", "loop")
    }
    assert found["loop"].sizes["proj_dim"] == 389_040
    for engine in ("hooks", "vmap"):
        for name in ("feature", "output", "out_to_loss"):
            np.testing.assert_allclose(
                found[engine][name], found["loop"][name], rtol=1e-5, atol=1e-9
            )
