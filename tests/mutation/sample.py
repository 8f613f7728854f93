"""Change the code in small ways and see whether a test fails: mutation testing of a sample.

`mutmut` makes the mutants and runs, for each, the tests that reach the changed function. It works
on a copy of the repository. From every module the same number of mutants is drawn by a fixed seed,
so that a run takes minutes. What survives is printed with its change: a test is missing there, or
the change makes no difference.

    python tests/mutation/sample.py                      # all parts
    python tests/mutation/sample.py arrays --per-module 100 --seed 1
    python tests/mutation/sample.py attribution --only scores
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PARTS = {
    "arrays": (["trakdask/arrays/*"], ["tests/arrays"]),
    "attribution": (
        ["trakdask/attribution/*", "trakdask/accessor.py"],
        ["tests/attribution", "tests/test_accessor.py"],
    ),
}
"""For each part of the package: the files to change, and the tests that should notice."""

# Workers are forked from a process that has imported everything but run nothing: threads of dask
# and torch do not survive a fork. No test pins the wording of a message, so no mutant changes one.
SETTINGS = """
[tool.mutmut]
source_paths = ["trakdask/"]
only_mutate = {files}
also_copy = ["kernels/", "README.md"]
process_isolation = "forkserver"
pytest_add_cli_args = ["-p", "no:cacheprovider"]
pytest_add_cli_args_test_selection = {tests}
do_not_mutate_patterns = ['raise \\w+', '^\\s*f?"[^"]*"\\s*[,)]?\\s*$', 'warn\\w*\\(']
timeout_constant = 20.0
"""

STATUS = {0: "survived", 1: "killed", 3: "killed", 33: "no tests", None: "not tried"}


def copied(folder: Path, files: list[str], tests: list[str]) -> None:
    """Copy what git knows of the working tree, and add the settings of mutmut."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    with (folder / "pyproject.toml").open("a") as settings:
        settings.write(SETTINGS.format(files=files, tests=tests))


def mutmut(folder: Path, *arguments: str) -> str:
    """Run mutmut in the copy and return what it printed."""
    environment = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "mutmut", *arguments],
        cwd=folder, env=environment, check=False, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    ).stdout  # fmt: skip


def outcomes(folder: Path) -> dict[str, dict[str, int | None]]:
    """Return the exit code of the tests for every mutant, by module."""
    found = {}
    for path in sorted((folder / "mutants" / "trakdask").rglob("*.py.meta")):
        codes = json.loads(path.read_text("utf-8"))["exit_code_by_key"]
        if codes:
            name = path.relative_to(folder / "mutants").as_posix().removesuffix(".py.meta")
            found[name] = codes
    return found


def tried(part: str, folder: Path, *, per_module: int, seed: int, only: str) -> None:
    """Try a sample of the mutants of one part, and print what came of it."""
    copied(folder, *PARTS[part])
    printed = mutmut(folder, "run", "--max-children", "1", "none")
    modules = {name: codes for name, codes in outcomes(folder).items() if only in name}
    if not modules:
        sys.exit(f"mutmut made no mutants of {part}; it printed:\n{printed[-3000:]}")
    drawn = {
        name: random.Random(f"{seed} {name}").sample(sorted(codes), min(per_module, len(codes)))
        for name, codes in modules.items()
    }
    printed = mutmut(folder, "run", "--max-children", "1", *itertools.chain(*drawn.values()))
    codes = outcomes(folder)
    survivors = []
    for name, chosen in drawn.items():
        counts = Counter(STATUS.get(codes[name][mutant], "timeout") for mutant in chosen)
        shown = ", ".join(f"{n} {status}" for status, n in sorted(counts.items()))
        print(f"{name}: {len(chosen)} of {len(modules[name])} mutants: {shown}")
        survivors += [m for m in chosen if STATUS.get(codes[name][m]) != "killed"]
    if all(codes[name][m] is None for name, chosen in drawn.items() for m in chosen):
        sys.exit(f"mutmut tried no mutant of {part}; it printed:\n{printed[-3000:]}")
    for mutant in survivors:
        print("\n" + mutmut(folder, "show", mutant).strip())


def main() -> None:
    """Read the arguments and try each part in a copy of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {list(PARTS)}")
    parser.add_argument("--per-module", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="modules whose path contains this")
    options = parser.parse_args()
    print(
        f"{datetime.date.today()}, Python {platform.python_version()}, mutmut {version('mutmut')}, "
        f"seed {options.seed}, at most {options.per_module} mutants of a module"
    )
    for part in options.parts or PARTS:
        print(f"\n== {part}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            tried(
                part, Path(folder), per_module=options.per_module, seed=options.seed,
                only=options.only,
            )  # fmt: skip


if __name__ == "__main__":
    main()
