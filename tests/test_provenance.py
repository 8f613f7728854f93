"""Specs are compared as JSON, field by field, and the first difference is named."""

from __future__ import annotations

import pytest

from trakdask.errors import StoreMismatchError
from trakdask.provenance import FEATURE_SPEC, digest, require_same
from trakdask.testing import simulate_features

SPEC = {**simulate_features().attrs, "parameters": {"w": [2, 3]}}


def test_require_same__lists_and_tuples_are_equal() -> None:
    """JSON, and so a store, has no tuples."""
    require_same({**SPEC, "parameters": {"w": (2, 3)}}, SPEC, what="both")


@pytest.mark.parametrize("name", FEATURE_SPEC)
def test_require_same__missing_field(name: str) -> None:
    without = {key: value for key, value in SPEC.items() if key != name}
    with pytest.raises(StoreMismatchError, match=f"both differ in {name}"):
        require_same(without, SPEC, what="both")


def test_require_same__order_of_checkpoints_matters() -> None:
    """Checkpoints are paired by position."""
    turned = dict(reversed(SPEC["checkpoints"].items()))
    with pytest.raises(StoreMismatchError, match="checkpoints: expected the order"):
        require_same({**SPEC, "checkpoints": turned}, SPEC, what="both")


def test_require_same__long_values_are_cut() -> None:
    with pytest.raises(StoreMismatchError) as caught:
        require_same({**SPEC, "task": "x" * 500}, SPEC, what="both")
    assert len(str(caught.value)) < 250


def test_digest__depends_on_content_not_order() -> None:
    assert digest({"a": 1, "b": [2]}) == digest({"b": (2,), "a": 1})
    assert digest({"a": 1}) != digest({"a": 2})
