"""Change the code in small ways and see whether a test fails: mutation testing of a sample.

`mutmut` numbers the mutants of each function. Those whose number ends with the same digit are
tried, a tenth of all and the first of every function, on the tests that mirror the module. What
survives is printed with its change: a test is missing there, or the change makes no difference.

    python tests/mutation/sample.py                                  # every module of SUBJECTS
    python tests/mutation/sample.py trakdask/arrays/gram.py --ending 3
    python tests/mutation/sample.py trakdask/storage --minutes 4     # for each module, at most
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

SUBJECTS = ("trakdask/arrays", "trakdask/attribution", "trakdask/storage")
ALSO = {
    "trakdask/arrays": ["tests/arrays/test_graphs.py"],
    "trakdask/attribution/dampings.py": ["tests/bad_inputs/test_scores.py"],
    "trakdask/attribution/scores.py": ["tests/attribution/test_products.py"],
    "trakdask/storage/appending.py": ["tests/storage/test_assigning.py"],
    "trakdask/storage/blocks.py": [
        "tests/storage/test_saving.py",
        "tests/storage/test_store_format.py",
    ],
    "trakdask/storage/coords.py": [
        "tests/storage/test_assigning.py",
        "tests/storage/test_lazy_coords.py",
    ],
    "trakdask/storage/zarr_stores.py": ["tests/storage/test_s3.py"],
}
"""Tests of a module, or of all modules of a folder, besides those that mirror a module."""

# Workers are forked from a process that has imported everything but run nothing: threads of dask
# and torch do not survive a fork. No test pins the wording of a message, and dask makes the same of
# any `meta`, so no mutant changes one. Tests on worker processes would take most of the time.
SETTINGS = """
[tool.mutmut]
source_paths = ["trakdask/"]
only_mutate = ["{module}"]
also_copy = ["kernels/", "README.md"]
process_isolation = "forkserver"
pytest_add_cli_args = ["-p", "no:cacheprovider"]
pytest_add_cli_args_test_selection = {tests}
do_not_mutate_patterns = [
    'raise \\w+', '^\\s*f?"[^"]*"\\s*[,)]?\\s*$', 'warn\\w*\\(', 'meta=', 'align_arrays=',
]
timeout_constant = 20.0
"""
FAST = "not process and not cluster"

STATUS = {0: "survived", 1: "killed", 3: "killed", 33: "no test", None: "not tried"}


def tests_of(module: str) -> list[str]:
    """Return the tests at the same path below tests/, or those that tests/tested_by.json names."""
    path = Path(module).relative_to("trakdask")
    mirror = Path("tests") / path.parent / f"test_{path.name}"
    listed = json.loads((ROOT / "tests" / "tested_by.json").read_text("utf-8"))
    own = [str(mirror)] if (ROOT / mirror).exists() else [listed[path.as_posix()]]
    return own + ALSO.get(module, []) + ALSO.get(str(Path(module).parent), [])


def copied(folder: Path, module: str) -> None:
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
        settings.write(SETTINGS.format(module=module, tests=["-k", FAST, *tests_of(module)]))


def mutmut(folder: Path, *arguments: str, minutes: float | None = None) -> str:
    """Run mutmut in the copy, end it after some minutes, and return what it printed."""
    environment = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "mutmut", *arguments],
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        return process.communicate(timeout=minutes and 60 * minutes)[0]
    except subprocess.TimeoutExpired:
        return ""
    finally:  # with the processes that it forked
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def tried(module: str, folder: Path, ending: int, minutes: float | None) -> None:
    """Try a tenth of the mutants of one module, and print what came of it."""
    copied(folder, module)
    names = f"*__mutmut_*{ending}"
    printed = mutmut(folder, "run", "--max-children", "1", names, minutes=minutes)
    meta = folder / "mutants" / f"{module}.meta"
    if not meta.exists() or (printed and "Mutant results" not in printed):
        print(
            f"\n{module}: mutmut did not try its mutants; it printed:\n{printed[-3000:]}",
            flush=True,
        )
        return
    codes = json.loads(meta.read_text("utf-8"))["exit_code_by_key"]
    sample = {name: code for name, code in codes.items() if name.endswith(str(ending))}
    counts = Counter(STATUS.get(code, "timeout") for code in sample.values())
    shown = ", ".join(f"{n} {status}" for status, n in sorted(counts.items()))
    print(f"\n{module}: {len(sample)} of {len(codes)} mutants: {shown or 'none'}", flush=True)
    for name, code in sample.items():
        if STATUS.get(code) not in ("killed", "not tried"):
            print("\n" + mutmut(folder, "show", name).strip(), flush=True)


def modules_in(path: str) -> list[str]:
    """Return the modules in a folder, or the one module that the path is."""
    if path.endswith(".py"):
        return [path]
    return [str(each.relative_to(ROOT)) for each in sorted((ROOT / path).glob("[a-z]*.py"))]


def main() -> None:
    """Read the arguments and try the modules one after another, each in a copy of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", default=SUBJECTS, help="modules or folders of trakdask")
    parser.add_argument("--ending", type=int, choices=range(10), default=1)
    parser.add_argument("--minutes", type=float, help="for each module, at most")
    options = parser.parse_args()
    print(
        f"{datetime.date.today()}, Python {platform.python_version()}, mutmut {version('mutmut')}, "
        f"mutants whose number ends with {options.ending}"
    )
    for path in options.paths:
        for module in modules_in(path):
            with tempfile.TemporaryDirectory() as folder:
                tried(module, Path(folder), options.ending, options.minutes)


if __name__ == "__main__":
    main()
