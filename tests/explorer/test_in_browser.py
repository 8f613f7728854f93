"""The explorer as it is used: a real browser, which clicks, types, and looks at what it sees."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.explorer import test_new_targets as new_targets
from tests.explorer.browser import Tab, served
from tests.explorer.marked import top
from trakdask.explorer import Explorer
from trakdask.explorer.app import Session
from trakdask.explorer.view import View


def test_pages__open_search_filter_click_through_and_reload(
    explorer: Explorer, url: str, tab: Tab
) -> None:
    page = tab.page
    tab.open(url)
    assert page.locator(".rows tbody tr").count() == 24
    assert "1–24 of 60" in page.inner_text("nav.pager >> nth=0")
    page.fill("input[name=search]", "no. 4")
    page.click("button:has-text('Search')")
    page.wait_for_selector("text=1–11 of 11")  # 4 and 40 to 49
    page.click("tbody th a:text-is('42')")
    tab.wait("Target 42")
    view = View(page="target", target=42)
    assert tab.cards("Most helpful") == top(explorer, view)
    assert tab.cards("Most harmful") == top(explorer, view, largest=False)

    page.fill("input[name=where]", 'source == "web"')
    page.locator("button:has-text('Filter')").first.click()
    page.wait_for_url(re.compile("where="))
    tab.wait("Target 42")
    filtered = view.replace(where="web")
    assert tab.cards("Most helpful") == top(explorer, filtered)

    first = tab.cards("Most helpful")[0]
    page.click(f"text=sample {first} >> nth=0")
    tab.wait(f"Training sample {first}")
    address, seen = page.url, page.inner_text(".trakdask")
    assert f"sample={first}" in address
    page.reload()
    tab.wait(f"Training sample {first}")
    assert page.url == address
    assert page.inner_text(".trakdask") == seen
    page.go_back()
    tab.wait("Target 42")
    assert tab.cards("Most helpful") == top(explorer, filtered)


def test_lists__go_on_and_going_back_finds_the_place(
    explorer: Explorer, url: str, tab: Tab
) -> None:
    page, view = tab.page, View(page="target", target=9, k=24, where='source == "web"')
    ranked = top(explorer, view)
    tab.open(f"{url}?{view.to_query()}", "Target 9")
    link = page.locator(".card header a", has_text=f"sample {ranked[20]}").first
    link.scroll_into_view_if_needed()
    scrolled = page.evaluate("window.scrollY")
    assert scrolled > 300
    link.click()
    for i in (20, 21, 22):
        page.wait_for_url(re.compile(f"sample={ranked[i]}(&|$)"))
        tab.wait(f"Training sample {ranked[i]}")
        assert page.title() == f"Training sample {ranked[i]} – trakdask"
        assert f"{i + 1} of 24" in page.inner_text("nav.pager >> nth=0")
        page.keyboard.press("n")
    page.wait_for_url(re.compile(f"sample={ranked[23]}(&|$)"))
    for _ in range(4):
        page.go_back()
    page.wait_for_url(re.compile("page=target"))
    tab.wait("Target 9")
    page.wait_for_function(f"() => Math.abs(window.scrollY - {scrolled}) < 2")
    assert f"sample {ranked[20]}" in page.inner_text(".card:focus-within header")


def test_every_change_of_a_page__is_held_so_that_none_is_lost(
    url: str, browser: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of pages that Panel sends by itself, some stay at "computing" on a busy machine."""
    held: list[str | None] = []

    def draw(session: Session, *arguments: Any) -> None:
        held.append(session._doc.callbacks.hold_value)
        drawn(session, *arguments)

    drawn = Session._draw
    monkeypatch.setattr(Session, "_draw", draw)
    with Tab(browser) as tab:
        tab.open(url)
        tab.page.click("nav >> text=Training samples")
        tab.wait("Training samples")
    assert len(held) > 4
    assert set(held) == {"combine"}


