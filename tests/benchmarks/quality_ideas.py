"""What else could raise LDS, or choose λ, without retraining? Everything that was tried.

    python tests/benchmarks/quality_ideas.py --cache demo-output/quality

Variants are judged at their best λ in hindsight, so that a bad rule for λ hides no good estimator;
rules by what they lose against that λ. Same checkpoints, features and truth as quality.py.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from _machine import parser_of
from _quality_kernels import GRID, Damped, Floats, Kernel, Task, lds, load
from _quality_report import table
from _quality_scores import Setting, ground, selected
from _quality_subjects import SUBJECTS
from _quality_truth import checkpoints

import trakdask as td

CHECKPOINTS = (1, 3, 10)
SHARPNESS = (1.25, 1.5, 2.0)
UNCHOSEN = ("diabetes", "surface", "language")


def soft(task: Task, power: float, n: int) -> tuple[Floats, Floats]:
    """Return h (sample, checkpoint) and g (sample) of soft weights; 1 and Q of a regression."""
    q = task.q[:, :n]
    if task.is_regression:
        return np.ones_like(q), q.mean(axis=1)
    return q**power * (1 - q), (q**power).mean(axis=1)


def weighted(products: Floats, g: Floats) -> Floats:
    return np.asarray(products * g[..., :, None].astype(np.float32))


# --- variants -------------------------------------------------------------------------------------


def variants(task: Task, n: int) -> Iterator[tuple[str, Floats]]:
    """Yield scores (ρ, sample, target) of n checkpoints by everything that was tried."""
    powers = (0.5,) if task.is_regression else (0.25, 0.5, 0.75, 1.0)
    kernels = [Kernel.of(task, c, 2048) for c in range(n)]
    by_power = {a: [Damped.of(k, soft(task, a, n)[0][:, c]) for c, k in enumerate(kernels)]
                for a in powers}  # fmt: skip
    h, g = soft(task, 0.5, n)
    products = [each.products() for each in by_power[0.5]]
    mean = np.mean(products, axis=0)
    yield "soft", weighted(mean, g)
    if not task.is_regression:
        plain = np.mean([Damped.of(k, np.ones(len(g))).products() for k in kernels], axis=0)
        yield "trak", weighted(plain, task.q[:, :n].mean(axis=1))
        for name, a in (("soft, a = 0.25", 0.25), ("soft, a = 0.75", 0.75), ("Gauss-Newton", 1.0)):
            scores = np.mean([each.products() for each in by_power[a]], axis=0)
            yield name, weighted(scores, soft(task, a, n)[1])
    yield from of_checkpoints(task, kernels, products, h, g)
    yield from sharpened(products, g)


def of_checkpoints(
    task: Task, kernels: list[Kernel], products: list[Floats], h: Floats, g: Floats
) -> Iterator[tuple[str, Floats]]:
    deviation = [each / each.std(axis=1, keepdims=True) for each in products]
    yield "equal spread per target and checkpoint", weighted(np.mean(deviation, axis=0), g)
    sizes = [np.trace(each.train) for each in kernels]
    pairs = list(zip(kernels, sizes, strict=True))
    joint = Kernel(sum(k.train / s for k, s in pairs), sum(k.cross / s for k, s in pairs))  # type: ignore[arg-type]
    yield (
        "checkpoints concatenated, one solve",
        weighted(Damped.of(joint, h.mean(axis=1)).products(), g),
    )
    best = [each[lds(task, weighted(each, g)).argmax()] for each in products]
    yield "λ of every checkpoint by itself, in hindsight", weighted(np.mean(best, axis=0), g)[None]


def sharpened(products: list[Floats], g: Floats) -> Iterator[tuple[str, Floats]]:
    mean = np.mean(products, axis=0)
    if len(products) > 1:
        yield "shrunk by the spread of checkpoints", weighted(shrunk(products), g)
    for power in SHARPNESS:
        yield f"products to the power {power}", weighted(powered(mean, power), g)
    for power in SHARPNESS[:2]:
        yield f"scores to the power {power}", powered(weighted(mean, g), power)


def shrunk(products: list[Floats]) -> Floats:
    """Return m³/(m² + v): the mean over checkpoints, less where its squared error v is large."""
    mean = np.mean(products, axis=0)
    noise = np.var(products, axis=0, ddof=1) / len(products)
    return np.asarray(mean**3 / (mean**2 + noise))


def powered(x: Floats, power: float) -> Floats:
    return np.asarray(np.sign(x) * np.abs(x) ** power)


# --- rules ----------------------------------------------------------------------------------------


def rules(task: Task, proj_dim: int, most: int) -> Iterator[tuple[str, ...]]:
    """Yield a row for 1, 3, 10 checkpoints: the best λ, and what each rule takes and loses."""
    total, damped = 0.0, []
    for c in range(most):
        damped.append(Damped.of(Kernel.of(task, c, proj_dim), np.ones(len(task.q))))
        total = total + damped[-1].products()
        if (n := c + 1) in CHECKPOINTS:
            found = lds(task, weighted(total, task.q[:, :n].mean(axis=1)))
            chosen = by_spectrum(damped)
            cells = (f"{chosen[name]:.2g} ({lost(found, chosen[name]):.3f})" for name in RULES)
            best = f"{GRID[found.argmax()]:.2g}"
            yield (task.name, str(n), f"{found.max():.3f}", best, *cells)


def lost(found: Floats, rho: float) -> float:
    return float(found.max() - np.interp(np.log(rho), np.log(GRID), found))


RULES = ("0.03 tr(K²)/tr(K)", "tr(K)/n", "0.07 n dims", "0.1 n dims", "0.15 n dims")


def by_spectrum(damped: list[Damped]) -> dict[str, float]:
    """Return ρ by every rule, all of which look at the eigenvalues alone."""
    closed = [0.03 * (d.values**2).sum() / d.values.sum() / d.values.mean() for d in damped]
    chosen = {RULES[0]: float(np.exp(np.mean(np.log(closed)))), RULES[1]: 1.0}
    fine = np.geomspace(GRID[0] / 100, GRID[-1] * 10, 200)
    share = [(d.values / (d.values + fine[:, None] * d.values.mean())).mean(1) for d in damped]
    for name, fraction in zip(RULES[2:], (0.07, 0.1, 0.15), strict=True):
        chosen[name] = float(fine[np.abs(np.mean(share, axis=0) - fraction).argmin()])
    return chosen


# --- report ---------------------------------------------------------------------------------------


def aligned(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return table(dict(zip(header, row, strict=True)) for row in rows)


def print_variants(tasks: dict[str, Task], n: int = 3) -> None:
    found: dict[str, dict[str, float]] = {}
    for task in tasks.values():
        start = time.process_time()
        for variant, scores in variants(task, n):
            found.setdefault(variant, {})[task.name] = lds(task, scores).max()
        _progress(f"variants of {task.name}, {n} checkpoints", start)
    base = found.pop("soft")
    rows = [("soft", *(f"{base[name]:.3f}" for name in tasks))]
    rows += [
        (variant, *(f"{by[name] - base[name]:+.3f}" if name in by else "-" for name in tasks))
        for variant, by in found.items()
    ]
    print(
        f"\nVariants, {n} checkpoints, proj_dim 2048, each at its best λ: LDS of soft (trak for a"
    )
    print("regression), and what every other variant gains on it")
    print(aligned(("variant", *tasks), rows))


def print_sharpened(tasks: dict[str, Task]) -> None:
    """More checkpoints leave less noise to suppress."""
    rows = []
    for task in tasks.values():
        start, total, h = time.process_time(), 0.0, soft(task, 0.5, max(CHECKPOINTS))[0]
        for c in range(max(CHECKPOINTS)):
            total = total + Damped.of(Kernel.of(task, c, 2048), h[:, c]).products()
            if (n := c + 1) in CHECKPOINTS:
                g = soft(task, 0.5, n)[1]
                scores = [weighted(powered(total, power), g) for power in (1, *SHARPNESS)]
                best = [lds(task, each).max() for each in scores]
                gains = (f"{each - best[0]:+.3f}" for each in best[1:])
                rows.append((task.name, str(n), f"{best[0]:.3f}", *gains))
        _progress(f"sharpening of {task.name}", start)
    header = ("task", "checkpoints", "power 1", *(f"{power}" for power in SHARPNESS))
    print("\nProducts to a power, proj_dim 2048, soft (trak for a regression), each at its best λ")
    print(aligned(header, rows))


def print_rules(tasks: dict[str, Task]) -> None:
    """For tasks whose outputs do not choose λ."""
    rows = []
    for task in tasks.values():
        start = time.process_time()
        if task.name in UNCHOSEN:
            rows += list(rules(task, 2048, max(CHECKPOINTS)))
            _progress(f"rules for {task.name}", start)
    print("\nRules for λ, trak: ρ = λ n / tr(K), and the LDS that it loses against the best")
    print(aligned(("task", "ckpts", "best", "at ρ", *RULES), rows))


def print_defaults(names: list[str], cache: Path) -> None:
    """By the package itself, with nothing chosen; for tasks whose outputs do not choose λ."""
    rows = []
    for name in (each for each in names if each in UNCHOSEN):
        found, rule = [], ""
        for n in CHECKPOINTS:
            train, targets = selected(Setting(name, "Rademacher", 2048, n, "trak"), cache)
            scores = td.score(train, targets)
            rule = str(scores.attrs["damping"])
            bare = scores.drop_vars(list(scores.coords))
            found.append(
                float(td.evaluate.lds(bare, *ground(SUBJECTS[name]), resamples=1).lds_mean)
            )
        rows.append((name, rule, *(f"{each:.3f}" for each in found)))
    print("\nLDS of td.score at its defaults, proj_dim 2048")
    print(aligned(("task", "λ", *(f"{n} ckpts" for n in CHECKPOINTS)), rows))


def _progress(what: str, start: float) -> None:
    print(f"  {what}: {time.process_time() - start:.0f} CPU seconds", file=sys.stderr, flush=True)


def main() -> None:
    defaults = {"tasks": list(SUBJECTS), "cache": Path("demo-output/quality")}
    options = parser_of(__doc__, **defaults).parse_args()
    print_defaults(options.tasks, options.cache)
    most, cache = max(CHECKPOINTS), options.cache
    subjects = [SUBJECTS[name] for name in options.tasks]
    tasks = {s.name: load(s, cache, checkpoints(s, cache, most)) for s in subjects}
    print_rules(tasks)
    print_variants(tasks)
    print_sharpened(tasks)


if __name__ == "__main__":
    main()
