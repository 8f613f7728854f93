"""Projectors that are fitted to samples: steps that turn a gradient into a feature, and back.

A feature is φ = C · P · S · R · ∇f. R rotates the gradient into the eigenvectors of a curvature, S
scales it there (or, by Adam's second moments, where it is). P is any projector, beside which
leading coordinates can be kept as they are. C are principal components of what P returns.

:class:`~trakdask.projection.maps.Maps` applies the steps, in both directions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from trakdask.errors import StoreMismatchError
from trakdask.projection.companding import widened
from trakdask.projection.protocol import Projector, from_spec
from trakdask.projection.rows import RowMap
from trakdask.tensors import Shapes, Turning, group_of

KIND = "fitted"
"""In the spec of a projector with fitted steps."""

Weights = Mapping[str, Mapping[str, float]]
"""By group of parameters: ``weight``, ``share``, ``directions`` and ``agreement``."""


@dataclass(frozen=True)
class SecondMoments:
    """Scale a gradient by (√v + 10⁻⁸)^-1/2, with Adam's second moments v."""

    kind: ClassVar[str] = "second_moments"
    arrays: ClassVar[Mapping[str, str]] = {"scale": "moment_scale"}
    formula: ClassVar[str] = "D grad f, D = (sqrt(v) + 1e-8)^-1/2 with Adam's second moments v"


@dataclass(frozen=True)
class Curvature:
    """Turn a gradient into the coordinates of the loss's curvature, and scale it there.

    Parameters
    ----------
    damping
        δ: the scale is 1/√(Λ + δ mean Λ), with the eigenvalues Λ of a parameter.
    power
        The exponent of the samples' weights, q^power (1 - q); None for equal weights.
    leading
        Coordinates with most of the scaled curvature, which are features of their own. What
        follows projects the others.
    weights
        What the scale of each group of parameters is multiplied by, and why; None for 1.
    kept
        By matrix, the axis that has no eigenvectors: that of the outputs of its layer. None in
        older stores, where outputs have some, too.
    block
        The longest part of an axis that has eigenvectors of its own; None in older stores, where
        axes are whole.
    writer
        In older stores, the one matrix whose first axis has no eigenvectors: that of words.
    """

    damping: float
    power: float | None
    leading: int
    weights: Weights | None = None
    kept: Mapping[str, int] | None = None
    block: int | None = None
    writer: str | None = None

    kind: ClassVar[str] = "curvature"
    arrays: ClassVar[Mapping[str, str]] = {
        "eigenvectors": "curvature_eigenvectors",
        "scale": "curvature_scale",
        "leading": "curvature_leading",
    }
    formula: ClassVar[str] = (
        "(L + d mean(L))^-1/2 U^T grad f, with eigenvalues L and eigenvectors U of the curvature; "
        "the first columns are leading coordinates, which P^T takes as 0"
    )

    @property
    def damping_prior(self) -> float:
        """How much larger λ is than for a random projection; older stores keep theirs.

        Chosen by ``2026-11-30-outputs.txt``, where the best λ of most tasks without weights is near
        10^½, and that of a language model, which has some, larger than both.
        """
        return 10 ** (0.5 if self.kept and not self.weights else 0.75)

    @property
    def turning(self) -> Turning:
        """Which axes have eigenvectors."""
        return Turning(self.kept or ({self.writer: 0} if self.writer else {}), self.block)

    def differentiated(self, shapes: Shapes) -> list[str]:
        """Return the parameters that have a weight."""
        weights = self.weights or {}
        left_out = {title for title, values in weights.items() if not values["weight"]}
        return [name for name in shapes if group_of(name, shapes) not in left_out]

    def __repr__(self) -> str:
        values = f"damping={self.damping}, power={self.power}, leading={self.leading}"
        values += f", block={self.block}" if self.block else ""
        weights = self.weights or {}
        order = sorted(
            weights, key=lambda name: -(weights[name]["weight"] ** 2) * weights[name]["share"]
        )
        most = ", ".join(f"{name!r}: {weights[name]['weight']:.3g}" for name in order[:3])
        more = ", ..." if len(order) > 3 else ""
        return f"Curvature({values}{f', weights={{{most}{more}}}' if weights else ''})"


@dataclass(frozen=True)
class Components:
    """Reduce the results of the projector to their principal components.

    Parameters
    ----------
    proj_dim
        Their number.
    """

    proj_dim: int

    kind: ClassVar[str] = "components"
    arrays: ClassVar[Mapping[str, str]] = {
        "components": "principal_components",
        "shares": "principal_shares",
    }


Step = SecondMoments | Curvature | Projector | Components
_STEPS: dict[str, Any] = {step.kind: step for step in (SecondMoments, Curvature, Components)}


