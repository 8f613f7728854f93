"""Curvature and principal components, against explicit products and SVD in float64."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn

import trakdask as td
from trakdask.models.curvature import SKETCHED_COLUMNS, axes_of, factors_of, places_of, signs
from trakdask.projection import RowMap, project

# Attention has no rule of vmap in torch, which says so once in a process.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

RNG = np.random.default_rng(0)
LABELS = np.arange(24) % 3


class Words(nn.Module):
    """Embeddings that share their weight with the output, and attention, which has no rules."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6, padding_idx=0)
        self.mix = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm = nn.LayerNorm(6)
        self.out = nn.Linear(6, 7, bias=False)
        self.out.weight = self.embed.weight
        self.head = nn.Linear(7, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = self.norm(x + self.mix(x, x, x, need_weights=False)[0])
        return self.head(self.out(x).mean(1))


def small_cnn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 2, groups=2), nn.Tanh(),
        nn.Flatten(), nn.Linear(36, 5), nn.ReLU(), nn.Linear(5, 3),
    )  # fmt: skip


def small_words() -> nn.Module:
    torch.manual_seed(0)
    return Words()


@functools.cache
def case(name: str) -> tuple[xr.Dataset, td.Model]:
    build = small_cnn if name == "cnn" else small_words
    image = RNG.normal(size=(24, 2, 4, 4)).astype("f4")
    inputs = image if name == "cnn" else RNG.integers(0, 7, (24, 5))
    samples = td.from_arrays({"image": inputs, "label": LABELS}, chunks=8)
    states = []
    for seed in range(2):
        state, draw = build().state_dict(), torch.Generator().manual_seed(seed)
        states.append({k: v + 0.1 * torch.randn(v.shape, generator=draw) for k, v in state.items()})
    if name == "words":
        for state in states:
            state["out.weight"] = state["embed.weight"]
    model = td.Model(build, {"a": states[0], "b": states[1]}, task="image_classification")
    return samples, model


@functools.cache
def fitted(name: str, **options: Any) -> xr.Dataset:
    return td.curvature(*case(name), **options)


