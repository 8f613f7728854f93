"""Projectors that are fitted to samples: steps that turn a gradient into a feature, and back.

A feature is φ = C · P · S · R · ∇f. R rotates the gradient into the eigenvectors of a curvature, S
scales it there (or, by Adam's second moments, where it is). P is any projector, beside which
leading coordinates can be kept as they are. C are principal components of what P returns.

Each step is one linear map with two directions, so the whole is a fold over the steps: ``open``
passes gradients forward, and ``back`` passes vectors backward, which is the adjoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from trakdask.html_tables import HtmlTable
from trakdask.projection.axes import Rotations, places_of, rotated, rotations
from trakdask.projection.protocol import Projector, RowMap, from_spec
from trakdask.projection.stream import ProjectionStream

KIND = "fitted"
"""In the spec of a projector with fitted steps."""


@dataclass(frozen=True)
class SecondMoments:
    """Scale a gradient by (√v + 10⁻⁸)^-1/2, with Adam's second moments v."""

    kind: ClassVar[str] = "second_moments"
    arrays: ClassVar[tuple[str, ...]] = ("moment_scale",)
    damping_prior: ClassVar[float] = 1.0


@dataclass(frozen=True)
class Curvature:
    """Turn a gradient into the coordinates of the loss's curvature, and scale it there.

    Parameters
    ----------
    damping
        δ: the scale is 1/√(Λ + δ mean Λ), with the eigenvalues Λ of a parameter.
    power
        Of the weights that samples had, q^power (1 - q); None for equal weights.
    leading
        Coordinates with most of the scaled curvature, which are features of their own. What
        follows projects the others.
    """

    damping: float
    power: float | None
    leading: int

    kind: ClassVar[str] = "curvature"
    arrays: ClassVar[tuple[str, ...]] = (
        *("curvature_eigenvectors", "curvature_scale", "curvature_leading"),
    )
    damping_prior: ClassVar[float] = 10**0.5


@dataclass(frozen=True)
class Components:
    """Reduce what the projector returns to its principal components.

    Parameters
    ----------
    proj_dim
        Their number.
    """

    proj_dim: int

    kind: ClassVar[str] = "components"
    arrays: ClassVar[tuple[str, ...]] = ("principal_components", "principal_shares")
    damping_prior: ClassVar[float] = 1.0


Step = SecondMoments | Curvature | Projector | Components
_STEPS: dict[str, Any] = {step.kind: step for step in (SecondMoments, Curvature, Components)}


