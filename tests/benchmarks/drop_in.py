"""Compare the scores of the drop-in with scores of traker itself, at equal λ.

Both draw the same projections, so that the scores differ by rounding alone. λ = 0 is traker's own
default. It needs fewer columns than samples: with more, the gram matrix is singular, and its
inverse is rounding error in either package; the line with all columns shows how much of it.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from _machine import parser_of
from compare_peers import Comparison, Job, spearman


def main() -> None:
    sizes = {"n_train": 512, "n_target": 64, "proj_dim": 2048, "batch_size": 128, "checkpoints": 2}
    parser = parser_of(__doc__, **sizes, few_columns=128, precisions=["float32", "float16"])
    parser.add_argument("--undamped", action="store_true", help="λ = 0 alone")
    options = parser.parse_args()
    print(
        f"digits_cnn, {options.checkpoints} checkpoints, {options.n_train} training samples, "
        f"{options.n_target} targets\n"
    )
    print(f"{'':27}{'largest difference':>20}{'mean Spearman':>16}{'min Spearman':>15}")
    print(
        f"{'precision':10}{'λ':>9}{'p':>8}{'/ largest score':>20}{'over targets':>16}"
        f"{'over targets':>15}"
    )
    with tempfile.TemporaryDirectory() as folder:
        comparison = Comparison(options, Path(folder))
        job = comparison.prepare("digits_cnn", options.checkpoints)
        job = replace(job, n_target=options.n_target, batch_size=options.batch_size)
        jobs = [
            *([] if options.undamped else [job]),
            replace(job, damping=0.0, proj_dim=options.few_columns),
            replace(job, damping=0.0),
        ]
        for precision in options.precisions:
            for asked in jobs:
                compare(comparison, precision, replace(asked, half=precision == "float16"))


def compare(comparison: Comparison, precision: str, job: Job) -> None:
    found, expected = (
        comparison.run(replace(job, engine=engine))["scores"] for engine in ("drop-in", "traker")
    )
    difference = np.abs(found - expected).max() / np.abs(expected).max()
    ranks = spearman(found, expected)
    print(
        f"{precision:10}{job.damping:9.2g}{job.proj_dim:8}{difference:20.1e}{ranks.mean():16.5f}"
        f"{ranks.min():15.5f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
