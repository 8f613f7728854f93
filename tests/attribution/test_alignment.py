"""Arrays beside scores and features: aligned by label, or as long as these. By hand in numpy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import xarray as xr

import trakdask as td
from trakdask.testing import simulate_features

N, M = 20, 6
X = simulate_features(N, 4, 5, chunks=8)
T = simulate_features(M, 4, 5, chunks=4, seed=1)
NAMES, TARGET_NAMES = [f"s{i:02}" for i in range(N)], [f"t{i}" for i in range(M)]
RNG = np.random.default_rng(0)
PARTS = RNG.random((N, 3))
EMBEDDINGS = RNG.normal(size=(N, 2)), RNG.normal(size=(M, 2))
FLAGS = np.arange(N) % 3 == 0
DOT = "grad_dot"

Ask = Callable[[xr.Dataset, xr.Dataset, Any], Any]


def parts(ask: Callable[..., Any], **options: Any) -> Ask:
    return lambda x, t, values: ask(x, t, DOT, by=values, **options)


def scores(x: xr.Dataset, t: xr.Dataset) -> xr.DataArray:
    return td.score(x, t, DOT)


#: Each takes features, targets, and an array along samples.
OF_SAMPLES: dict[str, tuple[Ask, np.ndarray]] = {
    "group_score": (parts(td.group_score), PARTS),
    "group_score, metric": (parts(td.group_score, metric="loss"), PARTS),
    "share": (parts(td.group_score, share=True), PARTS),
    "top_k": (lambda x, t, v: td.top_k(scores(x, t), 2, where=v).position, FLAGS),
    "gram": (lambda x, _, v: td.gram(x, weights=v), PARTS[:, 0]),
    "subsets": (lambda x, _, v: td.evaluate.subsets(x, 3, by=v), np.arange(N) // 4),
    "mislabelled_curve": (
        lambda x, _, v: td.evaluate.mislabelled_curve(td.self_influence(x, DOT), v).auc,
        FLAGS,
    ),
    "baselines": (
        lambda x, t, v: td.evaluate.baselines(x, t, embeddings=(v, EMBEDDINGS[1])).embedding,
        EMBEDDINGS[0],
    ),
    "lds": (
        lambda x, t, v: td.evaluate.lds(
            scores(x, t), v.rename(part="subset"), xr.DataArray(OUTPUTS, dims=("subset", "target")),
            resamples=3,
        ).lds,
        RNG.random((N, 3)) > 0.5,
    ),
}  # fmt: skip
OUTPUTS = RNG.normal(size=(3, M))

#: The same along targets.
OF_TARGETS: dict[str, tuple[Ask, np.ndarray]] = {
    "combine": (lambda _, t, v: td.combine(t, weights={"one": v}).output, PARTS[:M, 0]),
    "metric": (lambda _, t, v: td.evaluate.metric(v.rename(sample="target"), t, AUROC), OUTPUTS[0]),
    "top_k": (
        lambda x, t, v: td.top_k(scores(x, t), 2, where=v.rename(sample="target")).position,
        np.ones(M, bool),
    ),
}  # fmt: skip
AUROC: Any = "auroc"


def labelled(values: np.ndarray, names: list[str] | None = None) -> xr.DataArray:
    dims = ("sample", "part")[: values.ndim]
    coords = {} if names is None else {"sample": names}
    return xr.DataArray(values, coords, dims)


@pytest.mark.parametrize("cut", [slice(-1), slice(1, None)], ids=["a last", "a first"])
@pytest.mark.parametrize("name", OF_SAMPLES)
def test_arrays__of_other_lengths_are_refused(name: str, cut: slice) -> None:
    ask, values = OF_SAMPLES[name]
    with pytest.raises(ValueError, match=r"19|20"):
        ask(X, T, labelled(values[cut]))
    with pytest.raises(ValueError, match=r"19|20"):
        ask(X.isel(sample=cut), T, labelled(values))


@pytest.mark.parametrize("name", OF_TARGETS)
def test_arrays__along_targets_have_their_length(name: str) -> None:
    ask, values = OF_TARGETS[name]
    with pytest.raises(ValueError, match="6"):
        ask(X, T, labelled(values[1:]))


@pytest.mark.parametrize("name", [name for name in OF_SAMPLES if name != "lds"])
def test_arrays__are_reordered_by_their_labels(name: str) -> None:
    ask, values = OF_SAMPLES[name]
    named, order = X.assign_coords(sample=NAMES), RNG.permutation(N)
    found = ask(named, T, labelled(values, NAMES)[order])
    expected = ask(X, T, labelled(values))
    np.testing.assert_array_equal(found, expected)
    with pytest.raises(ValueError, match="s03"):
        ask(named, T, labelled(values, NAMES)[np.delete(order, list(order).index(3))])


@pytest.mark.parametrize("name", ["combine", "metric"])
def test_arrays__along_targets_are_reordered_by_their_labels(name: str) -> None:
    ask, values = OF_TARGETS[name]
    t = T.assign_coords(label=("sample", np.arange(M) % 2))
    order = RNG.permutation(M)
    found = ask(X, t.assign_coords(sample=TARGET_NAMES), labelled(values, TARGET_NAMES)[order])
    np.testing.assert_array_equal(found, ask(X, t, labelled(values)))


FROM_PANDAS = {
    name: OF_SAMPLES[name] for name in ("top_k", "subsets", "mislabelled_curve", "baselines")
}


@pytest.mark.parametrize("name", FROM_PANDAS)
def test_series__have_an_index(name: str) -> None:
    ask, values = FROM_PANDAS[name]
    made = pd.DataFrame(values, index=NAMES)
    made = made if values.ndim > 1 else made[0]
    found = ask(X.assign_coords(sample=NAMES), T, made.sample(frac=1, random_state=0))
    np.testing.assert_array_equal(found, ask(X, T, labelled(values)))
    shuffled = made.reset_index(drop=True).sample(frac=1, random_state=0)
    with pytest.raises(ValueError, match="to_numpy"):
        ask(X, T, shuffled)


def test_parts__of_the_samples_before_some_were_dropped_are_refused(tmp_path: Path) -> None:
    store = tmp_path / "f.zarr"
    td.save(X, store, estimator=None, progress=False)
    by_label = np.argsort(X.label.values, kind="stable")
    mask = labelled(FLAGS).assign_coords(label=X.label)
    with pytest.raises(ValueError, match="'label'"):
        td.drop(store, where=mask[by_label])
    masks = td.evaluate.subsets(X, 5).rename(subset="checkpoint")
    with pytest.raises(ValueError, match="'label'"):
        td.assign_coords(store, {"trained_on": masks.isel(sample=by_label)})
    kept = td.drop(store, where=mask)
    with pytest.raises(ValueError, match=r"{'sample': 13}, got {'sample': 20}"):
        td.group_score(kept, T, DOT, by=labelled(PARTS))
    found = td.group_score(kept, T, DOT, by=labelled(PARTS)[~FLAGS])
    expected = PARTS[~FLAGS].T @ scores(X, T).values[~FLAGS]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_lds__compares_coords() -> None:
    made = scores(X, T)
    masks = td.evaluate.subsets(X, 3)
    outputs = td.evaluate.retrain(lambda rows, seed: OUTPUTS[len(rows) % 3], masks, made)
    by_label = np.argsort(X.label.values, kind="stable")
    with pytest.raises(ValueError, match="'label'"):
        td.evaluate.lds(made.isel(sample=by_label), masks, outputs)
    with pytest.raises(ValueError, match="'target_label'"):
        td.evaluate.lds(made, masks, outputs.isel(target=np.argsort(T.label.values)))
    with pytest.raises(ValueError, match=r"scores of 'b'.*'label'"):
        td.evaluate.lds({"a": made, "b": made.isel(sample=by_label)}, masks, outputs)


def test_gallery__has_the_images_of_the_ranked_samples() -> None:
    pytest.importorskip("matplotlib")
    top = td.top_k(scores(X.isel(sample=~FLAGS), T), 2)
    with pytest.raises(ValueError, match="13 samples that were ranked, got 20"):
        td.plots.gallery(top, top, np.zeros((N, 4, 4)), np.zeros((M, 4, 4)))
