"""Baselines against loops over their formulas; a mapping of scores against its entries, alone."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import xarray as xr

import trakdask as td
from trakdask.testing import simulate_features

N, M = 24, 5
FEATURES = simulate_features(n_samples=N, proj_dim=4, chunks=7)
TARGETS = simulate_features(n_samples=M, proj_dim=4, chunks=3, seed=1)
RNG = np.random.default_rng(0)
EMBEDDINGS = RNG.standard_normal((N, 3)), RNG.standard_normal((M, 3))
WORDS = np.array(["Red", "blue", "sea,", "the", "Füchse", "x2"])
TEXTS = tuple([" ".join(RNG.choice(WORDS, RNG.integers(0, 9))) for _ in range(n)] for n in (N, M))
TEXTS[1][0] = "red red unseen"


def bm25(texts: list[str], query: str) -> list[float]:
    """Robertson and Zaragoza 2009, in loops; the logarithm is of 1 + odds, never negative."""
    documents = [re.findall(r"\w+", text.lower()) for text in texts]
    mean_length = sum(map(len, documents)) / len(documents)
    sums = []
    for document in documents:
        total = 0.0
        for word in re.findall(r"\w+", query.lower()):
            n_with = sum(word in other for other in documents)
            rarity = math.log(1 + (len(documents) - n_with + 0.5) / (n_with + 0.5))
            count = document.count(word)
            length = 1 - 0.75 + 0.75 * len(document) / mean_length
            total += rarity * count * (1.5 + 1) / (count + 1.5 * length)
        sums.append(total)
    return sums


@pytest.mark.parametrize("labelled", [True, False])
def test_baselines__equal_loops_over_their_formulas(labelled: bool) -> None:
    targets = TARGETS if labelled else TARGETS.drop_vars("label")
    given = {"embeddings": EMBEDDINGS, "texts": TEXTS}
    found = td.evaluate.baselines(FEATURES, targets, **given).compute()
    phi, phi_t = (x.feature.values.astype(np.float64) for x in (FEATURES, TARGETS))
    q = FEATURES.out_to_loss.values
    for z, t in np.ndindex(N, M):
        norm = np.linalg.norm(phi[z], axis=0)
        cosines = (phi[z] * phi_t[t]).sum(axis=0) / norm / np.linalg.norm(phi_t[t], axis=0)
        same = FEATURES.label.values[z] == TARGETS.label.values[t]
        sign = 1 if same or not labelled else -1
        a, b = EMBEDDINGS[0][z], EMBEDDINGS[1][t]
        expected = {
            "loss": -q[z].mean(),
            "gradient_norm": -np.sqrt((norm**2).mean()) * q[z].mean(),
            "gradient_cosine": cosines.mean() * np.sign(q[z].mean()),
            "embedding": sign * a @ b / np.linalg.norm(a) / np.linalg.norm(b),
            "bm25": sign * bm25(TEXTS[0], TEXTS[1][t])[z],
        } | ({"same_label": sign} if labelled else {})
        for name, value in expected.items():
            assert float(found[name][z, t]) == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert set(found) == {"random", *expected}
    assert all(x.dtype == np.float32 and x.dims == ("sample", "target") for x in found.values())
    assert set(found.coords) == set(td.score(FEATURES, targets).coords)


@pytest.mark.parametrize("as_rows", [True, False])
def test_baselines__tokens_are_words(as_rows: bool) -> None:
    ids = [RNG.integers(0, 9, (n, 6)) for n in (N, M)]
    if not as_rows:  # of several lengths, one of them 0
        ids = [[row[:length].tolist() for length, row in enumerate(rows)] for rows in ids]
    words = [[" ".join(map(str, row)) for row in rows] for rows in ids]
    found = td.evaluate.baselines(FEATURES, TARGETS.drop_vars("label"), texts=tuple(ids)).bm25
    expected = [[bm25(words[0], query)[z] for query in words[1]] for z in range(N)]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_baselines__chunks_are_invisible_and_random_is_seeded() -> None:
    features = FEATURES.assign_coords(text=("sample", TEXTS[0]))
    targets = TARGETS.assign_coords(text=("sample", TEXTS[1]))
    options = {"embeddings": EMBEDDINGS, "texts": "text"}
    one = td.evaluate.baselines(features, targets, **options).compute()
    other = td.evaluate.baselines(features.compute(), targets.chunk(sample=1), **options)
    xr.testing.assert_allclose(other, one, atol=1e-6)
    np.testing.assert_array_equal(other.random, one.random)
    again = td.evaluate.baselines(FEATURES, TARGETS, seed=1).random
    assert abs(np.corrcoef(again.values.ravel(), one.random.values.ravel())[0, 1]) < 0.4


# --- mappings of scores ---------------------------------------------------------------------------


SCORES = xr.DataArray(
    RNG.standard_normal((N, M)),
    dims=("sample", "target"),
    coords={
        "label": ("sample", np.arange(N) % 2),
        "target_label": ("target", np.arange(M) % 2),
    },
)


def train(positions: np.ndarray, seed: int) -> np.ndarray:
    return SCORES.values[positions].sum(axis=0) ** 3


EVALUATIONS = {
    "removal_curve": lambda scores: td.evaluate.removal_curve(train, scores, [0.2, 0.1]),
    "mislabelled_curve": lambda scores: td.evaluate.mislabelled_curve(scores, np.arange(N) < 9),
}


@pytest.mark.parametrize("name", EVALUATIONS)
def test_mapping__is_evaluated_as_each_of_its_entries(name: str) -> None:
    scores = SCORES[:, 1] if name == "mislabelled_curve" else SCORES
    minus = -scores
    several = {"lazy": scores.chunk(sample=5), "bare": minus.reset_coords(drop=True).T}
    found = EVALUATIONS[name](several).compute()
    for which, one in {"lazy": scores, "bare": minus}.items():
        alone = EVALUATIONS[name](one).compute()
        xr.testing.assert_allclose(found.sel(estimator=which, drop=True), alone)
    as_dataset = EVALUATIONS[name](xr.Dataset({"a": scores, "b": -scores}))
    np.testing.assert_array_equal(as_dataset.estimator, ["a", "b"])


def test_baselines__know_nothing_of_what_is_missing() -> None:
    label = np.where(np.arange(N) == 0, np.nan, FEATURES.label.values)
    whole = xr.DataArray(np.arange(N) != 1, dims="sample")
    broken = FEATURES.assign_coords(label=("sample", label))
    broken = broken.assign(
        {name: FEATURES[name].where(whole) for name in ("feature", "out_to_loss")}
    )
    zero = np.where(np.arange(N)[:, None] == 2, 0, EMBEDDINGS[0])
    found = td.evaluate.baselines(broken, TARGETS, embeddings=(zero, EMBEDDINGS[1]))
    unknown = {"same_label": 0, "loss": 1, "gradient_norm": 1, "gradient_cosine": 1, "embedding": 2}
    for name, row in unknown.items():
        rows = np.flatnonzero(np.isnan(found[name]).all("target"))
        assert rows.tolist() == [row], name
    assert not td.evaluate.baselines(FEATURES, TARGETS, texts=([""] * N, [""] * M)).bm25.any()
