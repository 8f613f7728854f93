"""Scores of the parts of samples: of their tokens or modules, without features of each part."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal

import dask.array as da
import numpy as np
import xarray as xr

from trakdask.arrays.solve import solve
from trakdask.attribution.estimators import EstimatorLike, resolve
from trakdask.attribution.labels import labelled, labels_of_groups, labels_of_scores, score_attrs
from trakdask.attribution.operands import Solver, solver
from trakdask.checks import require_flags
from trakdask.featurization.job import ERROR_DTYPE
from trakdask.models.model import Model
from trakdask.parts.products import divide, lazy_products
from trakdask.provenance import require_comparable
from trakdask.samples.token_texts import Text
from trakdask.variables import CHECKPOINT, SAMPLE, TARGET, TARGET_PREFIX, lazy_features, validate


def score_parts(
    features: xr.Dataset,
    targets: xr.Dataset,
    model: Model,
    estimator: EstimatorLike = "auto",
    *,
    of: xr.Dataset | None = None,
    by: str | None = None,
    parts: Literal["token"] | Sequence[str] | Mapping[str, str | Sequence[str]] = "token",
    text: Text | None = None,
    average: bool = True,
    on_error: Literal["raise", "record"] = "raise",
) -> xr.DataArray:
    """Divide scores among the words of sequences, or among the modules of the model.

    Which words of a document helped this answer? Give the documents as ``of``, as samples and not
    as features. Which words of a prompt made the model rely on these documents? Give the prompts as
    ``targets``, as samples. The scores of the parts add up to the scores of :func:`score`.

    Parameters
    ----------
    features
        Features of all training samples, as for :func:`score`. Their projector is used.
    targets
        Features of targets, if ``of`` is divided; else the samples to divide.
    model
        The model that the samples to divide are run through: the one of their features.
    estimator
        As in :func:`score`; but not ``"grad_cos"``, nor ``"relatif"`` if training samples are
        divided, because this needs their whole features.
    of
        The training samples to divide. Or, if targets are divided, features of the training samples
        whose scores are asked for: all by default, but few of them cost less.
    by
        If targets are divided: name of a coord of the training samples, for the sums of the scores
        of each group of them, as in :func:`group_score`.
    parts
        ``"token"``: one part per token and, if the model has layers that do not see tokens, such as
        the head of a classifier on a pooled vector, a last part for these. Or groups of modules: a
        mapping from names to names or globs of parameters, such as ``{"mlp": "*.mlp.*"}``, or a
        list of words, such as ``["attn", "mlp"]``, where each word stands for the parameters whose
        names contain it. Parameters of no group are the part ``"others"``.
    text
        For tokens: the text of a token id, as a tokenizer of transformers, a function, or a list of
        all texts. It becomes a coord.
    average
        ``False`` keeps ``checkpoint``.
    on_error
        As in :func:`featurize`. Scores of samples that failed are NaN, and the coord ``error`` (for
        targets ``target_error``) says why.

    Returns
    -------
    Lazy DataArray ``score``, float32: (sample, token, target) if ``of`` is divided, (sample,
    target, token) or (``by``, target, token) if targets are; ``module`` in the place of ``token``
    for groups of modules; and ``checkpoint`` with ``average=False``. Coords are the ones of
    :func:`score`, and ``module``, the names of the groups; or, lazy and (sample, token), the token
    ids, under the name of the variable that they come from, ``attention_mask``, if the model takes
    one, and ``text``. The last part of a pooled head has the id -1 and the text ``"[others]"``.

    Raises
    ------
    TypeError, ValueError
        If not exactly one side is given as samples; if features lack a part of their columns, or
        their projector cannot be multiplied from both sides; if parts share a parameter, or select
        none; if a layer looks at several tokens at once (convolutions, recurrent layers,
        normalization over samples), or a parameter belongs to no layer of its own; otherwise as
        :func:`score`.
    StoreMismatchError
        If the model is not the one that the features were made with; the field is named.
    BlockError
        When computed, as :func:`featurize`; also if the terms of the tokens do not add up to the
        gradient, or a layer gets something else than one value per token and this could not be
        foreseen, since the model does not run on tensors without values.

    Notes
    -----
    The gradient of a linear layer is Σ_t δ_t x_tᵀ: x_t is its input at token t, and δ_t the
    derivative of f with respect to its output there. So the part of a token contains the
    effect that the weights have at this token on everything predicted later, and not only on the
    next token: ``td.tasks.CausalLM(position=...)`` divides f by predicted tokens instead.

    The score of a part is φ_part · w, where w is the solved vector of the other side. It equals the
    product of the part's gradient with P w, so each w is projected back to the size of the
    parameters, once per checkpoint. For a linear layer, with U its piece of P w, the score of token
    t is δ_tᵀ(U x_t): one more multiplication of the layer's input per w. No gradient of a single
    token is formed, and none is projected.

    Cost: a forward and a backward pass, and about one more forward pass for each w; see
    ``tests/benchmarks/results/2026-11-23-tokens.txt``. Memory: 4 bytes per parameter for each w, at
    most 256 MiB at once per checkpoint, unless a single w is larger. The model runs in the
    precision of the features.

    Gradients are rounded when they are projected, to 14 bits by default, and products here are not.
    This is all by which sums differ from the scores of whole samples: a relative 1e-4 of the
    features. A solved vector is much longer than its product with a feature, and more so for small
    λ. The difference is therefore several times larger with ``"soft"`` and ``"trak"`` than with
    ``"grad_dot"``. ``td.Rademacher(arithmetic="int8x3")`` rounds to 22 bits.

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
    # 1. Which side is divided, and into which parts.
    validate(features, ["feature", "out_to_loss"], what="features")
    require_flags(average=average)
    divides_targets = _divides_targets(features, targets, of, by)
    training = lazy_features(features)
    resolved = resolve(training, estimator)
    if (TARGET if divides_targets else SAMPLE) in resolved.norms:
        raise ValueError(
            "expected an estimator whose scores need no norms of the samples that are divided, got "
            f"{resolved.name!r}; try estimator='trak'"
        )
    samples = targets if divides_targets or of is None else of
    prepared, like = divide(
        samples, model, parts=parts, features=features, text=text, on_error=on_error
    )
    # 2. Vectors from the other side, which the features of parts are multiplied with.
    operands = solver(training, resolved)
    if divides_targets:
        asked = operands.features if of is None else lazy_features(of)
        # The solved vectors of training samples, each times its weight, or of groups.
        if by is None:
            dims, coords = labels_of_scores(asked, like)
            vectors = operands.vectors(asked)
            weight = _pooled(operands, operands.weight(asked)).astype(vectors.dtype)
            vectors = vectors * weight[:, None, :]
        else:
            (dims, coords), members, (n_groups,) = labels_of_groups(asked, like, by)
            # A sum of solved vectors is the solved vector of a sum, so that groups cost one solve
            # each.
            vectors = solve(operands.inverse, operands.sums(asked, members, n_groups))
        results = lazy_products(prepared, vectors)
        # (target, part, sample or group, checkpoint), of which scores have the third axis first.
        data = da.moveaxis(results["product"], 2, 0)
        coords |= _errors(results, TARGET, f"{TARGET_PREFIX}error")
        attrs = score_attrs(features, like, operands.attrs)
    else:
        explained = lazy_features(targets)
        dims, coords = labels_of_scores(like, explained)
        results = lazy_products(prepared, operands.vectors(explained))
        # The weights of the divided samples follow from their Q, which the same pass of the model
        # gives.
        q = like[[]].assign(out_to_loss=((SAMPLE, CHECKPOINT), results["out_to_loss"]))
        weight = _pooled(operands, operands.weight(q)).astype(results["product"].dtype)
        data = results["product"] * weight[:, None, None, :]
        coords |= _errors(results, SAMPLE, "error")
        attrs = score_attrs(features, targets, operands.attrs)
    # 3. The mean of checkpoints, and what the parts are.
    if average:
        data = data.mean(axis=-1, dtype=data.dtype)
    attrs |= {"parts": like.attrs["parts"]}
    return labelled("score", (dims, coords), data, attrs, None if average else like[CHECKPOINT])


