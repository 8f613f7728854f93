"""The commands: the same results as the functions, resumed jobs, messages and exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlencode

import numpy as np
import pandas as pd
import pytest
import xarray as xr
import yaml
from typer.testing import CliRunner, Result

import trakdask as td
from trakdask.command_line.commands import app
from trakdask.command_line.configuration import ConfigurationError, read
from trakdask.command_line.jobs import explored, running, with_estimator
from trakdask.explorer import View
from trakdask.explorer.pages import page

Run = Callable[..., Result]
RunProcess = Callable[..., subprocess.CompletedProcess[str]]

MODULE = '''
"""A linear model of random samples; it can kill the process once a block is stored."""
import glob, os, signal
import numpy as np, torch
import trakdask as td

X = np.random.default_rng(0).standard_normal((60, 4)).astype("f4")
LABEL = np.arange(60) % 3


class Samples:
    def __len__(self):
        return 60

    def __getitem__(self, i):
        if os.environ.get("KILLED") and glob.glob("train.zarr/feature/c.*"):
            os.kill(os.getpid(), signal.SIGKILL)
        if i == 50 and os.environ.get("BROKEN"):
            raise OSError("the disk of sample 50 is gone")
        return X[i], LABEL[i]


def build():
    return torch.nn.Linear(4, 3)


def checkpoints(n):
    torch.manual_seed(0)
    return {f"[c{i}]": build().state_dict() for i in range(n)}


def targets(kind=""):
    return td.from_arrays({"image": X[:6] + 1, "label": LABEL[:6]}, coords={"name": list("uvwxyz")})


def not_samples(kind):
    return 3


def one():
    return td.from_arrays({"x": np.ones((60, 2), "f4")})


def pair():
    return one(), one().isel(sample=slice(6))


def three():
    return (*pair(), 3)
'''
JOB = """
data:
  kind: torch
  dataset: tiny:Samples
  names: [image, label]
  collate_fn: torch.utils.data:default_collate
  coords: samples.csv
  chunks: 20
targets: {kind: function, function: tiny:targets, arguments: {kind: six}}
model:
  build: tiny:build
  checkpoints: {function: tiny:checkpoints, arguments: {n: 2}}
projector: {kind: Rademacher, proj_dim: 8}
stores: {train: train.zarr, targets: targets.zarr}
score: {estimator: trak, damping: 1e-1}
save: {progress: false}
top_k: {k: 3}
groups: {by: source}
outputs: {score: scores.zarr, top_k: top.parquet, groups: groups.parquet}
"""
FIT = "projector: {kind: fit, proj_dim: 5, n_samples: 30, sketch: {kind: SJLT, proj_dim: 64}}"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Return the file of a job on threads, in a folder with what it needs."""
    return job_in(tmp_path)


def job_in(folder: Path) -> Path:
    (folder / "tiny.py").write_text(MODULE)
    rows = (f"{'web' if i % 2 else '[books]'},{i}" for i in range(60))
    (folder / "samples.csv").write_text("\n".join(["source,row", *rows]))
    path = folder / "job.yaml"
    path.write_text(JOB)
    return path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run a command in this process, which is cheap."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str | Path) -> Result:
        sys.modules.pop("tiny", None)  # that of another test
        return CliRunner().invoke(app, list(map(str, arguments)))

    return run


