"""Look at every built page in a browser, as on a laptop and on a telephone, light and dark.

    make docs && .venv/bin/python docs/check_pages.py [PAGE ...]

Prints pages that scroll sideways, code that is cut off on a laptop, and what axe-core says of
contrast, names of links and the like, unless it calls it minor. Needs Playwright and an installed
Chromium; takes minutes.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright

BUILT = Path(__file__).parent / "_build" / "html"
LAPTOP, TELEPHONE = 1280, 400

SCROLLS = "document.documentElement.scrollWidth > innerWidth"
CUT = """[...document.querySelectorAll("div.input pre, dd pre, div.highlight-python pre")]
    .filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.innerText.slice(0, 60))"""


def problems(page: Any, width: int) -> Iterator[str]:
    """Yield what is wrong with the page that a browser shows at this width."""
    if page.evaluate(SCROLLS):
        yield "scrolls sideways"
    if width == LAPTOP:
        yield from (f"cuts off {code!r}" for code in page.evaluate(CUT))
        for rule in Axe().run(page).response["violations"]:
            for node in rule["nodes"] if rule["impact"] != "minor" else ():
                yield f"{rule['impact']} {rule['id']}: {node['html'][:150]}"


def main() -> None:
    """Open one page after the other; the exit code says whether there was a problem."""
    paths = [Path(name) for name in sys.argv[1:]] or [
        page for page in sorted(BUILT.rglob("*.html")) if BUILT / "_static" not in page.parents
    ]
    found = 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for scheme in ("light", "dark"):
            for width in (LAPTOP, TELEPHONE):
                size = {"width": width, "height": 900}
                page = browser.new_page(color_scheme=scheme, viewport=size)
                for path in paths:
                    page.goto(path.resolve().as_uri())
                    for problem in problems(page, width):
                        found += 1
                        print(f"{path.stem}, {scheme}, {width}: {problem}", flush=True)
                page.close()
        browser.close()
    print(f"{len(paths)} pages, {found} problems")
    sys.exit(found > 0)


if __name__ == "__main__":
    main()
