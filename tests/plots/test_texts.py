"""plots.text: what the HTML says, what the figure draws."""

from __future__ import annotations

import html.parser
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

import trakdask as td

WORDS = [
    ["def", " f", "(", "x", "):", "\n", "    ", "return", " x", "\t"],
    ["<script>", "alert(1)", "</script>", "&amp;", '"', "'", "日本", "", "$x$", "x" * 200 + "gqy"],
]
VALUES = np.array([[1, -2, 0, 0.5, np.nan, 0, 0.1, 0, 0, 0], [0, 0, 0.2, 0, 0, -4, 0, 1, 0, 1]])


def scores(row: str = "sample", prefix: str = "") -> xr.DataArray:
    coords = {
        f"{prefix}text": ((row, "token"), np.array(WORDS, object)),
        f"{prefix}source": (row, np.array(["a<b", "c"], np.dtypes.StringDType())),  # as stored
    }
    return xr.DataArray(VALUES * 1e-3, dims=(row, "token"), coords=coords, name="score")


class Parser(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.spans: list[tuple[str, str]] = []
        self.text = ""

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append(tag)
        if tag == "span":
            self.spans.append((dict(attrs)["title"], dict(attrs)["style"]))

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(scores: xr.DataArray, **options) -> Parser:
    parser = Parser()
    parser.feed(td.plots.text(scores, **options)._repr_html_())
    return parser


@pytest.mark.parametrize(("row", "prefix"), [("sample", ""), ("target", "target_")])
def test_text__html_has_every_token_and_nothing_that_runs(row: str, prefix: str) -> None:
    found = parsed(scores(row, prefix), label=f"{prefix}source")
    assert set(found.tags) <= {"div", "span", "b", "sup"}
    assert len(found.spans) == VALUES.size
    for word in ("<script>", "alert(1)", "&amp;", "日本", "return", "a<b", "↵"):
        assert word in found.text
    of_sample = scores(row, prefix)
    if row == "target":  # a prompt, for a sample that has a text
        of_sample = of_sample.assign_coords(text="the selected sample")
    assert parsed(of_sample).spans == parsed(scores()).spans
    mask = np.arange(10) < np.array([[8], [3]])
    padded = scores(row, prefix).assign_coords({f"{prefix}attention_mask": ((row, "token"), mask)})
    assert len(parsed(padded).spans) == 11
    assert "日本" not in repr(td.plots.text(padded))


def test_text__colours_and_numbers_are_those_of_the_scores() -> None:
    spans = parsed(scores()).spans
    assert spans[0] == ("+0.00100", "background:#1a7f3723")
    assert spans[1] == ("-0.00200", "background:#c6282846")
    assert spans[15] == ("-0.00400", "background:#c628288c")
    assert spans[4][1].endswith("00")
    assert "-0.00040" in parsed(scores()).text  # the sum of the first row, without the NaN


def test_text__figure_draws_every_character_once(tmp_path: Path) -> None:
    figure = td.plots.text(scores(), label="source").figure()
    figure.savefig(tmp_path / "words.png")
    drawn = "".join(each.get_text() for each in figure.axes[0].texts)
    assert drawn.count("x" * 50) == 4
    for word in ("return", "<script>", "$x$", "□□", "↵", "a<b"):
        assert word in drawn
    ends = [patch.get_x() + patch.get_width() for patch in figure.axes[0].patches]
    assert max(ends) <= 92
    assert figure.get_size_inches()[0] == pytest.approx(6.45, abs=0.1)


def test_text__colours_are_relative_to_the_words_that_are_shown() -> None:
    texts = np.array([["good", "film", "", "[PAD]", "[others]"]], np.dtypes.StringDType())
    dims = ("sample", "token")
    words = xr.DataArray([[0.2, -0.1, 0.1, 5.0, 9.0]], dims=dims)
    mask = (dims, [[1, 1, 1, 0, 1]])
    found = parsed(words.assign_coords(text=(dims, texts), attention_mask=mask))
    strongest = "background:#1a7f378c"
    colors = [color for _, color in found.spans]
    assert colors == [strongest, "background:#c6282846", "background:#1a7f3746", strongest]
    assert "goodfilm·[others]" in found.text  # a token without text can be seen
