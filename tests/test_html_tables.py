"""Values in notebooks: their fields as a table, with all text escaped."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
import torch

import trakdask as td
from trakdask.html_tables import html_table
from trakdask.models.tasks import TASKS

VALUES = [td.Mask(10, then=td.SJLT(8)), td.Absolute(2.5), *(make() for make in TASKS.values())]


def cells(value: object) -> dict[str, str]:
    """Return the rows of a table; ElementTree fails where text was not escaped."""
    page = ElementTree.fromstring(f"<div>{value._repr_html_()}</div>")  # type: ignore[attr-defined]
    return {row.findtext("th", ""): row.findtext("td/code", "") for row in page.iter("tr")}


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_html_table__has_every_field(value: object) -> None:
    rows = cells(value)
    assert f"{type(value).__name__}({', '.join(map('='.join, rows.items()))})" == repr(value)
    assert type(value).__name__ in value._repr_html_()  # type: ignore[attr-defined]


def test_html_table__escapes() -> None:
    evil = "</code><script>alert(1)</script>&"
    assert cells(td.tasks.ImageClassification(image=evil))["inputs"] == repr((evil,))
    assert "<script>" not in html_table(evil, {evil: evil})


def test_model__has_a_card() -> None:
    rows = cells(td.Model(torch.nn.Linear(400, 3), task="image_classification"))
    assert rows["network"] == "Linear"
    assert rows["task"] == "ImageClassification"
    assert rows["checkpoints"].startswith("1: ")
    assert rows["differentiated"] == "1,203 of 1,203 parameters: ['weight', 'bias']"
