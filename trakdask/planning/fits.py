"""The cost of a fit, from shapes and the pilot of the features."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trakdask.arrays import memory
from trakdask.planning.pilot import Pilot
from trakdask.projection import SJLT
from trakdask.projection.fitted import Components, Fitted
from trakdask.tensors import LONGEST_BLOCK, Shapes, Turning, axes_of, factors_of

N_SAMPLES, PROJ_DIM = 2000, 1024
"""What :func:`trakdask.fit` uses if nobody says otherwise."""

N_CURVATURE, N_WEIGHTS = 600, 300
"""Samples of curvatures and of weights, which are means over samples. With 600 of a thousand for
curvatures, a fit of a CNN took two thirds of the time, and nine tasks of ten lost at most 0.003 of
their LDS (``tests/benchmarks/results/2026-11-29-choices.txt``). Models of tokens take all samples:
few have the same word, and a classifier of texts lost 0.016."""

_FEWEST, _SKETCHED, _WIDEST = 500, 16, 8192
"""Samples of a curvature; columns that its matrices are sketched to; columns of wrong classes."""
_SLOWER = 1.6
"""Rotations and eigenvectors take so many times as long as a product of two large matrices with as
many operations: 1.5 to 1.8 on the machine of the benchmarks."""


def sketch_of(shapes: Shapes) -> SJLT:
    """Return the sketch for a model: 4,096 columns, up to 32,768 for larger ones.

    It has up to a quarter as many columns as there are parameters. Texts need that; and the more
    parameters there are, the less products with wide components cost beside gradients, and the less
    space components take beside checkpoints.

    Examples
    --------
    >>> sketch_of({"weight": (1000, 11_000)})
    SJLT(proj_dim=32768, sparsity=4, seed=0)
    """
    n_parameters = sum(map(math.prod, shapes.values()))
    width = 2 ** math.floor(math.log2(n_parameters / 4))
    return SJLT(proj_dim=min(max(width, 4096), 32768), seed=0)


def planned_fit(
    projector: Fitted, attrs: Mapping[str, Any], n_samples: int, n_checkpoints: int
) -> dict[str, int]:
    """Return the cost of a fit: of the projector, if it has components, else by default.

    The numbers are those that :class:`~trakdask.planning.Plan` explains.
    """
    # 1. What is fitted: n samples in w columns of a sketch, of which p are kept.
    shapes = attrs["parameters"]
    n_parameters = sum(map(math.prod, shapes.values()))
    widths = [step.proj_dim for step in projector.steps if isinstance(step, Components)]
    sketch = projector.projector if widths else sketch_of(shapes)
    n, w = n_samples, int(getattr(sketch, "proj_dim", n_parameters))
    reads_tokens = bool(attrs.get("reads_tokens"))
    p, n_few = min(*(widths or [PROJ_DIM]), n), n if reads_tokens else min(n, N_CURVATURE)
    n_leading, n_gradients = 0, n
    if has_curvature := n >= _FEWEST:  # half of the columns are leading coordinates
        n_leading, n_gradients = min(w // 2, n_parameters), n + 2 * n_few
        is_asked = attrs.get("loss_kind") == "cross-entropy" and not reads_tokens
        n_gradients += min(n, N_WEIGHTS) * reads_tokens + n_few * is_asked
        w = n_leading + w - w // 2
    # 2. Components of the products of samples, and products of gradients with them.
    kept, operations = p * (w + 8), n * w * (4 * n + 2 * p) + 9 * n**3
    if attrs.get("loss_kind") == "cross-entropy" and p <= _WIDEST:
        n_gradients += n_few
        kept, operations = kept + 4 * p**2, operations + n_few * p * (2 * w + p)
    # 3. The matrices of each axis, and gradients in the coordinates of their eigenvectors. Hooks
    # turn both sides of a product of T positions: 2 T d² operations, where a gradient takes 6 T for
    # each parameter. Other engines turn the product.
    turning, n_turned = 0.0, n_gradients - n_few
    if has_curvature:
        kept += 4 * n_parameters + 8 * n_leading
        outputs = dict.fromkeys(shapes, 0)  # of nearly all layers: attrs do not name the others
        for name, axis, columns, _ in factors_of(shapes, Turning(outputs, LONGEST_BLOCK)):
            size, d = math.prod(shapes[name]), columns.stop - columns.start
            part = size * d / axes_of(shapes[name])[axis]
            operations += 2 * n_few * _SKETCHED * (part + d**2) + 9 * d**3
            kept += 4 * d**2
            if attrs.get("gradients", "hooks") == "hooks":
                turning += n_turned * d**2 / (3 * n_parameters)
            else:
                operations += 2 * n_turned * part * d
    most = max(memory.principal_components(n, w), 4 * kept)
    return {
        "n_samples": n,
        "n_gradients": n_gradients,
        "turning": round(turning),
        "operations": operations,
        "kept_bytes": kept * n_checkpoints,
        "memory_bytes": most,
    }


def fit_seconds(fit: Mapping[str, int], pilot: Pilot, n_checkpoints: int, proj_dim: int) -> float:
    """Return how long a fit will take, if gradients take as long as in a pilot of features."""
    gradients_s = (fit["n_gradients"] + fit["turning"]) * pilot.block_s / pilot.n_samples
    operation_s = pilot.gram_s / (2 * pilot.n_samples * proj_dim**2)
    of_one = gradients_s + _SLOWER * fit["operations"] * operation_s
    return n_checkpoints * of_one / pilot.n_slots
