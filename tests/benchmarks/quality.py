"""LDS of estimators and of rules for λ; and the ground truth of a task, computed again.

    python tests/benchmarks/quality.py --tasks mlp cancer                # minutes
    python tests/benchmarks/quality.py --stage train --tasks decay

The models of the first command are trained into the cache, with 1 and 3 checkpoints. The second one
retrains models on random halves, and writes their outputs, which are committed.
"""

from __future__ import annotations

from pathlib import Path

from _fits import ALL, SKETCH, arguments_of, featurized, lds, rows_of, setting
from _quality_tasks import SUBJECTS
from _quality_truth import keep, retrain

import trakdask as td

ESTIMATORS = {"trak": td.Trak(), "soft": td.Soft()}
RULES = (0.03, "trace", "completeness")


def measure(name: str, n: int, cache: Path) -> dict[str, float]:
    """Return the LDS of every estimator with every rule for λ."""
    subject, model, samples = setting(name, cache, n)
    features = featurized(model, *samples, SKETCH)
    return {
        f"{estimator}, {rule}": lds(subject, *features, estimator=value.with_damping(rule))
        for estimator, value in ESTIMATORS.items()
        for rule in RULES
    }


def main() -> None:
    options = arguments_of(__doc__, SUBJECTS, stages=("score", "train"))
    if options.stage == "train":
        for name in options.tasks:
            keep(ALL[name], retrain(ALL[name], options.cache))
        return
    frame = rows_of(measure, options.tasks, options.cache, options.cache / "estimators")
    for n, part in frame.groupby("checkpoints"):
        print(f"\n{n} checkpoint{'s' * (n > 1)}, {SKETCH.proj_dim} columns")
        print(part.drop(columns="checkpoints").set_index("task").round(3).to_string())


if __name__ == "__main__":
    main()
