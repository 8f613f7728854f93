"""Curvature and principal components, against explicit products and SVD in float64."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn
from transformers.pytorch_utils import Conv1D

import trakdask as td
from trakdask.errors import forget_warnings
from trakdask.fits.curvatures import SKETCHED_COLUMNS, kept_axes, signs
from trakdask.projection import RowMap, project
from trakdask.projection.fitted import Components, Fitted
from trakdask.tensors import axes_of, factors_of, places_of

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


def small_language() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 7))


BUILDS = {"cnn": small_cnn, "words": small_words, "language": small_language}


@functools.cache
def case(name: str) -> tuple[xr.Dataset, td.Model]:
    build = BUILDS[name]
    image = RNG.normal(size=(24, 2, 4, 4)).astype("f4")
    inputs = image if name == "cnn" else RNG.integers(0, 7, (24, 5))
    samples = td.from_arrays({"image": inputs, "label": LABELS}, chunks=12)
    states = []
    for seed in range(2):
        state, draw = build().state_dict(), torch.Generator().manual_seed(seed)
        states.append({k: v + 0.1 * torch.randn(v.shape, generator=draw) for k, v in state.items()})
    if name == "words":
        for state in states:
            state["out.weight"] = state["embed.weight"]
    language = td.tasks.CausalLM(inputs="image", positional=True)
    task = language if name == "language" else "image_classification"
    return samples, td.Model(build, {"a": states[0], "b": states[1]}, task=task)


@functools.cache
def fitted(name: str, **options: Any) -> Fitted:
    return td.fits.curvature(*case(name), **options)


@functools.cache
def gradients(name: str, checkpoint: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the gradients of each parameter by a loop of backward(), and Q, in float64."""
    samples, model = case(name)
    identity = td.featurize(samples, model, projector=td.Identity(), gradients="loop").compute()
    flat = identity.feature.values[:, :, checkpoint].astype(float)
    parts = {n: flat[:, place] for n, place in places_of(model.shapes).items()}
    return parts, identity.out_to_loss.values[:, checkpoint].astype(float)


def kronecker(curvature: Fitted, shapes: Any, name: str, checkpoint: int) -> np.ndarray:
    """Return the eigenvectors of a parameter as one explicit matrix."""
    matrices = [np.eye(length) for length in axes_of(shapes[name])]
    step = curvature.curvature
    assert step is not None
    for parameter, axis, block, place in factors_of(shapes, step.turning):
        if parameter == name:
            vectors = curvature.arrays["curvature_eigenvectors"][place, checkpoint]
            n = block.stop - block.start
            matrices[axis][block, block] = vectors.reshape(n, n)
    return functools.reduce(np.kron, matrices)


@pytest.mark.parametrize(
    ("name", "checkpoint", "estimator", "block"),
    [
        *[("cnn", 0, "auto", 64), ("cnn", 1, "trak", 3), ("words", 1, "auto", None)],
        *[("language", 0, "auto", 64), ("language", 1, "auto", 2)],
    ],
)
def test_eigenvectors_and_eigenvalues_are_those_of_explicit_sums(
    name: str, checkpoint: int, estimator: str, block: int | None
) -> None:
    shapes, curvature = case(name)[1].shapes, fitted(name, estimator=estimator, block=block)
    parts, q = gradients(name, checkpoint)
    h = np.sqrt(q) * (1 - q)
    if estimator == "trak" or name == "language":  # which has no weights by its outputs
        h = np.ones(len(q))
    step = curvature.curvature
    assert step is not None
    assert step.kept == ({} if block is None else kept_axes(case(name)[1]))
    factors = [*factors_of(shapes, step.turning)]
    assert len(curvature.arrays["curvature_eigenvectors"]) == factors[-1][-1].stop
    if name == "language":
        assert [axis for parameter, axis, *_ in factors if parameter == "3.weight"] == [1] * (
            1 if block == 64 else 2
        )
    for parameter, axis, columns, place in factors:
        length = columns.stop - columns.start
        lengths = axes_of(shapes[parameter])
        total = np.zeros((length, length))
        for weight, gradient in zip(h, parts[parameter], strict=True):
            m = np.moveaxis(gradient.reshape(lengths), axis, 0).reshape(lengths[axis], -1)[columns]
            if m.shape[1] > SKETCHED_COLUMNS:
                m = m @ signs(m.shape[1]).numpy()
            total += weight * m @ m.T
        u = curvature.arrays["curvature_eigenvectors"][place, checkpoint].reshape(length, length)
        np.testing.assert_allclose(u.T @ u, np.eye(length), atol=1e-5)
        turned = u.T @ total @ u
        off_diagonal = turned - np.diag(np.diag(turned))
        assert np.abs(off_diagonal).max() <= 1e-5 * np.trace(total)
    for parameter, place in places_of(shapes).items():
        rotated = parts[parameter] @ kronecker(curvature, shapes, parameter, checkpoint)
        expected = (h[:, None] * rotated**2).mean(0)
        scale = 1 / np.sqrt(expected + 10 * expected.mean())
        actual = curvature.arrays["curvature_scale"][place, checkpoint]
        np.testing.assert_allclose(actual, scale, rtol=1e-5)


