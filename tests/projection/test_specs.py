"""Oracle: the projector itself, to which a rebuilt one must be equal."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trakdask.projection import FastJL, Identity, Projector, Rademacher, RowMap
from trakdask.projection.kronecker import Kronecker
from trakdask.projection.mask import Mask
from trakdask.projection.sjlt import SJLT
from trakdask.projection.specs import KINDS, from_spec

PROJECTORS = [
    Identity(),
    Rademacher(),
    Rademacher(proj_dim=77, seed=2**64 - 1, arithmetic="int8x3"),
    SJLT(),
    SJLT(proj_dim=77, sparsity=7, seed=2**64 - 1),
    Mask(keep=40),
    Mask(keep=40, then=SJLT(proj_dim=8, seed=3), seed=2**64 - 1),
    Kronecker(),
    Kronecker(left=3, right=5, seed=2**64 - 1),
    FastJL(num_sms=132),
    FastJL(512, seed=2**31 - 1, entries="normal", num_sms=108),
]

SPECS = Path(__file__).with_name("specs.jsonl").read_text().splitlines()
"""Stores carry these texts: a difference in one byte makes stored features unusable."""


@pytest.mark.parametrize(("projector", "text"), list(zip(PROJECTORS, SPECS, strict=True)))
def test_spec__bytes_are_pinned(projector: Projector, text: str) -> None:
    assert json.dumps(projector.spec()) == text


@pytest.mark.parametrize("projector", PROJECTORS, ids=repr)
def test_from_spec__is_equal_after_json(projector: Projector) -> None:
    assert from_spec(json.loads(json.dumps(projector.spec()))) == projector


@pytest.mark.parametrize("projector", PROJECTORS, ids=repr)
def test_from_spec__of_a_bound_projector_is_unbound(projector: Projector) -> None:
    rows = RowMap.from_shapes({"weight": (12, 5)}, alignment=projector.row_alignment)
    assert from_spec(projector.bind(rows).spec()) == projector


def test_from_spec__every_kind_is_tested() -> None:
    assert {projector.spec()["kind"] for projector in PROJECTORS} == set(KINDS)
    assert {type(projector) for projector in PROJECTORS} == set(KINDS.values())


@pytest.mark.parametrize("kind", KINDS.values())
def test_kinds__fields_are_in_the_spec(kind: type) -> None:
    """A field that the spec lacks would be rebuilt with its default, unseen."""
    projector = next(projector for projector in PROJECTORS if type(projector) is kind)
    assert {field.name for field in fields(kind) if field.init} <= set(projector.spec())


def changed(**values: Any) -> dict[str, Any]:
    return {**Rademacher().spec(), **values}


MASK = Mask(keep=40).spec()


@pytest.mark.parametrize(
    "spec",
    [
        {},
        changed(kind="fastfood"),
        changed(definition=2),
        changed(row_block=4096),
        changed(rows="odd"),
        {name: value for name, value in changed().items() if name != "row_block"},
        MASK | {"then": {"kind": "fastfood"}},
        MASK | {"then": {**SJLT().spec(), "definition": 2}},
    ],
)
def test_from_spec__refused(spec: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="featurize again"):
        from_spec(spec)


@pytest.mark.parametrize("name", ["seed", "proj_dim"])
def test_from_spec__field_is_missing(name: str) -> None:
    spec = changed()
    del spec[name]
    with pytest.raises(TypeError, match=name):
        from_spec(spec)


def test_replace__checks_the_fields_again() -> None:
    with pytest.raises(ValueError, match=r"proj_dim .*got -1"):
        replace(Rademacher(), proj_dim=-1)


def test_projector__takes_integers_of_numpy() -> None:
    projector = SJLT(np.int64(77), seed=np.uint64(2**64 - 1))  # type: ignore[arg-type]
    assert json.dumps(projector.spec()) == json.dumps(SJLT(77, seed=2**64 - 1).spec())
