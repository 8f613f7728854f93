"""The program of ``make demo``: find the training digits behind the predictions of small CNNs.

It also draws the training digits with the most influence on themselves: those that are unusual,
ambiguous or mislabelled. Nobody has changed a label.
"""

from __future__ import annotations

import logging
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask
import numpy as np
import torch
import xarray as xr
from distributed import Client
from rich import box
from rich.console import Console
from rich.table import Table

import trakdask as td
from trakdask import examples
from trakdask.plots.figures import new_figure

__all__ = ["main", "model", "preprocess"]

OUTPUT = Path("demo-output")
N_TARGETS = 200
N_CHECKPOINTS = 3
PROJ_DIM = 2048
SHOWN = 5
N_SUSPICIOUS = 30

console = Console()
seconds: dict[str, float] = {}
"""How long each step took."""


def main() -> None:
    """Train, attribute, query and export, on a local cluster of two processes."""
    started = time.perf_counter()
    OUTPUT.mkdir(exist_ok=True)
    seconds.clear()
    console.rule("trakdask demo")
    with _timed("train (or load) 3 CNNs"):
        network = model()
    samples = examples.mnist(n_target=N_TARGETS)
    _print_accuracy(samples[1])
    # What would be logged is that connections end with the workers.
    quiet = {"dashboard_address": ":0", "silence_logs": logging.CRITICAL}
    with Client(n_workers=2, threads_per_worker=1, **quiet) as client:
        console.print(f"Dask dashboard: {client.dashboard_link}\n")
        features, target_features = _featurize(samples, network)
        scores = td.score(features, target_features)
        sizes = " × ".join(f"{dim} {size}" for dim, size in scores.sizes.items())
        console.print(f"\nscores ({sizes}) are lazy; none of them has been computed yet:")
        console.print(f"  {scores.attrs['formula']}\n", markup=False)
        lazy = td.top_k(scores, SHOWN), td.top_k(scores, SHOWN, largest=False)
        with _timed(f"rank all {N_TARGETS} targets, both ends"):
            ends = dask.compute(*lazy)
        with _timed("rank all training digits by self-influence"):
            suspicion = td.self_influence(features).compute()
        # The targets with the smallest margins, whose attributions are the most informative.
        margins = target_features.output.mean("checkpoint").values
        shown = [int(i) for i in np.argsort(margins)[:6]]
        _print_rankings(ends, shown, target_features)
        _print_queries(scores, shown)
        _print_groups(features, target_features, shown)
        written = _export(scores, ends, samples, shown)
        written.append(_draw_suspicious(suspicion, samples[0]))
    _print_measured(written, time.perf_counter() - started)
    _print_explore()


