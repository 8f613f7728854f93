"""Features of other programs, through every door; the oracle is their definition in float64."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
import torch
import xarray as xr

import trakdask as td
from tests.laziness import raise_if_dask_computes
from trakdask.explorer.questions import Questions
from trakdask.explorer.view import View

N, M, P, C = 70, 6, 5, 2
RNG = np.random.default_rng(0)
X, NEW = RNG.standard_normal((N, P, C)), RNG.standard_normal((M, P, C))
Q, F = RNG.random((N, C)), RNG.standard_normal((N, C))
SOURCE = np.array(["web", "book"])[np.arange(N) % 2]
ROWS = {"source": SOURCE, "row": np.arange(N)}


def train(rows: slice = slice(None), **options: Any) -> xr.Dataset:
    coords = {name: values[rows] for name, values in ROWS.items()}
    options = {"out_to_loss": Q[rows], "coords": coords, "chunks": 16} | options
    return td.from_features(X[rows], "words, version 1", **options)


def targets(made_by: str = "words, version 1") -> xr.Dataset:
    return td.from_features(NEW, made_by, coords={"row": np.arange(M)})


def expected(x: np.ndarray = X, q: np.ndarray = Q, h: np.ndarray | float = 1.0) -> np.ndarray:
    """Return scores whose λ is tr(K)/n, (sample, target)."""
    products = 0
    for c in range(C):
        weight = h if isinstance(h, float) else h[:, c, None]
        gram = x[..., c].T @ (weight * x[..., c])
        damped = gram + np.trace(gram) / len(x) * np.eye(P)
        products = products + x[..., c] @ np.linalg.solve(damped, NEW[..., c].T) / C
    return products * q.mean(1, keepdims=True)


@pytest.mark.parametrize(("kind", "chunks"), [("dask", 16), ("dask", 100), ("labelled", 16)])
def test_features__kinds_of_arrays(kind: str, chunks: int) -> None:
    """Others: ``test_array_source.py``."""
    labels = {"checkpoint": ["a", "b"], "source": ("sample", SOURCE)}
    labelled = xr.DataArray(X, labels, ("sample", "proj_dim", "checkpoint"))
    array = {
        "dask": lambda: da.from_array(X, chunks=(11, 2, -1)),
        "labelled": lambda: labelled.transpose("checkpoint", ...),
    }[kind]()
    with raise_if_dask_computes():
        output = labelled[:, 0, ::-1].copy(data=F[:, ::-1]) if kind == "labelled" else F
        features = td.from_features(array, "x", output=output, chunks=chunks)
    names = ["a", "b"] if kind == "labelled" else ["0", "1"]
    assert features.checkpoint.values.tolist() == names
    assert ("source" in features.coords) == (kind == "labelled")
    np.testing.assert_array_equal(features.feature, X)
    np.testing.assert_array_equal(features.output, F)
    assert (features.out_to_loss == 1).all()
    assert features.feature.chunks == da.core.normalize_chunks((chunks, P, 1), X.shape)
    assert features.output.data.chunks == features.feature.data.chunks[::2]


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [("?", "f4"), ("u1", "f4"), ("f2", "f4"), ("f4", "f4"), ("i8", "f8"), ("f8", "f8")],
)
def test_features__one_model_and_any_numbers(dtype: str, stored: str) -> None:
    words = (RNG.random((9, 4)) < 0.5).astype(dtype)
    features = td.from_features(words, "words", out_to_loss=np.arange(9.0))
    assert features.feature.dtype == stored
    np.testing.assert_array_equal(features.feature.values[..., 0], words)
    np.testing.assert_array_equal(features.out_to_loss.values[:, 0], np.arange(9))


def test_damping__by_outputs_only_where_there_are_some_and_if_asked() -> None:
    def rule(features: xr.Dataset, estimator: td.Soft | td.Trak) -> str:
        return str(td.damping(features, estimator).rule.values)

    soft, trak = td.Soft(), td.Trak()
    assert rule(train(), trak) == rule(train(), soft) == rule(train(output=F), trak) == "tr(K)/n"
    assert soft.resolved(train(output=F)).damping == "completeness"
    h = Q**0.5 * (1 - Q)
    scores = td.score(train(), targets(), td.Soft(power=0.5))
    np.testing.assert_allclose(scores, expected(q=Q**0.5, h=h), rtol=1e-6)
    with pytest.raises(ValueError, match="'output'"):
        td.damping(train(), td.Trak(damping="completeness"))
    with pytest.raises(TypeError, match="made_by as text, got None"):
        td.from_features(X, None)  # type: ignore[arg-type]
    knows = train().isel(checkpoint=[0] * 5)
    mask = xr.DataArray(np.ones((N, 5), bool), dims=("sample", "checkpoint"))
    assert td.Trak().resolved(knows.assign(trained_on=mask)).damping == "trace"


def test_store__is_saved_opened_appended_dropped_and_verified(tmp_path: Path) -> None:
    store = tmp_path / "f.zarr"
    first = td.save(train(slice(0, 40)), store, progress=False)
    assert first.damping.attrs["rule"] == "tr(K)/n"
    np.testing.assert_allclose(
        td.score(first, targets()), expected(X[:40], Q[:40]), rtol=1e-5, atol=1e-9
    )
    again = td.save(train(slice(0, 40)), store, progress=False)  # the same source: resumes
    assert again.sizes == first.sizes
    both = td.save(train(slice(40, N)), store, append_dim="sample", progress=False)
    np.testing.assert_allclose(td.score(both, targets()), expected(), rtol=1e-5, atol=1e-9)
    by_source = td.group_score(both, targets(), by="source")
    sums = [expected()[name == SOURCE].sum(0) for name in ("book", "web")]
    np.testing.assert_allclose(by_source, sums, rtol=1e-5)
    left = td.drop(store, where=lambda ds: ds.row < 10)
    np.testing.assert_allclose(
        td.score(left, targets()), expected(X[10:], Q[10:]), rtol=1e-5, atol=1e-9
    )
    assert td.verify(store, checksums=True).empty
    assert "output" not in td.open(store)
    with pytest.raises(td.errors.StoreMismatchError, match=r"made_by: .*1.*2"):
        td.score(left, targets("words, version 2"))
    other = td.from_features(X[:5], "words, version 2", coords={k: v[:5] for k, v in ROWS.items()})
    with pytest.raises(td.errors.StoreMismatchError, match="made_by"):
        td.save(other, store, append_dim="sample", progress=False)


def test_explorer__knows_no_output() -> None:
    questions = Questions(train(), targets(), "auto")
    top = questions.top(View(target=2, k=3))
    shown = expected()[:, 2]
    np.testing.assert_array_equal(top["sample"][:3], np.argsort(-shown)[:3])
    assert questions.targets.whole["output"].isna().all()
    assert np.isnan(questions.sample(View(sample=4))["output"])
    groups = questions.groups(View(target=2, group_by="source")).set_index("source")
    assert groups.score["web"] == pytest.approx(shown[SOURCE == "web"].sum(), rel=1e-5)
    page = td.explore(train(), targets())
    assert page.top(View(target=2, k=3))["sample"].tolist() == top["sample"].tolist()


# ------------------------------------------------------------------------- the page's own reader

PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "other_features.md"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_page__reads_stores_of_bergson(dtype: str, tmp_path: Path) -> None:
    """The layout is the one that bergson 2.5.1 wrote when its stores had a reader here."""
    gradients = np.arange(-10, 11, dtype="f4").reshape(3, 7) / 8  # exact in 16 bits
    stored = torch.tensor(gradients).to(getattr(torch, dtype)).contiguous()
    stored.view(torch.uint8).numpy().tofile(tmp_path / "gradients.bin")
    (tmp_path / "info.json").write_text(
        '{"attribute_tokens": false, "num_items": 3, "num_grads": 3, "grad_sizes": '
        f'{{"layers.0.q": 4, "layers.1.mlp": 3}}, "base_dtype": "{dtype}"}}'
    )
    cells = re.findall(r"```{code-cell}\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    (code,) = [cell for cell in cells if "def read_bergson" in cell]
    assert len(code.splitlines()) <= 15
    names: dict[str, Any] = {}
    exec(code, names)
    features = names["read_bergson"](tmp_path)
    np.testing.assert_array_equal(features.feature.values[..., 0], gradients)
    np.testing.assert_allclose(
        td.score(features, features, "grad_dot"), gradients @ gradients.T, rtol=1e-6
    )