@dataclass(frozen=True, eq=False, repr=False)
class Fitted(HtmlTable):
    """A projector whose steps may be fitted to samples and checkpoints.

    :func:`trakdask.fit` and the functions of its steps return it; :func:`trakdask.featurize` takes
    it, and features keep it, so that others can be made in the same way with ``like=``.

    Parameters
    ----------
    steps
        At most one scaling of gradients, a projector, and at most one reduction to components, in
        this order.
    arrays
        What was fitted, by the names of variables of features: in memory or lazy, with checkpoints
        along the last axis. Those of no step are for scores.
    digests
        By the name of the checkpoint, what identifies the values that features are made with.
    model
        The ``checkpoints``, in the order of that axis, and ``parameters`` of the model that it was
        fitted to, as in the attrs of features.
    origin
        What :func:`trakdask.fit` was asked for, and the samples, for those who compare it.
    """

    steps: tuple[Step, ...]
    arrays: Mapping[str, Any] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""

    def __post_init__(self) -> None:
        places = [_place(step) for step in self.steps]
        if places != sorted(set(places)):
            raise ValueError(
                "expected at most one scaling (second moments or curvature), one projector and "
                f"principal components, in this order, got {self!r}; try td.fit(samples, model)"
            )

    @classmethod
    def of(cls, projector: Projector | Fitted) -> Fitted:
        """Return a projector as one of fitted steps, of which it has none."""
        return projector if isinstance(projector, Fitted) else cls((projector,))

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any], **fit: Any) -> Fitted:
        """Rebuild the projector that a spec describes, with what was fitted.

        Raises
        ------
        TypeError, ValueError
            As :func:`~trakdask.projection.protocol.from_spec`.
        """
        described = spec["steps"] if spec.get("kind") == KIND else [spec]
        return cls(tuple(map(_step, described)), **fit)

    def spec(self) -> dict[str, Any]:
        """Return JSON values that say which steps these are; the digests say what was fitted."""
        steps = [
            step.spec() if isinstance(step, Projector) else {"kind": step.kind, **asdict(step)}
            for step in self.steps
        ]
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
            What projects the gradients that the steps so far have scaled.

        Examples
        --------
        >>> import numpy as np, torch, trakdask as td
        >>> samples = td.from_arrays({"image": np.eye(4, dtype="f4"), "label": np.arange(4) % 3})
        >>> model = td.Model(torch.nn.Linear(4, 3), task="image_classification")
        >>> td.curvature(samples, model, leading=2).then(td.SJLT(8))
        Fitted(Curvature(damping=100.0, power=0.5, leading=2), SJLT(proj_dim=8, sparsity=4, seed=0))
        """
        return replace(self, steps=(*self.steps, projector))

    def with_arrays(self, step: Step, arrays: Mapping[str, np.ndarray], model: Any) -> Fitted:
        """Return this projector with one more step that was fitted, (..., checkpoint) in memory."""
        names = list(model["checkpoints"])
        together = {**self.at_checkpoints(names).arrays, **arrays}
        digests = {
            name: _digest({n: array[..., i] for n, array in together.items()})
            for i, name in enumerate(names)
        }
        return Fitted((*self.steps, step), together, digests, model)

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
        )

    def without_arrays(self) -> Self:
        """Return the steps alone, which are small."""
        return replace(self, arrays={}, digests={}, model={}, origin="")

    @classmethod
    def joined(cls, parts: Sequence[Fitted]) -> Fitted:
        """Return the fits of several checkpoints, each with the same steps, as one."""
        first = parts[0]
        digests: dict[str, str] = {}
        checkpoints: dict[str, str] = {}
        for part in parts:
            digests |= part.digests
            checkpoints |= part.model["checkpoints"]
        return replace(
            first,
            arrays={n: _concatenated([part.arrays[n] for part in parts]) for n in first.arrays},
            digests=digests,
            model={**first.model, "checkpoints": checkpoints},
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
    def damping_prior(self) -> float:
        """How much larger λ is than for a random projection, whose gram matrix is less flat."""
        return max(getattr(step, "damping_prior", 1.0) for step in self.steps)

    def width(self, n_rows: int) -> int:
        """Return the number of feature columns."""
        if isinstance(last := self.steps[-1], Components):
            return last.proj_dim
        return self.sketch_width(n_rows)

    def sketch_width(self, n_rows: int) -> int:
        """Return the number of columns before they are reduced to components."""
        leading = sum(step.leading for step in self.steps if isinstance(step, Curvature))
        return leading + self.projector.width(n_rows)

    def bind(self, row_map: RowMap) -> Fitted:
        """Return the projector for one layout of rows."""
        bound = (s.bind(row_map) if isinstance(s, Projector) else s for s in self.steps)
        return replace(self, steps=tuple(bound))

    def at(
        self,
        row_map: RowMap,
        checkpoint: int,
        arrays: Mapping[str, np.ndarray],
        device: torch.device,
    ) -> Maps:
        """Return the maps of one checkpoint on a device.

        Parameters
        ----------
        row_map
            Rows of the parameters.
        checkpoint
            Checkpoint id in [0, 2**32).
        arrays
            What was fitted to this checkpoint, without its axis.
        device
            Of gradients and features.
        """
        return Maps(self, row_map, checkpoint, arrays, device)

    def __repr__(self) -> str:
        if self.is_random:
            return repr(self.steps[0])
        return f"Fitted({', '.join(map(repr, self.steps))})"

    def _repr_html_(self) -> str:
        return f"<code>{self!r}</code>"


def _concatenated(arrays: Sequence[Any]) -> Any:
    """Join along checkpoints; one array alone may be lazy, and stays it."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(list(map(np.asarray, arrays)), -1)


def _place(step: Step) -> int:
    """Return where among the steps one may be."""
    return 1 if isinstance(step, Projector) else 2 * isinstance(step, Components)