@dataclass(frozen=True, eq=False, repr=False)
class Fitted:
    """A projector whose steps may be fitted to samples and checkpoints.

    :func:`trakdask.fit` and the functions of its steps return it; :func:`trakdask.featurize` takes
    it, and features keep it, so that others can be made in the same way with ``like=``.

    Parameters
    ----------
    steps
        At most one scaling of gradients, a projector, and at most one reduction to components, in
        this order.
    arrays
        The fitted values, by the names of variables of features: in memory or lazy, with
        checkpoints along the last axis. Values that belong to no step are for scores.
    digests
        By the name of the checkpoint, a hash of the values that features are made with.
    model
        The ``checkpoints``, in the order of that axis, and ``parameters`` of the model that it was
        fitted to, as in the attrs of features.
    origin
        The options and samples of :func:`trakdask.fit`, which it compares when it is called again.
    rows
        By the name of the checkpoint, what :func:`trakdask.featurize` need not compute again: a
        digest of all samples and of how gradients were made, the places of samples that it was
        fitted to, and their features, output and Q, (sample, proj_dim + 2) float32.
    """

    steps: tuple[Step, ...]
    arrays: Mapping[str, Any] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""
    rows: Mapping[str, tuple[str, np.ndarray, np.ndarray]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        places = [
            1 if isinstance(step, Projector) else 2 * isinstance(step, Components)
            for step in self.steps
        ]
        if places != sorted(set(places)):
            raise ValueError(
                "expected at most one scaling (second moments or curvature), one projector and "
                f"principal components, in this order, got {self!r}; try td.fit(samples, model)"
            )

    @classmethod
    def of(cls, projector: Projector | Fitted) -> Fitted:
        """Return a random projector as a chain of one step; a fitted one as it is."""
        return projector if isinstance(projector, Fitted) else cls((projector,))

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any], **fit: Any) -> Fitted:
        """Rebuild the projector that a spec describes, with its fitted values.

        Raises
        ------
        TypeError, ValueError
            As :func:`~trakdask.projection.protocol.from_spec`.
        """
        described = spec["steps"] if spec.get("kind") == KIND else [spec]
        steps: list[Step] = []
        for each in described:
            options = {name: value for name, value in each.items() if name != "kind"}
            of_kind = _STEPS.get(each.get("kind", ""))
            steps.append(of_kind(**options) if of_kind else from_spec(each))
        return cls(tuple(steps), **fit)

    def spec(self) -> dict[str, Any]:
        """Return JSON values that say which steps these are; digests name the fitted values."""
        steps = []
        for step in self.steps:
            if isinstance(step, Projector):
                steps.append(step.spec())
                continue
            # The specs of older stores, without these options, are as they were.
            younger = "weights", "kept", "block", "writer"
            values = {n: v for n, v in asdict(step).items() if v or n not in younger}
            steps.append({"kind": step.kind, **values})
        return steps[0] if self.is_random else {"kind": KIND, "steps": steps}

    @property
    def is_random(self) -> bool:
        """Whether this is a projector alone, and nothing was fitted."""
        return len(self.steps) == 1 and isinstance(self.steps[0], Projector)

    def then(self, projector: Projector) -> Fitted:
        """Return this projector with one more step.

        Parameters
        ----------
        projector
            The projector of the gradients that the steps so far have scaled.

        Examples
        --------
        >>> import numpy as np, torch, trakdask as td
        >>> samples = td.from_arrays({"image": np.eye(4, dtype="f4"), "label": np.arange(4) % 3})
        >>> model = td.Model(torch.nn.Linear(4, 3), task="image_classification")
        >>> td.fits.curvature(samples, model, leading=2, progress=False).then(td.SJLT(8))
        Fitted(Curvature(damping=10.0, power=0.5, leading=2, block=1024), SJLT(proj_dim=8, ...))
        """
        return replace(self, steps=(*self.steps, projector))

    def with_arrays(self, step: Step, arrays: Mapping[str, np.ndarray], model: Any) -> Fitted:
        """Return this projector with one more step that was fitted, (..., checkpoint) in memory."""
        names = list(model["checkpoints"])
        together = {**self.at_checkpoints(names).arrays, **arrays}
        fitted = Fitted((*self.steps, step), together, model=model)
        return replace(fitted, digests={name: fitted.digest_at(i) for i, name in enumerate(names)})

    def beside(self, arrays: Mapping[str, np.ndarray]) -> Fitted:
        """Return this projector with values that belong to no step."""
        fitted = replace(self, arrays={**self.arrays, **arrays})
        return replace(
            fitted, digests={name: fitted.digest_at(i) for i, name in enumerate(self.digests)}
        )

    def digest_at(self, column: int) -> str:
        """Hash the values of a checkpoint: features are comparable only if made by the same.

        What belongs to no step, and is for scores, has a hash of its own after it.
        """
        made_by = {*self.variables.values()}
        others, hashes = self.arrays.keys() - made_by, []
        for names in (made_by, others) if others else (made_by,):
            content = hashlib.sha256()
            for name in sorted(names):
                values = np.asarray(self.arrays[name][..., column])
                # netCDF knows no integers of 64 bits, and has other bytes first.
                is_number = values.dtype.kind == "i" and values.dtype != np.int8
                dtype = np.dtype("<i8") if is_number else values.dtype.newbyteorder("<")
                content.update(values.astype(dtype, copy=False).tobytes())
            hashes.append(content.hexdigest())
        return "-".join(hashes)

    def require_digests(self) -> None:
        """Reject fitted values that are not those which the features were made with.

        Raises
        ------
        StoreMismatchError
            If somebody has changed them; a digest tells at which checkpoint.
        """
        for column, (name, expected) in enumerate(self.digests.items()):
            got = self.digest_at(column)
            # Older digests lack the second part, and so do features without what is for scores.
            if not (got.startswith(expected) or expected.startswith(got)):
                raise StoreMismatchError(
                    f"expected {sorted(self.arrays)} of checkpoint {name!r} as they "
                    f"were fitted (fit[{name!r}] is {expected[:12]}), got others ({got[:12]}); try "
                    "features whose fitted values nobody has changed, or td.fit again"
                )

    def at_checkpoints(self, names: Sequence[str]) -> Fitted:
        """Return the fit at some checkpoints, in their order."""
        order = list(self.model.get("checkpoints", ()))
        if not self.arrays or order == list(names):
            return self
        columns = [order.index(name) for name in names]
        return replace(
            self,
            arrays={name: array[..., columns] for name, array in self.arrays.items()},
            digests={name: self.digests[name] for name in names if self.digests},
            model={**self.model, "checkpoints": {n: self.model["checkpoints"][n] for n in names}},
            rows={name: self.rows[name] for name in names if name in self.rows},
        )

    @classmethod
    def joined(cls, parts: Sequence[Fitted]) -> Fitted:
        """Return the fits of several checkpoints, each with the same steps, as one.

        Values that some of them have in more bits, as older stores do, have as many in all of them.
        """
        names = parts[0].arrays
        dtypes = {n: np.result_type(*(part.arrays[n].dtype for part in parts)) for n in names}
        fits = []
        for part in parts:
            few = {n: a for n, a in part.arrays.items() if a.dtype != dtypes.get(n, a.dtype)}
            values = {n: widened(a).astype(dtypes[n]) for n, a in few.items()}
            fits.append(replace(part.beside(values), rows={}) if values else part)
        first, models = fits[0], [fit.model["checkpoints"] for fit in fits]
        return replace(
            first,
            arrays={n: np.concatenate([fit.arrays[n] for fit in fits], -1) for n in first.arrays},
            digests={name: text for fit in fits for name, text in fit.digests.items()},
            model={**first.model, "checkpoints": {n: v for m in models for n, v in m.items()}},
            rows={name: known for fit in fits for name, known in fit.rows.items()},
        )

    @property
    def projector(self) -> Projector:
        """The random step, which every feature is made by."""
        for step in self.steps:
            if isinstance(step, Projector):
                return step
        raise ValueError(
            f"expected a projector as one of the steps, got {self!r}; try "
            ".then(td.SJLT(proj_dim=1024))"
        )

    @property
    def curvature(self) -> Curvature | None:
        """The step that scales gradients by a curvature, if there is one."""
        return next((step for step in self.steps if isinstance(step, Curvature)), None)

    def differentiated(self, shapes: Shapes) -> list[str]:
        """Return the parameters of a model whose gradients make features."""
        step = self.curvature
        return [*shapes] if step is None else step.differentiated(shapes)

    @property
    def variables(self) -> dict[str, str]:
        """Names of the variables that the steps are fitted with, by their purpose."""
        return {k: v for step in self.steps for k, v in getattr(step, "arrays", {}).items()}

    @property
    def damping_prior(self) -> float:
        """How much larger λ is than for a random projection, whose gram matrix is less flat."""
        return max(getattr(step, "damping_prior", 1.0) for step in self.steps)

    @property
    def formula(self) -> str:
        """The formula of the steps, in words."""
        scaled = getattr(self.steps[0], "formula", "grad f")
        is_reduced = isinstance(self.steps[-1], Components)
        reduction = "; then C^T feature, with principal components C" if is_reduced else ""
        return f"feature = p^-1/2 P^T {scaled}{reduction}"

    def width(self, n_rows: int) -> int:
        """Return the number of feature columns."""
        if isinstance(last := self.steps[-1], Components):
            return last.proj_dim
        return self.sketch_width(n_rows)

    def sketch_width(self, n_rows: int) -> int:
        """Return the number of columns before they are reduced to components."""
        leading = 0 if self.curvature is None else self.curvature.leading
        return leading + self.projector.width(n_rows)

    def bind(self, row_map: RowMap) -> Fitted:
        """Return the projector for one layout of rows."""
        bound = (s.bind(row_map) if isinstance(s, Projector) else s for s in self.steps)
        return replace(self, steps=tuple(bound))

    def __repr__(self) -> str:
        if self.is_random:
            return repr(self.steps[0])
        return f"Fitted({', '.join(map(repr, self.steps))})"
