"""Do the defaults hold on other tasks, and what raises LDS?

    python tests/benchmarks/quality_wider.py --stage train    # half an hour
    python tests/benchmarks/quality_wider.py                  # as much again if nothing is cached

Other optimizers, regularisation, lengths of training, networks and labels, beside the
classification tasks of quality.py. The outputs of retrained models are committed.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pandas as pd
import torch
from _machine import parser_of
from _quality_measured import (
    LOSS_POWERS,
    WITH_Q,
    Measured,
    by_loss_power,
    by_package,
    ensembles,
    estimators,
    of_data,
)
from _quality_report import table
from _quality_subjects import SUBJECTS
from _quality_truth import checkpoints, keep, retrain
from _quality_wider import HELD_OUT, ON_ONE_RUN, WIDER, trajectory

from trakdask.arrays.weights import power_of

EARLIER = ("resnet", "mlp", "cnn", "transformer", "cancer", "noisy", "early")
#: Deviations from which and to which the power falls; the last two are Q always, and its root.
RAMPS = ((0.8, 1.4), (0.6, 1.4), (0.7, 1.3), (0.5, 1.5), (1.2, 1.2), (0.8, 2.0), (9, 10), (0, 0))
ALL = SUBJECTS | WIDER | HELD_OUT


def train(tasks: Iterable[str], cache: Path) -> None:
    """Train the models to attribute, and the truth that is committed."""
    for subject in (ALL[name] for name in tasks if name not in SUBJECTS):
        checkpoints(subject, cache)
        keep(subject, retrain(subject, cache))
        if subject.name in ON_ONE_RUN:
            trajectory(subject, cache)


# --- tables ---------------------------------------------------------------------------------------


def print_facts(measured: list[Measured]) -> None:
    rows = [row for each in measured for row in each.once(of_data)]
    print("\nTasks; Q of training samples, mean of 3 checkpoints: mean, deviation over mean; then")
    print("the deviation of log((1 - Q)/Q) at one checkpoint")
    print(table(rows))


def print_defaults(measured: list[Measured]) -> None:
    rows = []
    for each in measured:
        (row,) = each.once(by_package)
        low, high, gain = row["low"], row["high"], row["default"] - row["trak, best λ"]
        names = ("task", "is", "default", "trak", "soft", WITH_Q, "Gauss-Newton", "trak, best λ",
                 "ceiling")  # fmt: skip
        compared = {"default - trak, best λ": {"value": gain, "interval": [low, high]}}
        rows.append({name: row[name] for name in names} | compared)
    print("\nLDS by td.score, 3 checkpoints, proj_dim 2048: the default, then estimators with λ by")
    print("completeness; the default less trak at its best λ with a paired interval of 95 %")
    print(table(rows))


def print_powers(measured: list[Measured]) -> None:
    """By how unequally sure the model is of training samples."""
    rows = [
        {"deviation": about["deviation"], "power of the default": power(about["deviation"])} | row
        for each in measured
        for row, about in zip(each.once(by_loss_power), each.once(of_data), strict=True)
    ]
    frame = pd.DataFrame(rows).set_index("task").sort_values("deviation")
    print("\nLDS at the best λ in hindsight of the gram matrix of soft with powers of Q in scores,")
    print("and of trak; 3 checkpoints, proj_dim 2048. Deviation: of log((1 - Q)/Q)")
    print(frame.round(3).to_string())
    print("\nWhat powers that fall from 1 to 1/2 between two deviations lose, against the best of")
    print("trak, Q and its root; and how far they are below trak, at most")
    print(pd.DataFrame([ramp(frame, *ends) for ends in RAMPS]).round(4).to_string(index=False))


def ramp(frame: pd.DataFrame, low: float, high: float) -> dict[str, Any]:
    """Return what a rule for the power loses; LDS between powers is interpolated."""
    columns = [f"Q^{b:g}" for b in LOSS_POWERS]
    chosen = np.interp(frame["deviation"], (low, high), (1.0, 0.5))
    pairs = zip(chosen, frame[columns].to_numpy(), strict=True)
    lds = np.array([np.interp(b, LOSS_POWERS, row) for b, row in pairs])
    lost = frame[["trak", "Q^0.5", "Q^1"]].max(axis=1) - lds
    return {
        "from": low, "to": high, "mean": lost.mean(), "most": lost.max(), "in": lost.idxmax(),
        "below trak": (frame["trak"] - lds).max(),
    }  # fmt: skip


def power(deviation: float) -> float:
    return power_of(np.array([deviation**2]))


def print_estimators(frame: pd.DataFrame) -> None:
    """At the best λ of each, so that no rule for λ decides."""
    here = frame[(frame.checkpoints == 3) & (frame.change == "none")]
    wide = here.pivot(index="task", columns="estimator", values="lds").loc[here.task.unique()]
    print("\nLDS of weights at the best λ in hindsight, 3 checkpoints, proj_dim 2048")
    print(wide.round(3).to_string())


def print_changes(frame: pd.DataFrame) -> None:
    here = frame[frame.estimator.isin(["trak", "soft"])]
    wide = here.pivot(
        index=["estimator", "task"], columns=["checkpoints", "change"], values="lds"
    ).loc[(["soft", "trak"], here.task.unique()), :]
    gains = wide.drop(columns="none", level="change")
    gains = gains.sub(wide.xs("none", axis=1, level="change"), level="checkpoints")
    for estimator, part in gains.groupby("estimator", sort=False):
        part = part.droplevel("estimator")
        worst, mean = part.min().rename("least"), part.mean().rename("mean")
        whole = pd.concat([part, worst.to_frame().T, mean.to_frame().T])
        print(f"\nWhat changes of {estimator} gain in LDS, each at its best λ, by checkpoints")
        print(whole.map("{:+.3f}".format).to_string())


def print_ensembles(measured: list[Measured]) -> None:
    chosen = [each for each in measured if each.subject.name in ON_ONE_RUN]
    frame = pd.DataFrame([row for each in chosen for row in each.once(ensembles)])
    wide = frame.pivot(index=["source", "p", "checkpoints"], columns="task", values="lds")
    wide = wide[[each.subject.name for each in chosen]]
    wide.insert(0, "mean", wide.mean(axis=1))
    print("\nLDS of soft at the best λ: checkpoints of seeds, or of the second half of one run")
    print(wide.round(3).to_string())


# --- command line ---------------------------------------------------------------------------------


def arguments(argv: list[str] | None) -> argparse.Namespace:
    tasks = [*EARLIER, *WIDER, *HELD_OUT]
    parser = parser_of(__doc__, tasks=tasks, cache=Path("demo-output/quality"))
    parser.add_argument("--stage", choices=("train", "measure"), default="measure")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    torch.set_num_threads(1)
    if options.stage == "train":
        train(options.tasks, options.cache)
        return
    measured = [Measured(ALL[name], options.cache) for name in options.tasks]
    with dask.config.set(scheduler="synchronous"), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of few checkpoints
        frame = pd.DataFrame([row for each in measured for row in each.once(estimators)])
        print_facts(measured)
        print_defaults(measured)
        print_powers(measured)
        print_estimators(frame)
        print_changes(frame)
        print_ensembles(measured)


if __name__ == "__main__":
    main()