class Layers(nn.Module):
    """Layers with their outputs along either axis, a matrix of its own, and words tied twice."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(7, 4), nn.Embedding(5, 4)
        self.inner, self.up = Conv1D(6, 4), nn.ConvTranspose1d(6, 4, 2)
        self.attention, self.bag = nn.MultiheadAttention(4, 2), nn.EmbeddingBag(3, 4)
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(4, 7))
        self.logits = nn.Linear(4, 7)
        self.logits.weight = self.words.weight
        self.own = nn.Parameter(torch.zeros(3, 4))


def test_kept_axes__are_those_of_outputs() -> None:
    model = td.Model(Layers(), task="image_classification", parameters=["*[!s]"])
    parametrized = "head.parametrizations.weight.original"
    assert kept_axes(model) == {
        "own": 0, "words.weight": 0, "inner.weight": 1, "up.weight": 1,
        "attention.in_proj_weight": 0, "attention.out_proj.weight": 0,
        f"{parametrized}0": 0, f"{parametrized}1": 0,
    }  # fmt: skip
    alone = td.Model(Layers(), task="image_classification", parameters=["inner.*", "places.*"])
    assert kept_axes(alone) == {"inner.weight": 1}


@pytest.mark.parametrize(
    ("name", "engine", "batch_size", "block"),
    [
        *[("cnn", "hooks", 24, 64), ("cnn", "hooks", 7, 2), ("cnn", "vmap", 5, 3)],
        *[("words", "hooks", 5, 3), ("words", "loop", 24, None)],
        *[("language", "hooks", 24, 64), ("language", "hooks", 5, 2), ("language", "loop", 5, 2)],
    ],
)
def test_features_are_those_of_explicit_rotations(
    name: str, engine: Any, batch_size: int, block: int | None
) -> None:
    samples, model = case(name)
    n_kept = 32
    curvature = fitted(name, leading=n_kept, block=block)
    features = td.featurize(
        samples, model, curvature.then(td.SJLT(32)), gradients=engine, batch_size=batch_size
    ).compute()
    rows = RowMap.from_shapes(model.shapes, alignment=td.SJLT.row_alignment)
    for c, checkpoint in enumerate(model.checkpoints):
        parts, _ = gradients(name, c)
        rotated = np.concatenate(
            [parts[n] @ kronecker(curvature, model.shapes, n, c) for n in model.shapes], 1
        )
        scaled = rotated * curvature.arrays["curvature_scale"][:, c]
        kept = curvature.arrays["curvature_leading"][:, c]
        rest = scaled.copy()
        rest[:, kept] = 0
        others = project(
            td.SJLT(32),
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
    by_hooks, by_loop = (
        td.fits.curvature(samples, model, leading=32, gradients=g) for g in ("hooks", "loop")
    )
    one, other = (f.arrays["curvature_scale"] for f in (by_hooks, by_loop))
    np.testing.assert_allclose(one, other, rtol=5e-4)
    one, other = (
        td.featurize(samples, model, by_loop.then(td.SJLT(32)), gradients=g).feature.compute()
        for g in ("hooks", "loop")
    )
    np.testing.assert_allclose(one, other, atol=2e-4 * float(abs(other).max()))


def test_micro_batches_of_sums_are_as_large_as_those_of_sketches(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Sums keep no row for each sample, so many parameters leave room for many samples."""
    samples = td.from_arrays({"image": RNG.normal(size=(24, 1000)).astype("f4"), "label": LABELS})
    net = nn.Sequential(nn.Linear(1000, 600), nn.Linear(600, 3))
    with caplog.at_level("INFO", "trakdask"):
        td.fits.curvature(samples, td.Model(net, task="image_classification"))
    assert any(message.startswith("gradients by") for message in caplog.messages)
    assert "save memory" not in caplog.text


