"""Specs: what stores say of their projector. Oracle: the projector itself."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from trakdask.projection import SJLT, FastJL, Identity, Mask, Projector, Rademacher, RowMap
from trakdask.projection.protocol import from_spec

PROJECTORS = [
    Identity(),
    Rademacher(),
    Rademacher(proj_dim=77, seed=2**64 - 1, arithmetic="int8x3"),
    SJLT(),
    SJLT(proj_dim=77, sparsity=7, seed=2**64 - 1),
    Mask(keep=40),
    Mask(keep=40, then=SJLT(proj_dim=8, seed=3), seed=2**64 - 1),
    FastJL(num_sms=132),
    FastJL(512, seed=2**31 - 1, entries="normal", num_sms=108),
]

SPECS = Path(__file__).with_name("specs.jsonl").read_text().splitlines()
"""Stores carry these texts: a difference in one byte makes stored features unusable."""


@pytest.mark.parametrize(("projector", "text"), list(zip(PROJECTORS, SPECS, strict=True)))
def test_spec__bytes_are_pinned_and_give_the_projector_back(
    projector: Projector, text: str
) -> None:
    rows = RowMap.from_shapes({"weight": (12, 5)}, alignment=projector.row_alignment)
    assert json.dumps(projector.spec()) == json.dumps(projector.bind(rows).spec()) == text
    assert from_spec(json.loads(text)) == projector
    # A field that the spec lacks would be rebuilt with its default, unseen.
    assert {field.name for field in fields(projector) if field.init} <= set(projector.spec())


def test_projector__checks_its_fields_and_takes_integers_of_numpy() -> None:
    with pytest.raises(ValueError, match=r"proj_dim .*got -1"):
        replace(Rademacher(), proj_dim=-1)
    projector = SJLT(np.int64(77), seed=np.uint64(2**64 - 1))  # type: ignore[arg-type]
    assert json.dumps(projector.spec()) == json.dumps(SJLT(77, seed=2**64 - 1).spec())
