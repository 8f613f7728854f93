"""Bad inputs of open_traker: directories that are not what they should be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.lib.format import open_memmap

from tests.bad_inputs.bad_input import one_test, rows
from trakdask.trak import open_traker


def directory(folder: Path, *, n: int = 6, p: int = 4, ids: tuple[int, ...] = (0, 1)) -> Path:
    """Write the files of a finished run, with zeros in the arrays."""
    run = folder / "run"
    run.mkdir()
    metadata = {"JL dimension": p, "JL matrix type": "normal", "train set size": n}
    (run / "metadata.json").write_text(json.dumps(metadata))
    for id in ids:
        state = {str(id): {"is_featurized": 1, "is_finalized": 1}}
        (run / f"id_{id}.json").write_text(json.dumps(state))
        (run / str(id)).mkdir()
        array(run / str(id) / "grads.mmap", (n, p), "f2")
        array(run / str(id) / "out_to_loss.mmap", (n, 1), "f2")
        array(run / str(id) / "_is_featurized.mmap", (n, 1), "i4")
        array(run / str(id) / "test_grads.mmap", (3, p), "f2")
    return run


def array(path: Path, shape: tuple[int, ...], dtype: str) -> None:
    path.unlink(missing_ok=True)
    open_memmap(path, mode="w+", shape=shape, dtype=dtype)


def opened(change: Callable[[Path], object], *args: object, **kwargs: object) -> Callable:
    """Return a call that opens a directory after a change to it."""

    def call(folder: Path) -> object:
        run = directory(folder)
        change(run)
        return open_traker(run, *args, **kwargs)

    return call


def as_it_is(run: Path) -> None:
    pass


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda run: (run / name).write_text(text)


NOT_FINAL = '{"1": {"is_featurized": 1, "is_finalized": 0}}'

ROWS = [
    *rows(
        "open_traker", FileNotFoundError,
        ("no such folder", lambda f: open_traker(f / "runs"), "/runs'"),
        ("unknown experiment", opened(as_it_is, "val"), "val_grads"),
    ),
    *rows(
        "open_traker", ValueError,
        ("no checkpoint", opened(lambda run: [path.unlink() for path in run.glob("id_*.json")]), "out of the []"),
        ("array of another run", opened(lambda run: array(run / "1/grads.mmap", (6, 5), "f2")), "(6, 4)", "(6, 5)"),
        ("not finalized", opened(write("id_1.json", NOT_FINAL), "test"), "[1]", "final"),
    ),
]  # fmt: skip

test_bad_input = one_test(ROWS)


def test_directory__opens_as_it_is(tmp_path: Path) -> None:
    """The rows fail by their change and nothing else."""
    features, targets = open_traker(directory(tmp_path), "test")
    assert np.isnan(features.feature).all(), "no row is flagged as featurized"
    assert targets.sizes == {"sample": 3, "proj_dim": 4, "checkpoint": 2}
