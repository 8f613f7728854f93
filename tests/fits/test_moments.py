"""Scaled gradients against a loop of ``backward()`` times the scale, in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from safetensors.torch import save_file
from torch import Tensor, nn

import trakdask as td
from tests.models import engines
from trakdask.errors import CheckpointError, StoreMismatchError
from trakdask.models import delivery
from trakdask.models.tasks import Batch
from trakdask.provenance import as_values

N = 7


def build() -> nn.Module:
    return nn.Sequential(nn.Embedding(9, 6), nn.Flatten(), nn.Linear(18, 5), nn.Tanh(), Odd())


class Odd(nn.Module):
    """A parameter beside a child with parameters, which hooks leave to vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.ones(5)), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x * self.scale)


def weights(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {name: torch.randn_like(t) for name, t in build().double().state_dict().items()}


def moments(seed: int) -> dict[str, Tensor]:
    like = weights(0)
    torch.manual_seed(100 + seed)
    return {name: torch.rand_like(t) ** 4 for name, t in like.items()}


def samples() -> xr.Dataset:
    ids = np.random.default_rng(0).integers(0, 9, (N, 3))
    return td.from_arrays({"image": ids}, coords={"label": np.arange(N) % 4}, chunks=3)


def model(**options: object) -> td.Model:
    return td.Model(build, [weights(0), weights(1)], task="image_classification", **options)


BOTH = [moments(0), moments(1)]


def features(made: td.Model, given: object = BOTH, **options: object) -> xr.Dataset:
    projector = td.Identity()
    if given is not None:
        projector = td.fits.second_moments(made, given).then(projector)
    return td.featurize(samples(), made, projector, **options).compute(scheduler="sync")


def backward(seed: int) -> np.ndarray:
    """Gradients of the margins, one ``backward()`` each, divided by (√v + 1e-8)^1/2."""
    module, data, v = build().double(), samples().compute(scheduler="sync"), moments(seed)
    module.load_state_dict(weights(seed))

    def margin(module: nn.Module, one: Batch) -> Tensor:
        p = module(one["image"])[0].softmax(0)[one["label"][0]]
        return (p / (1 - p)).log()

    batch = Batch({name: torch.from_numpy(data[name].values) for name in ("image", "label")})
    found, _ = engines.backward(module, margin, batch)
    scaled = [g / (v[name].flatten().sqrt() + 1e-8).sqrt() for name, g in found.items()]
    return torch.cat(scaled, 1).numpy()


@pytest.mark.parametrize(
    ("gradients", "part_bytes"), [("hooks", None), ("hooks", 64), ("loop", 64)]
)
def test_scaled__equals_backward(
    gradients: str, part_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if part_bytes:
        monkeypatch.setattr(delivery, "_SLICE_BYTES", {"cpu": part_bytes})
    found = features(model(), gradients=gradients, batch_size=2)
    assert "Adam" in found.attrs["formula"]
    for seed in (0, 1):
        np.testing.assert_allclose(found.feature[..., seed], backward(seed), rtol=1e-5, atol=1e-8)
    plain = features(model(), None, gradients=gradients)
    assert not np.allclose(found.feature, plain.feature)
    for name in ("output", "out_to_loss"):
        np.testing.assert_array_equal(found[name], plain[name])


def test_open_moments__files_names_and_folders(tmp_path: Path) -> None:
    expected = features(model(checkpoint_ids=[1, 2])).feature
    run = tmp_path / "run"
    for seed, name in enumerate(("checkpoint-9", "checkpoint-10")):
        (run / name).mkdir(parents=True)
        save_file(weights(seed), run / name / "model.safetensors")
        save_file(moments(seed), run / name / "second_moments.safetensors")
    torch.save(moments(0), tmp_path / "v.pt")
    folders = [run / "checkpoint-9", run / "checkpoint-10"]
    named = {"checkpoint-10": str(folders[1]), "checkpoint-9": tmp_path / "v.pt"}
    for given in (str(run), run, folders, named):
        made = td.Model(build, run, task="image_classification")
        np.testing.assert_array_equal(features(made, given).feature, expected)


def test_spec__moments_belong_to_the_identity_only_if_given() -> None:
    plain = features(model(), None)
    assert "fit" not in plain.attrs
    one, other = features(model()), features(model(), [moments(0), moments(2)])
    assert list(as_values(one.attrs)["fit"]) == ["0", "1"]
    for different, field in ((other, "fit"), (plain, "projector")):
        with pytest.raises(StoreMismatchError, match=rf"{field}.*like=features"):
            td.score(one, different, estimator="grad_dot")
    first = [each.isel(checkpoint=[0]) for each in (one, other)]
    scores = td.score(*first, estimator="grad_dot")  # of this checkpoint they are the same
    assert "fit" in scores.attrs


@pytest.mark.parametrize("damage", ["missing", "shape", "negative", "nan"])
def test_open_moments__bad_values(damage: str) -> None:
    state = moments(0)
    if damage == "missing":
        del state["2.weight"]
    if damage == "shape":
        state["2.weight"] = state["2.weight"].T.contiguous()
    if damage in ("negative", "nan"):
        state["2.weight"][0, 0] = -1 if damage == "negative" else np.nan
    with pytest.raises(CheckpointError, match=r"'2.weight'.*\(5, 18\).*'1'.*keep_checkpoints"):
        td.fits.second_moments(model(), [moments(0), state])
    head = model(parameters="4.head.*")
    assert td.fits.second_moments(head, [moments(0), state]).digests  # not needed there


def test_open_moments__trainers_own_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"optimizer\.pt.*numbers them.*keep_checkpoints"):
        td.fits.second_moments(model().at_checkpoints(["0"]), [tmp_path / "optimizer.pt"])


@pytest.mark.parametrize("small", [0.0, 1e-18, 1e-13])
def test_scale__is_0_where_moments_are_none_or_rounding(small: float) -> None:
    """Of a whole parameter, as of attention's keys, and of words that training has never seen."""
    states = moments(0)
    states["2.bias"] *= small
    states["0.weight"][3:5] = small
    scale = td.fits.second_moments(model().at_checkpoints(["0"]), [states], progress=False)
    ends = np.cumsum([v.numel() for v in states.values()])[:-1]
    parts = np.split(scale.arrays["moment_scale"][:, 0], ends)
    for (name, v), found in zip(states.items(), parts, strict=True):
        expected = (v.sqrt() + 1e-8) ** -0.5
        if name == "0.weight":
            expected[3:5] = 0
        if name == "2.bias":
            expected[:] = 0
        np.testing.assert_allclose(found, expected.flatten(), rtol=1e-6)
