"""The pages: links lead somewhere, pictures and tables show what the repository has."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

from trakdask.files import Folder
from trakdask.storage.group import Group, zarr_store

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
RESULTS = ROOT / "tests" / "benchmarks" / "results"
BUILT = {DOCS / "_build", DOCS / "jupyter_execute", DOCS / "reference" / "generated"}
PAGES = [
    *(ROOT / name for name in ("README.md", ".github/CONTRIBUTING.md")),
    *(page for page in DOCS.rglob("*.md") if not BUILT & set(page.parents)),
]


def cells(page: str) -> list[list[str]]:
    """Return the cells of all tables of a page, without markup."""
    lines = (DOCS / page).read_text("utf-8").replace("−", "-").replace("*", "").splitlines()
    return [[c.strip() for c in line.strip("|").split("|")] for line in lines if line[:1] == "|"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_page__links_to_what_exists(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_page__is_merged(page: Path) -> None:
    lines = page.read_text("utf-8").splitlines()
    assert [line for line in lines if re.match(r"(<{7}|>{7}) ", line)] == []


@pytest.mark.parametrize(
    "page", [*PAGES, *ROOT.glob("notebooks/*.ipynb")], ids=lambda page: page.name
)
def test_page__computes_the_columns_of_a_table_together(page: Path) -> None:
    """xarray computes a lazy Dataset once for each column."""
    text = page.read_text("utf-8")
    for made in re.findall(r"([^\s\"].*)\.to_dataframe\(", text):
        (name, *_) = re.findall(r"\w+", made.rpartition(" = ")[2])
        at_once = made.endswith(".compute()") or re.search(
            rf"\b{name} = .{{0,400}}\.compute\(\)", text, re.DOTALL
        )
        assert at_once, made


def test_pages__name_files_of_results_that_exist() -> None:
    pages = [*DOCS.glob("evidence/*.md"), *DOCS.glob("choose/*.md")]
    named = {
        name
        for page in pages
        for name in re.findall(r"20\d\d-\d\d-\d\d-[\w.-]+\.txt", page.read_text("utf-8"))
    }
    assert len(named) >= 10
    assert [name for name in named if not (RESULTS / name).exists()] == []


def test_house__is_drawn_from_the_layers() -> None:
    drawn = runpy.run_path(str(DOCS / "draw_house.py"))["drawing"]()
    assert (DOCS / "_static" / "house.svg").read_text("utf-8") == drawn, (
        "run python docs/draw_house.py"
    )


def test_design__explains_every_layer() -> None:
    layers = runpy.run_path(str(DOCS / "draw_house.py"))["layers"]()
    text = (DOCS / "developers" / "design.md").read_text("utf-8")
    rows = re.findall(r"^\| (`.*?) \|", text, flags=re.MULTILINE)
    explained = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert {name for layer in layers for name in layer} <= explained


def test_walks__count_calls_and_entries() -> None:
    walked = runpy.run_path(str(DOCS / "walks.py"))["walked"]
    folder, calls = Folder("nowhere"), {"storage.group": 1, "files": 1}
    walk = walked(lambda: zarr_store(folder))
    assert (walk.row(), dict(walk.calls)) == ((2, 2, 1, 0), calls)
    assert dict(walk.entries) == {("storage.group", "files"): 1}


def test_walks__count_a_generator_once() -> None:
    group = Group(Folder("nowhere"), {"sources": [["a", 1], ["b", 2]]}, {})
    walk = runpy.run_path(str(DOCS / "walks.py"))["walked"](lambda: list(group.rows_of_sources()))
    assert dict(walk.functions) == {"storage.group.Group.rows_of_sources": 1}


# ----------------------------------------------------------------------------- tables of results


def quality() -> dict[tuple[str, int, int, str, str], float]:
    """Return LDS by task, proj_dim, checkpoints, estimator and rule, of Rademacher."""
    names = [("trak", r) for r in ("closed", "auto", "best")]
    names += [("soft", r) for r in ("closed", "auto", "best")]
    found = {}
    for task, projector, p, checkpoints, *values in quality_rows():
        if projector == "Rademacher":
            for (estimator, rule), value in zip(names, values[:6], strict=True):
                found[task, int(p), int(checkpoints), estimator, rule] = float(value)
    return found


def quality_rows(title: str = "LDS, and what soft") -> list[list[str]]:
    """Return the rows of a table of quality.py, without its header."""
    text = (RESULTS / "2026-11-23-quality.txt").read_text("utf-8")
    lines = text[text.index(title) :].split("\n\n")[0].splitlines()[2:]
    return [re.split(r" {2,}", line) for line in lines]


TASKS = {
    "digits, perceptron": "mlp",
    "digits, CNN with GroupNorm": "cnn",
    "digits, ResNet with BatchNorm": "resnet",
    "source code, transformer": "transformer",
    "tumours, perceptron": "cancer",
    "digits, 10 % wrong labels": "noisy",
    "digits, tanh, stopped early": "early",
}
SOFT = ("soft", "auto")
COLUMNS = {
    "evidence/quality.md": [
        *((2048, 3, "trak", rule) for rule in ("closed", "auto", "best")),
        (2048, 3, *SOFT),
    ],
    "choose/estimator.md": [
        *((2048, 3, "trak", rule) for rule in ("auto", "best")),
        (2048, 3, *SOFT),
    ],
    "choose/projector.md": [(512, 3, *SOFT), (2048, 3, *SOFT)],
    "choose/checkpoints.md": [(2048, count, *SOFT) for count in (1, 3, 10)],
}


@pytest.mark.parametrize("page", COLUMNS)
def test_tables_of_quality__are_those_of_the_results(page: str) -> None:
    known = quality()
    rows = [row for row in cells(page) if row[0] in TASKS and row[1].startswith("0.")]
    assert [row[0] for row in rows] == list(TASKS)
    for name, *shown in rows:
        expected = [known[TASKS[name], *column] for column in COLUMNS[page]]
        assert [float(value) for value in shown[: len(expected)]] == expected, name


def test_table_of_costs__is_that_of_the_results() -> None:
    known = quality()
    rows = [row for row in cells("choose/estimator.md") if re.fullmatch(r"\d+, \d+", row[0])]
    assert len(rows) == 6
    for size, *shown in rows:
        checkpoints, p = map(int, size.split(", "))
        rules = (("trak", "closed"), ("trak", "auto"), ("soft", "auto"))
        means = [
            sum(known[task, p, checkpoints, *rule] for task in TASKS.values()) / len(TASKS)
            for rule in rules
        ]
        assert [float(value) for value in shown[:3]] == pytest.approx(means, abs=6e-4)
        assert [int(value) for value in shown[3:]] == [checkpoints, checkpoints * p // 512]


def test_table_of_intervals__is_that_of_the_results() -> None:
    known = {row[0]: row[10] for row in quality_rows() if row[1:4] == ["Rademacher", "2048", "3"]}
    ceilings = {row[0]: row[-1].split()[0] for row in quality_rows("Tasks")}
    rows = [row for row in cells("evidence/quality.md") if row[0] in TASKS and len(row) == 7]
    assert len(rows) == len(TASKS)
    for name, *_, difference, ceiling in rows:
        numbers = re.findall(r"[-+]?\d\.\d+", known[TASKS[name]])
        assert re.findall(r"[-+]?\d\.\d+", difference.replace("−", "-")) == [
            number if at == 0 else number.lstrip("+") for at, number in enumerate(numbers)
        ], name
        assert ceiling == ceilings[TASKS[name]], name


def test_tables_of_regression_and_language__are_those_of_the_results() -> None:
    known: dict[str, list[list[str]]] = {"diabetes": [], "surface": [], "language": []}
    for task, projector, p, _, closed, auto, best, *_ in quality_rows():
        if projector == "Rademacher" and p == "2048" and task in known:
            known[task].append([closed, best, auto])
    for page in ("choose/estimator.md", "evidence/quality.md"):
        rows = [row for row in cells(page) if row[0].strip("`") in known]
        assert len(rows) == 3
        for name, *shown in rows:
            columns = zip(*known[name.strip("`")], strict=True)
            assert shown[-4:-1] == [", ".join(column) for column in columns]


def ideas(title: str) -> dict[str, list[str]]:
    """Return a table of quality_ideas.py by the first cell of its rows."""
    text = (RESULTS / "2026-11-23-quality_ideas.txt").read_text("utf-8")
    lines = text[text.index(title) :].split("\n\n")[0].splitlines()
    rows = [re.split(r" {2,}", line) for line in lines if "  " in line]
    return {name: values for name, *values in rows}


def test_defaults_of_regression_and_language__are_those_of_the_results() -> None:
    known = ideas("LDS of td.score at its defaults")
    del known["task"]
    for page in ("choose/estimator.md", "evidence/quality.md"):
        rows = [row for row in cells(page) if row[0].strip("`") in known and "," in row[-2]]
        assert len(rows) == 3
        for name, *shown in rows:
            rule, *values = known[name.strip("`")]
            assert rule == "tr(K)/n"
            assert shown[-5] == ", ".join(values)


def test_tables_of_ideas__are_those_of_the_results() -> None:
    known = ideas("Variants, 3 checkpoints")
    rows = [
        row
        for row in cells("evidence/quality.md")
        if row[0].removesuffix(", LDS") in known and len(row) == 11
    ]
    assert len(rows) == len(known) - 1
    for name, *shown in rows:
        expected = [value.strip("-") and value for value in known[name.removesuffix(", LDS")]]
        assert [value.replace("−", "-") for value in shown] == expected


def wider(title: str, skipped: int, separator: str = r" {2,}") -> list[list[str]]:
    """Return the rows of a table of quality_wider.py."""
    text = (RESULTS / "2026-11-23-quality_wider.txt").read_text("utf-8")
    lines = text[text.index(title) :].split("\n\n")[0].splitlines()[skipped:]
    return [re.split(separator, line.strip()) for line in lines]


def test_table_of_rules__is_that_of_the_results() -> None:
    known = wider("LDS that rules lose", 3)
    names = {name for name, *_ in known}
    assert [row for row in cells("evidence/quality.md") if row[0] in names] == known


def test_tables_of_powers__are_those_of_the_results() -> None:
    known = wider("LDS at the best λ in hindsight of the gram", 4)
    shown = [[row[0].strip("`"), *row[1:]] for row in cells("evidence/quality.md")]
    assert [row for row in shown if len(row) == 9 and row[0] != "task"][1:] == known
    ramps = wider("What powers that fall", 3, r" +")
    assert [row for row in shown if len(row) == 6 and row[0].replace(".", "").isdigit()] == ramps


def test_table_of_further_tasks__is_that_of_the_results() -> None:
    known = {row[0]: row for row in wider("LDS by td.score", 4)}
    deviations = {row[0]: row[1] for row in wider("LDS at the best λ in hindsight of the gram", 4)}
    rows = [row for row in cells("evidence/quality.md") if len(row) == 8 and "(`" in row[0]]
    names = [row[0].partition("(`")[2].removesuffix("`)") for row in rows]
    assert set(names) == set(known) - set(TASKS.values())
    for name, (_, *shown) in zip(names, rows, strict=True):
        about = known[name]
        assert shown[:5] == [deviations[name], about[2], about[3], about[4], about[7]]
        signed, *ends = re.findall(r"[-+]?\d\.\d+", about[9])
        assert re.findall(r"[-+]?\d\.\d+", shown[5]) == [
            signed,
            *(end.lstrip("+") for end in ends),
        ]
        assert shown[6] == about[8]


def test_table_of_projections__is_that_of_the_results() -> None:
    results = json.loads((RESULTS / "2026-11-21-projection-1e5.json").read_text("utf-8"))
    known = {(c["proj_dim"], c["batch"], c["engine"]): c for c in results["cells"]}
    engines = ["traker", "int8x2", "int8x2-numpy", "int8x1", "sjlt4", "sjlt4-numpy"]
    rows = [row for row in cells("evidence/speed.md") if len(row) == 8 and row[0].isdigit()]
    assert len(rows) == 9
    for p, batch, *shown in rows:
        for engine, text in zip(engines, shown, strict=True):
            cell = known[int(p), int(batch), engine]
            rate, *times = re.findall(r"\d+(?:\.\d+)?", text)
            assert float(rate) == pytest.approx(cell["samples_per_s"], rel=0.02)
            assert [float(t) for t in times] == pytest.approx(
                [cell["times_traker"]] * len(times), rel=0.03
            )


def test_table_of_tokens__is_that_of_the_results() -> None:
    lines = (RESULTS / "2026-11-23-tokens.txt").read_text("utf-8").splitlines()
    known = [re.fullmatch(r"(\w+) +(.*?) +([\d.]+) +([\d.]+)", line) for line in lines]
    ratios = {(row[1], row[2]): row[4] for row in known if row}
    shown = cells("how_to/tokens.md")
    assert shown[0] == ["what", "SJLT", "Rademacher"]
    assert len(shown[2:]) == 5
    for what, *values in shown[2:]:
        assert values == [ratios[name, what] for name in shown[0][1:]], what


def test_tables_of_peers__are_those_of_the_results() -> None:
    lines = (RESULTS / "2026-11-23-compare_peers.txt").read_text("utf-8").splitlines()
    table = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
    # Of a batch size and an engine: samples per second, and times traker.
    known = {(row[0], row[2]): row[3:5] for row in table if len(row) == 11}
    rows = [row for row in cells("evidence/speed.md") if len(row) == 7 and row[0].isdigit()]
    assert [int(row[0]) for row in rows] == [32, 128, 512]
    for batch, *shown in rows:
        expected = [*known[batch, "trakdask"], *known[batch, "rademacher"]]
        expected += [known[batch, engine][0] for engine in ("traker", "dattri")]
        assert [*map(float, shown)] == pytest.approx([*map(float, expected)], rel=0.03)


def test_readme__quotes_the_pages_of_evidence() -> None:
    features = (ROOT / "README.md").read_text("utf-8").split("## Features")[1].split("## ")[0]
    speed, *_ = (row for row in cells("evidence/speed.md") if row[0] == "32")
    assert {speed[1], speed[5]} <= set(re.findall(r"\d+", features.replace(",", "")))
    mlp, *_ = (
        row for row in cells("evidence/quality.md") if len(row) == 7 and "perceptron" in row[0]
    )
    for value in (mlp[3], mlp[4]):
        assert f"{float(value):.2f}" in features
    scale = (DOCS / "evidence" / "scale.md").read_text("utf-8")
    assert "599 MB" in scale
    assert "599 MB" in features
    resumed, *_ = (row for row in cells("evidence/scale.md") if row[0].startswith("to resume"))
    assert f"{float(resumed[1].split()[0]):.1f} seconds" in features
