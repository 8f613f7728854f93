"""The commands: the same results as the functions, resumed jobs, messages and exit codes."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext
from multiprocessing import resource_tracker
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xarray as xr
import yaml

import trakdask as td
from tests.command_line.job import MODULE, Run, as_arrays, refused, score_of
from trakdask.command_line import jobs
from trakdask.command_line.configuration import ConfigurationError, read
from trakdask.command_line.jobs import explored, running

FIT = "projector: {kind: fit, proj_dim: 5, n_samples: 30, sketch: {kind: SJLT, proj_dim: 64}}"


def test_every_command__of_one_job(job: Path, run: Run) -> None:
    folder = job.parent
    printed = {}
    for command in ("plan", "featurize", "top-k"):
        done = run(command, job)
        assert done.exit_code == 0, done.output
        printed[command] = done.output
    assert "60 samples" in printed["plan"]
    assert printed["plan"].endswith(f"trakdask featurize {job}\n")
    assert printed["featurize"].endswith(f"trakdask top-k {job}\n")
    quoted = run("plan", job, "--set", "top_k.where=row < 3").output
    assert quoted.endswith(f"{job} '--set=top_k.where=row < 3'\n")
    assert "Rademacher(proj_dim=8" in printed["plan"]
    other = run("plan", job, "--set", "projector={kind: Mask, keep: 9, then: {kind: Identity}}")
    assert "Mask(keep=9, then=Identity(" in other.output
    assert "[c1]" in printed["featurize"]
    scores = score_of(folder)
    # The function is the oracle: features have an oracle of their own.
    top = td.top_k(scores, 3).compute()
    table = pd.read_parquet(folder / "top.parquet").sort_values(["target", "rank"])
    np.testing.assert_array_equal(table.score, top.score.values.ravel())
    np.testing.assert_array_equal(table.position, top.position.values.ravel())
    assert "books" in set(table.source.str.strip("[]"))
    assert "target_name" in printed["top-k"]
    assert printed["top-k"].endswith(f"trakdask explore {job}\n")
    assert max(map(len, printed["top-k"].splitlines()[:-1])) <= 80


def test_commands__of_a_fitted_projector(job: Path, run: Run) -> None:
    job.write_text(job.read_text().replace("projector: {kind: Rademacher, proj_dim: 8}", FIT))
    assert "Components(proj_dim=5)" in run("plan", job).output
    refused(job, run("plan", job, "--set", "projector.proj_dim=many"), "proj_dim, got 'many'\nTry")
    bare = run("plan", job, "--set", "projector.components=false").output
    assert ("Components" in bare, "SJLT" in bare) == (False, True)
    assert not list(job.parent.glob("*.zarr*"))  # a plan fits nothing
    assert (done := run("top-k", job)).exit_code == 0, done.output
    train, targets = (td.open(job.parent / f"{name}.zarr") for name in ("train", "targets"))
    assert train.sizes["proj_dim"] == targets.sizes["proj_dim"] == 5
    assert train.attrs["fit"] == targets.attrs["fit"]
    made = {path: path.stat().st_mtime_ns for path in (job.parent / "train.zarr").rglob("c*")}
    assert run("top-k", job).exit_code == 0
    with running(read(job)):
        assert explored(read(job))[1].sizes["proj_dim"] == 5
    assert made == {path: path.stat().st_mtime_ns for path in made}
    other = run("top-k", job, "--set", "projector.proj_dim=4")
    assert (other.exit_code, "proj_dim" in other.output) == (2, True)
    (job.parent / "targets.zarr").rename(job.parent / "before.zarr")
    assert (done := run("top-k", job, "--set", "data=null")).exit_code == 0, done.output
    again = td.open(job.parent / "targets.zarr")
    np.testing.assert_allclose(again.feature, targets.feature, atol=1e-5)


def test_top_k__where_and_settings(job: Path, run: Run) -> None:
    where = 'source == "web" and row < 30'
    settings = f"top_k.where='{where}'", "top_k.k=2", "projector=null"
    done = run("top-k", job, *(f"--set={setting}" for setting in settings))
    assert done.exit_code == 0, done.output
    table = pd.read_parquet(job.parent / "top.parquet")
    assert len(table) == 6 * 2
    assert set(table.source) == {"web"}
    assert table.row.max() < 30
    kept = yaml.safe_load((job.parent / "top.parquet.yaml").read_text())
    assert kept["top_k"] == {"k": 2, "where": where}
    assert "projector" not in kept
    (job.parent / "top.parquet.yaml").rename(job.parent.parent / "elsewhere.yaml")
    again = run("top-k", job.parent.parent / "elsewhere.yaml")
    *table, line = done.output.splitlines()
    assert again.output.splitlines()[:-1] == table
    assert line.endswith(f"explore {job.parent / 'train.zarr.yaml'}")


def test_evaluate__grades_by_known_samples_and_by_training(job: Path, run: Run) -> None:
    (job.parent / "tiny.py").write_text(
        MODULE
        + "\n\ndef both(n):\n    return checkpoints(n), None\n\n\n"
        + "def train(positions, seed):\n    return X[:6] @ X[positions].sum(0) + seed % 7\n"
    )
    np.save(job.parent / "masks.npy", td.evaluate.subsets(60, 4).values)
    checkpoints = "model.checkpoints={function: tiny:both, item: 0, arguments: {n: 4}}"
    options = ["--set", f"data={{{as_arrays(job)}, trained_on: masks.npy}}", "--set", checkpoints]
    done = run("evaluate", job, *options)
    assert done.exit_code == 0, done.output
    features, targets = (td.open(job.parent / f"{n}.zarr") for n in ("train", "targets"))
    np.testing.assert_array_equal(features.trained_on, td.evaluate.subsets(60, 4).values.T)
    estimator = td.Trak(damping=0.1)
    assert done.output.strip() == td.evaluate.cross_validate(features, targets, estimator).summary
    section = "evaluate={train_fn: tiny:train, n_subsets: 12, seed: 3, store: m, progress: false}"
    done = run("evaluate", job, *options, "--set", section)
    assert done.exit_code == 0, done.output
    scores, masks = td.score(features, targets, estimator), td.evaluate.subsets(60, 12, seed=3)
    assert len(list((job.parent / "m" / "models").glob("*.npy"))) == 12

    def train(positions: np.ndarray, seed: int) -> np.ndarray:
        x = np.random.default_rng(0).standard_normal((60, 4)).astype("f4")
        return x[:6] @ x[positions].sum(0) + seed % 7

    outputs = td.evaluate.retrain(train, masks, 6, progress=False)
    expected = float(td.evaluate.lds(scores, masks, outputs).lds_mean)
    assert f"predict 12 retrained subsets at {expected:.2f}, 95 % interval" in done.output


def test_evaluate__says_what_is_needed_before_anything_is_computed(job: Path, run: Run) -> None:
    refused(job, run("evaluate", job), "td.evaluate.train_on_halves")
    one = "train_fn: tiny:one"
    for key in ("train_fn: tiny:none", *(f"{one}, {other}" for other in _WRONG_OPTIONS)):
        refused(job, run("evaluate", job, "--set", f"evaluate={{{key}}}"), "in evaluate: ")
    settings = "--set", f"evaluate={{{one}}}", "--set", "score={estimator: tracin}"
    refused(job, run("evaluate", job, *settings), "in score: ")


_WRONG_OPTIONS = (
    *("subsets: 4", "n_subsets: many", "fraction: 3", "seed: one", "seeds: [1, 1]"),
    *("progress: later", "store: 3"),
)


def test_verify__and_a_ranking_in_zarr(job: Path, run: Run) -> None:
    folder = job.parent
    assert run("top-k", job, "--set", "outputs.top_k=top.zarr").exit_code == 0
    top = td.top_k(score_of(folder), 3).compute()
    np.testing.assert_array_equal(xr.open_zarr(folder / "top.zarr").score, top.score)
    assert run("verify", folder / "train.zarr", "--checksums").exit_code == 0
    files = (folder / "train.zarr" / "feature").rglob("*")
    chunk = next(path for path in files if path.is_file() and path.name != "zarr.json")
    chunk.write_bytes(chunk.read_bytes()[:-1])
    found = run("verify", folder / "train.zarr", "--checksums")
    assert found.exit_code == 1
    assert chunk.relative_to(folder / "train.zarr").as_posix() in found.output


@pytest.mark.slow
@pytest.mark.parametrize("name", ["closed pipe", "full disk"])
def test_process__that_cannot_print_has_written(tmp_path: Path, name: str) -> None:
    if name == "closed pipe":
        reading, printed = os.pipe()
        os.close(reading)
    else:
        printed = os.open("/dev/full", os.O_WRONLY)
    line = [sys.executable, "-m", "trakdask", "init"]
    done = subprocess.run(line, stdout=printed, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    os.close(printed)
    assert "Traceback" not in done.stderr
    assert read(tmp_path / "trakdask.yaml")["projector"]["kind"] == "SJLT"


@pytest.mark.faults
def test_process__store_on_a_network_that_does_not_answer(job: Path) -> None:
    """The traceback of every request that is under way would be printed when Python ends."""
    options = "{endpoint_url: 'http://127.0.0.1:9', key: k, secret: s}"
    data = f"data={{kind: zarr, store: 's3://b/samples.zarr', storage_options: {options}}}"
    line = [sys.executable, "-m", "trakdask", "plan", job, "--set", data]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 1
    fact, remedy = done.stderr.splitlines()
    assert "http://127.0.0.1:9" in fact
    assert remedy.startswith("Try endpoint_url, key and secret")


def test_init__does_not_overwrite(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "a:on:[red].yaml"  # neither emoji nor markup
    assert path.name in run("init", path).output
    path.write_text("mine")
    assert run("init", path).exit_code == 2
    assert path.read_text() == "mine"
    assert isinstance(run("init", path, "--debug").exception, ConfigurationError)


@pytest.mark.slow
def test_process__that_is_killed_is_resumed_by_the_same_line(
    job: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ("featurize", job)
    killed = subprocess.run(
        [sys.executable, "-m", "trakdask", *line], cwd=job.parent,
        env={**os.environ, "KILLED": "1", "DASK_NUM_WORKERS": "1"},
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL
    store = job.parent / "train.zarr"
    chunks = list((store / "feature").glob("c.*"))
    before = {path: path.stat().st_mtime_ns for path in chunks}
    assert before
    with pytest.raises(td.errors.IncompleteFeaturesError):
        td.open(store)
    monkeypatch.chdir(job.parent)
    with monkeypatch.context() as broken:
        broken.setenv("BROKEN", "1")
        failed = run(*line)
    assert failed.exit_code == 1
    assert "Job error: " in failed.output
    assert "the disk of sample 50 is gone" in failed.output
    assert "Traceback" not in failed.output
    resumed = run(*line)
    assert resumed.exit_code == 0, resumed.output
    assert td.open(store).sizes["sample"] == 60
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_commands__ctrl_c_says_how_to_go_on(
    job: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs, "described_or_stored", interrupted)
    monkeypatch.setattr(logging, "disable", lambda level: None)
    done = run("featurize", job)
    assert done.exit_code == 130
    assert "The same line goes on" in done.output
    assert "Traceback" not in done.output


def test_commands__cluster_that_does_not_start(
    job: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by a client of Dask: one that failed to start stays behind in this process."""

    def failing(**_: object) -> None:
        raise RuntimeError("Cluster failed to start") from OSError(2, "Name not known")

    monkeypatch.setattr("distributed.Client", failing)
    options = "--set", "cluster={dashboard_address: none.invalid}"
    refused(job, run("top-k", job, *options), "it does not start: Name not known\nTry n_workers")


IS_BLOCKED = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"


def test_running__leaves_ctrl_c_to_the_process_of_the_user(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal sends it to all processes; a worker that got it would print a traceback.

    A cluster starts workers from a thread of its own, as Python's multiprocessing does.
    """
    printed: list[bytes] = []

    def start_workers() -> None:
        for _ in range(2):
            resource_tracker.ensure_running()
            printed.append(subprocess.check_output([sys.executable, "-c", IS_BLOCKED]))

    def cluster(**_: object) -> nullcontext[None]:
        thread = threading.Thread(target=start_workers)
        thread.start()
        thread.join()
        return nullcontext()

    monkeypatch.setattr("distributed.Client", cluster)
    with running({"folder": str(job.parent), "cluster": {"n_workers": 2}}):
        assert printed == [b"True\n"] * 2
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
