"""Bad checkpoints: files that cannot be read, and weights that do not fit the model."""

from __future__ import annotations

import argparse
import io
import pickle
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn

import trakdask as td
from tests.bad_inputs.bad_input import one_test, rows
from tests.bad_inputs.small_models import NET

STATE = dict(NET.state_dict())
OTHER = {name: tensor + 1 for name, tensor in STATE.items()}
TRUST = ("torch.load(file, weights_only=False)", "content['state_dict']", "model.state_dict()")


def given(content: Any, **options: Any) -> Callable[[Path], object]:
    return lambda _: td.Model(NET, [content], **options)


def written(name: str, content: bytes) -> Callable[[Path], object]:
    def call(folder: Path) -> object:
        (folder / name).write_bytes(content)
        return td.Model(NET, [folder / name])

    return call


def saved(content: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file, **options)
    return file.getvalue()


def program() -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings(action="ignore"):
        torch.jit.save(torch.jit.script(NET), file)
    return file.getvalue()


def tar() -> bytes:
    """What torch wrote before there were zip files."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name in ("storages", "tensors", "pickle"):
            archive.addfile(tarfile.TarInfo(name))
    return file.getvalue()


def renamed(prefix: str, state: dict[str, Tensor] = STATE) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in state.items()}


MIXED = renamed("net.") | renamed("net_ema.", OTHER)
OLD = saved(STATE, _use_new_zipfile_serialization=False)

ROWS = [
    *rows(
        "Model", td.errors.CheckpointError,
        ("weights and their average", given({"model": STATE, "ema": OTHER, "epoch": 1}), "['model', 'ema']", "key='model'", "key='ema'"),
        ("two prefixes", given(MIXED), "'weight'", "prefix='net.'", "prefix='net_ema.'"),
        ("two prefixes under a key", given({"state_dict": MIXED, "epoch": 3}), "'state_dict' of checkpoint '0'", "prefix='net.'"),
        ("a prefix and more", given(renamed("net.model.") | {"loss.weight": torch.ones(3)}), "'weight'", "(3, 4)", "td.Model(..., prefix='net.model.')"),
        ("prefix of nothing", given(renamed("net."), prefix="model."), "prefix='model.'", "'net.weight'"),
        ("key of nothing", given({"model": STATE}, key="state_dict"), "['model']", "key='model'"),
        ("a list", written("c.pt", saved([STATE])), "got list", "model.state_dict()"),
        ("numbers beside tensors", given({**STATE, "epoch": 3}), "'weight', 'bias', 'epoch'", "without 'epoch'"),
        ("nothing fits inside", given({"model": {"a": torch.ones(2)}, "step": 3}), "'weight' of shape (3, 4)", "'model' of checkpoint '0'"),
        ("a scalar of numpy", written("c.ckpt", saved({"state_dict": STATE, "best": np.float64(1)})), "c.ckpt", "numpy", "scalar", *TRUST),
        ("arguments", written("c.pth.tar", saved({"model": STATE, "args": argparse.Namespace(lr=1)})), "argparse.Namespace", *TRUST),
        ("a module", written("c.pt", saved(NET)), "torch.nn.modules.linear.Linear", "content.state_dict()"),
        ("tar", written("c.pt", tar()), "tar format", *TRUST),
        ("torch.jit.save", written("c.pt", program()), "c.pt", "torch.jit.load(file).state_dict()"),
        ("cut", written("c.pt", saved(STATE)[:300]), "c.pt", "ends too early", "copying"),
        ("old and cut", written("c.pt", OLD[:-5]), "ends too early"),
        ("safetensors cut", written("c.safetensors", save(STATE)[:-8]), "c.safetensors", "ends too early"),
        ("pointer of Git LFS", written("c.bin", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"), "b'version https://git-", "git lfs pull"),
        ("a web page", written("c.safetensors", b"<!DOCTYPE html><html>Not found</html>"), "b'<!DOCTYPE html>", "downloading"),
        ("pickle.dump", written("c.pt", pickle.dumps(nn.Linear(1, 1).state_dict())), "c.pt", "torch.save(model.state_dict(), file)"),
    ),
]  # fmt: skip

test_bad_input = one_test(ROWS)
