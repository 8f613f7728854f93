"""Compare the scores of the drop-in with scores of traker itself, at equal λ.

Both draw the same projections, so that the scores differ by rounding alone. λ = 0 is traker's own
default. It needs fewer columns than samples: with more, the gram matrix is singular, and its
inverse is rounding error in either package; the line with all columns shows how much of it.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _machine import parser_of
from numpy.typing import NDArray
from scipy.stats import rankdata

from trakdask import examples

BATCH_SIZE = 128
N_HELD_OUT = 200


def batches(images: Any, labels: Any, n: int) -> Iterator[list[torch.Tensor]]:
    for start in range(0, n, BATCH_SIZE):
        rows = slice(start, min(start + BATCH_SIZE, n))
        yield [torch.from_numpy(images[rows]), torch.from_numpy(labels[rows])]


def scores(
    package: str, options: argparse.Namespace, checkpoints: list[Path], **settings: Any
) -> NDArray[np.float64]:
    """Return what a package, traker or the drop-in, says of the same samples and checkpoints."""
    states = [torch.load(path, weights_only=True) for path in checkpoints]
    train, targets = examples.digits_arrays(N_HELD_OUT)
    with tempfile.TemporaryDirectory() as folder:
        traker = importlib.import_module(package).TRAKer(
            model=examples.digits_cnn(),
            task="image_classification",
            train_set_size=options.n_train,
            save_dir=folder,
            device="cpu",
            logging_level=logging.ERROR,
            **settings,
        )
        for index, state in enumerate(states):
            traker.load_checkpoint(state, model_id=index)
            for batch in batches(*train, options.n_train):
                traker.featurize(batch, num_samples=len(batch[0]))
        traker.finalize_features()
        for index, state in enumerate(states):
            traker.start_scoring_checkpoint("targets", state, index, options.n_target)
            for batch in batches(*targets, options.n_target):
                traker.score(batch, num_samples=len(batch[0]))
        return np.array(traker.finalize_scores("targets"), float)


def spearman(found: NDArray[np.float64], expected: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rank correlation over the training samples, for each target."""
    ranks = [rankdata(x, axis=0) - (len(x) + 1) / 2 for x in (found, expected)]
    norms = [np.sqrt((r**2).sum(axis=0)) for r in ranks]
    return np.asarray((ranks[0] * ranks[1]).sum(axis=0) / (norms[0] * norms[1]))


def main() -> None:
    sizes = {"n_train": 512, "n_target": 64, "proj_dim": 2048, "checkpoints": 2}
    parser = parser_of(
        __doc__, **sizes, few_columns=128, damping=150.0, precisions=["float32", "float16"]
    )
    parser.add_argument("--undamped", action="store_true", help="λ = 0 alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"digits_cnn, {options.checkpoints} checkpoints, {options.n_train} training samples, "
        f"{options.n_target} targets\n"
    )
    print(f"{'':27}{'largest difference':>20}{'mean Spearman':>16}{'min Spearman':>15}")
    print(
        f"{'precision':10}{'λ':>9}{'p':>8}{'/ largest score':>20}{'over targets':>16}"
        f"{'over targets':>15}"
    )
    asked = [(0.0, options.few_columns), (0.0, options.proj_dim)]
    if not options.undamped:
        asked.insert(0, (options.damping, options.proj_dim))
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = examples.digits_checkpoints(
            folder, examples.digits_cnn, options.checkpoints, n_target=N_HELD_OUT
        )
        for precision in options.precisions:
            for damping, proj_dim in asked:
                settings = {
                    "lambda_reg": damping,
                    "proj_dim": proj_dim,
                    "use_half_precision": precision == "float16",
                }
                found, expected = (
                    scores(package, options, checkpoints, **settings)
                    for package in ("trakdask.trak", "trak")
                )
                difference = np.abs(found - expected).max() / np.abs(expected).max()
                ranks = spearman(found, expected)
                print(
                    f"{precision:10}{damping:9.2g}{proj_dim:8}{difference:20.1e}"
                    f"{ranks.mean():16.5f}{ranks.min():15.5f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
