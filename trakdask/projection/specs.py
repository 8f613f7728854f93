"""Rebuild projectors from the specs in the attrs of stored features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from trakdask.checks import require_choice, shown
from trakdask.projection.fast_jl import FastJL
from trakdask.projection.gaussian import Gaussian
from trakdask.projection.identity import Identity
from trakdask.projection.kronecker import Kronecker
from trakdask.projection.mask import Mask
from trakdask.projection.protocol import DEFINITION_VERSION, Projector
from trakdask.projection.rademacher import Rademacher
from trakdask.projection.sjlt import SJLT

KINDS: dict[str, type[Projector]] = {
    each.kind: each for each in (FastJL, Gaussian, Identity, Kronecker, Mask, Rademacher, SJLT)
}
"""Class of projectors, by the kind in a spec."""


def from_spec(spec: Mapping[str, Any]) -> Projector:
    """Rebuild the projector that a spec describes.

    Parameters
    ----------
    spec
        The result of :meth:`Projector.spec`, also after a round trip through JSON.

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
    kind = _kind(spec)
    names = [field.name for field in fields(kind) if field.init]
    for name in names:
        if name not in spec:
            raise ValueError(
                f"expected {name!r} in the {spec['kind']} projector's spec, {_MISSING}"
            )
    values = {name: spec[name] for name in names}
    inner = {name: from_spec(v) for name, v in values.items() if isinstance(v, Mapping)}
    projector = kind(**values | inner)
    _require_same(projector.spec(), spec)
    return projector


_REMEDY = "try the version named in attrs['trakdask_version'], or featurize again"
_MISSING = f"got none; {_REMEDY}"


def _kind(spec: Mapping[str, Any]) -> type[Projector]:
    if not isinstance(spec, Mapping):
        raise TypeError(
            f"expected a projector's spec, as projector.spec() returns it, got {shown(spec)}; "
            f"{_REMEDY}"
        )
    kind, version = spec.get("kind"), spec.get("definition")
    require_choice("kind of the projector's spec", kind, sorted(KINDS), remedy=_REMEDY)
    if version != DEFINITION_VERSION:
        raise ValueError(
            f"expected definition {DEFINITION_VERSION} of the {kind} projector, which this version "
            f"of trakdask computes, got {version!r}; {_REMEDY}"
        )
    return KINDS[str(kind)]


def _require_same(rebuilt: Mapping[str, Any], spec: Mapping[str, Any]) -> None:
    """Reject a spec with missing or unknown fields, or with other values than the rebuilt one."""
    for name in (*rebuilt, *spec):
        if name not in rebuilt:
            raise ValueError(
                f"expected no {name!r} in the {spec['kind']} projector's spec, got "
                f"{shown(spec[name])}; {_REMEDY}"
            )
        if name not in spec:
            raise ValueError(
                f"expected {name!r} in the {spec['kind']} projector's spec, {_MISSING}"
            )
        if spec[name] != rebuilt[name]:
            raise ValueError(
                f"expected {name!r} of the {spec['kind']} projector's spec to be "
                f"{rebuilt[name]!r}, got {shown(spec[name])}; {_REMEDY}"
            )
