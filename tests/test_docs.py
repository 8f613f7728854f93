"""The pages: links lead somewhere, and what tables show is what benchmarks printed."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
RESULTS = ROOT / "tests" / "benchmarks" / "results"
BUILT = {DOCS / "_build", DOCS / "jupyter_execute", DOCS / "reference" / "generated"}
PAGES = [
    *(ROOT / name for name in ("README.md", ".github/CONTRIBUTING.md", ".github/SECURITY.md")),
    *(page for page in DOCS.rglob("*.md") if not BUILT & set(page.parents)),
]


def test_pages__link_to_what_exists() -> None:
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
        links = re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", text)
        assert [link for link in links if not (page.parent / link).exists()] == [], page


def test_notebooks__were_run_in_order_say_for_how_long_and_show_their_figures() -> None:
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text("utf-8"))["cells"]
        code = [cell for cell in cells if cell["cell_type"] == "code"]
        assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1)), path
        for output in (output for cell in code for output in cell["outputs"]):
            data = output.get("data", {})
            is_figure = re.match(r"<\w+ size .*Axes>", "".join(data.get("text/plain", "")))
            assert ("image/png" in data) == bool(is_figure), path
            assert output.get("name") != "stderr", path
        first, last = "".join(cells[0]["source"]), str(code[-1]["outputs"])
        (minutes,) = re.findall(r"took ([\d.]+) minutes of CPU time", last)
        assert f"takes about {minutes} minutes of CPU time" in first, path


def test_house__is_drawn_from_the_layers_that_the_page_on_design_explains() -> None:
    names = runpy.run_path(str(DOCS / "draw_house.py"))
    drawn = (DOCS / "_static" / "house.svg").read_text("utf-8")
    assert drawn == names["drawing"](), "run python docs/draw_house.py"
    text = (DOCS / "developers" / "design.md").read_text("utf-8")
    rows = re.findall(r"^\| (`.*?) \|", text, flags=re.MULTILINE)
    explained = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert {name for layer in names["layers"]() for name in layer} <= explained


RUN_CELL = """
import runpy, sys
import nbformat
from nbclient import NotebookClient
runpy.run_path(sys.argv[1])
NotebookClient(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(sys.argv[2])])).execute()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "code"), [("python -m trakdask init", 0), ("python -m trakdask plan none", 2)]
)
def test_pages__are_not_built_with_a_command_that_fails(
    command: str, code: int, tmp_path: Path
) -> None:
    line = [sys.executable, "-c", RUN_CELL, str(DOCS / "conf.py"), f"!{command}"]
    environment = os.environ | {"PATH": os.defpath}  # in which there is another Python, or none
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode == 0) == (code == 0), done.stderr
    assert (f"returned non-zero exit status {code}." in done.stderr) == (code != 0)


# ----------------------------------------------------------------------------- tables of results

NUMBER = re.compile(r"(?<![\w.])\d[\d,]*\.\d+")


def numbers(text: str) -> list[str]:
    return [number.replace(",", "") for number in NUMBER.findall(text)]


@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.parent.name in ("evidence", "choose")], ids=lambda p: p.name
)
def test_page__shows_numbers_of_results_that_it_names(page: Path) -> None:
    """Every number with decimals in a table is in one of the files, up to rounding."""
    text = page.read_text("utf-8")
    files = set(re.findall(r"20\d\d-\d\d-\d\d-[\w.-]+\.txt", text))
    files |= {
        file.name
        for script in re.findall(r"benchmarks/(\w+)\.py", text)
        for file in RESULTS.glob(f"*-{script}.txt")
    }
    printed = "\n".join((RESULTS / file).read_text("utf-8") for file in files)
    known = np.unique(np.array(numbers(printed), float))
    shown = {number for row in text.splitlines() if row[:1] == "|" for number in numbers(row)}
    unknown = set()
    for number in shown:
        decimals = len(number.partition(".")[2])
        if abs(known - float(number)).min(initial=np.inf) > 0.501 * 10.0**-decimals:
            unknown.add(number)
    assert not unknown
    assert bool(shown) <= bool(files)
