"""Rebuild projectors from the specs in the attrs of stored features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from trakdask.checks import require_choice, shown
from trakdask.projection.fast_jl import FastJL
from trakdask.projection.kronecker import Kronecker
from trakdask.projection.mask import Mask
from trakdask.projection.protocol import Identity, Projector
from trakdask.projection.rademacher import Rademacher
from trakdask.projection.sjlt import SJLT

KINDS: dict[str, type[Projector]] = {
    each.kind: each for each in (FastJL, Identity, Kronecker, Mask, Rademacher, SJLT)
}
"""Class of projectors, by the kind in a spec."""


def from_spec(spec: Mapping[str, Any]) -> Projector:
    """Rebuild the projector that a spec describes.

    Parameters
    ----------
    spec
        The result of ``Projector.spec``, also after a round trip through JSON.

    Returns
    -------
    The projector, not bound to a row map.

    Raises
    ------
    ValueError
        If the kind is unknown, the matrix was defined in another version, or the spec differs from
        that of the projector rebuilt from it.
    TypeError
        If the spec is not a mapping, or a field has another type.

    Examples
    --------
    >>> from_spec(Rademacher(proj_dim=512, seed=7).spec())
    Rademacher(proj_dim=512, seed=7, arithmetic='int8x2')
    """
    remedy = "try the version named in attrs['trakdask_version'], or featurize again"
    require_choice("kind of the projector's spec", spec.get("kind"), sorted(KINDS), remedy=remedy)
    kind = KINDS[spec["kind"]]
    values = {field.name: spec.get(field.name) for field in fields(kind) if field.init}
    inner = {name: from_spec(v) for name, v in values.items() if isinstance(v, Mapping)}
    projector = kind(**values | inner)
    rebuilt = projector.spec()
    for name in (*rebuilt, *spec):
        if rebuilt.get(name) != spec.get(name):
            raise ValueError(
                f"expected {name}={rebuilt.get(name)!r} in the spec of the {kind.kind} projector, "
                f"got {shown(spec.get(name))}; {remedy}"
            )
    return projector
