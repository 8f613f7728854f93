"""Projectors from the specs that stored features carry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from trakdask.projection.fast_jl import FastJL
from trakdask.projection.gaussian import Gaussian
from trakdask.projection.identity import Identity
from trakdask.projection.kronecker import Kronecker
from trakdask.projection.mask import Mask
from trakdask.projection.protocol import DEFINITION_VERSION, Projector
from trakdask.projection.rademacher import Rademacher
from trakdask.projection.sjlt import SJLT

KINDS: dict[str, type[Projector]] = {
    "fast_jl": FastJL,
    "gaussian": Gaussian,
    "identity": Identity,
    "kronecker": Kronecker,
    "mask": Mask,
    "rademacher": Rademacher,
    "sjlt": SJLT,
}
"""Kind, as a spec names it -> class. Its init fields are in the spec, under their own names."""


def from_spec(spec: Mapping[str, Any]) -> Projector:
    """Rebuild the projector that a spec describes.

    Parameters
    ----------
    spec
        What :meth:`Projector.spec` returned, also after a round trip through JSON.

    Returns
    -------
    The projector, equal to the one that was described before that was bound to a row map.

    Raises
    ------
    ValueError
        If the kind is unknown, the matrix was defined in another version, or the spec is not what
        the projector rebuilt from it says of itself.
    TypeError
        If a field is not of its kind.

    Examples
    --------
    >>> from_spec(Rademacher(proj_dim=512, seed=7).spec())
    Rademacher(proj_dim=512, seed=7, arithmetic='int8x2')
    """
    kind = _kind(spec)
    names = [field.name for field in fields(kind) if field.init]  # type: ignore[arg-type]
    projector = kind(**{name: _value(spec[name]) for name in names if name in spec})
    _require_same(projector.spec(), spec)
    return projector


def _kind(spec: Mapping[str, Any]) -> type[Projector]:
    kind, version = spec.get("kind"), spec.get("definition")
    if kind not in KINDS:
        raise ValueError(
            f"the projector's kind is {kind!r}; this version of trakdask knows {sorted(KINDS)}. "
            "Use the version named in attrs['trakdask_version'], or featurize again."
        )
    if version != DEFINITION_VERSION:
        raise ValueError(
            f"the {kind} projector has definition {version!r}; this version of trakdask draws "
            f"definition {DEFINITION_VERSION}. Use the version named in "
            "attrs['trakdask_version'], or featurize again."
        )
    return KINDS[kind]


def _value(value: Any) -> Any:
    """Rebuild a projector inside a projector."""
    return from_spec(value) if isinstance(value, Mapping) else value


def _require_same(rebuilt: Mapping[str, Any], spec: Mapping[str, Any]) -> None:
    """Refuse a spec with fields that are missing, unknown or fixed to another value here."""
    for name in (*rebuilt, *spec):
        found, needed = (side.get(name, "missing") for side in (spec, rebuilt))
        if found != needed:
            raise ValueError(
                f"{name!r} of the {spec['kind']} projector's spec is {found!r}; this version of "
                f"trakdask needs {needed!r}. Use the version named in attrs['trakdask_version'], "
                "or featurize again."
            )
