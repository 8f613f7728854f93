"""Compare the scores of the drop-in with those of traker itself, in both precisions.

Both draw the same projections and use the same λ: one that was chosen for these gradients, or 0,
which is traker's default. So the scores differ by rounding alone.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from _machine import parser_of
from compare_peers import Comparison, spearman
from numpy.typing import NDArray


def main() -> None:
    sizes = {"n_train": 512, "n_target": 64, "proj_dim": 256, "batch_size": 128, "checkpoints": 2}
    options = parser_of(__doc__, **sizes).parse_args()
    print(
        f"digits_cnn, p = {options.proj_dim}, {options.checkpoints} checkpoints, "
        f"{options.n_train} training samples, {options.n_target} targets\n"
    )
    print(f"{'':18}{'largest difference':>20}{'mean Spearman':>16}{'min Spearman':>15}")
    print(f"{'λ':9}{'precision':9}{'/ largest score':>20}{'over targets':>16}{'over targets':>15}")
    with tempfile.TemporaryDirectory() as folder:
        comparison = Comparison(options, Path(folder))
        job = comparison.prepare("digits_cnn", options.checkpoints)
        job = replace(job, n_target=options.n_target, batch_size=options.batch_size)
        for name, damping in (("positive", job.damping), ("0", 0.0)):
            for precision in ("float32", "float16"):
                half = precision == "float16"
                found, expected = (
                    comparison.run(replace(job, engine=engine, damping=damping, half=half))
                    for engine in ("drop-in", "traker")
                )
                show(f"{name:9}{precision:9}", found["scores"], expected["scores"])


def show(label: str, found: NDArray[np.float64], expected: NDArray[np.float64]) -> None:
    """Print how far scores are from the original's."""
    difference = np.abs(found - expected).max() / np.abs(expected).max()
    ranks = spearman(found, expected)
    print(f"{label}{difference:20.1e}{ranks.mean():16.5f}{ranks.min():15.5f}", flush=True)


if __name__ == "__main__":
    main()
