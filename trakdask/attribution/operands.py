"""The two operands of a score: weighted features of samples, and solved features of targets.

A score is their product. :class:`Solver` makes either, for each estimator.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import dask.array as da
import numpy as np
import xarray as xr
from scipy import sparse

from trakdask import arrays
from trakdask.arrays.blocks import align_weights, divided, product_dtype
from trakdask.arrays.memory import Sizes
from trakdask.attribution.damping_rules import regularize
from trakdask.attribution.estimators import EstimatorLike, TracIn, resolve
from trakdask.attribution.protocol import Estimator, GramEstimator
from trakdask.execution import require_memory
from trakdask.provenance import require_comparable
from trakdask.variables import NORM, SAMPLE, TARGET, lazy_features, validate

_MOST_TARGETS = 4096
"""In a block. More would make large tiles, where a selection of targets needs little."""


def operands_of(features: xr.Dataset, targets: xr.Dataset) -> tuple[xr.Dataset, xr.Dataset]:
    """Check the features of training samples and of targets, and return them with lazy arrays."""
    validate(features, ["feature", "out_to_loss"], what="features")
    validate(targets, ["feature"], what="targets")
    require_comparable(features, targets)
    targets = lazy_features(targets)
    feature = targets["feature"].variable
    sizes = divided(feature.chunksizes[SAMPLE], _MOST_TARGETS)
    if sizes != feature.chunksizes[SAMPLE]:
        targets = targets.assign(feature=feature.copy(data=feature.data.rechunk({0: sizes})))
    return lazy_features(features), targets


@dataclass(frozen=True)
class Solver:
    """The two operands of an estimator's product; each can be asked for alone.

    ``features`` are those of all training samples, whose Q raises an error when computed if they
    were changed since their gram matrix was reduced. ``estimator`` has the weights that it has in
    scores. ``inverse`` is (K_c + λ_c I)⁻¹, None where there is no gram matrix; ``attrs`` say how
    scores are made.
    """

    features: xr.Dataset
    estimator: Estimator
    inverse: da.Array | None
    attrs: dict[str, str]

    def vectors(self, targets: xr.Dataset, *, summed: bool = False) -> da.Array:
        """Return the vectors that features are multiplied with, for some targets.

        With ``summed`` it is the sum over all targets, as one row.
        """
        combined = str(targets.attrs.get("combined", ""))
        if combined.startswith("metric") and TARGET in self.estimator.norms:
            raise ValueError(
                "expected an estimator whose scores are linear in the targets, since the score of "
                f"a {combined} is a sum over them, got {self.estimator}; try 'grad_dot', or "
                "td.group_score(..., metric=...), which adds up scores"
            )
        feature, is_linear = targets.feature.data, TARGET not in self.estimator.norms
        if summed and is_linear:  # then one sum is solved, and not each of them
            ones = sparse.csr_array(np.ones((1, len(feature))))
            feature = arrays.groups.combine_rows(feature, ones)
        vectors = self.estimator.vectors(arrays.solve.solve(self.inverse, feature), targets)
        if summed and not is_linear:
            # Each target was divided by its own norm, so they are added up afterwards.
            vectors = vectors.sum(0, keepdims=True, dtype=np.float64).astype(vectors.dtype)
        return vectors

    def weight(self, of: xr.Dataset) -> da.Array:
        """Return the weight of each sample, (sample, checkpoint)."""
        return self.estimator.weight(of, self.inverse)

    def sums(
        self, of: xr.Dataset, members: np.ndarray | sparse.csr_array, n_groups: int
    ) -> da.Array:
        """Return the weighted sum of the features of each group of samples."""
        feature, pooled = of.feature.data, self.estimator.pooled
        weight = self.estimator.weight(of, self.inverse)
        require_sums(feature, n_groups)
        if pooled:
            # (sample,): the same weight in the sums of all checkpoints.
            weight = arrays.weights.pooled(align_weights(weight, feature))
        return arrays.groups.weighted_sums(
            feature, weight, members, n_groups,
            axes="s" if pooled else "sc", dtype=product_dtype(feature),
        )  # fmt: skip


def solver(features: xr.Dataset, estimator: Estimator) -> Solver:
    """Return the solver of a resolved estimator; features are all training samples', chunked."""
    # K has its own power: regularize gets the estimator as it was resolved, products the one with
    # the weights of scores.
    of_scores = estimator.of_scores(features)
    attrs = {"estimator": estimator.name, "formula": of_scores.formula}
    if not isinstance(estimator, GramEstimator):
        if isinstance(estimator, TracIn):
            attrs["learning_rates"] = ", ".join(f"{rate:g}" for rate in estimator.rates)
        return Solver(features, of_scores, None, attrs)
    sums, choice = regularize(features, estimator)
    attrs |= {"damping": choice.rule, "gram_weights": sums.weights}
    # A K that was just made of these features cannot be of others.
    if sums.is_stored and NORM in features:
        x, norm, q = (features[name].data for name in ("feature", NORM, "out_to_loss"))
        checked = features["out_to_loss"].copy(data=arrays.score.checked(x, norm, q))
        features = features.assign(out_to_loss=checked)
    return Solver(features, of_scores, sums.inverse(choice.value), attrs)


def self_influence_forms(
    features: xr.Dataset, estimator: EstimatorLike
) -> tuple[xr.Dataset, Solver, da.Array]:
    """Return features, their solver, and φ_c(z)ᵀ (K_c + λ_c I)⁻¹ φ_c(z), (sample, checkpoint)."""
    validate(features, ["feature", "out_to_loss"], what="features")
    features = lazy_features(features)
    resolved = resolve(features, estimator)
    if resolved.norms or not resolved.pooled:
        raise ValueError(
            f"expected an estimator with a self-influence, got {resolved}; try estimator='trak', "
            "'soft' or 'grad_dot'"
        )
    operands = solver(features, resolved)
    if operands.inverse is None:
        return features, operands, arrays.weights.squared_norm(features.feature.data)
    data = operands.features.feature.data
    sizes = Sizes.of(data)
    require_memory(
        arrays.memory.leverage(sizes, sizes.proj_dim),
        f"the products of a block of {sizes.rows} samples with a gram matrix",
        "try fewer columns, or smaller blocks: features.chunk(sample=...)",
    )
    return features, operands, arrays.solve.leverage(operands.inverse, data)


def require_tiles(
    feature: da.Array, vectors: da.Array, *, average: bool = True, errors: bool = False
) -> None:
    """Refuse tiles of scores that no worker has the memory for."""
    sizes, targets = Sizes.of(feature), Sizes.of(vectors)
    # Tiles of one checkpoint each.
    if not average:
        sizes, targets = (replace(of, n_checkpoints=1) for of in (sizes, targets))
    require_memory(
        arrays.memory.score(sizes, targets, errors=errors),
        f"the scores of a block of {sizes.rows} samples for {targets.rows} targets",
        "try smaller blocks: features.chunk(sample=...), targets.chunk(sample=...)",
    )


def require_sums(feature: da.Array, n_groups: int, n_folds: int = 1) -> None:
    """Refuse sums of features by group that no worker has the memory for."""
    require_memory(
        arrays.memory.group_sums(Sizes.of(feature), n_groups, n_folds),
        f"the sums of {n_groups} groups",
        "try groups that are larger, and so fewer, or td.score for some of the samples",
    )