def _step(spec: Mapping[str, Any]) -> Step:
    if spec.get("kind") not in _STEPS:
        return from_spec(spec)
    options = {name: value for name, value in spec.items() if name != "kind"}
    step: Step = _STEPS[spec["kind"]](**options)
    return step


def _digest(arrays: Mapping[str, np.ndarray]) -> str:
    """Identify the values: features are comparable only if they were made by the same ones."""
    content = hashlib.sha256()
    for name in sorted(arrays):
        content.update(arrays[name].tobytes())
    return content.hexdigest()


# ----------------------------------------------------------------------- the maps of a checkpoint


class Stream(Protocol):
    """Takes the gradients of a micro-batch, parameter by parameter, and makes rows of them."""

    def __call__(self, name: str, gradient: Tensor, first: int | None = None, /) -> None:
        """Receive a parameter's gradient, or, in order, a slice that starts at ``first``."""

    def result(self) -> Tensor:
        """Return a row per sample, once all gradients have been received."""


class _Map(Protocol):
    """A linear map from gradients to gradients, or from features to features."""

    def wrap(self, stream: Stream) -> Stream:
        """Return a stream with this map as one more."""

    def back(self, vectors: Tensor) -> Tensor:
        """Multiply from the other side."""


class Maps:
    """The steps of a projector at one checkpoint, in both directions.

    ``rotations`` are the coordinates in which streams expect gradients. They are not among the
    maps, because engines rotate the two sides of a product, which costs far less than rotating the
    product.
    """

    def __init__(
        self,
        fitted: Fitted,
        row_map: RowMap,
        checkpoint: int,
        arrays: Mapping[str, np.ndarray],
        device: torch.device,
    ) -> None:
        shapes = dict(zip(row_map.names, row_map.shapes, strict=True))
        self.rotations: Rotations | None = None
        if "curvature_eigenvectors" in arrays:
            self.rotations = rotations(arrays["curvature_eigenvectors"], shapes, device)
        scale = arrays.get("curvature_scale", arrays.get("moment_scale"))
        self._before: list[_Map] = []
        if scale is not None:
            self._before = [_Scale(row_map, scale, device, self.rotations)]
        leading = arrays.get("curvature_leading")
        self._sketch = _Sketch(fitted.projector, row_map, checkpoint, leading, device)
        matrix = arrays.get("principal_components")
        self._after: list[_Map] = [] if matrix is None else [_Reduction(matrix, device)]

    def open(self, n_samples: int) -> Stream:
        """Return a stream that makes features of the gradients of some samples."""
        stream = self._sketch.open(n_samples)
        for step in (*self._before, *self._after):
            stream = step.wrap(stream)
        return stream

    def back(self, vectors: Tensor) -> Tensor:
        """Multiply all maps from the other side.

        For every gradient g and vector v, φ(g)·v is g·back(v), up to the rounding of the features.

        Parameters
        ----------
        vectors
            Shape (m, width), float32, on the CPU.

        Returns
        -------
        Shape (m, n_rows), float32; rows of padding have no meaning.
        """
        for after in self._after:
            vectors = after.back(vectors)
        vectors = self._sketch.back(vectors)
        for before in self._before:
            vectors = before.back(vectors)
        return vectors


class _Scale:
    """Multiply gradients by the factors of their coordinates."""

    def __init__(
        self,
        row_map: RowMap,
        scale: np.ndarray,
        device: torch.device,
        matrices: Rotations | None,
    ) -> None:
        shapes = dict(zip(row_map.names, row_map.shapes, strict=True))
        flat = torch.tensor(scale, device=device)
        self._factors = {name: flat[place] for name, place in places_of(shapes).items()}
        self._row_map, self._rotations = row_map, matrices or {}

    def wrap(self, stream: Stream) -> Stream:
        return _Scaled(stream, self._factors)

    def back(self, rows: Tensor) -> Tensor:
        for name, factor in self._factors.items():
            start = self._row_map.offset(name)
            place = slice(start, start + len(factor))
            transposed = {axis: matrix.T for axis, matrix in self._rotations.get(name, {}).items()}
            scaled = rows[:, place] * factor
            rows[:, place] = rotated(scaled, self._row_map.shape(name), transposed)
        return rows


