"""Every number of the README was printed: by a benchmark or by a notebook."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text("utf-8")
LINES, PEERS = "2026-11-30-readme.txt", "2026-11-23-compare_peers.txt"
OURS, THEIRS = "2026-11-30-leaderboard.txt", "2026-11-24-leaderboard.txt"
COSTS = "2026-11-30-leaderboard-costs-2.txt"
MEMORY, STORE, FITS = "2026-11-23-memory.txt", "2026-11-23-store.txt", "2026-11-24-fits.txt"
FOLDER, BACKDOOR = "folder.ipynb", "backdoor.ipynb"

# What the README says, the file in which the same numbers are, and what is around them there.
MEASURED = [
    (r"in (\d+) seconds of one core", LINES, r"(\d+) CPU seconds, .* in train\.zarr"),
    (r"checkpoints at (\S+) ± (\S+)", LINES, r"checkpoints at (\S+) ± (\S+)"),
    (r"takes (\d+) seconds of one core, and (\d+) MB", LINES, r"(\d+) CPU .*?, (\d+) MB in halves"),
    (r"Of the (\d+) files .* (\d+) % are mis", FOLDER, r"misplaced .* worst (\d+): +(\d+)%"),
    (r"rises from (\S+) %", FOLDER, r"\nall files: +(\S+)%"),
    (r"rises from .* to (\S+) %", FOLDER, r"without the 250 worst files: +(\S+)%"),
    (
        r"from (\d+) wrong .* finds (\d+) of the (\d+)",
        BACKDOOR,
        r", (\d+) ans\w+ +(\d+) of .* (\d+):",
    ),
    (r"image search finds (\d+) at best", BACKDOOR, r"similar to one, label 8 +(\d+) of"),
    (r"on (\d+) of (\d+) tasks", FITS, r"(?s)\n3 checkpoints.*?\nfit, .*? on (\d+) of (\d+) tasks"),
    (r"correlate at (\S+) with", OURS, r"(?s)\nmlp:.*?\n +trakdask +3 (\S+)"),
    (r"at (\S+) with those of a CNN", OURS, r"(?s)\ncnn:.*?\n +trakdask +3 +(\S+)"),
    (r"reaches (\S+) and", THEIRS, r"(?s)\nmlp:.*?\n +traker +3 .*?\] (\S+)"),
    (r"and (\S+) with its best λ", THEIRS, r"(?s)\ncnn:.*?\n +traker +3 .*?\] (\S+)"),
    (r"scores of (\S+) digits take", COSTS, r"\ncnn: (\d+) samples"),
    (r"digits take (\S+) CPU seconds", COSTS, r"(?s)\ncnn:.*?\n +trakdask +3 .*?\] +(\S+)"),
    (r"`traker` takes (\S+)\. ", COSTS, r"(?s)\ncnn:.*?\n +traker +3 .*?\] +(\S+)"),
    (r"CNN (\d+) to \d+ times", PEERS, r"│ +512 │ +2048 │ +trakdask │ +\S+ │ +(\S+)"),
    (r"to (\d+) times as fast", PEERS, r"│ +32 │ +512 │ +trakdask │ +\S+ │ +(\S+)"),
    (r"Ranking (\S+) samples with (\S+) GB", MEMORY, r"n=(\d+) .*features (\S+) GB"),
    (r"features for (\d+) targets", MEMORY, r" m=(\d+) "),
    (r"takes (\d+) MB of memory", MEMORY, r"peak RSS after top_k +(\d+) MB"),
    (r"of (\S+) blocks resumes in (\S+)", STORE, r"(?s)(\d+) blocks of.*\nresume .*?\) +(\S+) s"),
]
NOT_MEASURED = (
    r"Version 0\.1 |Python 3\.11 |1 is perfect, and 0 is|3s and 4s|BM25|et al\. 2023|Apache-2\.0"
)


def said() -> str:
    """Return the README without code, pictures and the places to which links lead, in one line."""
    text = re.sub(r"```(?:python|console)\n.*?```|!\[.*?\]\(.*?\)", "", README, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"\]\(.*?\)", "]", text))


@cache
def printed(name: str) -> str:
    if not name.endswith(".ipynb"):
        return (ROOT / "tests" / "benchmarks" / "results" / name).read_text("utf-8")
    cells = json.loads((ROOT / "notebooks" / name).read_text("utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    return "".join("".join(output.get("text", ())) for output in outputs)


@pytest.mark.parametrize(("quoted", "file", "source"), MEASURED)
def test_readme__says_what_was_printed_up_to_rounding(quoted: str, file: str, source: str) -> None:
    shown, known = re.search(quoted, said()), re.search(source, printed(file))
    for one, other in zip(shown.groups(), known.groups(), strict=True):
        half_a_digit = 0.501 * 10.0 ** -len(one.partition(".")[2])
        assert float(one.replace(",", "")) == pytest.approx(float(other), abs=half_a_digit, rel=0)


def test_readme__has_no_other_numbers() -> None:
    text = re.sub(NOT_MEASURED, "", said())
    for quoted, *_ in MEASURED:
        found = re.search(quoted, text)
        for start, stop in found.regs[1:]:  # as long as before, so that the places stay right
            text = text[:start] + "#" * (stop - start) + text[stop:]
    assert re.findall(r".{20}\d.{,20}", text) == []


def test_readme__is_short() -> None:
    assert len(README.split()) <= 950
