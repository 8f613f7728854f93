"""Draw the leaderboard from what the benchmark printed: ``python docs/draw_leaderboard.py``.

A dot is the LDS with three checkpoints, or ten of random halves, at the defaults of a package, with
its interval; a circle is the best of a few λ, which nobody knows without retraining.
"""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tests" / "benchmarks" / "results"
FILES = (
    "2026-11-28-leaderboard-cells.txt",
    "2026-11-28-leaderboard-captum.txt",
    "2026-11-24-leaderboard.txt",  # of two files that have a cell, the later one here counts
    "2026-11-30-leaderboard-cells.txt",
    "2026-11-28-leaderboard-language.txt",
    "2026-11-29-leaderboard.txt",
    "2026-11-30-leaderboard-texts.txt",
    "2026-11-30-leaderboard.txt",
)
SHOWN = {"trakdask, halves": "10", "BM25": "1"}
"""How many checkpoints a method has; 3 where none is named."""
ROWS = (("wine", "mlp", "noisy", "cnn"), ("resnet", "transformer", "language"))
"""Tasks beside each other have nearly the same methods."""

_SCORE = r"(-?\d\.\d+) \[(-?\d\.\d+), (-?\d\.\d+)\]"
_ROW = re.compile(rf"^ *(\S.*?)  ?(\d+) +{_SCORE}(?: +{_SCORE})?")


def printed() -> tuple[dict[str, dict[str, list[float]]], dict[str, float]]:
    """Return the numbers of each task by method, and the ceilings of the tasks."""
    found: dict[str, dict[str, list[float]]] = {}
    ceilings: dict[str, float] = {}
    for file in FILES:
        task = ""
        for line in (RESULTS / file).read_text("utf-8").splitlines():
            if head := re.match(r"(\w+): \d+ samples, ceiling (\S+)", line):
                task, ceilings[head[1]] = head[1], float(head[2])
            elif (row := _ROW.match(line)) and row[2] == SHOWN.get(row[1], "3"):
                values = [float(value) for value in row.groups()[2:] if value]
                found.setdefault(task, {})[row[1]] = values
    return found, ceilings


def draw(panel: Axes, rows: dict[str, list[float]], methods: list[str], task: str) -> None:
    """Draw a task: trakdask's methods in red, those of the others in blue."""
    for place, method in enumerate(methods):
        values = rows.get(method, [])
        color = "#b3400f" if method.startswith("trakdask") else "#1f5f8b"
        if values:
            panel.hlines(place, values[1], values[2], color=color, linewidth=2)
            panel.plot(values[0], place, "o", color=color, markersize=5)
        if len(values) > 3:
            panel.plot(values[3], place, "o", color=color, markersize=6, fillstyle="none")
    panel.set_title(task, fontsize=10)
    panel.set_xlim(-0.1, 1)
    panel.set_xticks([0, 0.5, 1], ["0", "½", "1"], fontsize=11)
    panel.set_yticks(range(len(methods)), [m.replace(" columns", "") for m in methods], fontsize=11)
    panel.set_ylim(len(methods) - 0.5, -0.5)
    panel.grid(axis="y", color="0.92")
    panel.tick_params(length=0)
    panel.spines[["top", "right", "left"]].set_visible(False)


def main() -> None:
    """Draw one panel for each task, in the order of the page and in letters for a telephone."""
    found, ceilings = printed()
    figure, panels = plt.subplots(2, 4, figsize=(5, 6), sharey="row", layout="constrained")
    for line, tasks in zip(panels, ROWS, strict=True):
        methods = list(dict.fromkeys(method for task in tasks for method in found[task]))
        methods.sort(key=lambda method: not method.startswith("trakdask"))
        for panel, task in zip(line, tasks, strict=False):
            draw(panel, found[task], methods, task)
            panel.axvline(ceilings[task], color="0.6", linestyle=":")
    marks = [
        Line2D([], [], color="0.3", marker="o", linestyle="", label="default"),
        Line2D([], [], color="0.3", marker="o", linestyle="", fillstyle="none", label="best λ"),
        Line2D([], [], color="0.6", linestyle=":", label="ceiling"),
    ]
    panels[1, 3].set_axis_off()
    panels[1, 3].legend(
        handles=marks, loc="center", fontsize=11, frameon=False, handlelength=0.8, borderpad=0
    )
    figure.supxlabel("LDS: 1 is best, 0 is chance", size=11)
    figure.savefig(ROOT / "docs" / "_static" / "leaderboard.png", dpi=160)


if __name__ == "__main__":
    main()