def _pooled(operands: Solver, weight: da.Array) -> da.Array:
    """Return the weights of samples, (sample, 1), or (sample, checkpoint) if not pooled."""
    return weight.mean(axis=1, keepdims=True) if operands.estimator.pooled else weight


def _errors(results: dict[str, da.Array], dim: str, name: str) -> dict[Hashable, Any]:
    """Return why samples failed, if this is recorded: at the first checkpoint where they did."""
    if "error" not in results:
        return {}
    error, meta = results["error"].rechunk({1: -1}), np.empty(0, ERROR_DTYPE)
    first = da.map_blocks(_first_error, error, drop_axis=1, dtype=ERROR_DTYPE, meta=meta)
    return {name: (dim, first)}


def _first_error(errors: np.ndarray) -> np.ndarray:
    return errors[np.arange(len(errors)), (errors != "").argmax(axis=1)]


def _divides_targets(
    features: xr.Dataset, targets: xr.Dataset, of: xr.Dataset | None, by: str | None
) -> bool:
    """Return whether the targets are samples, to be divided, and check the side that is not."""
    sides: dict[str, Any] = {"targets": targets} | ({} if of is None else {"of": of})
    are_samples = [name for name, side in sides.items() if "feature" not in side]
    if len(are_samples) != 1:
        raise ValueError(
            "expected samples to divide on one side, as of= or as targets, and features on the "
            f"other, got samples as {are_samples or 'none of them'}; try td.score_parts(features, "
            "targets, model, of=samples.isel(sample=[...]))"
        )
    if are_samples == ["of"] and by is not None:
        raise ValueError(
            f"expected by= with samples as targets, got it with samples as of=, by={by!r}; try "
            f"td.combine(targets, by=...), or scores.groupby({by!r}).sum()"
        )
    if are_samples == ["of"]:
        validate(targets, ["feature"], what="targets")
        require_comparable(features, targets)
    elif of is not None:
        validate(of, ["feature", "out_to_loss"], what="of")
        require_comparable(features, of, "training")
    return are_samples == ["targets"]
