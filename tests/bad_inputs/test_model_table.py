"""Bad inputs of Model."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import trakdask as td
from tests.bad_inputs.bad_input import BadInput, one_test, rows
from tests.bad_inputs.small_models import NET, OnlyOutput

STATE = NET.state_dict()
M, K = "Model", "keep_checkpoints"
UNTIED, TIED = (nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)) for _ in range(2))
TIED[1].weight = TIED[0].weight
ONCE = {name: tensor for name, tensor in UNTIED.state_dict().items() if name != "1.weight"}
QUANTISED = type("Linear8bitLt", (nn.Linear,), {"__module__": "bitsandbytes.nn.modules"})(2, 2)


def model(*arguments: Any, **options: Any) -> Callable[[Path], object]:
    return lambda _: td.Model(*(arguments or (NET,)), **options)


def moments(given: Any) -> Callable[[Path], object]:
    return lambda _: td.fits.second_moments(td.Model(NET), given)


def checkpoint(make: Callable[[Path], Any]) -> Callable[[Path], object]:
    return lambda folder: td.Model(NET, [make(folder)])


def folder_with_file(folder: Path) -> str:
    torch.save(STATE, folder / "epoch_3.pt")
    return str(folder)


def having(value: Any) -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 3))
    module[0].odd = value
    return module


def of_torchscript(make: Callable[..., Any], *arguments: Any) -> nn.Module:
    with warnings.catch_warnings(action="ignore"):  # it is deprecated
        return make(*arguments)


class Extra(nn.Linear):
    """A layer whose extra state is of a class of its own."""

    def __init__(self) -> None:
        super().__init__(4, 3)

    def get_extra_state(self) -> Any:
        return Path()

    def set_extra_state(self, state: Any) -> None: ...


ROWS = [
    *rows(
        M, TypeError,
        ("a number", model(3), "3", "int", "nn.Module"),
        ("a state dict", model(STATE), "OrderedDict", "build"),
        ("class with arguments", model(nn.Linear, [STATE]), "Linear", "'in_features' and 'out_features'"),
        ("returns a number", model(lambda: 3, [STATE]), "int", "nn.Module"),
        ("name of a str", model("json:__doc__", [STATE]), "'json:__doc__'", "str"),
        ("checkpoints a number", model(NET, 5), "int"),
        ("task a class", model(task=td.tasks.Regression), "Regression", "Regression()"),
        ("task without Q", model(task=OnlyOutput()), "OnlyOutput", "out_to_loss"),
        ("parameters a number", model(parameters=3), "3", "parameters='head.*'"),
        ("predicate of one argument", model(parameters=lambda name: True), "1 positional argument"),
        ("parallel", model(nn.Sequential(nn.DataParallel(NET))), "'0' of class DataParallel"),
        ("scripted", model(of_torchscript(torch.jit.script, NET)), "the model of TorchScript", "state_dict()"),
        ("traced inside", model(nn.Sequential(of_torchscript(torch.jit.trace, NET, torch.ones(1, 4)))), "layer '0' of TorchScript"),
        ("with a lock", model(having(threading.Lock())), "'0.odd'", "[module.state_dict()]"),
        ("with a tensor that has a graph", model(having(nn.Parameter(torch.ones(3)) * 2)), "'0.odd'", "function build"),
        ("moments a number", moments(3), "moments", "3"),
        ("quantised", model(nn.Sequential(QUANTISED), task="causal_lm"), "'0'", "Linear8bitLt", "bfloat16"),
    ),
    *rows(M, ImportError, ("no such module", model("no_such:build", [STATE]), "'no_such:build'", "No module named")),
    *rows(
        M, ValueError,
        ("lazy module", model(nn.LazyLinear(3), [STATE]), "LazyModule", "dummy batch"),
        ("no checkpoints", model(lambda: NET), "checkpoints=['model.pt']"),
        ("empty checkpoints", model(NET, []), "at least one", "model.pt"),
        ("checkpoint a module", model(NET, [NET]), "Linear", "state_dict()"),
        ("one state dict", model(NET, STATE), "'weight'", "[state_dict]"),
        ("empty state dict", model(NET, [{}]), "'0'", "[]"),
        ("folder", checkpoint(folder_with_file), "folder", "epoch_3.pt'"),
        ("other shape", model(NET, [nn.Linear(5, 3).state_dict()]), "'weight'", "(3, 4)", "(3, 5)"),
        ("missing tensor", model(NET, [{"weight": STATE["weight"]}]), "'bias'", "(3,)"),
        ("further tensor", model(NET, [{**STATE, "extra": torch.ones(1)}]), "'extra'"),
        ("ties that the checkpoint has not", model(TIED, [UNTIED.state_dict()]), "'0.weight' and as '1.weight'", "does not tie them"),
        ("no ties of the checkpoint", model(UNTIED, [ONCE]), "'1.weight'", "no such tensor", "'1.weight': state['0.weight']"),
        ("extra state of a class", model(Extra()), "'0'", "WeightsUnpickler", "plain values"),
        ("no extra state", model(Extra(), [STATE]), "Missing key", "_extra_state"),
        ("twice the same", model(NET, {"a": STATE, "b": STATE}), "['a', 'b']"),
        ("parameters empty", model(parameters=[]), "got []", "None"),
        ("parameters inside of names", model(nn.ModuleDict({"lora_A": NET}), parameters="lora_A"), "'lora_A'", "'*lora_A*'"),
        ("parameters misspelled", model(parameters="wieght"), "'wieght'", "'weight'"),
        ("parameters of no class", model(parameters=nn.Conv2d), "Conv2d", "'Linear'"),
        ("parameters of no predicate", model(parameters=lambda name, _: False), "none of 2"),
        ("moments too many", moments([STATE, STATE]), "['0']", "(2)", "{'0'"),
    ),
    *rows(
        M, FileNotFoundError,
        ("no such file", model(NET, ["no_such.pt"]), "no_such.pt"),
    ),
    *rows(K, TypeError, ("a number", lambda _: td.keep_checkpoints(3), "int")),
    *rows(K, ValueError, ("a URL", lambda _: td.keep_checkpoints("s3://b/run"), "s3://b/run", "local")),
    *[
        BadInput(M, f"ids {ids}", model(checkpoint_ids=ids), error, ["checkpoint_ids", "=None"])
        for error, all_ids in ((ValueError, ([1, 2], [-1])), (TypeError, ([True],)))
        for ids in all_ids
    ],
    *[
        BadInput(K, f"every {every!r}", lambda _, every=every: td.keep_checkpoints("run", every=every), error, ["every", repr(every), "'epoch'"])
        for every, error in (("step", TypeError), (0, ValueError))
    ],
]  # fmt: skip

test_bad_input = one_test(ROWS)
