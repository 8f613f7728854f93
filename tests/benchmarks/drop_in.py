"""Compare the scores of the drop-in with scores of traker itself, in both precisions.

Both draw the same projections and use the same λ > 0, so that the scores differ by rounding alone.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from _machine import parser_of
from compare_peers import Comparison, spearman


def main() -> None:
    sizes = {"n_train": 512, "n_target": 64, "proj_dim": 2048, "batch_size": 128, "checkpoints": 2}
    options = parser_of(__doc__, **sizes).parse_args()
    print(
        f"digits_cnn, p = {options.proj_dim}, {options.checkpoints} checkpoints, "
        f"{options.n_train} training samples, {options.n_target} targets\n"
    )
    print(f"{'':10}{'largest difference':>20}{'mean Spearman':>16}{'min Spearman':>15}")
    print(f"{'precision':10}{'/ largest score':>20}{'over targets':>16}{'over targets':>15}")
    with tempfile.TemporaryDirectory() as folder:
        comparison = Comparison(options, Path(folder))
        job = comparison.prepare("digits_cnn", options.checkpoints)
        job = replace(job, n_target=options.n_target, batch_size=options.batch_size)
        for precision in ("float32", "float16"):
            found, expected = (
                comparison.run(replace(job, engine=engine, half=precision == "float16"))["scores"]
                for engine in ("drop-in", "traker")
            )
            difference = np.abs(found - expected).max() / np.abs(expected).max()
            ranks = spearman(found, expected)
            print(f"{precision:10}{difference:20.1e}{ranks.mean():16.5f}{ranks.min():15.5f}")


if __name__ == "__main__":
    main()
