"""A small job, the rows of its samples, and how its commands are run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import xarray as xr
from typer.testing import Result

import trakdask as td

Run = Callable[..., Result]

MODULE = '''
"""A linear model of random samples; it can kill the process once a block is stored."""
import glob, os, signal
import numpy as np, pandas as pd, torch
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


def samples():
    coords = pd.read_csv("samples.csv")
    return td.from_torch("tiny:Samples", names=["image", "label"], coords=coords, chunks=20)


def all_samples():
    return td.from_arrays({"image": X, "label": LABEL}, coords={"row": np.arange(60)})


def not_samples(kind):
    return 3


def one():
    return td.from_arrays({"x": np.ones((60, 2), "f4")})


def pair():
    return one(), one().isel(sample=slice(6))


def tokens():
    samples = td.from_arrays({"input_ids": np.arange(300).reshape(60, 5)})
    return samples, samples.isel(sample=slice(6))


def training_tokens():
    return tokens()[0]


def word(number):
    return f"<w{number}> "


class Tokenizer:
    def __call__(self, text):
        return {"input_ids": [int(text)]}

    def decode(self, ids):
        return " ".join(f"<w{number}>" for number in ids)


tokenizer = Tokenizer()


def three():
    return (*pair(), 3)
'''
JOB = """
data:
  kind: function
  function: tiny:samples
targets: {kind: function, function: tiny:targets, arguments: {kind: six}}
model:
  build: tiny:build
  checkpoints: {function: tiny:checkpoints, arguments: {n: 2}}
projector: {kind: Rademacher, proj_dim: 8}
stores: {train: train.zarr, targets: targets.zarr}
score: {estimator: trak, damping: 1e-1}
save: {progress: false}
top_k: {k: 3}
outputs: {top_k: top.parquet}
"""
ROWS = pd.DataFrame(np.random.default_rng(1).standard_normal((60, 4)), columns=[*"abcd"])
ROWS = ROWS.assign(c=range(60), label=np.arange(60) % 3)


def job_in(folder: Path) -> Path:
    (folder / "tiny.py").write_text(MODULE)
    rows = (f"{'web' if i % 2 else '[books]'},{i}" for i in range(60))
    (folder / "samples.csv").write_text("\n".join(["source,row", *rows]))
    path = folder / "job.yaml"
    path.write_text(JOB)
    return path


def score_of(folder: Path) -> xr.DataArray:
    train, targets = (td.open(folder / f"{name}.zarr") for name in ("train", "targets"))
    return td.score(train, targets, td.Trak(damping=0.1))


def as_arrays(job: Path) -> str:
    """Write the rows as arrays; return the section that describes them."""
    np.save(job.parent / "x.npy", ROWS[[*"abcd"]].to_numpy("f4"))
    np.save(job.parent / "label.npy", ROWS.label)
    return "kind: arrays, arrays: {image: x.npy, label: label.npy}"


def refused(job: Path, done: Result, words: str) -> None:
    assert done.exit_code == 2, done.output
    fact, remedy = done.output.splitlines()[-2:]
    assert fact.startswith("Configuration error: in ")
    assert remedy.startswith(("Try ", "See "))
    assert words in f"{fact}\n{remedy}"
    for of_python in ("Traceback", "[Errno", "__init__", "<class ", "Error: "):
        assert of_python not in done.output.removeprefix("Configuration error: ")
    assert not (job.parent / "train.zarr").exists()  # nothing was computed