@pytest.fixture
def run_process(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command in a process of its own, as users do."""

    def run(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "trakdask", *map(str, arguments)],
            cwd=tmp_path,
            env={**os.environ, "COLUMNS": "200", **variables},
            capture_output=True,
            text=True,
            timeout=280,
        )

    return run


def score_of(folder: Path) -> xr.DataArray:
    train, targets = (td.open(folder / f"{name}.zarr") for name in ("train", "targets"))
    return td.score(train, targets, td.Trak(damping=0.1))


def test_every_command__of_one_job(job: Path, run: Run) -> None:
    folder = job.parent
    printed = {}
    for command in ("plan", "featurize", "score", "top-k", "groups"):
        done = run(command, job)
        assert done.exit_code == 0, done.output
        printed[command] = done.output
    assert "60 samples" in printed["plan"]
    assert "Rademacher(proj_dim=8" in printed["plan"]
    other = run("plan", job, "--set", "projector={kind: Mask, keep: 9, then: {kind: Identity}}")
    assert "Mask(keep=9, then=Identity(" in other.output
    assert "[c1]" in printed["featurize"]
    scores = score_of(folder)
    np.testing.assert_array_equal(xr.open_zarr(folder / "scores.zarr").score, scores)
    # The function is the oracle: features have an oracle of their own.
    top = td.top_k(scores, 3).compute()
    table = pd.read_parquet(folder / "top.parquet").sort_values(["target", "rank"])
    np.testing.assert_array_equal(table.score, top.score.values.ravel())
    np.testing.assert_array_equal(table.position, top.position.values.ravel())
    assert "books" in set(table.source.str.strip("[]"))
    assert "target_name" in printed["top-k"]
    assert printed["top-k"].endswith(f"trakdask explore {job}\n")
    assert max(map(len, printed["top-k"].splitlines()[:-1])) <= 80
    sums = pd.read_parquet(folder / "groups.parquet").set_index(["source", "target"]).score
    web = np.arange(60) % 2 == 1
    np.testing.assert_allclose(sums["web"], scores.values[web].sum(0), rtol=1e-4, atol=1e-6)
    assert "[books]" in printed["groups"]


def test_commands__of_a_fitted_projector(job: Path, run: Run) -> None:
    job.write_text(job.read_text().replace("projector: {kind: Rademacher, proj_dim: 8}", FIT))
    assert "Components(proj_dim=5)" in run("plan", job).output
    bare = run("plan", job, "--set", "projector.components=false").output
    assert ("Components" in bare, "SJLT" in bare) == (False, True)
    assert not list(job.parent.glob("*.zarr*"))  # a plan fits nothing
    assert (done := run("top-k", job)).exit_code == 0, done.output
    train, targets = (td.open(job.parent / f"{name}.zarr") for name in ("train", "targets"))
    assert train.sizes["proj_dim"] == targets.sizes["proj_dim"] == 5
    assert train.attrs["fit"] == targets.attrs["fit"]
    made = {path: path.stat().st_mtime_ns for path in (job.parent / "train.zarr").rglob("c*")}
    assert run("groups", job).exit_code == 0
    with running(read(job)):
        assert explored(read(job))[1].sizes["proj_dim"] == 5
    assert made == {path: path.stat().st_mtime_ns for path in made}
    other = run("top-k", job, "--set", "projector.proj_dim=4")
    assert (other.exit_code, "proj_dim" in other.output) == (2, True)
    (job.parent / "targets.zarr").rename(job.parent / "before.zarr")
    assert (done := run("top-k", job, "--set", "data=null")).exit_code == 0, done.output
    again = td.open(job.parent / "targets.zarr")
    np.testing.assert_allclose(again.feature, targets.feature, atol=1e-5)


@pytest.mark.parametrize("ending", [".parquet", ".zarr"])
def test_credit__and_intervals_of_top_k(job: Path, run: Run, ending: str) -> None:
    folder, path = job.parent, f"shares{ending}"
    five = "--set", "model.checkpoints.arguments.n=5"
    done = run("credit", job, *five, "--set=credit.by=source", f"--set=outputs.credit={path}")
    assert done.exit_code == 0, done.output
    train, targets = (td.open(folder / f"{name}.zarr") for name in ("train", "targets"))
    expected = td.credit(train, targets, td.Trak(damping=0.1), by="source").compute()
    if ending == ".parquet":
        found = pd.read_parquet(folder / path).set_index("source").to_xarray()
    else:
        found = xr.open_zarr(folder / path).compute()
    for name in ("share", "lower", "upper", "is_certain", "samples"):
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
    first, second = expected.sortby("share", ascending=False).source.values
    assert done.output.index(first) < done.output.index(second)
    options = "--set=intervals.level=0.5", "--set=top_k.rank_by=lower"
    assert (done := run("top-k", job, *five, *options)).exit_code == 0, done.output
    bounds = td.intervals(train, targets, td.Trak(damping=0.1), level=0.5)
    top = td.top_k(bounds, 3, rank_by="lower").compute()
    table = pd.read_parquet(folder / "top.parquet").sort_values(["target", "rank"])
    for name in ("score", "lower", "upper", "position"):
        np.testing.assert_array_equal(table[name], top[name].values.ravel())
    assert "upper" in done.output


def test_credit__of_two_checkpoints_computes_nothing(job: Path, run: Run) -> None:
    done = run("credit", job, "--set=credit.by=source")
    assert (done.exit_code, "5 or more checkpoints" in done.output) == (2, True)
    assert not (job.parent / "train.zarr").exists()


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
    assert line.endswith(f"explore {job.parent / 'train.zarr'} {job.parent / 'targets.zarr'}")


ROWS = pd.DataFrame(np.random.default_rng(1).standard_normal((60, 4)), columns=[*"abcd"])
ROWS = ROWS.assign(c=range(60), label=np.arange(60) % 3)
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
    np.save(job.parent / "x.npy", ROWS[[*"abcd"]].to_numpy("f4"))
    np.save(job.parent / "label.npy", ROWS.label)
    data = "data={kind: arrays, arrays: {image: x.npy, label: label.npy}}"
    assert run("featurize", job, "--set", data, "--set", "stores.train=npy.zarr").exit_code == 0
    expected = td.open(job.parent / "npy.zarr").feature
    np.testing.assert_allclose(td.open(job.parent / "train.zarr").feature, expected, rtol=1e-5)


def test_featurize__knows_what_checkpoints_were_trained_on(job: Path, run: Run) -> None:
    masks = np.random.default_rng(0).random((2, len(ROWS))) < 0.5
    np.save(job.parent / "masks.npy", masks)
    np.save(job.parent / "x.npy", ROWS[[*"abcd"]].to_numpy("f4"))
    np.save(job.parent / "label.npy", ROWS.label)
    files = "arrays: {image: x.npy, label: label.npy}, trained_on: masks.npy"
    done = run("featurize", job, "--set", f"data={{kind: arrays, {files}}}")
    assert done.exit_code == 0, done.output
    np.testing.assert_array_equal(td.open(job.parent / "train.zarr").trained_on, masks.T)


def halves(job: Path) -> list[str]:
    """Write samples of which it is known what four checkpoints were trained on."""
    masks = td.evaluate.subsets(60, 4).values
    np.save(job.parent / "masks.npy", masks)
    np.save(job.parent / "x.npy", ROWS[[*"abcd"]].to_numpy("f4"))
    np.save(job.parent / "label.npy", ROWS.label)
    files = "arrays: {image: x.npy, label: label.npy}, trained_on: masks.npy"
    data = f"data={{kind: arrays, {files}}}"
    checkpoints = "model.checkpoints={function: tiny:both, item: 0, arguments: {n: 4}}"
    return ["--set", data, "--set", checkpoints]


def test_evaluate__grades_by_known_samples_and_by_training(job: Path, run: Run) -> None:
    (job.parent / "tiny.py").write_text(
        MODULE
        + "\n\ndef both(n):\n    return checkpoints(n), None\n\n\n"
        + "def train(positions, seed):\n    return X[:6] @ X[positions].sum(0) + seed % 7\n"
    )
    options = halves(job)
    done = run("evaluate", job, *options)
    assert done.exit_code == 0, done.output
    features, targets = (td.open(job.parent / f"{n}.zarr") for n in ("train", "targets"))
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
    refused(job, run("evaluate", job), "td.train_on_halves")
    for key in ("train_fn: tiny:none", "train_fn: tiny:one, subsets: 4"):
        refused(job, run("evaluate", job, "--set", f"evaluate={{{key}}}"), "in evaluate: ")


TEXT = ROWS[:9].to_csv(index=False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "No columns"),
        (TEXT.encode("utf-16"), "utf-8"),
        (TEXT + "1,2,3,4,5,6,7\n", "line 11"),
        (TEXT + '"1,2,3,4,5\n', "EOF"),
        (TEXT[:-3], "column 'label', got nan in row 9"),
        (TEXT.replace("0.345584192064786", "O.3"), "'a', got O.3 in row 1"),
        (ROWS.drop(columns="b").to_csv(index=False), "'b'"),
    ],
    ids=["empty", "encoding", "more fields", "open quote", "cut", "no number", "no column"],
)
def test_featurize__damaged_csv_is_named(
    job: Path, run: Run, text: str | bytes, words: str
) -> None:
    done = featurize_csv(job, run, TEXT, text)
    refused(job, done, words)
    assert f"in data: {job.parent}/p1.csv: " in done.output


def test_info_verify_export__of_a_store(job: Path, run: Run) -> None:
    folder = job.parent
    assert run("top-k", job, "--set", "outputs.top_k=top.zarr").exit_code == 0
    assert "60 sample, 8 proj_dim, 2 checkpoint" in run("info", folder / "train.zarr").output
    assert run("verify", folder / "train.zarr", "--checksums").exit_code == 0
    files = (folder / "train.zarr" / "feature").rglob("*")
    chunk = next(path for path in files if path.is_file() and path.name != "zarr.json")
    chunk.write_bytes(chunk.read_bytes()[:-1])
    found = run("verify", folder / "train.zarr", "--checksums")
    assert found.exit_code == 1
    assert chunk.relative_to(folder / "train.zarr").as_posix() in found.output
    for name in ("copy.parquet", "copy.nc", "copy.csv"):
        assert run("export", folder / "top.zarr", folder / name).exit_code == 0, name
    assert run("export", folder / "copy.parquet", folder / "again.csv").exit_code == 0
    copied = xr.open_dataset(folder / "copy.nc")
    top = xr.open_zarr(folder / "top.zarr")
    np.testing.assert_array_equal(copied.score, top.score)
    frame = pd.read_parquet(folder / "copy.parquet")
    assert len(frame) == 6 * 3
    for name in ("copy.csv", "again.csv"):
        read = pd.read_csv(folder / name, dtype={"score": "f4"})
        pd.testing.assert_frame_equal(read, frame, check_dtype=False, check_categorical=False)
    (folder / "precious.nc").write_text("mine")
    for result, to, words in (
        ("copy.parquet", "table.nc", "try result.csv"),
        ("top.zarr", "copy.xlsx", "copy.xlsx"),
        ("top.zarr", "precious.nc", "precious.nc"),
        ("none.parquet", "none.csv", "none.parquet"),
    ):
        done = run("export", folder / result, folder / to)
        assert (done.exit_code, words in done.output) == (2, True), to
    assert (folder / "precious.nc").read_text() == "mine"


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
        ("groups.by=sources", "'sources'"),
        ("groups.buy=source", "'buy'"),
        ("data.coords=cut.csv", "in data: cut.csv: "),
    ],
)
def test_configuration__refused_before_anything_is_computed(
    job: Path, run: Run, setting: str, words: str
) -> None:
    (job.parent / "cut.csv").write_text('source,row\n"a,b\n')
    command = "groups" if setting.startswith("groups") else "top-k"
    refused(job, run(command, job, "--set", setting), words)


def refused(job: Path, done: Result, words: str) -> None:
    assert done.exit_code == 2, done.output
    assert "Configuration error: " in done.output
    assert words in done.output
    assert "Traceback" not in done.output
    assert not (job.parent / "train.zarr").exists()  # nothing was computed


@pytest.mark.parametrize("name", ["train.zarr.yaml", "top.parquet.yaml", "top.parquet/notes.txt"])
def test_top_k__files_of_the_user_stay(job: Path, run: Run, name: str) -> None:
    path = job.parent / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    refused(job, run("top-k", job), name.partition("/")[0])
    assert path.read_text() == "mine"


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
    assert (done.returncode == 0) == (name == "closed pipe"), done.stderr
    assert "Traceback" not in done.stderr
    assert read(tmp_path / "trakdask.yaml")["projector"]["kind"] == "SJLT"


def test_init__does_not_overwrite(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "a:on:[red].yaml"  # neither emoji nor markup
    assert path.name in run("init", path).output
    path.write_text("mine")
    assert run("init", path).exit_code == 2
    assert path.read_text() == "mine"
    assert isinstance(run("init", path, "--debug").exception, ConfigurationError)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    job = job_in(tmp_path_factory.mktemp("stores"))
    assert CliRunner().invoke(app, ["featurize", str(job)]).exit_code == 0
    return job.parent


@pytest.fixture
def saved(stores: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(stores)
    return stores


@pytest.mark.filterwarnings("ignore::UserWarning")  # too few checkpoints and samples for a good λ
@pytest.mark.parametrize("samples", ["tiny:pair", "tiny:one"])
def test_explore__saves_a_view_of_two_stores(saved: Path, run: Run, samples: str) -> None:
    where = urlencode(
        {"page": "target", "target": 4, "where": 'source == "[books]"', "k": 2, "damping": 0.1}
    )
    line = f"explore train.zarr targets.zarr --samples {samples} --view {where} --save v.html"
    done = run(*line.split())
    assert done.exit_code == 0, done.output
    assert "v.html is written" in done.output
    page = (saved / "v.html").read_text()
    scores = score_of(saved).isel(target=[4])
    top = td.top_k(scores, 2, where=scores.source == "[books]").compute()
    for position in top.position.values.ravel():
        assert f"{position:g}" in page
    assert "[books]" in page
    assert not (saved / "train.marks.parquet").exists()


@pytest.mark.filterwarnings("ignore::UserWarning")  # too few checkpoints and samples for a good λ
def test_explore__of_a_configuration_computes_what_is_missing(job: Path, run: Run) -> None:
    view = "page=target&target=2&damping=0.1"
    done = run("explore", job, "--view", view, "--save", "v.html")
    assert done.exit_code == 0, done.output
    page = (job.parent / "v.html").read_text()
    assert page.count('class="numbers">image: ') == 25  # the target, and twelve at either end
    refused = run("explore", job.parent / "train.zarr")
    assert refused.exit_code == 2
    assert "trakdask.yaml" in refused.output


@pytest.mark.filterwarnings("ignore::UserWarning")  # too few checkpoints and samples for a good λ
def test_explore__shows_the_files_of_the_job_that_wrote_a_store_and_runs_nothing(
    job: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(job.parent)
    rows = Path("rows.csv")
    rows.write_text(
        "\n".join(["row,label,a,b", *(f"{i},{i % 3},{i / 7},{i / 9}" for i in range(60))])
    )
    data = (
        "kind: csv, source: rows.csv, variables: {image: [a, b, b, a], label: label}, coords: [row]"
    )
    others = JOB.partition("targets:")[2].replace("by: source", "by: row")
    job.write_text(f"data: {{{data}}}\ntargets:{others}")
    assert run("featurize", job).exit_code == 0

    def has_content(row: int, position: int, *stores: str) -> bool:
        view = f"page=sample&sample={position}&damping=0.1"
        done = run("explore", *stores, "--view", view, "--save", "v.html")
        assert done.exit_code == 0, done.output
        return f"image: {row / 7:.4g}, {row / 9:.4g}" in Path("v.html").read_text()

    stores = "train.zarr", "targets.zarr"
    assert has_content(57, 57, *stores)
    assert "tiny" not in sys.modules  # whose function returns the targets
    td.drop("train.zarr", where=lambda features: features.row < 10)
    assert has_content(57, 47, *stores)
    assert has_content(57, 47, "job.yaml")
    kept = Path("train.zarr.yaml")
    text = kept.read_text()
    kept.write_text(text.replace("rows.csv", f"file://{rows.absolute()}"))
    assert not has_content(57, 47, *stores)  # no URL is opened, which could be any
    kept.write_text(text)
    rows.write_text(rows.read_text().partition("\n59")[0])
    assert not has_content(57, 47, *stores)
    described = {"folder": ".", "stores": dict(zip(("train", "targets"), stores, strict=True))}
    _, features, targets, options = explored(described)
    html = page(td.explore(features, targets, **options), View(), [])
    assert f"<code>trakdask explore {kept.absolute()}</code>" in html


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ("--samples tiny:three", 2, "tiny:three"),
        ("--view page=start", 2, "'start'"),
        ("--model none:model", 2, "none:model"),
        ("--preprocess tiny:pair", 1, "model=td.Model"),
    ],
)
def test_explore__refused(saved: Path, run: Run, options: str, code: int, words: str) -> None:
    done = run("explore", "train.zarr", "targets.zarr", *options.split())
    assert done.exit_code == code, done.output
    assert words in done.output
    assert "Traceback" not in done.output


@pytest.mark.slow
def test_process__that_is_killed_is_resumed_by_the_same_line(
    job: Path, run: Run, run_process: RunProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ("featurize", job)
    killed = run_process(*line, KILLED="1", DASK_NUM_WORKERS="1")
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


def test_import__loads_nothing_that_a_shell_would_wait_for(run_python, tmp_path: Path) -> None:
    code = (
        "import sys, trakdask.command_line.commands\n"
        "print([n for n in ('torch', 'dask', 'distributed') if n in sys.modules])"
    )
    assert run_python("-c", code, cwd=tmp_path).strip() == "[]"


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
