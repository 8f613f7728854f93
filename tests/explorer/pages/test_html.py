"""Pieces of pages: everything from data is escaped, and links and forms keep the view."""

from __future__ import annotations

import re
from html import unescape
from html.parser import HTMLParser

import numpy as np
import pandas as pd

from trakdask.explorer.pages import controls, html
from trakdask.explorer.state import View

EVIL = "<script>\"'&"
VIEW = View(page="target", target=3, where=f"source == {EVIL!r}", k=5, checkpoints=("a", EVIL))


class Inputs(HTMLParser):
    """The names and values that a form would send, and all tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.pairs: list[tuple[str, str]] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        if tag == "input" and given.get("type") in (None, "hidden"):
            self.pairs.append((str(given["name"]), str(given["value"])))


def sent(form: str) -> View:
    pairs = Inputs(form).pairs
    return View.from_query("&".join(f"{name}={_quoted(text)}" for name, text in pairs))


def _quoted(text: str) -> str:
    return "".join(f"%{byte:02x}" for byte in text.encode())


def test_link__leads_to_the_view() -> None:
    made = html.link(VIEW, EVIL, label=EVIL)
    (href,) = re.findall(r'href="\?([^"]*)"', made)
    assert View.from_query(unescape(href)) == VIEW
    assert "<script" not in made


def test_form__keeps_all_but_what_it_asks_for() -> None:
    made = html.form(VIEW, html.text_field("k", "7", "Samples"), ["k"], button="Apply")
    assert sent(made) == VIEW.replace(k=7)
    assert sent(html.form(VIEW.replace(first=50), "", [], button="Apply")) == VIEW


def test_fields__escape_their_values() -> None:
    made = html.text_field("where", EVIL, "Condition", EVIL, [EVIL])
    made += html.option_field("group_by", EVIL, "Group by", {EVIL: EVIL})
    assert "<script" not in made
    assert ("where", EVIL) in Inputs(made).pairs


def test_filter_form__every_field_has_a_label() -> None:
    made = controls.filter_form(View(), pd.DataFrame({"a": [1]}), "where")
    assert not re.findall(r"<label><(?:select|input)", made)


def test_tables_and_bars__escape_names() -> None:
    heat = html.heat_table(pd.DataFrame([[1.0, np.nan]], [EVIL], [EVIL, "b"]), 0, EVIL)
    bars = html.bars([(html.value(EVIL), -2.0, EVIL), (html.value("b"), np.nan, "")])
    columns = html.columns([1.0, np.nan, -1.0], [EVIL, "b", "c"], EVIL, "high")
    notes = html.note(EVIL) + html.tip(EVIL, EVIL) + controls.facts(pd.Series({EVIL: EVIL}), VIEW)
    for made in (heat, bars, columns, notes):
        assert "<script" not in made
        assert EVIL in unescape(made)


def test_bars__are_as_long_as_their_values() -> None:
    made = html.bars([("a", 2.0, ""), ("b", -0.5, "")])
    assert re.findall(r'"(helpful|harmful)" style="--length:([\d.]+)"', made) == [
        ("helpful", "1.0000"),
        ("harmful", "0.2500"),
    ]


def test_columns__are_links_to_their_views() -> None:
    views = [View(damping=f"{x} tr(K)/n") for x in (1, 2)]
    made = html.columns([2.0, 1.0], ["a", EVIL], "low", "high", marked=1, views=views)
    hrefs = [View.from_query(unescape(q)) for q in re.findall(r'href="\?([^"]*)"', made)]
    assert hrefs == views
    assert "<script" not in made
    assert re.findall(r"--length:([\d.]+)", made) == ["1.0000", "0.5000"]


def test_pager__leads_to_the_pages_beside() -> None:
    made = html.pager(View(first=25), 25, 60, 25)
    firsts = [View.from_query(unescape(q)).first for q in re.findall(r'href="\?([^"]*)"', made)]
    assert firsts == [0, 50]
    assert "26–50 of 60" in made
    assert "href" not in html.pager(View(), 10, 10, 25)


def test_equals__is_a_condition_on_a_value() -> None:
    assert controls.equals("label", np.int64(3)) == "label == 3"
    assert controls.equals("source", np.str_("it's")) == 'source == "it\'s"'
    assert controls.equals("size", np.float64("nan")) is None
    assert controls.equals("when", np.datetime64("2024-01-01")) is None
