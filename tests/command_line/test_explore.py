"""The command explore: of stores, and of configurations."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path
from urllib.parse import urlencode

import numpy as np
import pytest
from typer.testing import CliRunner

import trakdask as td
from tests.command_line.job import Run, job_in
from trakdask.command_line.commands import app
from trakdask.command_line.configuration import read
from trakdask.command_line.jobs import explored, running
from trakdask.explorer import Explorer
from trakdask.explorer.pages import page
from trakdask.explorer.view import View


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    job = job_in(tmp_path_factory.mktemp("stores"))
    assert CliRunner().invoke(app, ["featurize", str(job)]).exit_code == 0
    return job.parent


@pytest.fixture
def saved(stores: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(stores)
    return stores


@pytest.mark.parametrize("is_asked", [True, False])
def test_explore__opens_the_address_that_it_prints(
    saved: Path, run: Run, monkeypatch: pytest.MonkeyPatch, is_asked: bool
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setattr(Explorer, "serve", lambda self, *, announce, **_: announce("http://a/"))
    line = "explore train.zarr targets.zarr --view page=corpus"
    done = run(*line.split(), *["--open"] * is_asked)
    assert done.stdout.strip() == "http://a/?page=corpus"
    assert opened == ["http://a/?page=corpus"] * is_asked


@pytest.mark.filterwarnings("ignore::UserWarning")  # too few checkpoints and samples for a good λ
@pytest.mark.parametrize(
    ("samples", "text"),
    [("tokens", "word"), ("tokens", "tokenizer"), ("training_tokens", "tokenizer.decode")],
)
def test_explore__saves_a_view_of_token_ids_as_text(
    saved: Path, run: Run, samples: str, text: str
) -> None:
    view = {"page": "target", "target": 4, "where": 'source == "[books]"', "k": 2}
    line = f"explore train.zarr targets.zarr --samples tiny:{samples} --text tiny:{text}"
    done = run(*line.split(), "--view", urlencode(view), "--save", "v.html")
    assert done.exit_code == 0, done.output
    assert "v.html is written" in done.output
    html = (saved / "v.html").read_text()
    scores = td.score(*(td.open(saved / f"{name}.zarr") for name in ("train", "targets")))
    top = td.top_k(scores.isel(target=[4]), 2, where='source == "[books]"').compute()
    for position in top.position.values.ravel():
        assert f"&lt;w{5 * int(position)}&gt;" in html
    assert not (saved / "train.marks.parquet").exists()
    refused = run(*line.replace(text, "words").split())
    assert "--text tiny:words" in refused.output


@pytest.mark.filterwarnings("ignore::UserWarning")  # too few checkpoints and samples for a good λ
def test_explore__of_a_configuration_computes_what_is_missing(job: Path, run: Run) -> None:
    view = "page=target&target=2"
    done = run("explore", job, "--view", view, "--save", "v.html")
    assert done.exit_code == 0, done.output
    page = (job.parent / "v.html").read_text()
    assert page.count('class="numbers">image: ') == 25  # the target, and twelve at either end
    refused = run("explore", job.parent / "train.zarr")
    assert refused.exit_code == 2
    assert "trakdask.yaml" in refused.output


@pytest.mark.filterwarnings("ignore::UserWarning")  # too few checkpoints and samples for a good λ
def test_explore__of_stores_runs_nothing_and_names_the_job(saved: Path, run: Run) -> None:
    assert run("explore", "train.zarr", "targets.zarr", "--save", "v.html").exit_code == 0
    assert "tiny" not in sys.modules  # whose function returns the targets
    stores = {"train": "train.zarr", "targets": "targets.zarr"}
    _, features, targets, options = explored({"folder": ".", "stores": stores})
    html = page(td.explore(features, targets, **options), View(), [])
    assert f"<code>trakdask explore {saved.absolute()}/train.zarr.yaml</code>" in html


@pytest.mark.filterwarnings("ignore::UserWarning")  # too few checkpoints and samples for a good λ
def test_explore__of_a_configuration_leaves_out_dropped_samples(job: Path, run: Run) -> None:
    text = job.read_text()
    job.write_text(text.replace("tiny:samples", "tiny:all_samples"))
    assert (done := run("featurize", job)).exit_code == 0, done.output
    td.drop(job.parent / "train.zarr", where=lambda features: features.row < 10)
    with running(read(job)):
        _, features, _, options = explored(read(job))
    np.testing.assert_array_equal(options["samples"].row, features.row)


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