@pytest.mark.parametrize(
    ("width", "scheme"), [(400, "dark"), pytest.param(1280, "light", marks=pytest.mark.faults)]
)
def test_pages__are_accessible_and_run_nothing_of_the_metadata(
    url: str, browser: Any, width: int, scheme: str
) -> None:
    with Tab(browser, width=width, color_scheme=scheme) as tab:
        for page in ("targets", "target", "sample", "corpus", "marks"):
            tab.open(f"{url}?{View(page=page, sample=1, target=1, search='no. 1').to_query()}")
            is_there = "<script>window.hacked" in tab.page.inner_text(".trakdask")
            assert is_there == (page != "marks")
            assert tab.page.evaluate("window.hacked") is None
            assert tab.page.evaluate("document.documentElement.scrollWidth") <= width, page
            assert tab.violations() == [], page


def test_saved_view__is_what_was_seen_and_needs_no_server_and_no_network(
    url: str, tab: Tab, browser: Any, tmp_path: Path
) -> None:
    def widths(tab: Tab) -> list[float]:
        return tab.page.locator(".bar span").evaluate_all(
            "bars => bars.map(bar => bar.getBoundingClientRect().width)"
        )

    tab.open(f"{url}?page=target&target=8&k=2", "Target 8")
    with tab.page.expect_download() as download:
        tab.page.click("text=Save view")
    assert download.value.suggested_filename == "trakdask-target-8.html"
    saved = Path(download.value.path()).rename(tmp_path / "view.html")
    with Tab(browser, offline=True) as other:
        other.page.goto(f"file://{saved}")
        for title in ("Most helpful", "Most harmful"):
            assert other.cards(title) == tab.cards(title) != []
        assert widths(other) == pytest.approx(widths(tab), abs=0.5)
        assert max(widths(other)) > 30
        assert other.page.locator("article img").first.evaluate("image => image.naturalWidth") > 0
        assert other.page.locator("a, button, input, form").count() == 0
        assert other.page.evaluate("window.hacked") is None
        assert other.violations() == []
        assert [url for url in other.requests if not url.startswith("data:")] == [other.page.url]


def test_new_target__is_uploaded_and_explained_in_one_tab(browser: Any, tmp_path: Path) -> None:
    explorer = new_targets.explorer_of_images()
    image = new_targets.images(1, 7)[0]
    Image.fromarray(image).save(tmp_path / "target.png")
    (tmp_path / "broken.png").write_bytes(b"no image <script>window.hacked = 1</script>")
    with served(explorer) as url, Tab(browser) as tab, Tab(browser) as other:
        tab.open(url)
        tab.page.click("nav >> text=New target")
        tab.wait("New target")
        tab.page.set_input_files("input[name=image]", tmp_path / "broken.png")
        tab.page.click("text=Explain it")
        tab.page.wait_for_selector("[role=alert]")
        assert "cannot be read" in tab.page.inner_text("[role=alert]")
        tab.page.set_input_files("input[name=image]", tmp_path / "target.png")
        shown = tab.page.locator("img[alt='the chosen image']")
        shown.wait_for()
        tab.page.set_input_files("input[name=image]", tmp_path / "target.png")
        assert shown.count() == 1  # the one before is gone
        assert shown.evaluate("image => image.decode().then(() => image.naturalWidth)") > 0
        tab.page.fill("input[name=label]", "2")
        tab.page.click("text=Explain it")
        tab.wait(f"Target {new_targets.M}")
        assert f"target={new_targets.M}" in tab.page.url
        assert tab.cards("Most helpful") == new_targets.expected_top(image, label=2, k=12)
        assert tab.page.locator("img[alt*=uploaded]").evaluate("image => image.naturalWidth") > 0
        with tab.page.expect_download() as download:
            tab.page.click("text=Save view")
        assert "the image that was uploaded" in Path(download.value.path()).read_text()
        tab.page.click("nav >> text=Targets")
        tab.wait("Targets")
        badges = tab.page.locator("tbody tr:has(.badge) th a").all_inner_texts()
        assert badges == [str(new_targets.M)]
        other.open(url)
        assert "new" not in other.page.inner_text("tbody")
        other.open(f"{url}?page=target&target={new_targets.M}", f"Target {new_targets.M}")
        assert f"no target {new_targets.M}" in other.page.inner_text("[role=alert] >> nth=0")
