"""Take the pictures of the explorer, and the moving one, on what ``make demo`` has written.

    make demo && .venv/bin/python docs/draw_explorer.py [--folder demo-output]

Needs Playwright and an installed Chromium.
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw
from playwright.sync_api import sync_playwright

from trakdask.explorer import Marks

HERE = Path(__file__).parent
WIDTH, COLOURS = 1280, 128

SHOTS = {
    "explorer": ("page=target&target=120&k=6&where=label+%21%3D+7", 800),
    "explorer_targets": ("", 600),
    "explorer_corpus": ("page=corpus", 860),
    "explorer_sample": ("page=sample&sample=4403&k=6", 700),
    "explorer_marks": ("page=marks", 560),
    "explorer_new": ("page=new", 760),
}
"""Name of the picture: the view, and its height in pixels."""

FILM = {"width": 1000, "height": 640}
"""Size of the moving picture."""

MARKED = {"wrong label": {2808: "", 4403: "1", 3714: "8"}, "remove": {1122: ""}}
"""Samples with a mark, and their corrected labels."""


def main() -> None:
    """Serve the explorer, and take one picture after the other."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("demo-output"))
    folder = parser.parse_args().folder
    with tempfile.TemporaryDirectory(prefix="demo-") as copy:
        stores = [f"{copy}/{name}.zarr" for name in ("train", "targets")]
        for store in stores:
            shutil.copytree(folder / Path(store).name, store)
        options = ["--samples", "trakdask.examples:mnist"]
        options += ["--model", "docs.demo:model", "--preprocess", "docs.demo:preprocess"]
        for kind, labels in MARKED.items():
            for sample, label in labels.items():
                Marks.beside(stores[0]).mark(sample, kind, label=label)
        command = [sys.executable, "-m", "trakdask", "explore", *stores, *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                take(server.stdout.readline().strip(), copy)  # type: ignore[union-attr]
            finally:
                server.terminate()


def take(url: str, folder: str) -> None:
    """Take all pictures in one browser; the folder of the copy is not to be seen in them."""
    hide = "(all, folder) => all.forEach(e => e.innerHTML = e.innerHTML.replaceAll(folder, ''))"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(color_scheme="light")
        for name, (query, height) in SHOTS.items():
            page.set_viewport_size({"width": WIDTH, "height": height})
            page.goto(f"{url}?{query}")
            page.wait_for_selector("section")
            wait(page)
            if name == "explorer_new":
                upload(page)
            page.locator(".line code, .note").evaluate_all(hide, f"{folder}/")
            write(page, name)
        page.set_viewport_size(FILM)
        page.goto(url)
        film(page)
        browser.close()


def wait(page: Any) -> None:
    """Wait until the page is complete."""
    page.wait_for_selector("[aria-busy=true]", state="detached", timeout=120_000)


def upload(page: Any) -> None:
    """Explain a digit that is drawn here: a 7."""
    image, buffer = Image.new("L", (64, 64), 255), io.BytesIO()
    ImageDraw.Draw(image).line([(14, 10), (48, 10), (26, 56)], fill=0, width=9)
    image.save(buffer, format="PNG")
    file = {"name": "seven.png", "mimeType": "image/png", "buffer": buffer.getvalue()}
    page.set_input_files("input[name=image]", file)
    page.click("text=Explain it")
    page.wait_for_selector("h1:has-text('Target 200')")
    wait(page)


def write(page: Any, name: str) -> None:
    """Write what the browser shows as a small PNG."""
    image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    path = HERE / "_static" / f"{name}.png"
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.name}: {image.width} × {image.height}, {path.stat().st_size / 1000:.0f} kB")


def film(page: Any) -> None:
    """Write what somebody sees who looks why a target was misread, with a ring at each click."""
    frames: list[tuple[Image.Image, float]] = []

    def show(seconds: float) -> None:
        image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        frames.append((image, seconds))

    def press(what: str, title: str) -> None:
        wait(page)
        show(2.5)
        button = page.locator(what).first
        button.evaluate("e => e.style.outline = '4px solid #e8590c'")
        show(0.8)
        button.click()
        page.wait_for_selector(f"h1:has-text('{title}')")

    page.wait_for_selector("h1:has-text('Targets')")
    press("tbody th a", "Target ")
    wait(page)
    page.fill("input[name=where]", "label != target_label")
    press("button:text-is('Filter')", "Target ")
    page.wait_for_selector("a.clear")
    press("section:has(h2:text-is('Most harmful')) a:has-text('sample')", "Training sample")
    wait(page)
    show(3.5)
    images, seconds = zip(*frames, strict=True)
    together = Image.fromarray(np.concatenate([np.asarray(image) for image in images]))
    colours = together.quantize(256)  # one palette, so that what stays is not stored again
    first, *others = (i.quantize(palette=colours, dither=Image.Dither.NONE) for i in images)
    path = HERE / "_static" / "explorer.gif"
    durations = [round(1000 * s) for s in seconds]
    first.save(path, save_all=True, append_images=others, duration=durations, loop=0)
    print(f"{path.name}: {len(images)} frames, {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