class _Scaled:
    """Multiplies gradients by the factors of their parameters, and passes them on."""

    def __init__(self, stream: Stream, factors: Mapping[str, Tensor]) -> None:
        self.result = stream.result
        self._stream, self._factors = stream, factors

    def __call__(self, name: str, gradient: Tensor, first: int | None = None, /) -> None:
        start = first or 0
        factor = self._factors[name][start : start + gradient.shape[1]]
        self._stream(name, gradient * factor.to(gradient.dtype), first)


class _Sketch:
    """Project gradients, but keep their leading coordinates as features of their own."""

    def __init__(
        self,
        projector: Projector,
        row_map: RowMap,
        checkpoint: int,
        leading: np.ndarray | None,
        device: torch.device,
    ) -> None:
        self._place = projector, row_map, checkpoint, device
        self._rows = np.empty(0, np.int64)
        if leading is not None:
            # Coordinates are numbered without the padding between parameters that rows have.
            edges = np.cumsum([0, *map(row_map.size, row_map.names)])
            owners = np.searchsorted(edges, leading, side="right") - 1
            self._rows = leading - edges[owners] + np.array(row_map.offsets)[owners]

    def open(self, n_samples: int) -> Stream:
        projector, row_map, checkpoint, device = self._place
        stream = ProjectionStream(projector, row_map, n_samples, checkpoint, device)
        if not len(self._rows):
            return stream
        return _Leading(stream, row_map, self._rows, n_samples, device)

    def back(self, vectors: Tensor) -> Tensor:
        projector, row_map, checkpoint, _ = self._place
        kept, rest = vectors.split([len(self._rows), vectors.shape[1] - len(self._rows)], 1)
        rows = projector.bind(row_map).back_project(row_map, checkpoint, rest)
        # The rows of kept elements meet zeros in the sketch; here they are those of their columns.
        rows[:, torch.from_numpy(self._rows)] = kept.to(rows.dtype)
        return rows


class _Leading:
    """Keeps the leading elements of gradients, and passes on the gradients without them."""

    def __init__(
        self,
        rest: ProjectionStream,
        row_map: RowMap,
        rows: np.ndarray,
        n_samples: int,
        device: torch.device,
    ) -> None:
        self._columns = np.argsort(rows)
        self._rows = rows[self._columns]
        self._row_map, self._rest = row_map, rest
        self._kept = torch.zeros(n_samples, len(rows), device=device)

    def __call__(self, name: str, gradient: Tensor, first: int | None = None, /) -> None:
        start = self._row_map.offset(name) + (first or 0)
        here = slice(*np.searchsorted(self._rows, (start, start + gradient.shape[1])))
        columns = torch.from_numpy(self._columns[here])
        places = torch.from_numpy(self._rows[here] - start)
        self._kept[:, columns] = gradient[:, places].to(self._kept.dtype)
        gradient[:, places] = 0  # in place: a scaled gradient belongs to nobody else
        self._rest.add(name, gradient, first)

    def result(self) -> Tensor:
        return torch.cat([self._kept, self._rest.result()], 1)


class _Reduction:
    """Multiply what was projected with principal components."""

    def __init__(self, matrix: np.ndarray, device: torch.device) -> None:
        self._matrix = torch.tensor(matrix, device=device)

    def wrap(self, stream: Stream) -> Stream:
        return _Reduced(stream, self._matrix)

    def back(self, vectors: Tensor) -> Tensor:
        return vectors @ self._matrix.to(vectors.dtype).T


class _Reduced:
    """Passes gradients on, and multiplies what was made of them with principal components."""

    def __init__(self, stream: Stream, matrix: Tensor) -> None:
        self._stream, self._matrix = stream, matrix

    def __call__(self, name: str, gradient: Tensor, first: int | None = None, /) -> None:
        self._stream(name, gradient, first)

    def result(self) -> Tensor:
        with torch.autocast(self._matrix.device.type, enabled=False):  # features are float32
            return self._stream.result() @ self._matrix
