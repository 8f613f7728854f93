"""The program of ``make demo``: find the training digits behind the predictions of small CNNs.

It also draws the training digits with the most influence on themselves, which are unusual,
ambiguous or mislabelled. Nobody has changed a label.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import dask
import numpy as np
import torch
import xarray as xr
from rich import box
from rich.console import Console
from rich.table import Table

import trakdask as td
from trakdask import examples
from trakdask.plots.figures import decimals, new_figure

__all__ = ["main", "model", "preprocess"]

OUTPUT = Path("demo-output")
N_TARGETS = 200
N_CHECKPOINTS = 6
PROJ_DIM = 512
SHOWN = 5
N_SUSPICIOUS = 30
N_EXPORTED = 100

# Samples per block: four blocks, which are enough for a few threads.
BLOCK = 1200

console = Console()


def main() -> None:
    """Train, attribute, query and export, on the threads of this process."""
    OUTPUT.mkdir(exist_ok=True)
    console.rule("trakdask demo")
    train, targets = examples.mnist(n_target=N_TARGETS, chunks=BLOCK)
    # On a laptop, a cluster of processes takes twice as long: each imports torch for itself.
    console.print("Everything runs on the threads of this process. Where a Dask client was started")
    console.print("before, the same calls run on its workers.\n")
    checkpoints, train = td.evaluate.train_on_halves(
        examples.fit_mnist_cnn, train, OUTPUT / "halves", N_CHECKPOINTS
    )
    network, samples = td.Model(examples.mnist_cnn, checkpoints), (train, targets)
    predictions = _predictions(checkpoints.values(), targets)
    features, target_features = _featurize(samples, network)
    scores = td.score(features, target_features)
    sizes = " × ".join(f"{dim} {size}" for dim, size in scores.sizes.items())
    console.print(f"\nscores ({sizes}) are lazy; none of them has been computed yet:")
    console.print(f"  {scores.attrs['formula']}\n", markup=False)
    best, worst = td.top_k(scores, N_EXPORTED), td.top_k(scores, SHOWN, largest=False)
    lazy = best, worst, td.self_influence(features), target_features.output.mean("checkpoint")
    best, worst, suspicion, margins = dask.compute(*lazy)  # together, as they share the solve
    ends = best.isel(rank=slice(SHOWN)), worst
    # The targets with the smallest margins, whose attributions are the most informative.
    shown = [int(i) for i in np.argsort(margins.values)[:6]]
    _print_rankings(ends, shown, margins)
    _print_queries(scores, shown)
    written = _export(scores, best, ends, samples, shown, predictions)
    written.append(_draw_suspicious(suspicion, train))
    grade = td.evaluate.cross_validate(features, target_features)
    console.print("Written:", *(f"  {path}" for path in written), sep="\n")
    console.print(f"How good are they? {grade.summary[0].upper()}{grade.summary[1:]}")
    console.print("(a rank correlation: 1 is perfect, and 0 is chance).")
    _print_explore()


def _predictions(checkpoints: Collection[str], targets: xr.Dataset) -> np.ndarray:
    """Return the digits that the models take the targets for, together, and print how good."""
    images, total = torch.from_numpy(targets.image.values), torch.zeros(())
    network = examples.mnist_cnn()
    for path in checkpoints:
        network.load_state_dict(torch.load(path, weights_only=True))
        with torch.no_grad():
            total = total + network(images).softmax(1)
    read_as: np.ndarray = total.argmax(1).numpy()
    share = float((read_as == targets.label.values).mean())
    console.print(
        f"{len(checkpoints)} CNNs, each trained on another half of the training digits, together "
        f"read {share:.1%} of {len(read_as)} held-out digits right"
    )
    return read_as


def model() -> td.Model:
    """Return the model of the demo, which has been trained."""
    paths = {path.stem: path for path in (OUTPUT / "halves").glob("*.pt")}
    return td.Model(examples.mnist_cnn, {name: paths[name] for name in sorted(paths)})


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
        # Without this, save would find everything done where the demo has run before.
        shutil.rmtree(store, ignore_errors=True)
        how = {"like": saved[0]} if saved else {"projector": projector}
        features = td.featurize(samples, network, **how)
        saved.append(td.save(features, store, estimator=None if saved else "auto"))
    return saved


def _print_rankings(ends: Sequence[xr.Dataset], shown: list[int], margins: xr.DataArray) -> None:
    digits = decimals(*(end.score[shown] for end in ends), digits=2)
    rows = []
    for target in shown:
        best, worst = (_ranked(end.isel(target=target), digits) for end in ends)
        name = f"{target} (a {int(margins.label[target])})"
        margin = f"{float(margins[target]):.2f}"
        rows.append((name, margin, f"[green]{best}[/]\n[red]{worst}[/]"))
    title = f"The {len(shown)} targets with the smallest margin"
    columns = ("target", "margin f", f"top and bottom {SHOWN} training samples: digit score")
    _print_table(title, columns, rows)


def _print_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    table = Table(*columns, title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _ranked(ranking: xr.Dataset, digits: int) -> str:
    pairs = zip(ranking.label.values, ranking.score.values, strict=True)
    return "  ".join(f"{label:g} {score:+.{digits}f}" for label, score in pairs)


def _print_queries(scores: xr.DataArray, shown: list[int]) -> None:
    """Query by metadata: only training digits of the target's class, or only of other classes."""
    target = shown[0]
    one = scores.isel(target=[target])
    label = int(one.target_label[0])
    queries = ("label == target_label", "label != target_label", "label in [4, 9]")
    lazy = {text: td.top_k(one, SHOWN, where=text) for text in queries}
    (rankings,) = dask.compute(lazy)  # computed together, as they share the solve
    digits = decimals(*(top.score for top in rankings.values()), digits=2)
    title = f"Queries by metadata, target {target} (a {label})"
    rows = [(text, _ranked(top.isel(target=0), digits)) for text, top in rankings.items()]
    _print_table(title, ("where", f"top {SHOWN}: digit score"), rows)


