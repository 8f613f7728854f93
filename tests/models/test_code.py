"""Changed code under an unchanged name: other digests, and features that do not meet."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn

import trakdask as td
from trakdask.models.modules import code_digests
from trakdask.provenance import as_values

SOURCE = """
import functools
from torch import nn

def scaled(x, by=1.0):
    return by * x

class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.power = 1

    def encode(self, x):
        return x ** self.power

def logged(function):
    @functools.wraps(function)
    def call(*args):
        return function(*args)
    return call

class Net(Base):
    names = "one"

    def __init__(self):
        super().__init__()
        self.fc = nn.Sequential(nn.Linear(4, 3), nn.ReLU())

    @logged
    def forward(self, x):
        if self.names in {"one", "two", "three"}:
            x = scaled(x)
        return self.fc(self.encode(x)) + 1

class MyTask:
    variables = ("x", "label")

    def output(self, forward, batch):
        return forward(batch["x"])[:, 0]

    def out_to_loss(self, forward, batch):
        return 2 * batch["label"]

build = lambda: Net()
"""


def namespace(source: str) -> dict:
    """Run the source as the cells of a notebook are: there is no file that has it."""
    names = {"__name__": "__main__"}
    exec(compile(source, "<cell>", "exec"), names)
    return names


def digests(source: str) -> Mapping[str, str]:
    names = namespace(source)
    return code_digests(names["build"](), names["MyTask"](), names["build"])


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        ("import functools", "import functools\n\n# a comment", ""),
        ("def forward(self, x):", 'def forward(self, x):\n        """Docs."""', ""),
        ("build = lambda: Net()", "def build():\n    return Net()", ""),
        ("+ 1", "- 1", "Net"),
        ("return function(*args)", "return 2 * function(*args)", "Net"),
        ("by * x", "by + x", "Net"),
        ("by=1.0", "by=2.0", "Net"),
        ("self.power = 1", "self.power = 2", "Net"),
        ("x ** self.power", "x * self.power", "Net"),
        ('names = "one"', 'names = "two"', "Net"),
        ('"two", "three"', '"two", "four"', "Net"),
        ("2 * batch", "3 * batch", "task"),
        ("out_to_loss(self, forward, batch)", "out_to_loss(self, batch, forward)", "arguments"),
        ("class MyTask:", "class MyTask:\n    loss_kind = 'other'", ""),
        ("lambda: Net()", "lambda: Net().double()", "build"),
        ("nn.ReLU", "nn.GELU", "Net modules"),
    ],
)
def test_code_digests__what_changes_them(before: str, after: str, changed: str) -> None:
    assert SOURCE.count(before) == 1
    one, two = digests(SOURCE), digests(SOURCE.replace(before, after))
    different = {name for name in one if one[name] != two[name]}
    assert different == set(changed.split())
    of_torch = code_digests(nn.Linear(2, 2), td.tasks.Regression(), nn.Linear)
    assert set(of_torch) == {"python", "modules", "task"}


SCRIPT = f"""

{SOURCE}
import sys
import torch
from trakdask.models.independence import reads_values
from trakdask.models.modules import code_digests
from trakdask.models.tasks import Batch, Forward, Regression

print(sorted(code_digests(build(), MyTask(), build).items()))
net = nn.Linear(4, 1)
forward = Forward(net, dict(net.named_parameters()), {{}})
batch = Batch(x=torch.ones(2, 4), y=torch.ones(2))
print(reads_values(forward, Regression(), batch))
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""


def test_code_digests__same_in_another_process(tmp_path: Path) -> None:
    """And a check of the model does not import torch's compiler, which takes seconds."""
    (tmp_path / "script.py").write_text(SCRIPT)
    run = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")],
        env={"PYTHONHASHSEED": "7", "PYTHONPATH": str(Path(td.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    expected = sorted(digests(SOURCE).items())
    assert run.stdout.splitlines() == [str(expected), "False", "[]"]


def featurized(source: str) -> xr.Dataset:
    names = namespace(source)
    state = {name: torch.ones_like(t) for name, t in names["build"]().state_dict().items()}
    model = td.Model(names["build"], [state], names["MyTask"]())
    x = np.random.default_rng(0).random((6, 4), "f4")
    samples = td.from_arrays({"x": x, "label": np.arange(6, dtype="f4")}, chunks=4)
    return td.featurize(samples, model, projector=td.Identity())


def test_save__changed_code(tmp_path: Path) -> None:
    stored = td.save(featurized(SOURCE), tmp_path / "f.zarr")
    corrected = featurized(SOURCE.replace("+ 1", "* 2"))
    with pytest.raises(
        td.errors.StoreMismatchError, match=r"differ in code\['Net'\].*attrs\['code'\]"
    ):
        td.save(corrected, tmp_path / "f.zarr")
    with pytest.raises(td.errors.StoreMismatchError, match=r"differ in code\['Net'\]"):
        td.score(stored, corrected)
    code = as_values(stored.attrs)["code"]
    # Instructions of two versions of Python cannot be compared, and need not agree.
    for accepted in (code, {**code, "python": "3.0", "Net": "other"}):
        corrected.attrs["code"] = json.dumps(accepted)
        assert td.score(stored, corrected, td.Trak(damping=1.0)).shape == (6, 6)
    corrected.attrs["code"] = stored.attrs["code"]
    with pytest.raises(td.errors.StoreMismatchError, match="computed again"):
        td.save(corrected, tmp_path / "f.zarr")
