"""Job files: samples from files, options of estimators, and errors before anything is computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

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


TEXT = ROWS[:9].to_csv(index=False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "No columns"),
        (TEXT + '"1,2,3,4,5\n', "EOF"),
        (TEXT[:-3], "column 'label', got none in row 9"),
        (TEXT.replace("0.345584192064786", "O.3"), "O.3"),
        (ROWS.drop(columns="b").to_csv(index=False), "'b'"),
    ],
    ids=["empty", "open quote", "cut", "no number", "no column"],
)
def test_featurize__damaged_csv_is_named(
    job: Path, run: Run, text: str | bytes, words: str
) -> None:
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
        ("projector.proj_dim=0", "proj_dim"),
        ("featurize.model=x", "'model'"),
        ("save.stor=x", "'stor'"),
        ("stores.train=null", "stores.train"),
        ("cluster.workers=2", "'workers'"),
        ("top_k.where=label ==", "label =="),
        ("outputs.top_k=top.csv", "'top.csv'"),
        ("top_k.k=61", "got 61"),
        ("outputs.topk=top.parquet", "'topk'"),
        ("folder=/none/such", "folder"),
        ("projector={kind: fit, columns: 5}", "'columns'"),
        ("data={kind: torch, dataset: 'tiny:Samples'}", "'names'"),
        ("data=null", "train.zarr"),
        ("data.coords=cut.csv", "in data: cut.csv: "),
        ("groups.by=source", "'groups'"),
    ],
)
def test_configuration__refused_before_anything_is_computed(
    job: Path, run: Run, setting: str, words: str
) -> None:
    (job.parent / "cut.csv").write_text('source,row\n"a,b\n')
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
        td.Soft(0.25, td.Absolute(2)): {
            "estimator": "soft",
            "power": 0.25,
            "damping": {"value": 2},
        },
        td.TracIn({"c0": 1}): {"estimator": "tracin", "learning_rates": {"c0": 1}},
        None: {"estimator": None, "power": 1},
    }
    for expected, options in described.items():
        made = with_estimator(options, features)
        assert made.pop("estimator") == expected
        assert made == ({"average": False} if "average" in options else {})


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_job__held_out_samples_choose_the_damping(tmp_path: Path) -> None:
    features, held_out = (td.testing.simulate_features(60, 4, 3, seed=seed) for seed in (0, 1))
    td.save(held_out, tmp_path / "held_out.zarr", progress=False)
    options = {"estimator": "soft", "calibrate": str(tmp_path / "held_out.zarr")}
    made = with_estimator(options, features)["estimator"]
    expected = td.damping(features, "soft", calibrate=held_out).damping
    np.testing.assert_array_equal(made.damping, expected)
