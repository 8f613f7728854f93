"""Scores that take no attribution: by chance, label, loss, gradient, embedding, and words."""

from __future__ import annotations

from typing import Any

import dask
import dask.array as da
import numpy as np
import pandas as pd
import xarray as xr
from scipy import sparse

from trakdask.arrays.blocks import blockwise, where
from trakdask.arrays.graphs import plain
from trakdask.attribution.scores import score, self_influence
from trakdask.checks import nearest
from trakdask.variables import (
    CHECKPOINT,
    SAMPLE,
    TARGET,
    TARGET_PREFIX,
    coords_along,
    data_in_order,
)


def baselines(
    features: xr.Dataset,
    targets: xr.Dataset,
    *,
    label: str = "label",
    embeddings: tuple[Any, Any] | None = None,
    texts: str | tuple[Any, Any] | None = None,
    seed: int = 0,
) -> xr.Dataset:
    """Make simple scores, by which every evaluation shows whether attribution was needed.

    Pass them to an evaluation beside the scores: ``lds({"soft": scores, **baselines}, ...)``.

    Parameters
    ----------
    features, targets
        As in :func:`trakdask.score`.
    label
        Name of the coord of classes, which baselines use if both sides have it.
    embeddings
        One matrix of the training samples (sample, dim) and one of the targets (target, dim), such
        as the last hidden layer of the model, or of another model.
    texts
        The texts of the training samples and of the targets, or the name of a coord that holds
        them. Without texts: numbers of their tokens, a row or a list for each, where padding is a
        word like others.
    seed
        Seed of ``random``.

    Returns
    -------
    Lazy Dataset of scores (sample, target), float32, with the coords of :func:`trakdask.score`.
    High is what should have raised the output of a target:

    - ``random``: standard normal numbers, a function of the seed and the two sizes;
    - ``loss``: minus the size of mean_c[Q_c(z)], the same for every target. Q rises with the loss
      of the sample, and is 1 - p in a classification: hard samples count as harmful;
    - ``gradient_norm``: the same times (mean_c[‖φ_c(z)‖²])^½, minus the norm of the gradient of the
      loss;
    - ``gradient_cosine``: mean_c[cos(φ_c(z), φ_c(t))] times the sign of Q, without a gram matrix;
    - ``same_label``, or how the coord is called: 1 for samples of the target's class, else -1; NaN
      where a label is missing;
    - ``embedding``: the cosine of embeddings;
    - ``bm25``: how many words of the target the text of the sample has, weighted by their rarity,
      with k₁ = 1.5 and b = 0.75. Words are runs of letters and digits, in lower case.

    If there are classes, the last two are negative for samples of another one: a sample that looks
    like the target, but is called something else, lowers its output.

    Raises
    ------
    StoreMismatchError
        If features and targets were made differently.
    ValueError
        If embeddings or texts are not one for each sample and target, embeddings differ in size, or
        there is no coord of that name.

    Notes
    -----
    Samples with a high loss are either wrong, and lower the outputs of others, or rare, and raise
    the outputs of similar samples. Which kind prevails depends on the data. A clearly negative
    result says that the rare ones do.

    Cost: ``gradient_norm`` and ``gradient_cosine`` read the features, the others do not. The words
    of all texts are in memory on one worker.

    References
    ----------
    Robertson and Zaragoza 2009, "The probabilistic relevance framework: BM25 and beyond"; Akyürek
    et al. 2022, "Towards tracing knowledge in language models back to the training data", where
    BM25 is better than attribution; Hanawa et al. 2021 (similarity of embeddings); Paul et al.
    2021, "Deep learning on a data diet" (loss and gradient norm).

    Examples
    --------
    >>> import trakdask as td
    >>> features = td.testing.simulate_features(n_samples=3, proj_dim=4)
    >>> targets = features.isel(sample=[0, 1])
    >>> texts = ["a red fox", "a blue sea", "the red sea"], ["red", "a sea"]
    >>> simple = td.evaluate.baselines(features, targets, texts=texts)
    >>> list(simple)
    ['random', 'loss', 'gradient_norm', 'gradient_cosine', 'same_label', 'bm25']
    >>> simple.bm25.values.round(2).tolist()
    [[0.47, -0.47], [-0.0, 0.94], [0.47, -0.47]]
    """
    # 1. Scores without texts and embeddings. (sample, target) of 0 with the labels and blocks of
    # scores makes scores of numbers of each sample.
    cosine, both = score(features, targets, estimator="grad_cos"), (features, targets)
    zero, (rows, columns) = xr.zeros_like(cosine).drop_attrs(), cosine.data.chunks
    # Numbers depend on the chunks in which they are drawn: always the same ones.
    normal = da.random.default_rng(seed).standard_normal(cosine.shape, chunks=4096)
    simple = {
        "random": zero.copy(data=normal.rechunk(cosine.chunks)),
        "loss": zero - abs(features.out_to_loss.variable.mean(CHECKPOINT, skipna=False)),
        "gradient_norm": zero - self_influence(features, estimator="grad_dot").variable ** 0.5,
        "gradient_cosine": cosine,
    }
    # 2. Whether labels are the same, by which the next ones get their sign.
    sign: Any = 1
    if {label, f"{TARGET_PREFIX}{label}"} <= set(cosine.coords):
        of_sample = cosine[label].variable.chunk({SAMPLE: rows})
        of_target = cosine[f"{TARGET_PREFIX}{label}"].variable.chunk({TARGET: columns})
        is_known = of_sample.notnull() & of_target.notnull()
        is_same = (of_sample == of_target).where(is_known).transpose(SAMPLE, TARGET)
        simple[f"same_{label}"] = same = 2 * zero.copy(data=plain(is_same.data)) - 1
        sign = same.fillna(1)
    # 3. What the caller has of each sample and target, in their order.
    if isinstance(texts, str):
        for side, ds in {"features": features, "targets": targets}.items():
            if texts not in ds.coords:
                near = nearest(texts, coords_along(ds, SAMPLE))
                pair = "(features['text'].values, targets['prompt'].values)"
                raise ValueError(
                    f"expected {side} with the coord {texts!r}, got {list(ds.coords)}; try "
                    f"texts={repr(near) if near else pair}"
                )
        texts = features[texts].data, targets[texts].data
    pairs = {
        name: [data_in_order(pair[i], both[i], SAMPLE, "dim", what=name) for i in range(2)]
        for name, pair in {"embeddings": embeddings, "texts": texts}.items()
        if pair is not None
    }
    for name, found in pairs.items():
        if (lengths := tuple(map(len, found))) != zero.shape:
            raise ValueError(
                f"expected {name} of {zero.shape} samples and targets, got {lengths}; try "
                f"{name} of the samples that were featurized"
            )
    # 4. Similarities.
    if "embeddings" in pairs:
        of_samples, of_targets = pairs["embeddings"]
        cosines = _unit(of_samples, rows) @ _unit(of_targets, columns).T
        simple["embedding"] = sign * zero.copy(data=cosines)
    if "texts" in pairs:
        # One task counts the words of all texts, since rarity depends on all; blocks multiply their
        # rows.
        words = dask.delayed(_bm25)(*pairs["texts"])
        data = blockwise(
            _bm25_block, "st", da.arange(len(zero), chunks=(rows,)), "s", name="bm25",
            new_axes={"t": zero.sizes[TARGET]}, dtype=np.float64, words=words,
        )  # fmt: skip
        simple["bm25"] = sign * zero.copy(data=data)
    return xr.Dataset(simple).astype(np.float32)