def test_chunks_and_workers_are_invisible(process_cluster: Any) -> None:
    samples, model = case("cnn")
    first = fitted("cnn", leading=16)
    projector = first.then(td.SJLT(16))
    with process_cluster.get_client():
        remote = td.fits.curvature(samples.chunk(sample=5), model)
        far = td.featurize(samples.chunk(sample=7), model, projector).compute()
    scale, expected = (fit.arrays["curvature_scale"] for fit in (remote, first))
    np.testing.assert_allclose(scale, expected, rtol=1e-3)
    near = td.featurize(samples, model, projector).compute()
    np.testing.assert_allclose(far.feature, near.feature, atol=1e-4 * abs(near.feature).max())


@pytest.mark.filterwarnings("ignore:scores are made from 2 checkpoints")
def test_everything_works_on_top(tmp_path: Any) -> None:
    samples, model = case("words")
    sketch = fitted("words", leading=16).then(td.SJLT(16))
    projector = td.fits.principal_components(samples, model, 12, projector=sketch)
    features = td.featurize(samples, model, projector)
    some = td.featurize(samples.isel(sample=slice(16)).chunk(sample=5), model, projector)
    store = td.save(some, tmp_path / "train.zarr")
    more = td.featurize(samples.isel(sample=slice(16, 24)), model, like=store)
    store = td.save(more, tmp_path / "train.zarr", append_dim="sample")
    assert store.attrs["damping_prior"] == 10**0.5
    assert str(td.damping(store, td.Soft(damping="trace")).rule.values) == "3.16 tr(K)/n"
    assert "damping_prior" not in td.featurize(samples, model, td.SJLT(32)).attrs
    targets = td.featurize(samples.isel(sample=[0, 3]), model, like=store)
    expected = td.score(features, features.isel(sample=[0, 3]))
    np.testing.assert_allclose(td.score(store, targets), expected, rtol=1e-3, atol=1e-6)
    require_parts(store, targets, samples, model, "head.*")


def require_parts(
    features: xr.Dataset, targets: xr.Dataset, samples: xr.Dataset, model: td.Model, some: str
) -> None:
    """Compare scores with the sums of their parts: of some parameters, and of the others."""
    parts = td.score_parts(features, targets, model, of=samples, parts={"some": some})
    scores = td.score(features, targets)
    atol = 1e-3 * float(abs(scores).max())
    np.testing.assert_allclose(parts.sum("module"), scores, rtol=1e-2, atol=atol)


@pytest.mark.filterwarnings("ignore:scores are made from 2 checkpoints")
def test_features_of_other_coordinates_are_refused() -> None:
    samples, model = case("cnn")
    projector, other = (fitted("cnn", damping=d, leading=8).then(td.SJLT(8)) for d in (10, 1))
    features = td.featurize(samples, model, projector)
    for targets, field in ((td.SJLT(16), "projector"), (other, "projector.*damping")):
        with pytest.raises(td.errors.StoreMismatchError, match=field):
            td.score(features, td.featurize(samples, model, targets))
    half = td.fits.curvature(samples.isel(sample=slice(12)), model, leading=8).then(td.SJLT(8))
    with pytest.raises(td.errors.StoreMismatchError, match=r"fit\['a'\].*like=features"):
        td.score(features, td.featurize(samples, model, half))


