"""Bad inputs of Model."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import trakdask as td
from tests.bad_inputs.bad_input import BadInput, check, parametrize
from tests.bad_inputs.small_models import NET, OnlyOutput

STATE = NET.state_dict()
M, K = "Model", "keep_checkpoints"
QUANTISED = type("Linear8bitLt", (nn.Linear,), {"__module__": "bitsandbytes.nn.modules"})(2, 2)


def model(*arguments: Any, **options: Any) -> Callable[[Path], object]:
    return lambda _: td.Model(*(arguments or (NET,)), **options)


def checkpoint(make: Callable[[Path], Any]) -> Callable[[Path], object]:
    return lambda folder: td.Model(NET, [make(folder)])


def saved(content: Any) -> Callable[[Path], object]:
    def make(folder: Path) -> str:
        torch.save(content, folder / "c.pt")
        return str(folder / "c.pt")

    return checkpoint(make)


def written(name: str, content: bytes) -> Callable[[Path], object]:
    def make(folder: Path) -> str:
        (folder / name).write_bytes(content)
        return str(folder / name)

    return checkpoint(make)


def loop_of_links(folder: Path) -> str:
    for one, other in ("ab", "ba"):
        os.symlink(folder / f"{other}.pt", folder / f"{one}.pt")
    return str(folder / "a.pt")


def folder_with_file(folder: Path) -> str:
    torch.save(STATE, folder / "epoch_3.pt")
    return str(folder)


def renamed(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in state.items()}


def needs_arguments(width: int, *, depth: int) -> nn.Module:
    return nn.Linear(width, depth)


ROWS = [
    BadInput(M, "a number", model(3), TypeError, ["3", "int", "nn.Module"]),
    BadInput(M, "None", model(None), TypeError, ["None", "nn.Module"]),
    BadInput(M, "a state dict", model(STATE), TypeError, ["OrderedDict", "build"]),
    BadInput(
        M,
        "class with arguments",
        model(nn.Linear, [STATE]),
        TypeError,
        ["Linear", "['in_features', 'out_features']", "lambda: Linear("],
    ),
    BadInput(
        M,
        "function with arguments",
        model(needs_arguments, [STATE]),
        TypeError,
        ["needs_arguments", "['width', 'depth']"],
    ),
    BadInput(M, "returns a number", model(lambda: 3, [STATE]), TypeError, ["int", "nn.Module"]),
    BadInput(M, "returns None", model(lambda: None, [STATE]), TypeError, ["NoneType"]),
    BadInput(
        M,
        "no such module",
        model("no_such:build", [STATE]),
        ImportError,
        ["'no_such:build'", "ModuleNotFound"],
    ),
    BadInput(
        M,
        "no such name",
        model("json:build", [STATE]),
        ImportError,
        ["'json:build'", "AttributeError"],
    ),
    BadInput(
        M,
        "no import name",
        model("a b c", [STATE]),
        ImportError,
        ["'a b c'", "package.module:callable"],
    ),
    BadInput(
        M, "name of a str", model("json:__doc__", [STATE]), TypeError, ["'json:__doc__'", "str"]
    ),
    BadInput(
        M,
        "lazy module",
        model(nn.LazyLinear(3), [STATE]),
        ValueError,
        ["'weight'", "lazy", "example_input"],
    ),
    BadInput(
        M,
        "lazy module of its own",
        model(nn.Sequential(nn.LazyLinear(3))),
        ValueError,
        ["'0.weight'", "lazy"],
    ),
    BadInput(M, "no checkpoints", model(lambda: NET), ValueError, ["checkpoints=['model.pt']"]),
    BadInput(M, "empty checkpoints", model(NET, []), ValueError, ["at least one", "model.pt"]),
    BadInput(M, "checkpoints a number", model(NET, 5), TypeError, ["5", "int", "checkpoints=["]),
    BadInput(M, "checkpoints a module", model(NET, NET), TypeError, ["Linear"]),
    BadInput(M, "checkpoint a module", model(NET, [NET]), ValueError, ["Linear", "state_dict()"]),
    BadInput(M, "checkpoint a number", model(NET, [5]), ValueError, ["'0'", "int"]),
    BadInput(M, "checkpoint None", model(NET, [None]), ValueError, ["'0'", "NoneType"]),
    BadInput(M, "one state dict", model(NET, STATE), ValueError, ["'weight'", "[state_dict]"]),
    BadInput(
        M,
        "nested in memory",
        model(NET, [{"state_dict": STATE, "epoch": 3}]),
        ValueError,
        ["['state_dict', 'epoch']", "key='state_dict'"],
    ),
    BadInput(
        M,
        "nested in a file",
        saved({"model": STATE, "step": 3}),
        ValueError,
        ["c.pt", "key='model'"],
    ),
    BadInput(M, "empty state dict", model(NET, [{}]), ValueError, ["'0'", "[]"]),
    BadInput(M, "no such file", model(NET, ["no_such.pt"]), FileNotFoundError, ["no_such.pt"]),
    BadInput(M, "folder", checkpoint(folder_with_file), ValueError, ["folder", "epoch_3.pt'"]),
    BadInput(M, "empty folder", checkpoint(lambda folder: folder), ValueError, ["folder"]),
    BadInput(M, "loop of links", checkpoint(loop_of_links), OSError, ["a.pt"]),
    BadInput(
        M,
        "URL of nothing",
        model(NET, ["memory://none/c0.pt"]),
        FileNotFoundError,
        ["none/c0.pt"],
    ),
    BadInput(M, "unknown scheme", model(NET, ["foo://c0.pt"]), ValueError, ["foo"]),
    BadInput(M, "NUL in a path", model(NET, ["a\0b.pt"]), ValueError, ["checkpoint"]),
    BadInput(M, "text file", written("c.pt", b"hello"), ValueError, ["c.pt"]),
    BadInput(M, "empty file", written("c.pt", b""), ValueError, ["c.pt"]),
    BadInput(M, "cut file", written("c.pt", b"PK\x03\x04zip"), ValueError, ["c.pt"]),
    BadInput(
        M, "text as safetensors", written("c.safetensors", b"hello"), ValueError, ["c.safetensors"]
    ),
    BadInput(M, "code in a file", saved(NET), ValueError, ["c.pt", "state_dict()"]),
    BadInput(
        M,
        "other shape",
        model(NET, [nn.Linear(5, 3).state_dict()]),
        ValueError,
        ["'weight'", "(3, 4)", "(3, 5)"],
    ),
    BadInput(
        M,
        "missing tensor",
        model(NET, [{"weight": STATE["weight"]}]),
        ValueError,
        ["'bias'", "(3,)"],
    ),
    BadInput(
        M,
        "further tensor",
        model(NET, [{**STATE, "extra": torch.ones(1)}]),
        ValueError,
        ["'extra'"],
    ),
    BadInput(
        M,
        "wrapped",
        model(NET, [renamed(STATE, "module.")]),
        ValueError,
        ["removeprefix('module.')"],
    ),
    BadInput(
        M,
        "wrapped, with other tensors",
        model(NET, [{**renamed(STATE, "net.model."), "loss.weight": torch.ones(3)}]),
        ValueError,
        ["removeprefix('net.model.')", "startswith('net.model.')"],
    ),
    BadInput(M, "twice the same", model(NET, {"a": STATE, "b": STATE}), ValueError, ["['a', 'b']"]),
    BadInput(
        M,
        "task unknown",
        model(task="clasification"),
        ValueError,
        ["'clasification'", "_classification"],
    ),
    BadInput(
        M,
        "task a class",
        model(task=td.tasks.Regression),
        TypeError,
        ["Regression", "Regression()"],
    ),
    BadInput(M, "task a number", model(task=3), TypeError, ["int", "image_classification"]),
    BadInput(
        M, "task without Q", model(task=OnlyOutput()), TypeError, ["OnlyOutput", "out_to_loss"]
    ),
    BadInput(
        M, "parameters a number", model(parameters=3), TypeError, ["3", "parameters='head.*'"]
    ),
    BadInput(M, "parameters of numbers", model(parameters=[0, 1]), TypeError, ["[0, 1]"]),
    BadInput(M, "parameters empty", model(parameters=[]), ValueError, ["parameters=[]", "None"]),
    BadInput(M, "parameters empty text", model(parameters=""), ValueError, ["''", "weight"]),
    BadInput(
        M,
        "parameters inside of names",
        model(nn.ModuleDict({"lora_A": NET}), parameters="lora_A"),
        ValueError,
        ["'lora_A'", "'*lora_A*'"],
    ),
    BadInput(
        M,
        "parameters in capitals",
        model(nn.ModuleDict({"lora_A": NET}), parameters="LORA"),
        ValueError,
        ["'LORA'"],
    ),
    BadInput(
        M, "parameters misspelled", model(parameters="wieght"), ValueError, ["'wieght'", "'weight'"]
    ),
    BadInput(
        M, "parameters of no class", model(parameters=nn.Conv2d), ValueError, ["Conv2d", "'Linear'"]
    ),
    BadInput(
        M,
        "parameters of no predicate",
        model(parameters=lambda name, _: False),
        ValueError,
        ["none of 2"],
    ),
    BadInput(
        M,
        "predicate of one argument",
        model(parameters=lambda name: True),
        TypeError,
        ["lambda name, parameter"],
    ),
    *[
        BadInput(
            M, f"ids {ids}", model(checkpoint_ids=ids), ValueError, ["checkpoint_ids", "2**32"]
        )
        for ids in ([], [1, 2], [-1], [2**32], [0.5], [True], "a", 3.5)
    ],
    BadInput(K, "a number", lambda _: td.keep_checkpoints(3), TypeError, ["3", "folder='run'"]),
    BadInput(K, "no path", lambda _: td.keep_checkpoints(""), TypeError, ["''", "folder='run'"]),
    BadInput(
        K, "a URL", lambda _: td.keep_checkpoints("s3://b/run"), ValueError, ["s3://b/run", "local"]
    ),
    *[
        BadInput(
            K,
            f"every {every!r}",
            lambda _, every=every: td.keep_checkpoints("run", every=every),
            error,
            ["every", repr(every), "'epoch'"],
        )
        for every, error in (
            ("step", TypeError),
            (0, ValueError),
            (True, TypeError),
            (None, TypeError),
        )
    ],
    BadInput(M, "moments a number", model(second_moments=3), TypeError, ["second_moments", "3"]),
    BadInput(
        M,
        "moments too many",
        model(second_moments=[STATE, STATE]),
        ValueError,
        ["['0']", "(2)", "{'0'"],
    ),
    BadInput(
        M,
        "moments of others",
        model(second_moments={"last": STATE}),
        ValueError,
        ["['0']", "'last'"],
    ),
    BadInput(
        M,
        "moments of no file",
        model(second_moments=["no.pt"]),
        FileNotFoundError,
        ["no.pt"],
    ),
    BadInput(
        M,
        "moments empty",
        model(second_moments=[{}]),
        td.errors.CheckpointError,
        ["state dict", "[]"],
    ),
    BadInput(
        M,
        "quantised",
        model(nn.Sequential(QUANTISED), task="causal_lm"),
        TypeError,
        ["'0'", "Linear8bitLt", "bfloat16"],
    ),
]


@parametrize(ROWS)
def test_bad_input(row: BadInput, tmp_path: Path) -> None:
    check(row, tmp_path)