def _unit(rows: Any, sizes: tuple[int, ...]) -> da.Array:
    """Return the rows of a matrix, divided by their norms, in chunks of these sizes."""
    data = da.asarray(rows).rechunk((sizes, -1))
    norm = da.linalg.norm(data, axis=1, keepdims=True)
    return data / where(norm > 0, norm, np.nan)


def _bm25(texts: Any, target_texts: Any) -> tuple[sparse.csr_array, sparse.csr_array]:
    """Return the weights of words, (sample, word), and their numbers in the targets' texts."""
    k_1, b = 1.5, 0.75
    both = pd.Series([*texts, *target_texts])
    if not both.map(np.ndim).any():  # texts, some of which may be None
        both = both.str.lower().str.findall(r"\w+")
    words = both.explode().dropna()
    columns, vocabulary = words.factorize()
    shape = len(both), len(vocabulary)
    # A word that occurs twice in a text is two entries here, which become one.
    counts = sparse.csr_array((np.ones(len(words)), (words.index, columns)), shape)
    counts, of_targets = counts[: len(texts)], counts[len(texts) :]
    # Texts of samples alone say how rare a word is: scores of a target would else depend on other
    # targets.
    n_with = np.bincount(counts.indices, minlength=len(vocabulary))
    rarity = np.log1p((len(texts) - n_with + 0.5) / (n_with + 0.5))
    n_words = counts.sum(axis=1)
    length = np.repeat(n_words / (n_words.mean() or 1), np.diff(counts.indptr))
    # Of a word with the number c in a text: rarity c (k₁ + 1)/(c + k₁ (1 - b + b length)), where
    # length is relative to the mean.
    saturation = k_1 * (1 - b + b * length)
    counts.data *= rarity[counts.indices] * (k_1 + 1) / (counts.data + saturation)
    return counts, of_targets


def _bm25_block(positions: np.ndarray, *, words: tuple[Any, Any]) -> np.ndarray:
    weights, of_targets = words
    return np.asarray((weights[positions] @ of_targets.T).toarray())
