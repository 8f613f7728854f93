"""Take the picture of Dask's dashboard while two processes of this machine compute features.

    .venv/bin/python docs/draw_dashboard.py

Needs Playwright and an installed Chromium.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from threading import Thread

from distributed import Client
from draw_explorer import write
from playwright.sync_api import sync_playwright

import trakdask as td
from trakdask import examples


def main() -> None:
    """Compute features in a thread, and take the picture when half of the blocks are stored."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Client(n_workers=2, threads_per_worker=1) as client,
        sync_playwright() as playwright,
    ):
        samples, _ = examples.digits(chunks=32)
        paths = examples.digits_checkpoints(folder, n_checkpoints=4, epochs=1)
        features = td.featurize(samples, td.Model(examples.digits_cnn, paths))
        features.isel(sample=slice(32)).compute()  # the first task of a worker imports torch
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 720}, color_scheme="light")
        page.goto(client.dashboard_link)
        page.wait_for_timeout(3000)  # in which its plots appear
        store = Path(folder, "train.zarr")
        job = Thread(target=td.save, args=(features, store), kwargs={"progress": False})
        job.start()
        n_blocks = features.out_to_loss.data.npartitions
        while len(list(store.glob("feature/records/*"))) < n_blocks / 2:
            page.wait_for_timeout(50)  # Playwright does nothing while Python sleeps
        page.mouse.move(900, 160)  # shows the name of a task
        page.wait_for_timeout(500)
        write(page, "dashboard")
        job.join()
        browser.close()


if __name__ == "__main__":
    main()
