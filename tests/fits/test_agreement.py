"""Agreement of checkpoints by parameter, against explicit gradients and solves in float64."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn

import trakdask as td
from trakdask.fits import reliability
from trakdask.projection.axes import places_of

RNG = np.random.default_rng(0)


def build(width: int = 5) -> nn.Module:
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))


def model_of(width: int = 5, names: str = "abc") -> td.Model:
    states = {}
    for seed, name in enumerate(names):
        torch.manual_seed(seed)
        states[name] = {n: torch.randn_like(t) for n, t in build(width).state_dict().items()}
    return td.Model(lambda: build(width), states, task="image_classification")


IMAGES = RNG.normal(size=(40, 6)).astype("f4")
SAMPLES = td.from_arrays({"image": IMAGES, "label": np.arange(40) % 3}, chunks=16)


def by_definition(samples: xr.Dataset, model: td.Model) -> dict[str, float]:
    identity = td.featurize(samples, model, td.Identity(), gradients="loop", dtype="float64")
    gradients = identity.feature.values.astype(float)
    found = {}
    for name, place in places_of(model.shapes).items():
        scores = []
        for c in range(gradients.shape[2]):
            x = gradients[:, place, c]
            damped = x.T @ x + np.square(x).sum() / len(x) * np.eye(x.shape[1])
            scores.append((x @ np.linalg.inv(damped) @ x.T)[np.triu_indices(len(x), 1)])
        pairs = [np.corrcoef(a, b)[0, 1] for a, b in combinations(scores, 2)]
        found[name] = max(0.0, float(np.mean(pairs)))
    return found


def test_agreement__is_the_correlation_of_scores_by_one_parameter() -> None:
    model = model_of()
    expected = by_definition(SAMPLES, model)
    actual = td.agreement(SAMPLES, model)
    assert actual.parameter.values.tolist() == list(model.shapes)
    np.testing.assert_allclose(actual, list(expected.values()), rtol=0, atol=1e-5)
    assert len({round(value, 3) for value in expected.values()}) > 2
    other = td.agreement(SAMPLES.chunk(sample=7), model, batch_size=3, gradients="loop")
    np.testing.assert_allclose(other, actual, rtol=0, atol=1e-5)


def test_agreement__is_zero_without_gradients() -> None:
    state = build().state_dict() | {"2.weight": torch.zeros(3, 5)}
    states = {"a": state, "b": state | {"2.bias": torch.ones(3)}}
    actual = td.agreement(SAMPLES, td.Model(build, states, task="image_classification"))
    # Nothing but the last layer has gradients, and their directions hardly differ.
    assert (actual.sel(parameter=["0.weight", "0.bias"]) == 0).all()
    assert (actual.sel(parameter=["2.weight", "2.bias"]) > 0.5).all()


def test_agreement__sketches_large_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reliability, "_WIDTH", 512)
    model = model_of(width=150)
    expected, actual = by_definition(SAMPLES, model), td.agreement(SAMPLES, model)
    np.testing.assert_allclose(actual, list(expected.values()), rtol=0, atol=0.05)
    assert td.agreement(SAMPLES, model, n_samples=20).values.tolist() != actual.values.tolist()


def test_agreement__needs_two_checkpoints() -> None:
    with pytest.raises(ValueError, match="expected two checkpoints or more, got 1"):
        td.agreement(SAMPLES, model_of(names="a"))


def test_weights__multiply_scaled_gradients() -> None:
    model = model_of()
    weights = xr.DataArray([0.5, 2.0, 0.0, 1.0], {"parameter": list(model.shapes)})
    plain = td.curvature(SAMPLES, model, leading=8)
    weighted = td.curvature(SAMPLES, model, leading=8, weights=weights[::-1])
    for place, weight in zip(places_of(model.shapes).values(), weights.values, strict=True):
        scales = (fit.arrays["curvature_scale"][place] for fit in (weighted, plain))
        np.testing.assert_allclose(next(scales), weight * next(scales), rtol=1e-6)
    without = places_of(model.shapes)["2.weight"]
    leading = weighted.arrays["curvature_leading"]
    assert not ((leading >= without.start) & (leading < without.stop)).any()
    options = {"proj_dim": 6, "sketch": td.SJLT(24), "progress": False}
    front = td.fit(SAMPLES, model, weights=weights, **options)
    sketch = td.curvature(SAMPLES, model, leading=12, weights=weights).then(td.SJLT(12))
    by_hand = td.principal_components(SAMPLES, model, 6, projector=sketch)
    one, other = (td.featurize(SAMPLES, model, p).feature.compute() for p in (front, by_hand))
    products = [np.einsum("ipc,jpc->cij", x.values, x.values) for x in (one, other)]
    np.testing.assert_allclose(*products, rtol=1e-3, atol=1e-4 * products[0].max())


def test_weights__are_part_of_what_a_store_was_fitted_with(tmp_path: object) -> None:
    model = model_of()
    weights = xr.DataArray([0.5, 2.0, 0.0, 1.0], {"parameter": list(model.shapes)})
    options = {"proj_dim": 6, "sketch": td.SJLT(24), "progress": False, "store": f"{tmp_path}/s"}
    projector = td.fit(SAMPLES, model, weights=weights, **options)
    td.save(td.featurize(SAMPLES, model, projector), options["store"], progress=False)
    again = td.fit(SAMPLES, model, weights=weights, **options)
    assert again.digests == projector.digests
    with pytest.raises(td.errors.StoreMismatchError, match="weights"):
        td.fit(SAMPLES, model, **options)
