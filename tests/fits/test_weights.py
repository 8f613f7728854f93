"""Weights of parameters, against explicit modules in float64."""

from __future__ import annotations

import functools
import shutil
from dataclasses import replace
from typing import Any

import dask
import numpy as np
import pytest
import torch
from torch import nn

import trakdask as td
from tests.fits.test_curvature import case, fitted, gradients, kronecker, require_parts, small_words
from trakdask.fits import fitting, weights
from trakdask.fits.curvatures import differentiates_words, writes_words
from trakdask.fits.weights import weights_of
from trakdask.projection.fitted import Fitted
from trakdask.provenance import as_values
from trakdask.tensors import VECTORS, groups_of, places_of

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore::UserWarning")
EXACT: dict[str, Any] = {
    "curvature": True, "weights": True, "components": False, "sketch": td.Identity(),
    "progress": False,
}  # fmt: skip


def scaled(name: str, checkpoint: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return scaled gradients of each parameter, (sample, coordinate), and h, in float64."""
    shapes, (parts, q) = case(name)[1].shapes, gradients(name, checkpoint)
    factors = fitted(name).arrays["curvature_scale"][:, checkpoint].astype(float)
    return {
        n: parts[n] @ kronecker(fitted(name), shapes, n, checkpoint) * factors[place]
        for n, place in places_of(shapes).items()
    }, np.ones(len(q)) if name == "language" else np.sqrt(q) * (1 - q)


def explicit(name: str, checkpoints: list[int]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for title, names in groups_of(case(name)[1].shapes).items():
        scores, traces, directions = [], [], []
        for c in checkpoints:
            parts, h = scaled(name, c)
            x = np.concatenate([parts[n] for n in names], 1)
            gram = sum(w * np.outer(row, row) for w, row in zip(h, x, strict=True))
            lam = 10**0.75 * np.trace(gram) / len(x)
            s = x @ np.linalg.solve(gram + lam * np.eye(len(gram)), x.T)
            columns = [np.delete(column, i) for i, column in enumerate(s.T)]
            scores.append(np.concatenate([column - column.mean() for column in columns]))
            traces.append(np.trace(gram))
            directions.append(np.trace(gram) ** 2 / np.trace(gram @ gram))
        r = [np.corrcoef(a, b)[0, 1] for i, a in enumerate(scores) for b in scores[:i]]
        n, mean = len(checkpoints), max(np.mean(r), 0.01) if r else 1
        reliability = n * mean / (1 + (n - 1) * mean)
        found[title] = {
            "weight": (reliability * np.mean(directions)) ** 2,
            "share": np.mean(traces), "directions": np.mean(directions),
        } | ({"agreement": np.mean(r)} if r else {})  # fmt: skip
    total = sum(each["share"] for each in found.values())
    length = sum(each["weight"] ** 2 * each["share"] for each in found.values())
    for each in found.values():
        if each["weight"] ** 2 * each["share"] < 0.01 * length:
            each["weight"] = 0
        each["share"] /= total
    length = sum(each["weight"] ** 2 * each["share"] for each in found.values())
    for each in found.values():
        each["weight"] /= np.sqrt(length)
    return found


def weights_in(projector: Fitted) -> Any:
    return projector.spec()["steps"][0].get("weights")


@pytest.mark.parametrize(
    ("name", "checkpoints"),
    [("cnn", [0, 1]), ("words", [0, 1]), ("cnn", [1]), ("language", [0, 1])],
)
def test_weights__are_those_of_explicit_modules(name: str, checkpoints: list[int]) -> None:
    samples, model = case(name)
    names = ["ab"[c] for c in checkpoints]
    model = model.at_checkpoints(names)
    projector = td.fit(samples, model, **EXACT)
    expected, found = explicit(name, checkpoints), weights_in(projector)
    assert found.keys() == expected.keys()
    for title, values in expected.items():
        assert found[title] == pytest.approx(values, rel=1e-4, abs=1e-5), title
    features = td.featurize(samples, model, projector).compute()
    owner = {n: title for title, names in groups_of(model.shapes).items() for n in names}
    for i, c in enumerate(checkpoints):
        rows, _ = scaled(name, c)
        weight = {n: expected[owner[n]]["weight"] for n in rows}
        rows = {n: x * weight[n] for n, x in rows.items() if weight[n]}
        whole = np.concatenate([*rows.values()], 1)
        atol = 1e-4 * np.abs(whole).max()
        np.testing.assert_allclose(features.feature.values[..., i], whole, atol=atol)
    total = sum(each["weight"] ** 2 * each["share"] for each in found.values())
    assert total == pytest.approx(1, rel=1e-4)  # as before, so that λ means the same


def test_weights__are_by_default_of_models_of_tokens(tmp_path: Any) -> None:
    options = EXACT | {"weights": "auto", "sketch": td.SJLT(64), "proj_dim": 64}
    for name, has_weights in (("cnn", False), ("words", True)):
        samples, model = case(name)
        assert (weights_in(td.fit(samples, model, **options)) is not None) == has_weights
        one, store = model.at_checkpoints(["a"]), tmp_path / f"{name}.zarr"
        other = td.fit(samples, one, store=store, **options | {"weights": not has_weights})
        td.save(td.featurize(samples, one, other), store, progress=False)
        both = td.fit(samples, model, store=store, **options)
        assert weights_in(both) == weights_in(other)  # a store goes on as it began
        with pytest.raises(td.errors.StoreMismatchError, match="weights"):
            td.fit(samples, model, store=store, **options | {"weights": has_weights})
    positional = td.tasks.CausalLM(inputs="ids", positional=True)
    assert differentiates_words(td.Model(nn.Linear(4, 9), task=positional))
    samples, model = case("words")
    adapted = td.Model(small_words, [small_words().state_dict()], parameters=["mix.*", "head.*"])
    assert adapted.reads_tokens  # but it differentiates no words
    assert weights_in(td.fit(samples, adapted, **options)) is None
    assert weights_in(td.fit(samples, adapted, **options | {"weights": True})) is not None
    with pytest.raises(ValueError, match="weights=True for 24 samples"):
        td.fit(*case("cnn"), **options | {"weights": True, "curvature": False})


@pytest.mark.parametrize("older_kept", [{}, {"3.weight": 0}])
def test_fit__goes_on_with_the_coordinates_of_an_older_store(
    tmp_path: Any, monkeypatch: Any, older_kept: dict[str, int]
) -> None:
    """Older versions turned whole axes, and outputs, too: of words, or of other layers alone."""
    monkeypatch.setattr(fitting, "LONGEST_BLOCK", 3)
    samples, model = case("language")
    options, store = EXACT | {"sketch": td.SJLT(64), "proj_dim": 64}, tmp_path / "older.zarr"
    one = model.at_checkpoints(["a"])
    with monkeypatch.context() as older:
        older.setattr(fitting, "kept_axes", lambda model: older_kept)
        older.setattr(fitting, "LONGEST_BLOCK", None)
        before = td.fit(samples, one, store=store, **options)
    assert before.curvature is not None
    step = replace(before.curvature, kept=None, writer=next(iter(older_kept), None))
    before = replace(before, steps=(step, *before.steps[1:]))
    assert not {"kept", "block"} & before.spec()["steps"][0].keys()
    td.save(td.featurize(samples, one, before), store, progress=False)
    both = td.fit(samples, model, store=store, **options)
    assert both.spec() == before.spec()
    features = td.save(
        td.featurize(samples, model, both), store, append_dim="checkpoint", progress=False
    )
    targets = td.featurize(samples.isel(sample=[1, 5]), model, like=features)
    np.testing.assert_allclose(targets.feature, features.feature[[1, 5]], rtol=1e-3, atol=1e-5)
    younger = td.fit(samples, model, **options).curvature
    assert younger is not None
    assert younger.turning == ({"1.weight": 0, "3.weight": 0}, 3)
    assert step.damping_prior == younger.damping_prior == 10**0.75


def test_fit__curvatures_of_models_of_tokens_are_of_all_samples(monkeypatch: Any) -> None:
    samples, model = case("words")
    monkeypatch.setattr(fitting, "N_CURVATURE", 8)
    found = td.fit(samples, model, **EXACT | {"weights": False}).arrays["curvature_scale"]
    alone = td.fits.curvature(samples, model, leading=0, progress=False).arrays["curvature_scale"]
    np.testing.assert_allclose(found, alone, rtol=1e-5)


@functools.cache
def exact() -> Fitted:
    with dask.config.set(scheduler="threads"):
        return td.fit(*case("cnn"), **EXACT)


def test_weights__of_sketches_are_near(monkeypatch: Any) -> None:
    expected = weights_in(exact())
    monkeypatch.setattr(weights, "_WIDEST", 128)  # of 225 elements, and fewer
    near = weights_in(td.fit(*case("cnn"), **EXACT))
    assert near != expected
    for title, values in expected.items():
        assert near[title]["agreement"] == pytest.approx(values["agreement"], abs=0.15), title
        assert near[title]["directions"] == pytest.approx(values["directions"], rel=0.2), title


def test_weights__do_not_depend_on_the_way() -> None:
    samples, model = case("cnn")
    samples, model = samples.chunk(sample=7), model.at_checkpoints(["b", "a"])
    other = weights_in(td.fit(samples, model, **EXACT, gradients="vmap", batch_size=5))
    for title, values in weights_in(exact()).items():
        assert other[title] == pytest.approx(values, rel=1e-3), title


def test_weights__are_measured_where_a_store_that_had_them_was_removed(tmp_path: Any) -> None:
    samples, model = case("words")
    store, options = tmp_path / "a.zarr", EXACT | {"sketch": td.SJLT(64), "proj_dim": 64}
    one = model.at_checkpoints(["a"])
    fit = td.fit(samples, one, store=store, **options)
    td.save(td.featurize(samples, one, fit), store, progress=False)
    td.fit(samples, model, store=store, **options)  # keeps that of "b" beside, without facts
    shutil.rmtree(store)
    again = td.fit(samples, model, store=store, **options)
    assert weights_in(again) == weights_in(td.fit(samples, model, **options))


def test_weights__what_has_none_is_not_differentiated(tmp_path: Any, monkeypatch: Any) -> None:
    """Nor by any door: features like others, rows and a checkpoint that are appended to a store."""
    samples, model = case("cnn")
    monkeypatch.setattr(weights, "_NEGLIGIBLE", 0)
    whole = td.fit(samples, model, **EXACT)
    monkeypatch.setattr(weights, "_NEGLIGIBLE", 0.1)
    projector = td.fit(samples, model, **EXACT)
    found, before = weights_in(projector), weights_in(whole)
    small = [t for t, w in before.items() if w["weight"] ** 2 * w["share"] < 0.1]
    assert 0 < len(small) < len(before)
    assert [title for title, w in found.items() if not w["weight"]] == small
    kept = [n for title, names in groups_of(model.shapes).items() if found[title]["weight"]
            for n in names]  # fmt: skip
    features = td.featurize(samples, model, projector).compute()
    assert as_values(features.attrs)["parameters"].keys() == set(kept)
    assert projector.model["parameters"].keys() == set(kept)
    places = places_of(model.shapes)
    columns = np.concatenate([np.arange(p.start, p.stop) for n, p in places.items() if n in kept])
    title = next(title for title, w in found.items() if w["weight"])
    gain = found[title]["weight"] / before[title]["weight"]  # as long as before, all together
    expected = gain * td.featurize(samples, model, whole).feature.values[:, columns]
    np.testing.assert_allclose(features.feature, expected, rtol=1e-3, atol=1e-5)

    store, options = tmp_path / "a.zarr", EXACT | {"sketch": td.SJLT(64), "proj_dim": 64}
    one, first = model.at_checkpoints(["a"]), samples.isel(sample=slice(16))
    fit = td.fit(samples, one, store=store, **options)
    opened = td.save(td.featurize(first, one, fit), store, progress=False)
    kept = as_values(opened.attrs)["projector"]["steps"][0]["weights"]
    assert kept == weights_in(fit) != found
    more = td.featurize(samples.isel(sample=slice(16, 24)), one, like=opened)
    td.save(more, store, append_dim="sample", progress=False)
    fit = td.fit(samples, model, store=store, **options)
    assert weights_in(fit) == kept
    features = td.save(
        td.featurize(samples, model, fit), store, append_dim="checkpoint", progress=False
    )
    targets = td.featurize(samples.isel(sample=[1, 5]), model, like=features)
    np.testing.assert_allclose(targets.feature, features.feature[[1, 5]], rtol=1e-3, atol=1e-5)
    require_parts(features, targets, samples, model, next(iter(fit.model["parameters"])))
    with pytest.raises(td.errors.StoreMismatchError, match="parameters"):
        td.featurize(*case("words"), projector)


class Tiny(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4)
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 9, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.words(ids)).tanh())


@pytest.mark.parametrize(("tied", "writer"), [(False, "head.weight"), (True, "words.weight")])
def test_weights__of_one_language_model_are_small_inside(tied: bool, writer: str) -> None:
    task = td.tasks.CausalLM(inputs="input_ids", positional=True)
    model = td.Model(Tiny(tied), task=task)
    groups = list(groups_of(model.shapes))
    facts = {
        "scores": np.ones((3, 3, len(groups), 1)), "traces": np.ones((len(groups), 1)),
        "directions": np.full((len(groups), 1), 4.0),
    }  # fmt: skip
    shapes, found_writer = model.shapes, writes_words(model)
    assert found_writer == writer
    found = {t: each["weight"] for t, each in weights_of(facts, shapes, writer).items()}
    largest = found.pop(writer)
    assert found.keys() == {"inner.weight", VECTORS} | ({"words.weight"} - {writer})
    assert [w / largest for w in found.values()] == pytest.approx(
        [0.03**0.5] * len(found), rel=1e-4
    )
    adapters = td.Model(Tiny(tied), task=task, parameters="inner.*")  # which write nothing
    facts = {name: values[..., :2, :] for name, values in facts.items()}
    assert writes_words(adapters) is None
    assert {each["weight"] for each in weights_of(facts, adapters.shapes, None).values()} == {1.0}
