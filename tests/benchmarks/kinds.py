"""Features that are no gradients: texts as words and embeddings, and the leaves of boosted trees.

python tests/benchmarks/kinds.py --cache demo-output/quality    # some minutes

Texts: on two tasks of the quality benchmark, TF-IDF of the words and the mean of the last hidden
layer, as cosines and under their gram matrix, beside BM25 and gradients (2,048 random columns, and
``td.fit``). For the classifier, scores
of samples of another class are negative; "x Q" has the weight 1 - p of the model, too.

Trees: gradient boosting of scikit-learn on two tables, retrained twice on each of 100 random
halves. A feature is 1 if the sample falls into a leaf. LDS with the interval of 95 % by
bootstrap over halves and targets, of three models, beside neighbours in the space of inputs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from _fits import SKETCH, arguments_of, featurized, setting
from _quality_tasks import cancer, diabetes, members
from _quality_truth import checkpoints, ground
from sklearn.ensemble import GradientBoostingClassifier, GradientBoostingRegressor
from sklearn.feature_extraction.text import TfidfTransformer
from sklearn.preprocessing import OneHotEncoder

import trakdask as td

N_CHECKPOINTS, N_HALVES = 3, 100
DAMPINGS = (0.01, 0.1, 1.0, 10.0, 100.0)
"""λ in units of tr(K)/n, by which the best one in hindsight is found."""


def report(scores: dict[str, Any], masks: xr.DataArray, outputs: xr.DataArray) -> None:
    for name, score in scores.items():
        result = td.evaluate.lds(score, masks, outputs).compute()
        low, high = result.interval.values
        print(f"{name:36}{float(result.lds_mean):7.3f}   {low:.3f} to {high:.3f}", flush=True)
    print(f"{'ceiling':36}{float(result.ceiling_mean):7.3f}")


def ways(train: xr.Dataset, targets: xr.Dataset) -> dict[str, xr.DataArray]:
    """Return scores by cosines and under the gram matrix."""
    trace = (train.feature**2).sum("proj_dim").mean("sample").mean()
    best = {rho: td.Trak(td.Absolute(float(rho * trace))) for rho in DAMPINGS}
    return {
        "cosine": td.score(train, targets, "grad_cos"),
        "product": td.score(train, targets, "grad_dot"),
        "gram": td.score(train, targets),
        **{f"gram, λ = {rho:g} tr(K)/n": td.score(train, targets, e) for rho, e in best.items()},
    }


# ------------------------------------------------------------------------------------------ texts


def embeddings(subject: Any, files: list[Path], tokens: np.ndarray) -> np.ndarray:
    """Return the mean over words of the last hidden layer, (sample, width, checkpoint)."""
    of_models = []
    for file in files:
        net = subject.build().eval()
        net.load_state_dict(torch.load(file))
        net.head = torch.nn.Identity()
        with torch.no_grad():
            hidden = net(torch.from_numpy(tokens))
        of_models.append(hidden if hidden.ndim == 2 else hidden.mean(1))
    return torch.stack(of_models, -1).numpy()


def texts(name: str, cache: Path) -> None:
    subject, model, samples = setting(name, cache, N_CHECKPOINTS)
    files = checkpoints(subject, cache, N_CHECKPOINTS)
    gradients = featurized(model, *samples, SKETCH)
    fitted = featurized(model, *samples, td.fit(samples[0], model, progress=False))
    tokens = [np.asarray(s[next(iter(s.data_vars))]) for s in samples]
    counts = [np.stack([np.bincount(row, minlength=800) for row in rows]) for rows in tokens]
    of_words = TfidfTransformer().fit(counts[0])
    kinds = {
        "TF-IDF": [of_words.transform(c).toarray().astype("f4") for c in counts],
        "embedding": [embeddings(subject, files, t) for t in tokens],
    }
    words = [[" ".join(map(str, row)) for row in rows] for rows in tokens]
    simple = td.evaluate.baselines(*gradients, texts=tuple(words))
    sign = simple.same_label.data if "same_label" in simple else 1
    q = gradients[0].out_to_loss.mean("checkpoint").data[:, None]
    scores = {
        "gradients": td.score(*gradients).data,
        "gradients, td.fit": td.score(*fitted).data,
        "BM25": simple.bm25.data,
    }
    for kind, arrays in kinds.items():
        both = [td.from_features(array, f"{kind} of {name}") for array in arrays]
        scores |= {f"{kind}, {way}": sign * s.data for way, s in ways(*both).items()}
        scores[f"{kind}, gram, x Q"] = sign * td.score(*both).data * q
    labelled = {n: xr.DataArray(s, dims=("sample", "target")) for n, s in scores.items()}
    print(f"\nLDS, texts: {name}, {N_CHECKPOINTS} checkpoints")
    report(labelled, *ground(subject))


# ------------------------------------------------------------------------------------------ trees


def trees(name: str) -> None:
    (x, y), (x_new, y_new) = {"diabetes": diabetes, "cancer": cancer}[name]()
    is_regression = name == "diabetes"
    kind = GradientBoostingRegressor if is_regression else GradientBoostingClassifier

    def trained(rows: Any, seed: int) -> Any:
        return kind(subsample=0.5, random_state=seed).fit(x[rows], y[rows])

    def raw(model: Any, rows: np.ndarray) -> np.ndarray:
        return model.predict(rows) if is_regression else model.decision_function(rows)

    masks = np.stack([members(half, len(x)) for half in range(N_HALVES)])
    sign = 1 if is_regression else 2 * y_new - 1
    outputs = [[sign * raw(trained(m, seed), x_new) for seed in (0, 1)] for m in masks]
    models = [trained(slice(None), 100 + seed) for seed in range(N_CHECKPOINTS)]
    f = np.stack([raw(model, x) for model in models], -1)
    residual = y[:, None] - (f if is_regression else 1 / (1 + np.exp(-f)))
    leaves = [[m.apply(rows).reshape(len(rows), -1) for rows in (x, x_new)] for m in models]
    coded = [OneHotEncoder(sparse_output=False, dtype="f4").fit(of_both[0]) for of_both in leaves]
    width = max(sum(map(len, code.categories_)) for code in coded)

    def indicators(side: int) -> np.ndarray:
        """Return which leaves samples fall into, (sample, leaf, model); 0 fills a width."""
        each = [code.transform(pair[side]) for code, pair in zip(coded, leaves, strict=True)]
        return np.stack([np.pad(one, ((0, 0), (0, width - one.shape[1]))) for one in each], -1)

    train = td.from_features(indicators(0), f"leaves of {name}", out_to_loss=residual)
    scores = ways(train, td.from_features(indicators(1), f"leaves of {name}"))
    squared = np.square(x[:, None] - x_new).sum(-1)
    nearness = {
        f"Gaussian of distance, {c:g}": np.exp(-c * squared / np.median(squared)) for c in (1, 4)
    }
    nearness["10 nearest neighbours"] = 1.0 * (squared.argsort(0).argsort(0) < 10)
    scores = {f"leaves, {way}": s for way, s in scores.items()}
    for way, near in nearness.items():
        scores[way] = xr.DataArray(
            near * residual.mean(1, keepdims=True), dims=("sample", "target")
        )
    print(f"\nLDS, boosted trees: {name}, {width} leaves, {N_CHECKPOINTS} models")
    signs = xr.DataArray(sign * np.ones(len(x_new)), dims="target")
    report(
        {way: s * signs for way, s in scores.items()},
        xr.DataArray(masks, dims=("subset", "sample")),
        xr.DataArray(np.array(outputs), dims=("subset", "seed", "target")),
    )


def main() -> None:
    options = arguments_of(__doc__, ("transformer", "language"))
    for name in options.tasks:
        texts(name, options.cache)
    trees("diabetes")
    trees("cancer")


if __name__ == "__main__":
    main()