def _export(
    scores: xr.DataArray,
    best: xr.Dataset,
    ends: Sequence[xr.Dataset],
    samples: Iterable[xr.Dataset],
    shown: list[int],
    predictions: np.ndarray,
) -> list[Path]:
    parquet, zarr, png = (OUTPUT / name for name in ("top.parquet", "scores.zarr", "gallery.png"))
    td.to_parquet(best, parquet, overwrite=True)
    td.to_zarr(scores, zarr, overwrite=True)
    (helpful, harmful), images = ends, [dataset.image.values for dataset in samples]
    figure = td.plots.gallery(
        helpful, harmful, *images, targets=shown[:3], predictions=predictions, n_shown=4
    )
    figure.savefig(png, dpi=160)
    return [parquet, zarr, png]


def _draw_suspicious(suspicion: xr.DataArray, train: xr.Dataset) -> Path:
    """Draw the training digits that have the most influence on themselves, with their labels."""
    png = OUTPUT / "suspicious.png"
    chosen = train.isel(sample=np.argsort(-suspicion.values)[:N_SUSPICIOUS])
    n_columns = N_SUSPICIOUS // 3
    # One picture, with room for a line of text above each digit: it is drawn faster than 30 axes.
    padded = np.pad(chosen.image.values[:, 0], ((0, 0), (9, 0), (2, 2)))
    height, width = padded.shape[1:]
    rows = padded.reshape(3, n_columns, height, width).swapaxes(1, 2)
    figure = new_figure(8, 3.2)
    ax = figure.add_axes((0, 0, 1, 1))
    ax.imshow(rows.reshape(3 * height, -1), cmap="gray_r")
    ax.axis("off")
    for i, label in enumerate(chosen.label.values):
        row, column = divmod(i, n_columns)
        place = (column + 0.5) * width, row * height + 5
        ax.text(*place, f"label {label}", fontsize=8, ha="center", va="center")
    figure.savefig(png, dpi=160)
    return png


def _print_explore() -> None:
    """Print the line that opens the explorer on the stores of the demo.

    After ``make demo`` its environment is not active in the shell, so it is named.
    """
    stores = f"{OUTPUT / 'train.zarr'} {OUTPUT / 'targets.zarr'}"
    options = "--samples trakdask.examples:mnist --model docs.demo:model"
    options += " --preprocess docs.demo:preprocess"
    line = f"{sys.executable} -m trakdask explore {stores} {options}"
    console.print("Look at them in a browser:")
    console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="python docs/demo.py",
        description=f"{__doc__} It writes to the folder {OUTPUT}, and takes no arguments.",
    ).parse_args()
    main()
