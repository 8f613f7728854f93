"""Marks in a real browser: buttons, keys, downloads, and a server that stops."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pandas as pd
import pytest

from tests.explorer.browser import ROOT, Tab, served
from tests.explorer.marked import top
from tests.waiting import wait_until
from trakdask.explorer import Explorer
from trakdask.explorer.app import Session
from trakdask.explorer.view import View


def test_marks__are_in_the_file_and_undone_on_any_page(
    explorer: Explorer, url: str, tab: Tab
) -> None:
    tab.open(f"{url}?page=sample&sample=5", "Training sample 5")
    assert tab.page.locator("button[aria-pressed=true]").count() == 0
    for kind in ("wrong label", "duplicate", "remove"):
        tab.page.click(f"button[data-mark='{kind}']")
        tab.page.wait_for_selector(f"text=Sample 5 is marked as {kind}.")
    assert tab.page.locator("button[aria-pressed=true]").count() == 3
    table = pd.read_parquet(explorer.marks.path)
    assert table.values.tolist()[0] == [5, "wrong label", "", ""]
    tab.page.keyboard.press("Control+z")
    tab.page.wait_for_selector("button:text-is('Undo (2)')")
    tab.page.click("nav >> text=Targets")
    tab.wait("Targets")
    tab.page.fill("input[name=search]", "abc")
    tab.page.keyboard.press("Control+z")  # which belongs to the field
    tab.page.locator("h1").click()
    for is_last in ("false", "true"):
        tab.page.keyboard.press("Control+z")
        tab.page.wait_for_function(
            f"() => {{ {ROOT}; return root.querySelector('[data-undo]').hidden === {is_last} }}"
        )
    assert "sample 5 is undone" in tab.page.inner_text(".said")
    assert explorer.marks.table().empty


def test_server_that_stops__is_told_of_and_marks_are_sent_when_it_is_back(
    explorer: Explorer, browser: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trakdask.explorer.app.secrets.token_urlsafe", lambda n: "a-token")
    with Tab(browser) as tab:
        with served(explorer) as url:
            tab.open(f"{url}?page=sample&sample=7", "Training sample 7")
            tab.page.click("button[data-mark='duplicate']")
            tab.page.wait_for_selector("text=Sample 7 is marked as duplicate.")
            with monkeypatch.context() as patched:  # it stops before it has read what is sent
                unread: list[object] = []
                patched.setattr(Session, "_say", lambda _, change, **how: unread.append(change))
                tab.page.click("button[data-mark='remove']")
                tab.page.click("button[data-mark='duplicate']")
                wait_until(lambda: len(unread) == 2, "both marks")
        tab.page.wait_for_selector("[role=alert]")
        text = tab.page.inner_text("[role=alert]")
        assert "The server has stopped; nothing is kept from here on." in text
        assert "sample 7 as remove, sample 7 no longer as duplicate." in text
        assert tab.violations() == []
        tab.page.keyboard.press("1")  # marks nothing
        tab.page.keyboard.press("Tab")
        with pytest.raises(AssertionError):
            tab.press_until("button", "remove")
        assert explorer.marks.table()["mark"].tolist() == ["duplicate"]
        assert {error for error in tab.errors if "CONNECTION_REFUSED" not in error} == set()
        with served(explorer, int(re.search(r":(\d+)/", url)[1])):
            tab.page.wait_for_selector("[role=alert]", state="detached")
            tab.wait("Training sample 7")
            tab.page.wait_for_selector("text=no longer marked as duplicate")
            assert explorer.marks.table()[["sample", "mark"]].values.tolist() == [[7, "remove"]]
            pressed = tab.page.locator("button[aria-pressed=true]").all_inner_texts()
            assert pressed == ["remove"]
            tab.page.click("button[data-mark='remove']")
            tab.page.wait_for_selector("text=no longer marked as remove")
            tab.page.reload()  # after which nothing is left to send
            tab.wait("Training sample 7")
            assert tab.page.locator("button[aria-pressed=true]").count() == 0
            assert explorer.marks.table().empty
        tab.errors.clear()


def test_keys__reach_and_mark_samples_and_turn_pages(
    explorer: Explorer, url: str, tab: Tab
) -> None:
    view, page = View(page="target", target=2, k=4), tab.page
    first, second = top(explorer, view)[:2]
    tab.open(f"{url}?sort=")
    tab.press_until("a", "2")
    page.keyboard.press("Enter")
    tab.wait("Target 2")
    tab.open(f"{url}?{view.to_query()}", "Target 2")
    for key in ("ArrowRight", "ArrowRight", "1", "ArrowLeft", "3"):
        page.keyboard.press(key)
    page.wait_for_selector(f"text=Sample {first} is marked as remove.")
    assert explorer.marks.samples("wrong label").tolist() == [second]
    tab.press_until("button", "Undo (2)")
    page.keyboard.press("Space")
    page.wait_for_selector("text=is undone")
    assert page.inner_text("[data-count]") == "1"
    explorer.marks.unmark(second, "wrong label")
    tab.open(f"{url}?page=corpus", "Training samples")
    page.locator(".card header a").last.focus()
    page.keyboard.press("ArrowRight")  # to the next page of the table
    page.wait_for_selector("text=25–48 of 150")
    header = page.inner_text(".card:focus-within header")
    assert header in page.inner_text(".card header >> nth=0")
    position = int(re.search(r"sample (\d+)", header)[1])
    page.locator(".card .content").first.click(force=True)  # its picture, below the link
    tab.wait(f"Training sample {position}")
    tab.open(f"{url}?sort=", "Targets")
    page.locator("tbody tr").nth(2).click()
    tab.wait("Target 2")


def test_page_of_marks__keeps_what_is_typed_and_downloads_the_table(
    explorer: Explorer, url: str, tab: Tab
) -> None:
    explorer.marks.mark([11, 3], "wrong label")
    tab.open(f"{url}?page=marks", "Marks")
    page = tab.page
    page.fill("[aria-label='Corrected label of sample 11, wrong label']", "4, 1 or 7")
    page.keyboard.press("Tab")
    page.wait_for_selector("text=The label of sample 11 is kept.")
    page.keyboard.type("a note")  # in the next field, which was not drawn again
    page.keyboard.press("Tab")
    page.wait_for_selector("text=The note of sample 11 is kept.")
    expected = [[11, "wrong label", "4, 1 or 7", "a note"], [3, "wrong label", "", ""]]
    readers = {"CSV": partial(pd.read_csv, keep_default_na=False), "Parquet": pd.read_parquet}
    for kind, read in readers.items():
        with page.expect_download() as download:
            page.click(f"text=Download as {kind}")
        assert download.value.suggested_filename == f"train.marks.{kind.lower()}"
        assert read(download.value.path()).values.tolist() == expected
    page.reload()
    tab.wait("Marks")
    fields = page.locator("td input").evaluate_all("all => all.map((field) => field.value)")
    assert fields == ["", "", "4, 1 or 7", "a note"]  # the newest mark first
    page.click("[aria-label='Take back: sample 11 as wrong label']")
    page.wait_for_selector("text=Sample 11 is no longer marked as wrong label.")
    explorer.marks.unmark(3, "wrong label")
