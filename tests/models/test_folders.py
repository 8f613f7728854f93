"""Folders of ``save_pretrained``, ``Trainer`` and PEFT: tiny models, saved here and read back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn

import trakdask as td
from tests.models.language_models import VOCABULARY, adapted, gpt2, peft, transformers
from trakdask.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers")


def lora(base: nn.Module, **options: object) -> nn.Module:
    return adapted(base, **{"targets": ["c_attn"], "fan_in_fan_out": True, **options})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model, whole and in shards, and adapters of it."""
    root = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    base = gpt2()
    base.save_pretrained(root / "base")
    base.save_pretrained(root / "shards", max_shard_size="10KB")
    for step in (2, 10):
        trained = gpt2()
        trained.save_pretrained(root / "run" / f"checkpoint-{step}")
    return root


def adapter(folder: Path, seed: int = 1) -> tuple[Path, nn.Module]:
    """Save an adapter of the base model; return its folder and the model."""
    torch.manual_seed(seed)
    base = transformers.GPT2LMHeadModel.from_pretrained(folder / "base")
    made = lora(base)
    path = folder / f"adapter{seed}"
    made.save_pretrained(path)
    return path, made


def name_base(adapter: Path, base: str) -> None:
    """Change the configuration of an adapter."""
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": base}))


def samples() -> xr.Dataset:
    ids = np.random.default_rng(0).integers(3, VOCABULARY, (4, 6))
    return td.from_arrays({"input_ids": ids, "attention_mask": np.ones_like(ids)}, chunks=2)


def features(model: td.Model) -> xr.DataArray:
    made = td.featurize(samples(), model, projector=td.Identity())
    return made.compute(scheduler="sync").feature


def test_make_checkpoints__all_steps_of_a_run_in_their_order(folder: Path) -> None:
    fsspec.filesystem("memory").put(str(folder / "run"), "/saved/run", recursive=True)
    for given in (folder / "run", str(folder / "run"), "memory://saved/run"):
        model = td.Model(gpt2, given, task="causal_lm")
        assert [each.name for each in model.checkpoints] == ["checkpoint-2", "checkpoint-10"]
    with pytest.raises(CheckpointError, match="memory://saved/nothing"):
        td.Model(gpt2, ["memory://saved/nothing"], task="causal_lm")
    with pytest.raises(CheckpointError, match=r"checkpoint-2.*try .*checkpoints="):
        td.Model(gpt2, [folder / "run"], task="causal_lm")


def test_adapter__several_share_one_base_which_belongs_to_their_identity(
    folder: Path, tmp_path: Path
) -> None:
    (first, one), (second, two), (_, three) = (adapter(folder, seed) for seed in (1, 2, 3))
    other = Path(shutil.copytree(first, tmp_path / "adapter"))
    gpt2().save_pretrained(tmp_path / "base")
    name_base(other, str(tmp_path / "base"))
    states = {"1": first, "2": second, "memory": peft.get_peft_model_state_dict(three), "3": other}
    model = td.Model(one, states, task="causal_lm", parameters="*lora_*")
    assert model.checkpoints[0].base is model.checkpoints[1].base is not None
    assert model.checkpoints[0].base == model.checkpoints[2].base  # which build gives
    assert len({checkpoint.digest for checkpoint in model.checkpoints}) == 4
    found = features(model)
    for index, adapted_model in enumerate((one, two, three)):
        wanted = features(td.Model(adapted_model, task="causal_lm", parameters="*lora_*"))
        np.testing.assert_allclose(found[..., index], wanted[..., 0], rtol=1e-5, atol=1e-6)


def test_read_folder__damaged(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder / "shards", tmp_path / "copy"))
    first, second, *_ = sorted(copy.glob("*.safetensors"))
    second.unlink()
    with pytest.raises(FileNotFoundError, match="-of-"):
        td.Model(gpt2, [copy], task="causal_lm")
    first.write_bytes(first.read_bytes()[:-50])
    with pytest.raises(CheckpointError, match="cannot be read"):
        td.Model(gpt2, [copy], task="causal_lm")


def two() -> nn.Module:
    made = lora(gpt2())
    made.add_adapter("other", made.peft_config["default"])
    return made


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: lora(gpt2(hidden_size=32)), r"shape"),
        (lambda: lora(gpt2(), targets=["c_proj"]), r"c_proj.*target modules"),
        (two, r"one adapter.*default.*other"),
        (gpt2, r"adapter.*get_peft_model"),
    ],
    ids=["another base", "other modules", "two adapters", "no adapter"],
)
def test_adapter__of_another_model(
    folder: Path, build: Callable[[], nn.Module], words: str
) -> None:
    path, _ = adapter(folder)
    with pytest.raises(CheckpointError, match=words):
        td.Model(build, [path], task="causal_lm")
