"""The estimators whose gram matrix is a curvature of the loss: Trak and Soft."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import dask.array as da
import numpy as np
import xarray as xr

from trakdask import arrays
from trakdask.arrays.graphs import plain
from trakdask.attribution.protocol import (
    LOGIT_VARIANCE,
    SOFT,
    Damping,
    GramEstimator,
    has_squared_error,
    is_positive,
)
from trakdask.checks import require_flags
from trakdask.provenance import pooled_checkpoints
from trakdask.variables import (
    CHECKPOINT,
    COLUMN,
    DAMPING,
    GRAM,
    LOSS_GRADIENT,
    N_SAMPLES,
    PROJ_DIM,
    PROJ_DIM_1,
    SAMPLE,
    WRONG_CLASSES,
    checkpoint_names,
)


@dataclass(frozen=True, eq=False, repr=False)
class Soft(GramEstimator):
    """The curvature and the gradient of one loss that is flatter than the real one.

    With q = Q in [0, 1] and a = ``power``, h = q^a (1 - q) and g = q^a. a = 1 is the Gauss-Newton
    influence function. For a classifier of several classes, K also has the curvature between the
    wrong classes. The loss of a squared error has the same curvature everywhere, so that there this
    is :class:`Trak`.

    Parameters
    ----------
    power
        a, in [0, 1]; lower for models whose training was stopped early. ``"auto"``: ½ in h; in g it
        rises from ½ to 1 as the model's confidence becomes more uniform (by the standard deviation
        of log((1 - q)/q) over training samples: ½ from 1.4 on, 1 up to 0.8). 1 for a squared error.
    damping
        λ. ``"auto"`` is ``"completeness"``: one ρ for all checkpoints, λ_c = ρ tr(K_c)/n, chosen by
        the outputs of the model; see :func:`trakdask.damping`. Where features have ``trained_on``
        and five or more checkpoints, it is ``"cross_validation"``: that ρ, or another one within a
        decade by which left-out checkpoints are predicted better. Where features have no
        ``output``, it is ``"trace"``: tr(K_c)/n, so ρ = 1; n counts samples that failed, too. A
        number is relative to tr(K_c²)/tr(K_c), the mean of the eigenvalues, weighted by themselves.
        ``Absolute(x)`` is x itself. What :func:`trakdask.damping` returned is taken as it is. Where
        a store keeps λ, ``"auto"`` and the rule that it stands for are the stored λ, unless the
        features were changed.
    wrong_classes
        Whether K has n times the variable ``wrong_classes`` of the training features, if they have
        it, as features of :func:`trakdask.fit` do. It is in K before λ is chosen, and in a stored
        K, so that a query costs no more than without them.

    Raises
    ------
    ValueError
        If an option is none of these.

    Notes
    -----
    On seven small classification tasks with half of the samples removed, the linear datamodeling
    score of ``Soft()`` was at least the score of :class:`Trak` at the best λ in hindsight
    (``tests/benchmarks/results/2026-11-23-quality.txt``). Other packages are on the page
    "Leaderboard and other packages".

    References
    ----------
    Koh & Liang 2017 (influence functions).

    Examples
    --------
    >>> Soft() == Soft("auto"), Soft(power=1) == Soft(power=1.0)
    (True, True)
    """

    name: ClassVar[str] = SOFT
    sums: ClassVar[tuple[str, ...]] = (GRAM, LOSS_GRADIENT)
    power: float | Literal["auto"] | da.Array = "auto"  # lazy only as `of_scores` returns it
    damping: Damping = "auto"
    wrong_classes: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_flags(wrong_classes=self.wrong_classes)
        power: Any = self.power
        if is_positive(power) and power <= 1:
            object.__setattr__(self, "power", float(power))
        elif not isinstance(power, da.Array) and not (isinstance(power, str) and power == "auto"):
            raise ValueError(
                f"expected power='auto' or a number in [0, 1], got {power!r}; try power='auto'"
            )

    @property
    def gram_weights(self) -> str:
        """The formula of h."""
        between = ", and 2 q^0.5 between wrong classes" if self.wrong_classes else ""
        return f"{self.loss_weights} (1 - q){between}"

    @property
    def loss_weights(self) -> str:
        """The formula of g."""
        if isinstance(self.power, da.Array):
            return "q^b, b in [0.5, 1] by the spread of log((1 - q)/q)"
        return f"q^{self.power:g}"

    def resolved(self, features: xr.Dataset) -> GramEstimator:
        """Return the estimator with a rule for λ; for a squared error it is :class:`Trak`."""
        here = replace(self, wrong_classes=self.wrong_classes and WRONG_CLASSES in features)
        resolved = super(Soft, here).resolved(features)
        if not has_squared_error(features):
            return resolved
        if not isinstance(self.power, str) and self.power != 1:
            raise ValueError(
                f"expected power=1 for the task {features.attrs['task']}, whose loss is a squared "
                f"error, got power={self.power}; try Trak(), which gives the same scores as power=1"
            )
        return Trak(resolved.damping)

    def of_sums(self) -> Soft:
        """Return the estimator with the power that it has in sums over all samples."""
        return replace(self, power=0.5) if isinstance(self.power, str) else self

    def of_scores(self, features: xr.Dataset) -> Soft:
        """Return the estimator with the power that it has in g, which may be lazy.

        Rows that were selected from a store have the power of all, as they have its gram matrix.
        """
        if not isinstance(self.power, str):
            return self
        attrs = features[DAMPING].attrs if DAMPING in features and GRAM in features else {}
        # Only stores keep variances, and not if they were saved for "trak".
        variances = attrs.get(LOGIT_VARIANCE, ())
        by_name = dict(zip(pooled_checkpoints(attrs), variances, strict=False))
        names = checkpoint_names(features)
        if set(names) <= set(by_name) and features.sizes[SAMPLE] <= attrs[N_SAMPLES]:
            variance = np.array([by_name[name] for name in names])
            return replace(self, power=arrays.weights.power_of(variance))
        return replace(self, power=arrays.weights.adaptive_power(features.out_to_loss.data))

    def h(self, features: xr.Dataset) -> da.Array:
        """Return q^a (1 - q)."""
        assert isinstance(self.power, float), "a power of sums"
        return arrays.weights.soft_gram_weights(features.out_to_loss.data, self.power)

    def completed(self, matrix: da.Array, features: xr.Dataset) -> da.Array:
        """Return the matrix plus n times the mean curvature between wrong classes."""
        if not self.wrong_classes:
            return matrix
        whole = features.variables[WRONG_CLASSES].chunk({PROJ_DIM: -1, PROJ_DIM_1: -1})
        mean = plain(whole.chunk({CHECKPOINT: 1}).data)
        if COLUMN in features.coords:  # isel(proj_dim=...) selects along one axis
            rows = features[COLUMN].values
            sizes = len(rows), len(rows), 1
            mean = mean.map_blocks(arrays.gram.of_rows, rows=rows, chunks=sizes, meta=mean._meta)
        return matrix + features.sizes[SAMPLE] * mean

    def rank(self, n_samples: int, features: xr.Dataset) -> int:
        """Return a bound of the rank."""
        return int(features.sizes[PROJ_DIM]) if self.wrong_classes else n_samples

    def g(self, features: xr.Dataset) -> da.Array:
        """Return q^a."""
        assert not isinstance(self.power, str), "a power of sums or of scores"
        return arrays.weights.soft_loss_weights(features.out_to_loss.data, self.power)


@dataclass(frozen=True, eq=False, repr=False)
class Trak(GramEstimator):
    """TRAK as it was published: h = 1, g = Q.

    Parameters
    ----------
    damping
        λ, as in :class:`Soft`. ``"auto"`` is ``"completeness"`` for classification into one of
        several classes or by several labels, ``"trace"`` for regression and causal language models,
        as was measured to be best; else it is 0.03, relative to tr(K_c²)/tr(K_c).

    References
    ----------
    Park et al. 2023, equation 17; traker's ``TRAKer.finalize_scores``, which gives the scores of
    ``Trak(Absolute(lambda_reg))`` up to one factor per checkpoint.

    Examples
    --------
    >>> import trakdask as td
    >>> td.Trak(damping=td.Absolute(1.0))
    Trak(damping=Absolute(value=1.0))
    """

    name: ClassVar[str] = "trak"
    damping: Damping = "auto"
