"""Scores of the parts of samples: of their tokens or modules, without features of each part."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import dask.array as da
import numpy as np
import xarray as xr
from dask.base import tokenize

from trakdask import arrays
from trakdask.attribution.dampings import Damping
from trakdask.attribution.estimators import DEFAULT_ESTIMATOR, DEFAULT_POWER, Estimator, Power
from trakdask.attribution.groups import group_codes, require_group_coord
from trakdask.attribution.labels import (
    labelled,
    labels_of_samples,
    labels_of_scores,
    labels_of_targets,
    require_flag,
    score_attrs,
)
from trakdask.attribution.options import gather_options
from trakdask.attribution.products import Solver, solver
from trakdask.attribution.sides import Side, part_dim
from trakdask.checks import shown
from trakdask.featurization.failures import ERROR_DTYPE, OnError
from trakdask.featurization.parts import PartProducts, Parts, Text, part_products
from trakdask.featurization.precision import DType
from trakdask.models.model import Model
from trakdask.projection import Projector
from trakdask.projection.back_projection import require_back_projection
from trakdask.projection.specs import from_spec
from trakdask.provenance import require_comparable
from trakdask.variables import (
    CHECKPOINT,
    PROJ_DIM,
    SAMPLE,
    TARGET,
    TARGET_PREFIX,
    lazy_features,
    may_have_failed,
    validate,
)

__all__ = ["score_parts"]

_REMEDY = "try td.featurize_parts, and td.score with its features"


def score_parts(
    features: xr.Dataset,
    targets: xr.Dataset,
    model: Model,
    *,
    of: xr.Dataset | None = None,
    by: str | None = None,
    parts: Parts = "token",
    text: Text | None = None,
    estimator: Estimator = DEFAULT_ESTIMATOR,
    power: Power = DEFAULT_POWER,
    damping: Damping = "auto",
    calibrate: xr.Dataset | None = None,
    weights: xr.DataArray | None = None,
    learning_rates: Mapping[str, float] | xr.DataArray | None = None,
    average: bool = True,
    batch_size: int | Literal["auto"] = "auto",
    dtype: DType | None = None,
    device: str = "auto",
    on_error: OnError = "raise",
) -> xr.DataArray:
    """Divide scores among the words of sequences, or among the modules of the model.

    Which words of a document helped this answer? Give the documents as ``of``, as samples and not
    as features. Which words of a prompt made the model rely on these documents? Give the prompts as
    ``targets``, as samples. The scores of the parts add up to those of :func:`score`.

    Parameters
    ----------
    features
        Features of all training samples, as for :func:`score`. Their projector is used.
    targets
        Features of targets, if ``of`` is divided; else the samples to divide.
    model
        The model that the samples to divide are run through: the one of their features.
    of
        The training samples to divide. Or, if targets are divided, features of the training samples
        whose scores are asked for: all by default, but few of them cost less.
    by
        If targets are divided: name of a coord of the training samples, for the sums of the scores
        of each group of them, as in :func:`group_score`.
    parts, text
        As in :func:`featurize_parts`.
    estimator, power, damping, calibrate, weights, learning_rates, average
        As in :func:`score`; but not ``"grad_cos"``, nor ``"relatif"`` if training samples are
        divided, which need whole features of what is divided.
    batch_size, dtype, device, on_error
        As in :func:`featurize`. Scores of samples that failed are NaN, and the coord ``error`` (for
        targets ``target_error``) says why.

    Returns
    -------
    Lazy DataArray ``score``, float32: (sample, token, target) if ``of`` is divided, (sample,
    target, token) or (``by``, target, token) if targets are; ``module`` in the place of ``token``
    for groups of modules; and ``checkpoint`` with ``average=False``. Coords are those of
    :func:`score` with features of parts.

    Raises
    ------
    TypeError, ValueError
        If not exactly one side is given as samples; if features lack a part of their columns, or
        their projector cannot be multiplied from both sides; otherwise as :func:`featurize_parts`
        and :func:`score`.
    StoreMismatchError
        If the model is not the one that the features were made with; the field is named.
    BlockError
        When computed, as :func:`featurize_parts`.

    Notes
    -----
    The score of a part is φ_part · w, where w is the solved vector of the other side. It equals the
    product of the part's gradient with P w, so each w is projected back to the size of the
    parameters, once per checkpoint. For a linear layer, with U its piece of P w, the score of token
    t is δ_tᵀ(U x_t): one more multiplication of the layer's input per w. No gradient of a single
    token is formed, and none is projected.

    Cost: a forward and a backward pass, and about one more forward pass for each w. So with
    :class:`SJLT` and a hundred targets, features of tokens (:func:`featurize_parts`) cost less; see
    ``tests/benchmarks/tokens.py``. Memory: 4 bytes per parameter for each w, at most 256 MiB at
    once per checkpoint, unless a single w is larger.

    Features are rounded when they are projected, and products here are not, so sums differ from the
    scores of whole samples by this rounding: a relative 1e-4 of the features with the default
    arithmetic, which a small λ amplifies in both.

    Examples
    --------
    >>> import numpy as np, torch, trakdask as td
    >>> net = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9))
    >>> model = td.Model(net, task=td.tasks.CausalLM(inputs="input_ids", positional=True))
    >>> samples = td.from_arrays({"input_ids": np.arange(60).reshape(20, 3) % 9})
    >>> features = td.featurize(samples, model, projector=td.SJLT(64))
    >>> targets = features.isel(sample=[0, 1])
    >>> top = samples.isel(sample=[5, 7])
    >>> words = td.score_parts(features, targets, model, of=top, text=list("abcdefghi"))
    >>> words.dims, words.text.values[0].tolist()
    (('sample', 'token', 'target'), ['g', 'h', 'i'])
    >>> scores = td.score(features, targets).isel(sample=[5, 7])
    >>> bool(np.allclose(words.sum("token"), scores, rtol=1e-3, atol=1e-4 * abs(scores).max()))
    True
    """
    require_flag("average", average)
    validate(features, ["feature", "out_to_loss"], what="features")
    divides_targets = _divides_targets(targets, of, by)
    options = gather_options(
        features, estimator, power, damping, calibrate, weights, learning_rates
    )
    _require_linear(options.estimator.name, divides_targets=divides_targets)
    if divides_targets:
        _require_fixed(features, of, ["feature", "out_to_loss"])
    else:
        _require_fixed(features, targets, ["feature"])
    divided = part_products(
        targets if divides_targets or of is None else of,
        model,
        parts=parts,
        projector=_projector(features),
        text=text,
        batch_size=batch_size,
        dtype=dtype,
        device=device,
        on_error=on_error,
    )
    _require_whole_columns(features, divided)
    require_comparable(features, divided.like, name="parts'")
    training = Side(lazy_features(features))
    made = solver(training.ds, options)
    training = Side(made.features)
    asked = _Asked(made, divided, training, on_error, average=average)
    if divides_targets:
        return _of_targets(asked, training if of is None else Side(lazy_features(of)), by)
    return _of_samples(asked, Side(lazy_features(targets), None, may_have_failed(targets)))


@dataclass(frozen=True)
class _Asked:
    """What both directions share: how to solve, what is divided, and what is averaged."""

    solver: Solver
    divided: PartProducts
    training: Side
    on_error: OnError
    average: bool

    @property
    def side(self) -> Side:
        """What is divided."""
        like = self.divided.like
        return Side(like, part_dim(like), self.on_error == "record")

    def pooled(self, weight: da.Array) -> da.Array:
        """Return the weights of samples, (sample, 1), or (sample, checkpoint) if not pooled."""
        return weight.mean(axis=1, keepdims=True) if self.solver.pooled else weight

    def averaged(self, data: da.Array) -> da.Array:
        """Return the mean over checkpoints, the last axis, unless they are to be kept."""
        return data.mean(axis=-1, dtype=data.dtype) if self.average else data

    def labelled(
        self, dims: tuple[str, ...], data: da.Array, coords: dict[Any, Any], targets: Side
    ) -> xr.DataArray:
        like = self.divided.like
        if not self.average:
            dims, coords = (*dims, CHECKPOINT), coords | {CHECKPOINT: like[CHECKPOINT]}
        attrs = score_attrs(self.training, targets, self.solver.attrs)
        return labelled("score", dims, data, coords, attrs | {"parts": str(like.attrs["parts"])})


def _of_samples(asked: _Asked, targets: Side) -> xr.DataArray:
    of, solver = asked.side, asked.solver
    dims, coords = labels_of_scores(of, targets)
    found = asked.divided.arrays(solver.vectors(targets))
    q = xr.Dataset({"out_to_loss": ((SAMPLE, CHECKPOINT), found["out_to_loss"])})
    weight = asked.pooled(solver.weight(Side(q.assign_coords({CHECKPOINT: of.ds[CHECKPOINT]}))))
    product = found["product"]
    data = asked.averaged(product * weight.astype(product.dtype)[:, None, None, :])
    return asked.labelled(dims, data, coords | _errors(found, SAMPLE, "error"), targets)


def _of_targets(asked: _Asked, of: Side, by: str | None) -> xr.DataArray:
    targets, solver = asked.side, asked.solver
    weight = solver.weight(of)
    if by is None:
        dims, coords = labels_of_scores(of, targets)
        vectors = solver.vectors(of)
        vectors = vectors * asked.pooled(weight).astype(vectors.dtype)[:, None, :]
    else:
        dims, coords = labels_of_targets(targets)
        known = list(map(str, labels_of_samples(of)[1]))
        by = require_group_coord(by, known, [TARGET, *map(str, coords)])
        codes, groups = group_codes(of.ds[by].values)
        sums = arrays.groups.group_sum(of.rows(), weight, codes, len(groups), pooled=solver.pooled)
        vectors = solver.solve(sums)
        dims, coords = (by, *dims), coords | {by: (by, groups)}
    found = asked.divided.arrays(vectors)
    data = asked.averaged(da.moveaxis(found["product"], 2, 0))
    errors = _errors(found, TARGET, f"{TARGET_PREFIX}error")
    return asked.labelled(dims, data, coords | errors, targets)


def _errors(found: dict[str, da.Array], dim: str, name: str) -> dict[Hashable, Any]:
    """Return why samples failed, if this is recorded: at the first checkpoint where they did."""
    if "error" not in found:
        return {}
    error = found["error"]
    first = da.blockwise(
        _first_error, "s", error, "sc",
        concatenate=True, dtype=ERROR_DTYPE, meta=np.empty(0, ERROR_DTYPE),
        name=f"first-error-{tokenize(error.name)}",
    )  # fmt: skip
    return {name: (dim, first)}


def _first_error(errors: np.ndarray) -> np.ndarray:
    first: np.ndarray = errors[np.arange(len(errors)), (errors != "").argmax(axis=1)]
    return first


def _divides_targets(targets: object, of: object, by: object) -> bool:
    """Return whether the targets are the side that is given as samples, and check that one is."""
    sides = {"targets": targets} | ({} if of is None else {"of": of})
    for name, side in sides.items():
        if not isinstance(side, xr.Dataset):
            raise TypeError(
                f"expected {name} as an xarray.Dataset, got {shown(side)}; try of=samples.isel("
                "sample=[...])"
            )
    are_samples = [name for name, side in sides.items() if "feature" not in side]  # type: ignore[operator]
    if len(are_samples) != 1:
        raise ValueError(
            "expected samples to divide on one side, as of= or as targets, and features on the "
            f"other, got samples as {are_samples or 'none of them'}; try td.score_parts(features, "
            "targets, model, of=samples.isel(sample=[...]))"
        )
    divides_targets = are_samples == ["targets"]
    if not divides_targets and by is not None:
        raise ValueError(
            f"expected by= with samples as targets, got it with samples as of=, by={by!r}; try "
            f"td.combine(targets, by=...), or scores.groupby({by!r}).sum()"
        )
    return divides_targets


def _require_fixed(features: xr.Dataset, fixed: xr.Dataset | None, names: list[str]) -> None:
    """Check the features of the side that is not divided."""
    if fixed is not None:
        what = "of" if "out_to_loss" in names else "targets"
        validate(fixed, names, what=what)
        require_comparable(features, fixed, name="training" if what == "of" else "target")


def _require_linear(estimator: str, *, divides_targets: bool) -> None:
    """Refuse estimators whose scores need the whole features of what is divided."""
    if estimator == "grad_cos" or (estimator == "relatif" and not divides_targets):
        raise ValueError(
            "expected an estimator whose scores need no norms of the samples that are divided, got "
            f"{estimator!r}; {_REMEDY}"
        )


def _projector(features: xr.Dataset) -> Projector:
    spec = features.attrs.get("projector")
    if spec is None:
        raise ValueError(
            "expected features with their projector in attrs, as td.featurize makes them, got the "
            f"attrs {list(map(str, features.attrs))}; {_REMEDY}"
        )
    projector = from_spec(spec)
    require_back_projection(projector)
    return projector


def _require_whole_columns(features: xr.Dataset, divided: PartProducts) -> None:
    """Refuse features of which columns were selected: vectors must have all of them."""
    width = divided.like.sizes[PROJ_DIM]
    if features.sizes[PROJ_DIM] != width:
        raise ValueError(
            f"expected features with all {width} columns of their projector, got "
            f"{features.sizes[PROJ_DIM]}; try them before isel(proj_dim=...)"
        )
