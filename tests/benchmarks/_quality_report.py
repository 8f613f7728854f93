"""Differences with paired intervals, a summary, and the tables of the quality benchmark."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

Row = dict[str, Any]
PLACE = ("task", "projector", "proj_dim", "checkpoints")


def comparisons(rows: list[Row], peers: list[Row]) -> list[Row]:
    """Return the differences that matter, one row per task, projection and number of checkpoints.

    Bootstrap draws of one task are paired, since all are of the same resamples.
    """
    known: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        known.setdefault(_place(row), {})[row["estimator"]] = row["at"]
    found = []
    for place, at in known.items():
        trak, soft = at["trak"], at["soft"]
        cells = {
            f"{name} auto - trak best": difference(one["auto"], trak["best"])
            for name, one in at.items()
            if name != "trak"
        }
        cells["soft auto - trak closed form"] = difference(soft["auto"], trak["closed_form"])
        cells["regret of soft auto"] = difference(soft["best"], soft["auto"])
        found.append(dict(zip(PLACE, place, strict=True)) | cells)
    for row in peers:
        ours = _ours(rows, row)
        if ours is not None:
            row["soft auto - its best"] = difference(ours["auto"], row["at"]["best"])
            row["soft auto - its default"] = difference(ours["auto"], row["at"]["default"])
    return found


def _ours(rows: list[Row], peer: Row) -> Row | None:
    wanted = (peer["task"], "Rademacher", peer["proj_dim"], peer["checkpoints"])
    same = [r["at"] for r in rows if _place(r) == wanted and r["estimator"] == "soft"]
    return same[0] if same else None


def _place(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in PLACE)


def difference(a: Row, b: Row) -> Row:
    """Return a - b with its 95 % interval."""
    draws = np.array(a["draws"]) - np.array(b["draws"])
    return {"value": a["lds"] - b["lds"], "interval": np.quantile(draws, [0.025, 0.975]).tolist()}


# --- summary --------------------------------------------------------------------------------------


def summary(rows: list[Row]) -> list[Row]:
    """Return the regret of every rule, over settings and tasks."""
    found = []
    for estimator in dict.fromkeys(row["estimator"] for row in rows):
        for rule in ("auto", "by targets", "closed_form"):
            regrets = {
                task: [
                    _regret(r, rule)
                    for r in rows
                    if (r["task"], r["estimator"]) == (task, estimator)
                ]
                for task in dict.fromkeys(r["task"] for r in rows if r["estimator"] == estimator)
            }
            every = [x for some in regrets.values() for x in some]
            means = {task: float(np.mean(some)) for task, some in regrets.items()}
            worst = max(means, key=lambda task: means[task])
            found.append(
                {"estimator": estimator, "rule": rule, "mean regret": float(np.mean(every)),
                 "worst task": f"{worst} {means[worst]:.3f}", "worst setting": max(every)}
            )  # fmt: skip
    return found


def _regret(row: Row, rule: str) -> float:
    return float(row["at"]["best"]["lds"] - row["at"][rule]["lds"])


def verdicts(compared: list[Row], name: str) -> list[Row]:
    """Count, for every task, in how many settings a difference lies above, across and below 0."""
    found = []
    compared = [row for row in compared if name in row]
    for task in dict.fromkeys(row["task"] for row in compared):
        cells = [row[name] for row in compared if row["task"] == task]
        values = [cell["value"] for cell in cells]
        found.append(
            {
                "task": task,
                name: float(np.mean(values)),
                "least": min(values),
                "most": max(values),
                "above 0": sum(cell["interval"][0] > 0 for cell in cells),
                "across 0": sum(cell["interval"][0] <= 0 <= cell["interval"][1] for cell in cells),
                "below 0": sum(cell["interval"][1] < 0 for cell in cells),
            }
        )
    return found


# --- tables ---------------------------------------------------------------------------------------


def report(result: dict[str, Any]) -> str:
    """Return everything as aligned text."""
    lines = [f"{name:>14}: {value}" for name, value in result["header"].items()]
    tasks = [task | {"ceiling": _range(task["ceiling"], "")} for task in result["tasks"]]
    parts = [
        "\n".join(lines),
        _titled("Tasks", tasks),
        _titled(
            "LDS, and what soft at the automatic λ gains on trak at its best", _lds_rows(result)
        ),
        _titled("Powers of soft", _power_rows(result)),
    ]
    if result["peers"]:
        parts.append(
            _titled("Other packages at λ = 0 and at their best λ", _peer_rows(result["peers"]))
        )
    for name, rows in result["verdicts"].items():
        parts.append(_titled(f"Settings by the interval of: {name}", rows))
    for kind, rows in result["summary"].items():
        if rows:
            parts.append(_titled(f"LDS lost against the best λ: {kind}", rows))
    return "\n\n".join(parts)


def _titled(title: str, rows: list[Row]) -> str:
    return f"{title}\n{table(rows)}"


def table(rows: Iterable[Row]) -> str:
    """Align columns; numbers to three digits."""
    rows = list(rows)
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names] + [[_cell(row.get(name, "")) for name in names] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in cells]
    return "\n".join(line.rstrip() for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return _range(value, "+")
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _range(cell: Row, sign: str) -> str:
    low, high = cell["interval"]
    return f"{cell['value']:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"


def _lds_rows(result: dict[str, Any]) -> list[Row]:
    def at(place: tuple[Any, ...], estimator: str) -> Row:
        return next(
            r for r in result["rows"] if (*_place(r), r["estimator"]) == (*place, estimator)
        )

    lines = []
    for compared in result["comparisons"]:
        trak, soft = (at(_place(compared), name) for name in ("trak", "soft"))
        lines.append(
            _short(compared)
            | {f"trak {name}": trak["at"][key]["lds"] for name, key in _COLUMNS}
            | {f"soft {name}": soft["at"][key]["lds"] for name, key in _COLUMNS}
            | {name: compared[name] for name in ("soft auto - trak best",)}
            | {"regret": compared["regret of soft auto"]["value"], "ρ": f"{soft['rho']:.2g}"}
            | {"peak": soft["peak"], "chosen by": soft["rule"].removeprefix("completeness, ")}
        )
    return lines


_COLUMNS = (("closed", "closed_form"), ("auto", "auto"), ("best", "best"))


def _short(row: Row) -> Row:
    names = ("task", "projector", "p", "ckpts")
    return dict(zip(names, _place(row), strict=True))


def _power_rows(result: dict[str, Any]) -> list[Row]:
    lines = []
    for compared in result["comparisons"]:
        differences = {k: v for k, v in compared.items() if k.endswith("auto - trak best")}
        if len(differences) > 1:
            here = [row for row in result["rows"] if _place(row) == _place(compared)]
            best = {f"{row['estimator']} best": row["at"]["best"]["lds"] for row in here}
            lines.append(_short(compared) | best | differences)
    return lines


def _peer_rows(peers: list[Row]) -> list[Row]:
    differences = ("soft auto - its default", "soft auto - its best")
    return [
        {"task": r["task"], "package": r["engine"], "p": r["proj_dim"], "ckpts": r["checkpoints"]}
        | {
            "default": r["at"]["default"]["lds"],
            "best": r["at"]["best"]["lds"],
            "best at": r["best_at"],
        }
        | {name: r[name] for name in differences if name in r}
        for r in peers
    ]
