"""Job files: samples from files, options of estimators, and errors before anything is computed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import xarray as xr
import zarr

import trakdask as td
from tests.command_line.job import ROWS, Result, Run, as_arrays, refused
from trakdask.command_line.jobs import with_estimator

CSV = {"kind": "csv", "source": "p*.csv", "variables": {"image": [*"abcd"], "label": "label"}}


def featurize_csv(job: Path, run: Run, *texts: str | bytes, **data: object) -> Result:
    for i, text in enumerate(texts):
        (job.parent / f"p{i}.csv").write_bytes(text.encode() if isinstance(text, str) else text)
    return run("featurize", job, "--set", f"data={CSV | data}")


def test_featurize__of_csv_files_equals_that_of_arrays(job: Path, run: Run) -> None:
    """One column is of integers, and one file of its header alone."""
    parts = (part.to_csv(index=False) for part in (ROWS[:37], ROWS[:0], ROWS[37:]))
    done = featurize_csv(job, run, *parts)
    assert done.exit_code == 0, done.output
    data = f"data={{{as_arrays(job)}}}"
    assert run("featurize", job, "--set", data, "--set", "stores.train=npy.zarr").exit_code == 0
    expected = td.open(job.parent / "npy.zarr").feature
    np.testing.assert_allclose(td.open(job.parent / "train.zarr").feature, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "data",
    [
        {"arrays": "all.npz", "coords": ["author"]},
        {"arrays": {"image": "all.npz:image", "label": "all.npz"}, "coords": "rows.csv"},
        {"arrays": {"image": "x.npy", "label": "other.npz:[y]"}, "coords": {"author": "all.npz"}},
    ],
)
def test_featurize__of_npz_files_equals_that_of_npy(job: Path, run: Run, data: dict) -> None:
    folder, section = job.parent, as_arrays(job)
    author = np.array(["bob", "zoe"] * 30)
    np.savez(folder / "all.npz", image=np.load(folder / "x.npy"), label=ROWS.label, author=author)
    np.savez(folder / "other.npz", **{"[y]": ROWS.label, "more": author})
    pd.DataFrame({"author": author}).to_csv(folder / "rows.csv", index=False)
    for store, described in {"npy": f"{{{section}}}", "train": {"kind": "arrays", **data}}.items():
        settings = f"data={described}", f"stores.train={store}.zarr"
        done = run("featurize", job, *(f"--set={setting}" for setting in settings))
        assert done.exit_code == 0, done.output
    made, expected = (td.open(folder / f"{store}.zarr") for store in ("train", "npy"))
    np.testing.assert_array_equal(made.feature, expected.feature)
    assert made.author.values.tolist() == author.tolist()


def as_zarr(job: Path) -> str:
    image = ROWS[[*"abcd"]].to_numpy("f4")
    samples = xr.Dataset({"image": (("sample", "x"), image)}, {"label": ("sample", ROWS.label)})
    samples.to_zarr(job.parent / "rows.zarr", consolidated=False)
    return "kind: zarr, store: rows.zarr"


@pytest.mark.parametrize(
    ("describe", "projector"),
    [
        (as_arrays, "{kind: Rademacher, proj_dim: 8}"),
        (as_zarr, "{kind: fit, proj_dim: 5, n_samples: 30, sketch: {kind: SJLT, proj_dim: 64}}"),
    ],
)
def test_job__goes_on_after_its_folder_was_moved_or_touched(
    job: Path, run: Run, describe: Callable[[Path], str], projector: str
) -> None:
    settings = f"--set=data={{{describe(job)}}}", f"--set=projector={projector}"
    (job.parent / "job").mkdir()
    before = job.parent / "job"
    for path in job.parent.glob("*.*"):
        path.rename(before / path.name)
    assert (done := run("top-k", before / job.name, *settings)).exit_code == 0, done.output
    expected = pd.read_parquet(before / "top.parquet")
    shutil.copytree(before, copied := job.parent / "copied")
    for path in (*copied.glob("*.npy"), copied / "rows.zarr"):
        if path.exists():
            os.utime(path, (1, 1))
    chunks = [*copied.glob("*.zarr/*/c*")]
    made = [path.stat().st_mtime_ns for path in chunks]
    again = run("top-k", copied / job.name, *settings, "--set=outputs.top_k=again.parquet")
    assert again.exit_code == 0, again.output
    pd.testing.assert_frame_equal(pd.read_parquet(copied / "again.parquet"), expected)
    assert [path.stat().st_mtime_ns for path in chunks] == made
    if describe == as_arrays:
        x = np.load(copied / "x.npy")
        x[40, 2] += 1
        np.save(copied / "x.npy", x)
    else:
        zarr.open_array(copied / "rows.zarr", path="image", mode="r+")[40, 2] += 1
    changed = run("top-k", copied / job.name, *settings)
    assert (changed.exit_code > 0, "samples-" in changed.output) == (True, True), changed.output


TEXT = ROWS[:9].to_csv(index=False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "No columns"),
        (TEXT + '"1,2,3,4,5\n', "EOF"),
        (TEXT[:-3], "column 'label', got none in row 9"),
        (TEXT.replace("0.345584192064786", "O.3"), "O.3"),
        (ROWS.drop(columns="b").to_csv(index=False), "got 'b'\nTry one of these"),
    ],
    ids=["empty", "open quote", "cut", "no number", "no column"],
)
def test_featurize__damaged_csv(job: Path, run: Run, text: str, words: str) -> None:
    done = featurize_csv(job, run, TEXT, text)
    refused(job, done, words)
    assert f"in data: {job.parent}/p1.csv: " in done.output


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("data.kind=tabel", "'tabel'"),
        ("data={kind: function, function: 'tiny:targets', item: 7}", "named 7"),
        ("targets.item=one", "'one'"),
        ("targets.function=tiny:not_samples", "got int"),
        ("model.task=clasification", "'clasification'"),
        ("model.checkpoints=none/*.pt", "none/*.pt"),
        ("featurize.model=x", "'model'"),
        ("stores.train=null", "stores.train"),
        ("cluster.workers=2", "'workers'"),
        ("top_k.where=label ==", "label =="),
        ("outputs.top_k=top.csv", "'top.csv'"),
        ("top_k.k=61", "got 61"),
        ("outputs.topk=top.parquet", "'topk'"),
        ("folder=/none/such", "folder"),
        ("projector={kind: fit, columns: 5}", "'columns'"),
        ("data=null", "train.zarr"),
        ("data={kind: arrays, arrays: all.npz, coords: cut.csv}", "in data: cut.csv: "),
        ("data={kind: arrays, arrays: x.npy}", "got 'x.npy'\nTry arrays: {"),
        ("data={kind: arrays, arrays: {image: 3}}", "arrays.image, got 3"),
        ("data={kind: arrays, arrays: {image: 'all.npz:imag'}}", "all.npz:imag, which has only "),
        ("data={kind: arrays, arrays: all.npz, coords: label}", "Try coords: [label]"),
        ("data={kind: arrays, arrays: all.npz, coords: [lable]}", "got 'lable'"),
        ("data={kind: arrays}", "the key 'arrays'"),
        ("data={kind: arrays, arrays: {image: empty.npy}}", "got 'empty.npy'"),
        ("data={kind: arrays, arrays: all.npz, coords: {name: objects.npz}}", "text in objects"),
        ("data={kind: arrays, arrays: all.npz, coords: source}", "Try coords: metadata.csv"),
        ("data.trained_on=samples.csv", "expected a complete .npy or .npz file, got 'samples.csv'"),
        ("data={kind: csv, source: samples.csv, variables: row}", "as variables, got 'row'"),
        ("targets.arguments=[3]", "arguments, got [3]"),
        ("targets.function=3", "function = 'package.module:callable'"),
        ("model.checkpoints=3", "as checkpoints, got 3"),
        ("model.checkpoints.argument=3", "Try 'arguments'"),
        ("projector.projdim=3", "Try 'proj_dim'"),
        ("save.retris=3", "Try 'retries'"),
        ("score.dampin=3", "Try 'damping'"),
        ("top_k.whre=label == 3", "Try 'where'"),
        ("cluster.n_workers=two", "n_workers, got 'two'\nTry n_workers: 2"),
        ("outputs.top_k=[top.parquet]", "text as top_k"),
        ("data={kind: arrays, arrays: {x: none.npy}}", "directory: none.npy\nTry another path"),
        ("data={kind: zarr, store: none.zarr}", "none.zarr does not exist\nTry another path"),
        (
            "data={kind: arrays, arrays: {imag: 'all.npz:image'}}",
            "\nTry samples.rename({'imag': 'image'})",
        ),
        ("data.function=tiny:smples", "no attribute 'smples'\nTry 'tiny:samples'"),
        ("model.checkpoints=none.pt", "/none.pt\nTry another path"),
        ("score.damping={valu: 3}", "got 'valu'\nTry 'value'"),
        ("score.power=2", "got 'power'\nSee"),
        ("score={estimator: tracin}", "the key 'learning_rates', got []\nSee"),
        ("save.estimator=sof", "'sof'\nTry 'soft'"),
        ("save.dtype=float8", "in save: expected dtype"),
        ("stores.targets=.", "which holds"),
    ],
)
def test_top_k__refused_at_once(job: Path, run: Run, setting: str, words: str) -> None:
    (job.parent / "cut.csv").write_text('source,row\n"a,b\n')
    np.savez(job.parent / "objects.npz", name=np.array(["a", None], object))
    (job.parent / "empty.npy").touch()
    np.savez(job.parent / "all.npz", image=np.ones((60, 4), "f4"), label=ROWS.label)
    refused(job, run("top-k", job, "--set", setting), words)


@pytest.mark.filterwarnings("default")  # to be printed
def test_top_k__files_of_the_user_stay(job: Path, run: Run) -> None:
    mine = job.parent / "top.parquet" / "notes.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    refused(job, run("top-k", job), "top.parquet")
    kept = job.parent / "train.zarr.yaml"
    kept.write_text("mine")
    done = run("featurize", job)
    assert (done.exit_code, "train.zarr.yaml" in done.output) == (0, True), done.output
    assert mine.read_text() == kept.read_text() == "mine"


def test_job__options_of_an_estimator_make_its_value() -> None:
    features = td.testing.simulate_features(60, 4, 3)
    described = {
        td.Trak(): {"average": False},
        td.Trak(damping="trace"): {"damping": "trace"},
        td.Soft(wrong_classes=False): {"estimator": "soft", "wrong_classes": False},
        td.Soft(1, td.Absolute(2)): {"estimator": "soft", "power": 1, "damping": {"value": 2}},
        td.TracIn({"c0": 1}): {"estimator": "tracin", "learning_rates": {"c0": 1}},
        None: {"estimator": None, "power": 1},
    }
    for expected, options in described.items():
        made = with_estimator(options, features, None)
        assert made.pop("estimator") == expected
        assert made == ({"average": False} if "average" in options else {})


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_job__held_out_samples_choose_the_damping(tmp_path: Path) -> None:
    features, held_out = (td.testing.simulate_features(60, 4, 3, seed=seed) for seed in (0, 1))
    td.save(held_out, tmp_path / "held_out.zarr", progress=False)
    options = {"estimator": "soft", "calibrate": str(tmp_path / "held_out.zarr")}
    with mock.patch.object(td, "open", wraps=td.open) as opened:
        made = with_estimator(options, features, {"auto_mkdir": False})["estimator"]
    assert opened.call_args.kwargs == {"storage_options": {"auto_mkdir": False}}
    expected = td.damping(features, "soft", calibrate=held_out).damping
    np.testing.assert_array_equal(made.damping, expected)