@functools.cache
def gradients(name: str, checkpoint: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the gradients of each parameter by a loop of backward(), and Q, in float64."""
    samples, model = case(name)
    identity = td.featurize(samples, model, projector=td.Identity(), gradients="loop").compute()
    flat = identity.feature.values[:, :, checkpoint].astype(float)
    parts = {n: flat[:, place] for n, place in places_of(model.shapes).items()}
    return parts, identity.out_to_loss.values[:, checkpoint].astype(float)


def kronecker(curvature: xr.Dataset, shapes: Any, name: str, checkpoint: int) -> np.ndarray:
    """Return the eigenvectors of a parameter as one explicit matrix."""
    matrices = [np.eye(length) for length in axes_of(shapes[name])]
    for parameter, axis, length, place in factors_of(shapes):
        if parameter == name:
            vectors = curvature.eigenvectors.values[place, checkpoint]
            matrices[axis] = vectors.reshape(length, length).astype(float)
    return functools.reduce(np.kron, matrices)


@pytest.mark.parametrize("name", ["cnn", "words"])
@pytest.mark.parametrize("checkpoint", [0, 1])
def test_eigenvectors_and_eigenvalues_are_those_of_explicit_sums(
    name: str, checkpoint: int
) -> None:
    shapes, curvature = case(name)[1].shapes, fitted(name)
    parts, q = gradients(name, checkpoint)
    h = np.sqrt(q) * (1 - q)
    for parameter, axis, length, place in factors_of(shapes):
        lengths = axes_of(shapes[parameter])
        total = np.zeros((length, length))
        for weight, gradient in zip(h, parts[parameter], strict=True):
            m = np.moveaxis(gradient.reshape(lengths), axis, 0).reshape(length, -1)
            if m.shape[1] > SKETCHED_COLUMNS:
                m = m @ signs(m.shape[1]).numpy()
            total += weight * m @ m.T
        u = curvature.eigenvectors.values[place, checkpoint].reshape(length, length)
        np.testing.assert_allclose(u.T @ u, np.eye(length), atol=1e-5)
        turned = u.T @ total @ u
        off_diagonal = turned - np.diag(np.diag(turned))
        assert np.abs(off_diagonal).max() <= 1e-5 * np.trace(total)
    for parameter, place in places_of(shapes).items():
        rotated = parts[parameter] @ kronecker(curvature, shapes, parameter, checkpoint)
        expected = (h[:, None] * rotated**2).mean(0)
        actual = curvature.eigenvalue.values[place, checkpoint]
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5 * expected.max())
        scale = 1 / np.sqrt(actual + 100 * actual.mean())
        np.testing.assert_allclose(curvature.scale.values[place, checkpoint], scale, rtol=1e-6)


@pytest.mark.parametrize("name", ["cnn", "words"])
@pytest.mark.parametrize("engine", ["hooks", "vmap", "loop"])
@pytest.mark.parametrize("batch_size", [24, 5])
def test_features_are_those_of_explicit_rotations(name: str, engine: Any, batch_size: int) -> None:
    samples, model = case(name)
    curvature = fitted(name)
    projector, n_kept = td.SJLT(64), 32
    features = td.featurize(
        samples, model.with_curvature(curvature),
        projector=projector, gradients=engine, batch_size=batch_size,
    ).compute()  # fmt: skip
    rows = RowMap.from_shapes(model.shapes, alignment=td.SJLT.row_alignment)
    for c, checkpoint in enumerate(model.checkpoints):
        parts, _ = gradients(name, c)
        rotated = np.concatenate(
            [parts[n] @ kronecker(curvature, model.shapes, n, c) for n in model.shapes], 1
        )
        scaled = rotated * curvature.scale.values[:, c]
        order = np.argsort(-curvature.eigenvalue.values[:, c] * curvature.scale.values[:, c] ** 2)
        kept = order[:n_kept]
        np.testing.assert_array_equal(curvature.leading.values[:n_kept, c], kept)
        rest = scaled.copy()
        rest[:, kept] = 0
        others = project(
            td.SJLT(64 - n_kept),
            {n: torch.from_numpy(rest[:, s]) for n, s in places_of(model.shapes).items()},
            rows,
            checkpoint.id,
        )
        expected = np.concatenate([scaled[:, kept], others.numpy()], 1)
        actual = features.feature.values[:, :, c]
        np.testing.assert_allclose(actual, expected, atol=2e-4 * np.abs(expected).max())


def test_weights_whose_gradients_come_in_slices() -> None:
    """A gradient of more than 4 MB is computed some rows at a time."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(200, 300), nn.Tanh(), nn.Linear(300, 3))
    image = RNG.normal(size=(24, 200)).astype("f4")
    samples = td.from_arrays({"image": image, "label": LABELS}, chunks=24)
    model = td.Model(net, task="image_classification")
    by_hooks, by_loop = (td.curvature(samples, model, gradients=g) for g in ("hooks", "loop"))
    np.testing.assert_allclose(
        by_hooks.eigenvalue.values.sum(), by_loop.eigenvalue.values.sum(), rtol=1e-4
    )
    curved = model.with_curvature(by_loop)
    one, other = (
        td.featurize(samples, curved, projector=td.SJLT(64), gradients=g).feature.compute()
        for g in ("hooks", "loop")
    )
    np.testing.assert_allclose(one, other, atol=2e-4 * float(abs(other).max()))


def test_the_whole_gradient_keeps_products_of_the_inverse_curvature() -> None:
    samples, model = case("cnn")
    curvature = fitted("cnn", damping=1.0)
    features = td.featurize(
        samples, model.with_curvature(curvature), projector=td.Identity()
    ).compute()
    phi = features.feature.values[:, :, 0].astype(float)
    expected = np.zeros((24, 24))
    parts, _ = gradients("cnn", 0)
    for name, place in places_of(model.shapes).items():
        u = kronecker(curvature, model.shapes, name, 0)
        inverse = u * curvature.scale.values[place, 0].astype(float) ** 2 @ u.T
        expected += parts[name] @ inverse @ parts[name].T
    np.testing.assert_allclose(phi @ phi.T, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_chunks_and_workers_are_invisible(process_cluster: Any) -> None:
    samples, model = case("cnn")
    first = fitted("cnn")
    again = td.curvature(samples.chunk(sample=5), model)
    with process_cluster.get_client():
        remote = td.curvature(samples, model)
        curved = model.with_curvature(first)
        far = td.featurize(samples.chunk(sample=7), curved, projector=td.SJLT(32)).compute()
    for other in (again, remote):
        np.testing.assert_allclose(other.eigenvalue, first.eigenvalue, rtol=1e-3, atol=1e-9)
    near = td.featurize(samples, curved, projector=td.SJLT(32)).compute()
    np.testing.assert_allclose(far.feature, near.feature, atol=1e-4 * abs(near.feature).max())


def test_weights_are_those_of_the_estimator() -> None:
    samples, model = case("cnn")
    equal = td.curvature(samples, model, estimator="trak")
    parts, _ = gradients("cnn", 0)
    rotated = parts["7.weight"] @ kronecker(equal, model.shapes, "7.weight", 0)
    actual = equal.eigenvalue.values[places_of(model.shapes)["7.weight"], 0]
    expected = (rotated**2).mean(0)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5 * expected.max())


@pytest.mark.filterwarnings("ignore:scores are made from 2 checkpoints")
def test_everything_works_on_top(tmp_path: Any) -> None:
    samples, model = case("words")
    fitted("words").to_zarr(tmp_path / "curvature.zarr", consolidated=False)
    stored = xr.open_zarr(tmp_path / "curvature.zarr", consolidated=False)
    curved = model.with_curvature(stored)
    features = td.featurize(samples, curved, projector=td.SJLT(32))
    store = td.save(features.isel(sample=slice(16)), tmp_path / "train.zarr")
    more = td.featurize(samples.isel(sample=slice(16, 24)), curved, projector=td.SJLT(32))
    store = td.save(more, tmp_path / "train.zarr", append_dim="sample")
    assert store.attrs["damping_prior"] == 10**0.5
    assert str(td.damping(store, "trace").rule.values) == "3.16 tr(K)/n"
    assert "damping_prior" not in td.featurize(samples, model, projector=td.SJLT(32)).attrs
    targets = features.isel(sample=[0, 3])
    scores = td.score(store, targets)
    np.testing.assert_allclose(scores, td.score(features, targets), rtol=1e-3, atol=1e-6)
    parts = td.score_parts(store, targets, curved, of=samples, parts={"out": "head.*"})
    np.testing.assert_allclose(
        parts.sum("module"), scores, rtol=1e-2, atol=1e-3 * float(abs(scores).max())
    )


@pytest.mark.filterwarnings("ignore:scores are made from 2 checkpoints")
def test_features_of_other_coordinates_are_refused() -> None:
    samples, model = case("cnn")
    curved = model.with_curvature(fitted("cnn"))
    other = model.with_curvature(fitted("cnn", damping=1.0))
    features = td.featurize(samples, curved, projector=td.SJLT(16))
    for targets in (model, other):
        with pytest.raises(td.errors.StoreMismatchError, match="curvature"):
            td.score(features, td.featurize(samples, targets, projector=td.SJLT(16)))


def test_honest_mistakes_have_clear_errors() -> None:
    samples, model = case("cnn")
    words = case("words")[1]
    curvature = fitted("cnn")
    with pytest.raises(ValueError, match="parameters"):
        words.with_curvature(curvature)
    with pytest.raises(ValueError, match="'b'"):
        model.with_curvature(curvature.sel(checkpoint=["a"]))
    other = td.Model(small_cnn, {"a": small_cnn().state_dict()}, task="image_classification")
    with pytest.raises(ValueError, match="weights"):
        other.with_curvature(curvature)
    with pytest.raises(ValueError, match="damping"):
        td.curvature(samples, model, damping=-1)
    curved = model.with_curvature(curvature)
    with pytest.raises(ValueError, match="Kronecker"):
        td.featurize(samples, curved, projector=td.Kronecker(4, 4))
    broken = samples.copy(deep=True)
    values = samples.image.values.copy()
    values[3] = np.nan
    broken = td.from_arrays({"image": values, "label": LABELS}, chunks=8)
    with pytest.raises(td.errors.BlockError, match="0:8"):
        td.curvature(broken, model)


# ------------------------------------------------------------------------- principal components


def rows_along(features: xr.Dataset) -> np.ndarray:
    return features.feature.values[:, :, 0].astype(float)


@pytest.mark.parametrize("is_curved", [False, True])
def test_components_are_the_right_singular_vectors(is_curved: bool) -> None:
    samples, model = case("cnn")
    if is_curved:
        model = model.with_curvature(fitted("cnn"))
    projector = td.SJLT(256)
    wide = rows_along(td.featurize(samples, model, projector=projector))
    components = td.principal_components(samples, model, 5, projector=projector)
    _, singular, rows = np.linalg.svd(wide)
    share = singular**2 / (singular**2).sum()
    np.testing.assert_allclose(components.share.values[:, 0], share[:5], rtol=1e-4)
    vectors = components.component.values[:, :, 0]
    np.testing.assert_allclose(np.abs(rows[:5] @ vectors), np.eye(5), atol=1e-3)

    features = td.featurize(samples, model.with_components(components))
    assert td.plan(features).projections[0].proj_dim == 5
    expected = wide @ vectors.astype(float)
    np.testing.assert_allclose(rows_along(features), expected, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_allclose(features.feature_norm.values[:, 0], (expected**2).sum(1), rtol=1e-4)


def test_fits_of_a_fitted_model_are_those_of_the_model() -> None:
    """As when a cell of a notebook runs twice."""
    samples, model = case("cnn")
    components = td.principal_components(samples, model, 4)
    again = td.principal_components(samples, model.with_components(components), 4)
    xr.testing.assert_identical(again, components)
    curved = model.with_curvature(fitted("cnn")).with_components(
        td.principal_components(samples, model.with_curvature(fitted("cnn")), 4)
    )
    xr.testing.assert_identical(td.curvature(samples, curved), fitted("cnn"))
    assert td.featurize(samples, curved.with_curvature(fitted("cnn"))).sizes["proj_dim"] == 2048


def test_all_components_keep_all_products() -> None:
    samples, model = case("cnn")
    for n in (24, 100):  # there are no more than samples
        components = td.principal_components(samples, model, n, projector=td.Identity())
        assert components.sizes["proj_dim"] == 24
        np.testing.assert_allclose(components.share.sum("proj_dim"), 1, rtol=1e-6)
    reduced = rows_along(td.featurize(samples, model.with_components(components)))
    whole = rows_along(td.featurize(samples, model, projector=td.Identity()))
    expected = whole @ whole.T
    np.testing.assert_allclose(reduced @ reduced.T, expected, atol=1e-4 * np.abs(expected).max())


def test_equal_samples_have_one_component() -> None:
    samples, model = case("cnn")
    equal = samples.isel(sample=[0] * 6)
    components = td.principal_components(equal, model, 3)
    np.testing.assert_allclose(components.share.values[:, 0], [1, 0, 0], atol=1e-6)
    features = td.featurize(equal, model.with_components(components)).compute()
    assert np.isfinite(features.feature).all()
    assert not features.feature[:, 1:].any()


@pytest.mark.filterwarnings("ignore:scores are made from 2 checkpoints")
def test_everything_works_on_components(tmp_path: Any, process_cluster: Any) -> None:
    samples, model = case("words")
    curved = model.with_curvature(fitted("words"))
    components = td.principal_components(samples, curved, 12, projector=td.SJLT(512))
    components.to_zarr(tmp_path / "components.zarr", consolidated=False)
    stored = xr.open_zarr(tmp_path / "components.zarr", consolidated=False)
    reduced = curved.with_components(stored)
    features = td.featurize(samples, reduced)
    with process_cluster.get_client():
        some = samples.isel(sample=slice(16)).chunk(sample=5)
        store = td.save(td.featurize(some, reduced), tmp_path / "train.zarr")
        more = td.featurize(samples.isel(sample=slice(16, 24)), reduced)
        store = td.save(more, tmp_path / "train.zarr", append_dim="sample")
    targets = features.isel(sample=[0, 3])
    scores = td.score(store, targets)
    np.testing.assert_allclose(scores, td.score(features, targets), rtol=1e-3, atol=1e-6)
    parts = td.score_parts(store, targets, reduced, of=samples, parts={"out": "head.*"})
    np.testing.assert_allclose(
        parts.sum("module"), scores, rtol=1e-2, atol=1e-3 * float(abs(scores).max())
    )


@pytest.mark.filterwarnings("ignore:scores are made from 2 checkpoints")
def test_mistakes_with_components_have_clear_errors() -> None:
    samples, model = case("cnn")
    components = td.principal_components(samples, model, 4)
    with pytest.raises(ValueError, match="curvature"):
        model.with_curvature(fitted("cnn")).with_components(components)
    with pytest.raises(ValueError, match="'b'"):
        model.with_components(components.sel(checkpoint=["a"]))
    for no_components in (fitted("cnn"), np.eye(4)):
        with pytest.raises(ValueError, match="component"):
            model.with_components(no_components)
    reduced = model.with_components(components)
    with pytest.raises(ValueError, match="8192"):
        td.featurize(samples, reduced, projector=td.SJLT(64))
    with pytest.raises(td.errors.StoreMismatchError, match="components"):
        td.score(td.featurize(samples, reduced), td.featurize(samples, model))
    with pytest.raises(ValueError, match="proj_dim"):
        td.principal_components(samples, model, 0)