def test_honest_mistakes_have_clear_errors() -> None:
    samples, model = case("cnn")
    projector = fitted("cnn", leading=8).then(td.SJLT(8))
    components = td.fits.principal_components(samples, model, 4, projector=td.SJLT(32))
    features = td.featurize(samples, model, components)
    other = td.Model(small_cnn, {"a": small_cnn().state_dict()}, task="image_classification")
    values = samples.image.values.copy()
    values[3] = np.nan
    broken = td.from_arrays({"image": values, "label": LABELS}, chunks=12)
    mismatch = td.errors.StoreMismatchError
    one = td.fits.curvature(samples, model.at_checkpoints(["a"])).then(td.SJLT(8))
    for error, words, call in (
        (mismatch, "parameters", lambda: td.featurize(*case("words"), projector)),
        (mismatch, r"checkpoints \(their names", lambda: td.featurize(samples, model, one)),
        (mismatch, "checkpoints", lambda: td.featurize(samples, other, projector)),
        (ValueError, "damping", lambda: td.fits.curvature(samples, model, damping=np.inf)),
        (ValueError, "SJLT", lambda: td.featurize(samples, model, fitted("cnn"))),
        (ValueError, "in this order", lambda: projector.then(td.SJLT(8))),
        (ValueError, "without a p", lambda: td.featurize(samples, model, projector, like=features)),
        (td.errors.BlockError, "0:12", lambda: td.fits.curvature(broken, model)),
        (TypeError, "projector", lambda: td.featurize(samples, model, np.eye(4))),
        (ValueError, "proj_dim", lambda: td.fits.principal_components(samples, model, 0)),
        (
            ValueError,
            "principal_components",
            lambda: td.featurize(samples, model, like=features.drop_vars("principal_components")),
        ),
    ):
        with pytest.raises(error, match=words):
            call()
    again = td.featurize(samples, model, like=features.transpose())  # dimensions have names
    np.testing.assert_array_equal(again.feature, features.feature)


def test_a_checkpoint_of_a_fit_of_three() -> None:
    """A fit belongs to checkpoints, and can be used for one of them, in any order."""
    samples, model = case("cnn")
    projector = td.fits.principal_components(
        samples, model, 4, projector=fitted("cnn", leading=8).then(td.SJLT(8))
    )
    both = td.featurize(samples, model, projector).compute()
    for names in (["b"], ["b", "a"]):
        some = td.featurize(samples, model.at_checkpoints(names), projector)
        xr.testing.assert_equal(some.feature, both.feature.sel(checkpoint=names))
        like = td.featurize(samples, model, like=both.sel(checkpoint=names))
        xr.testing.assert_equal(like.feature, both.feature.sel(checkpoint=names))


# ------------------------------------------------------------------------- principal components


def rows_along(features: xr.Dataset) -> np.ndarray:
    return features.feature.values[:, :, 0].astype(float)


def of_codes(codes: np.ndarray) -> np.ndarray:
    """Return what codes of components stand for, with columns of length 1."""
    assert codes.dtype == np.int8
    columns = np.sign(codes) * codes.astype(float) ** 2
    return np.asarray(columns / np.linalg.norm(columns, axis=0))


@pytest.mark.parametrize("is_curved", [False, True])
def test_components_are_the_right_singular_vectors(is_curved: bool) -> None:
    samples, model = case("cnn")
    projector: Any = td.SJLT(256)
    if is_curved:
        projector = fitted("cnn", leading=128).then(td.SJLT(128))
    wide = rows_along(td.featurize(samples, model, projector))
    components = td.fits.principal_components(samples, model, 5, projector=projector)
    _, singular, rows = np.linalg.svd(wide)
    share = singular**2 / (singular**2).sum()
    shares = components.arrays["principal_shares"][:, 0]
    np.testing.assert_allclose(shares, share[:5], rtol=1e-4)
    vectors = of_codes(components.arrays["principal_components"][:, :, 0])
    np.testing.assert_allclose(np.abs(rows[:5] @ vectors), np.eye(5), atol=0.01)

    features = td.featurize(samples, model, components)
    assert td.plan(features).projections.proj_dim[0] == 5
    expected = wide @ vectors
    np.testing.assert_allclose(rows_along(features), expected, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_allclose(features.feature_norm.values[:, 0], (expected**2).sum(1), rtol=1e-4)


@pytest.mark.parametrize(("n", "width", "expected"), [(100, 512, 24), (20, 16, 16)])
def test_columns_that_there_are_not_are_cut_with_both_numbers(
    n: int, width: int, expected: int
) -> None:
    samples, model = case("cnn")
    forget_warnings()
    with pytest.warns(UserWarning, match=f"expected {n} columns.*got {expected}: 24 samples and"):
        found = td.fits.principal_components(samples, model, n, projector=td.SJLT(width))
    assert found.steps[-1] == Components(expected)
    np.testing.assert_allclose(found.arrays["principal_shares"].sum(0), 1, rtol=1e-6)


def test_equal_samples_have_one_component() -> None:
    samples, model = case("cnn")
    equal = samples.isel(sample=[0] * 6)
    components = td.fits.principal_components(equal, model, 3)
    shares = components.arrays["principal_shares"][:, 0]
    np.testing.assert_allclose(shares, [1, 0, 0], atol=1e-6)
    features = td.featurize(equal, model, components).compute()
    assert np.isfinite(features.feature).all()
    assert not features.feature[:, 1:].any()


# --------------------------------------------------- gradients that are 0 but for their rounding


class Keys(nn.Module):
    """The bias of attention's keys adds the same to all logits of a query."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(4, 6) for _ in range(3))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(len(x), -1, 4)
        weights = (self.query(x) @ self.key(x).mT).softmax(-1)
        return self.head((weights @ self.value(x)).mean(1))


class Normalized(nn.Module):
    """Subtracts the mean of each channel, and with it the bias of the convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(2, 6, 3), nn.InstanceNorm2d(6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))


