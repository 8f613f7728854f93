"""The explorer as it is used: a real browser, which clicks, types, and looks at what it sees."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from PIL import Image

import trakdask as td
from tests.explorer import test_new_targets as new_targets
from tests.explorer.browser import ROOT, Tab, chromium, served
from trakdask.explorer import Explorer, Marks, View
from trakdask.explorer.app import Session

EVIL = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
N, M = 150, 60


def features(n: int, seed: int) -> xr.Dataset:
    simulated = td.testing.simulate_features(n, 8, 3, chunks=64, seed=seed)
    note = np.array([f"{EVIL} no. {i}" if i % 2 else f"plain no. {i}" for i in range(n)], object)
    source = np.array(["web", "book", EVIL], object)[np.arange(n) % 3]
    about = {"task": "ImageClassification()", "default_estimator": "soft"}
    return simulated.assign_coords(source=("sample", source), note=("sample", note)).assign_attrs(
        about
    )


def samples(n: int, seed: int) -> xr.Dataset:
    images = np.random.default_rng(seed).random((n, 1, 8, 8), dtype=np.float32)
    return td.from_arrays({"image": images})


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def explorer(tmp_path_factory: pytest.TempPathFactory) -> Explorer:
    folder = tmp_path_factory.mktemp("stores")
    train = td.save(features(N, 0), folder / "train.zarr", progress=False)
    return td.explore(
        train, features(M, 1), samples=samples(N, 0), target_samples=samples(M, 1),
        marks=Marks.beside(folder / "train.zarr", who="Ada"), estimator=td.Trak(damping=0.1),
    )  # fmt: skip


@pytest.fixture(scope="module")
def url(explorer: Explorer, browser: Any) -> Iterator[str]:
    with served(explorer) as url:
        yield url


@pytest.fixture
def tab(browser: Any) -> Iterator[Tab]:
    with Tab(browser) as tab:
        yield tab


def top(explorer: Explorer, view: View, *, largest: bool = True) -> list[int]:
    """Return the positions that the function ranks: it has an oracle of its own."""
    target = explorer.targets.isel(sample=[view.target])
    scores = td.score(explorer.features, target, td.Trak(damping=0.1))
    where = scores.source == "web" if view.where else None
    ranked = td.top_k(scores, view.k, where=where, largest=largest).compute()
    return [int(position) for position in ranked.position.values[0]]


def test_pages__open_search_filter_click_through_and_reload(
    explorer: Explorer, url: str, tab: Tab
) -> None:
    page = tab.page
    tab.open(url)
    assert page.locator("tbody tr").count() == 24
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


def test_marks__are_in_the_file_beside_other_people_s_and_undone_on_any_page(
    explorer: Explorer, url: str, tab: Tab
) -> None:
    bob = explorer.marks.by("Bob")
    bob.mark([5], "remove")
    tab.open(f"{url}?page=sample&sample=5", "Training sample 5")
    button = tab.page.locator("button[data-mark='remove']")
    assert button.get_attribute("aria-pressed") == "false"
    after = button.evaluate("node => getComputedStyle(node, '::after').content")
    assert after == '" +1"'
    assert "also marked by Bob" in button.get_attribute("title")
    for kind in ("wrong label", "duplicate", "remove"):
        tab.page.click(f"button[data-mark='{kind}']")
        tab.page.wait_for_selector(f"text=Sample 5 is marked as {kind}.")
    assert tab.page.locator("button[aria-pressed=true]").count() == 3
    table = pd.read_parquet(explorer.marks.path)
    assert table[["sample", "mark", "who"]].values.tolist()[1] == [5, "wrong label", "Ada"]
    tab.page.keyboard.press("Control+z")
    tab.page.wait_for_selector("button:text-is('Undo (2)')")
    tab.page.click("nav >> text=Targets")
    tab.wait("Targets")
    tab.page.fill("input[name=search]", "abc")
    tab.page.keyboard.press("Control+z")  # which belongs to the field
    tab.page.locator("h1").click()
    for left in (1, 0):
        tab.page.keyboard.press("Control+z")
        tab.page.wait_for_function(
            f"() => {{ {ROOT}; return root.querySelectorAll('[data-undo]').length === {left} }}"
        )
    assert "sample 5 is undone" in tab.page.inner_text("[data-said]")
    assert explorer.marks.table()["who"].tolist() == ["Bob"]
    bob.unmark([5], "remove")


def test_server_that_stops__is_told_of_and_marks_are_sent_when_it_is_back(
    explorer: Explorer, browser: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trakdask.explorer.server.secrets.token_urlsafe", lambda n: "a-token")
    with Tab(browser) as tab:
        with served(explorer) as url:
            tab.open(f"{url}?page=sample&sample=7", "Training sample 7")
            tab.page.click("button[data-mark='duplicate']")
            tab.page.wait_for_selector("text=Sample 7 is marked as duplicate.")
            with monkeypatch.context() as patched:  # it stops before it has read what is sent
                patched.setattr(Session, "_mark", lambda *_: None)
                tab.page.click("button[data-mark='remove']")
                tab.page.click("button[data-mark='duplicate']")
                tab.page.wait_for_timeout(500)
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
            tab.page.wait_for_selector("text=no longer marked as duplicate by you")
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


def test_map__is_brushed(explorer: Explorer, url: str, tab: Tab) -> None:
    tab.open(f"{url}?page=map&colour=score&target=8&where=source+%21%3D+%22web%22", "Map")
    box = tab.page.locator("svg.map").bounding_box()
    x, y, width, height = (box[name] for name in ("x", "y", "width", "height"))
    tab.page.mouse.move(x + 0.2 * width, y + 0.2 * height)
    tab.page.mouse.down()
    tab.page.mouse.move(x + 0.5 * width, y + 0.6 * height)
    tab.page.mouse.up()
    tab.page.wait_for_url(re.compile("map_x"))
    tab.wait("Map")
    view = View.from_query(tab.page.url.partition("?")[2])
    low, high = (float(text) for text in re.findall(r"map_x [<>]= ([\d.]+)", view.where))
    assert (low, high) == pytest.approx((0.2 * 102 - 1, 0.5 * 102 - 1), abs=1)
    place, source = explorer.questions.map(view), explorer.questions.metadata["source"]
    low_y, high_y = (float(text) for text in re.findall(r"map_y [<>]= ([\d.]+)", view.where))
    is_in = place["map_x"].between(low, high) & place["map_y"].between(low_y, high_y)
    scores = explorer.questions.scores(view)
    inside = np.flatnonzero(is_in & (source != "web"))
    assert tab.cards("Selected samples") == sorted(inside, key=lambda i: -scores[i])[:24]
    tab.page.click("text=Select the whole map")
    # The address changes after the sections, which have the same title before and after.
    tab.page.wait_for_url(lambda url: "map_x" not in url)
    tab.wait("Map")
    assert len(tab.cards("Selected samples")) == 24


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


def test_marks_of_others__appear_while_a_page_is_open(
    explorer: Explorer, url: str, tab: Tab
) -> None:
    tab.open(f"{url}?page=sample&sample=11", "Training sample 11")
    explorer.marks.by("Bob").mark([11], "duplicate")
    tab.page.wait_for_selector("button[data-others=' +1']")
    explorer.marks.by("Bob").unmark([11], "duplicate")
    tab.page.wait_for_selector("button[data-others=' +1']", state="detached")


def test_map__shows_the_sample_at_the_mouse(explorer: Explorer, url: str, tab: Tab) -> None:
    tab.open(f"{url}?page=map&where=map_x+%3E%3D+50", "Map")
    place = explorer.questions.map(View())
    box, height = tab.page.locator("svg.map").bounding_box(), place["map_y"].max() + 2
    x, y = place.iloc[17]
    at = ((x + 1) / 102 * box["width"], (y + 1) / height * box["height"])
    tab.page.mouse.move(box["x"] + at[0], box["y"] + at[1])
    tab.page.wait_for_selector(".hovered:has-text('sample')")
    shown = int(re.search(r"sample (\d+)", tab.page.inner_text(".hovered"))[1])
    assert place.iloc[shown].tolist() == pytest.approx([x, y], abs=1.5)
    assert tab.page.locator(".hovered img").evaluate("image => image.naturalWidth") > 0
    outline = tab.page.locator("svg.map rect")
    assert [outline.get_attribute(name) for name in ("x", "width")] == ["50.0", "50.0"]
    tab.page.mouse.move(2, 2)
    tab.page.wait_for_selector(".hovered", state="hidden")


@pytest.mark.parametrize(
    ("width", "scheme"),
    [(400, "dark"), pytest.param(1280, "light", marks=pytest.mark.faults)],
)
def test_pages__are_accessible_and_run_nothing_of_the_metadata(
    url: str, browser: Any, width: int, scheme: str
) -> None:
    with Tab(browser, width=width, color_scheme=scheme) as tab:
        for page in ("targets", "target", "sample", "corpus", "map", "marks"):
            tab.open(f"{url}?{View(page=page, sample=1, target=1, search='no. 1').to_query()}")
            is_there = "<script>window.hacked" in tab.page.inner_text(".trakdask")
            assert is_there == (page != "marks")
            assert tab.page.evaluate("window.hacked") is None
            assert tab.page.evaluate("document.documentElement.scrollWidth") <= width, page
            assert tab.violations() == [], page


def test_saved_view__is_what_was_seen_and_needs_no_server_and_no_network(
    url: str, tab: Tab, browser: Any, tmp_path: Path
) -> None:
    def heights(tab: Tab) -> list[float]:
        return tab.page.locator(".columns [style]").evaluate_all(
            "bars => bars.map(bar => bar.getBoundingClientRect().height)"
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
        assert heights(other) == pytest.approx(heights(tab), abs=0.5)
        assert max(heights(other)) > 30
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