@contextmanager
def _timed(what: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[what] = time.perf_counter() - start


def _print_accuracy(targets: xr.Dataset) -> None:
    held_out = targets.image.values, targets.label.values
    states = [torch.load(path, weights_only=True) for path in _checkpoints()]
    build, accuracy = examples.mnist_cnn, examples.classifier_accuracy
    shares = ", ".join(f"{accuracy(build, state, *held_out):.1%}" for state in states)
    console.print(f"{len(states)} CNNs, accuracy on {N_TARGETS} held-out digits: {shares}")


def _checkpoints() -> list[Path]:
    return examples.mnist_checkpoints(OUTPUT / "checkpoints", n_checkpoints=N_CHECKPOINTS)


def model() -> td.Model:
    """Return the model of the demo; its checkpoints are trained unless they are there."""
    checkpoints = {f"seed {i}": path for i, path in enumerate(_checkpoints())}
    return td.Model(examples.mnist_cnn, checkpoints)


def preprocess(image: Any) -> np.ndarray:
    """Return an image of dark ink on light paper as a digit, (1, 28, 28) in [0, 1]."""
    grey = np.asarray(image.convert("L").resize((28, 28)), np.float32)
    return 1 - grey[None] / 255


def _featurize(datasets: Iterable[xr.Dataset], network: td.Model) -> list[xr.Dataset]:
    projector = td.SJLT(proj_dim=PROJ_DIM, seed=0)
    console.print(f"{network}\n{projector}")
    saved: list[xr.Dataset] = []
    for name, samples in zip(("train", "targets"), datasets, strict=True):
        store = OUTPUT / f"{name}.zarr"
        # Without an earlier store, so that the full time is measured: save would resume it.
        shutil.rmtree(store, ignore_errors=True)
        how = {"like": saved[0]} if saved else {"projector": projector}
        features = td.featurize(samples, network, **how)
        with _timed(f"featurize and save {samples.sizes['sample']} {name} digits × 3"):
            saved.append(td.save(features, store, estimator=None if saved else "auto"))
    return saved


def _print_rankings(ends: Sequence[xr.Dataset], shown: list[int], targets: xr.Dataset) -> None:
    unit = td.plots.power_of_ten(*(end.score[shown] for end in ends))
    rows = []
    for target in shown:
        best, worst = (_ranked(end.isel(target=target), unit) for end in ends)
        name = f"{target} (a {int(targets.label[target])})"
        margin = f"{float(targets.output[target].mean()):.2f}"
        rows.append((name, margin, f"[green]{best}[/]\n[red]{worst}[/]"))
    title = f"The {len(shown)} targets with the smallest margin; score in 1e{unit}"
    columns = ("target", "margin f", f"top and bottom {SHOWN} training samples: digit score")
    _print_table(title, columns, rows)


def _print_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    table = Table(*columns, title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _ranked(ranking: xr.Dataset, unit: int) -> str:
    pairs = zip(ranking.label.values, ranking.score.values / 10.0**unit, strict=True)
    return "  ".join(f"{label:g} {score:+.1f}" for label, score in pairs)


def _print_queries(scores: xr.DataArray, shown: list[int]) -> None:
    """Query by metadata: only training digits of the target's class, or only of other classes."""
    target = shown[0]
    one = scores.isel(target=[target])
    label = int(one.target_label[0])
    queries = ("label == target_label", "label != target_label", "label in [4, 9]")
    lazy = {text: td.top_k(one, SHOWN, where=text) for text in queries}
    with _timed(f"{len(queries)} queries of one target"):
        (rankings,) = dask.compute(lazy)  # computed together, as they share the solve
    unit = td.plots.power_of_ten(*(top.score for top in rankings.values()))
    title = f"Queries by metadata, target {target} (a {label}); score in 1e{unit}"
    rows = [(text, _ranked(top.isel(target=0), unit)) for text, top in rankings.items()]
    _print_table(title, ("where", f"top {SHOWN}: digit score"), rows)


def _print_groups(features: xr.Dataset, targets: xr.Dataset, shown: list[int]) -> None:
    some = targets.isel(sample=shown)
    groups = td.group_score(features, some, by="label").compute()
    unit = td.plots.power_of_ten(groups)
    title = f"Sum of scores by class of the training digits (group_score), in 1e{unit}"
    names = [f"{target} (a {int(groups.target_label[i])})" for i, target in enumerate(shown)]
    sums = groups.transpose("target", "label").values / 10.0**unit
    rows = [(name, *(f"{x:+.1f}" for x in row)) for name, row in zip(names, sums, strict=True)]
    _print_table(title, ("target", *(f"{label}s" for label in groups.label.values)), rows)


def _export(
    scores: xr.DataArray,
    ends: Sequence[xr.Dataset],
    samples: Iterable[xr.Dataset],
    shown: list[int],
) -> list[Path]:
    parquet, zarr, png = (OUTPUT / name for name in ("top.parquet", "scores.zarr", "gallery.png"))
    with _timed("export parquet and zarr"):
        td.to_parquet(td.top_k(scores, 100), parquet, overwrite=True)
        td.to_zarr(scores, zarr, overwrite=True)
    (helpful, harmful), images = ends, [dataset.image.values for dataset in samples]
    td.plots.gallery(helpful, harmful, *images, targets=shown[:3]).savefig(png, dpi=160)
    return [parquet, zarr, png]


def _draw_suspicious(suspicion: xr.DataArray, train: xr.Dataset) -> Path:
    """Draw the training digits that have the most influence on themselves, with their labels."""
    png = OUTPUT / "suspicious.png"
    chosen = train.isel(sample=np.argsort(-suspicion.values)[:N_SUSPICIOUS])
    figure = new_figure(8, 3.2)
    axes = figure.subplots(3, N_SUSPICIOUS // 3)
    for ax, image, label in zip(axes.flat, chosen.image.values, chosen.label.values, strict=True):
        ax.imshow(image[0], cmap="gray_r")
        ax.set_title(f"label {label}", fontsize=8)
        ax.axis("off")
    figure.tight_layout()
    figure.savefig(png, dpi=160)
    return png


def _print_measured(written: list[Path], total: float) -> None:
    rows = [(what, f"{spent:.1f}") for what, spent in {**seconds, "everything": total}.items()]
    _print_table("Measured in this run", ("step", "seconds"), rows)
    console.print("Written:")
    for path in [OUTPUT / "train.zarr", OUTPUT / "targets.zarr", *written]:
        console.print(f"  {path}  ({_size(path) / 1e6:.1f} MB)")


def _print_explore() -> None:
    """Print the line that opens the explorer on what the demo has written.

    After ``make demo`` its environment is not active in the shell, so it is named.
    """
    stores = f"{OUTPUT / 'train.zarr'} {OUTPUT / 'targets.zarr'}"
    options = "--samples trakdask.examples:mnist --model trakdask.demo:model"
    options += " --preprocess trakdask.demo:preprocess"
    line = f"{sys.executable} -m trakdask explore {stores} {options}"
    console.print("Look at them in a browser:")
    console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file())


if __name__ == "__main__":
    main()