class Shifted(nn.Module):
    """Adds the same to all logits, and has a layer whose units are all off."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.off, self.head = nn.Linear(32, 6), nn.Linear(32, 6), nn.Linear(6, 3)
        self.shift = nn.Parameter(torch.zeros(1))
        nn.init.constant_(self.off.bias, -99)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        return self.head(self.first(x).tanh() + self.off(x).relu()) + self.shift


def distilbert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.DistilBertConfig(
        vocab_size=30, dim=16, n_layers=2, n_heads=2, hidden_dim=32, num_labels=3
    )
    return transformers.DistilBertForSequenceClassification(config)


@pytest.mark.parametrize(
    ("build", "null"),
    [
        (distilbert, ["layer.0.attention.k_lin.bias", "layer.1.attention.k_lin.bias"]),
        (Keys, ["key.bias"]),
        (Normalized, ["conv.bias"]),
        (Shifted, ["off.bias", "off.weight", "shift"]),
    ],
)
def test_scale__is_0_where_gradients_are_rounding(build: Any, null: list[str]) -> None:
    torch.manual_seed(0)
    module, draw = build(), np.random.default_rng(5)
    ids, image = draw.integers(1, 30, (24, 9)), draw.normal(size=(24, 2, 4, 4)).astype("f4")
    words = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    samples = td.from_arrays(
        {**(words if build is distilbert else {"image": image}), "label": LABELS}
    )
    task = "text_classification" if build is distilbert else "image_classification"
    model, made, scales = td.Model(module, task=task), [], []
    for size in (1, 6):
        fit = td.fits.curvature(samples, model, leading=16, batch_size=size, progress=False)
        features = td.featurize(samples, model, fit.then(td.SJLT(64)), batch_size=size)
        made.append(features.feature.values[..., 0].astype(float))
        scales.append(fit.arrays["curvature_scale"][:, 0])
    for name, place in places_of(model.shapes).items():
        assert bool(scales[0][place].any()) != any(name.endswith(each) for each in null)
    alone, together = made
    assert np.linalg.norm(together - alone) <= 1e-4 * np.linalg.norm(alone)


def test_components_of_gradients_that_are_0() -> None:
    samples = td.from_arrays({"image": np.zeros((6, 4), "f4"), "label": np.arange(6) % 3})
    model = td.Model(nn.Linear(4, 3, bias=False), task="image_classification")
    found = td.fits.principal_components(samples, model, 3, projector=td.Identity(), progress=False)
    assert not any(np.any(array) for array in found.arrays.values())


@pytest.mark.parametrize("progress", [True, False])
def test_progress__of_each_fit(progress: bool, capsys: pytest.CaptureFixture[str]) -> None:
    samples, model = case("cnn")
    moments = {n: {p: torch.ones(s) for p, s in model.shapes.items()} for n in ("a", "b")}
    td.fits.curvature(samples, model, progress=progress)
    td.fits.principal_components(samples, model, 3, projector=td.SJLT(32), progress=progress)
    td.fits.second_moments(model, moments, progress=progress)
    shown = capsys.readouterr().out
    # Two blocks at two checkpoints, twice for the curvature; moments are files.
    assert [count in shown for count in ("8/8", "4/4", "2/2")] == 3 * [progress]
