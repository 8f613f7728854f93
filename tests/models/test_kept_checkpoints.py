"""The callback while ``Trainer`` really trains tiny models, against what another callback saw."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import trakdask as td

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytest.importorskip("accelerate")

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=8, bos_token_id=1, eos_token_id=1
    )
    return transformers.GPT2LMHeadModel(config)


def lora() -> nn.Module:
    config = peft.LoraConfig(
        r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False
    )
    return peft.get_peft_model(gpt2(), config)


class Plain(nn.Module):
    """A module that transformers did not make, with tied weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> object:
        logits = self.head(self.embedding(input_ids))
        if labels is None:
            return {"logits": logits}
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


class Watcher(transformers.TrainerCallback):
    """Copies the weights and the learning rate of every step."""

    def __init__(self) -> None:
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.rates: dict[int, float] = {}

    def on_step_begin(self, args, state, control, optimizer=None, **given) -> None:
        self.rates[state.global_step + 1] = optimizer.param_groups[0]["lr"]

    def on_step_end(self, args, state, control, model=None, **given) -> None:
        self.weights[state.global_step] = {n: t.clone() for n, t in model.state_dict().items()}


def train(
    model: nn.Module,
    folder: Path,
    keep: object,
    resume: bool = False,
    watch: object = None,
    **options,
) -> Watcher:
    ids = np.random.default_rng(0).integers(2, 20, (24, 6))
    data = [{"input_ids": torch.tensor(row), "labels": torch.tensor(row)} for row in ids]
    settings = {"num_train_epochs": 3, "save_strategy": "no", **options}
    args = transformers.TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=4,
        learning_rate=0.1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        dataloader_pin_memory=False,
        **settings,
    )
    watcher = Watcher()
    callbacks = [watcher, *([watch] if watch else []), keep]
    trainer = transformers.Trainer(model, args, train_dataset=data, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume or None)
    return watcher


def check(made: td.Model, watcher: Watcher, steps: list[int], rates: dict[str, float]) -> None:
    names = [f"checkpoint-{step}" for step in steps]
    assert [each.name for each in made.checkpoints] == list(rates) == names
    for checkpoint, before, step in zip(made.checkpoints, [0, *steps], steps, strict=False):
        seen = watcher.weights[step]
        forward = made.forward(checkpoint)
        for name, tensor in forward.parameters.items():
            torch.testing.assert_close(tensor, seen[name], rtol=0, atol=0)
        expected = np.mean([watcher.rates[i] for i in range(before + 1, step + 1)])
        assert rates[checkpoint.name] == pytest.approx(expected)


def kept_rates(folder: Path) -> dict[str, float]:
    return json.loads((folder / "learning_rates.json").read_text())


@pytest.mark.parametrize(
    ("build", "every", "steps"),
    [(gpt2, "epoch", [6, 12, 18]), (lora, 5, [5, 10, 15]), (Plain, "epoch", [6, 12, 18])],
)
def test_keep_checkpoints__what_the_model_was(build, every, steps, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    watcher = train(build(), tmp_path, td.keep_checkpoints(kept, every=every))
    inputs = {"task": td.tasks.CausalLM("input_ids")}
    check(td.Model(build, kept, **inputs), watcher, steps, kept_rates(kept))
    assert len(set(kept_rates(kept).values())) == 3


def test_keep_checkpoints__whenever_trainer_saves(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    options = {"save_strategy": "steps", "save_steps": 7, "save_total_limit": 1}
    watcher = train(gpt2(), tmp_path, td.keep_checkpoints(kept), **options)
    check(td.Model(gpt2, kept, task="causal_lm"), watcher, [7, 14, 18], kept_rates(kept))
    assert not list(kept.rglob("optimizer*"))
    rates = kept_rates(kept)
    ids = np.random.default_rng(0).integers(2, 20, (5, 6))
    samples = td.from_arrays({"input_ids": ids, "attention_mask": np.ones_like(ids)})
    model = td.Model(gpt2, kept, task="causal_lm")
    features = td.featurize(samples, model, projector=td.Identity()).compute(scheduler="sync")
    found = td.score(features, features, estimator="tracin", learning_rates=rates)
    q = features.out_to_loss.values
    expected = sum(
        rate * q[:, c, None] * (features.feature.values[..., c] @ features.feature.values[..., c].T)
        for c, rate in enumerate(rates.values())
    )
    np.testing.assert_allclose(found.transpose("sample", ...), expected, rtol=1e-4)


def test_keep_checkpoints__second_moments(tmp_path: Path) -> None:
    """Against Adam's recurrence, from the gradients that a hook sees."""
    squares: dict[str, torch.Tensor] = {}
    model, kept = gpt2(), tmp_path / "kept"

    class Gradients(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **given) -> None:
            for name, parameter in model.named_parameters():
                before = squares.get(name, torch.zeros_like(parameter))
                squares[name] = 0.9 * before + 0.1 * parameter.grad.clone() ** 2

    keep = td.keep_checkpoints(kept, every=5, second_moments=True)
    train(model, tmp_path, keep, watch=Gradients(), max_steps=5, adam_beta2=0.9)
    found = load_file(kept / "checkpoint-5" / "second_moments.safetensors")
    assert set(found) == set(squares)
    for name, expected in squares.items():
        torch.testing.assert_close(found[name], expected / (1 - 0.9**5), rtol=1e-5, atol=1e-12)
    made = td.Model(gpt2, kept, task="causal_lm", second_moments=kept)
    assert list(made.second_moments) == ["checkpoint-5"]


def test_keep_checkpoints__optimizer_without_second_moments(tmp_path: Path) -> None:
    keep = td.keep_checkpoints(tmp_path / "kept", every="epoch", second_moments=True)
    with pytest.raises(NotImplementedError, match=r"exp_avg_sq.*SGD.*adamw_torch"):
        train(gpt2(), tmp_path, keep, optim="sgd")
    assert not list((tmp_path / "kept").glob("checkpoint-*"))


def test_keep_checkpoints__of_a_run_that_was_continued(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    options = {"save_strategy": "steps", "save_steps": 6}
    train(gpt2(), tmp_path, td.keep_checkpoints(kept), max_steps=6, **options)
    with pytest.raises(FileExistsError, match=r"checkpoint-6.*kept"):
        train(gpt2(), tmp_path, td.keep_checkpoints(kept), **options)
    train(gpt2(), tmp_path, td.keep_checkpoints(kept), resume=True, **options)
    assert list(kept_rates(kept)) == ["checkpoint-6", "checkpoint-12", "checkpoint-18"]
    assert len(td.Model(gpt2, kept, task="causal_lm").checkpoints) == 3


def test_keep_checkpoints__half_written_ones_are_not_read(tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    class Full(Plain):
        def save_pretrained(self, folder: Path) -> None:
            (folder / "model.safetensors").write_bytes(b"half")
            raise Killed

    kept = tmp_path / "kept"
    train(Plain(), tmp_path, td.keep_checkpoints(kept, every="epoch"), num_train_epochs=1)
    keep = td.keep_checkpoints(kept, every=1)
    keep.on_step_begin(None, None, None, optimizer=torch.optim.SGD([torch.ones(1)], lr=1))
    state = SimpleNamespace(global_step=9, is_world_process_zero=True)
    with pytest.raises(Killed):
        keep.on_step_end(None, state, None, model=Full(), optimizer=None)
    model = td.Model(Plain, kept, task=td.tasks.CausalLM("input_ids"))
    assert [each.name for each in model.checkpoints] == ["checkpoint-6"]


@pytest.mark.parametrize("name", ["deepspeed", "fsdp"])
def test_keep_checkpoints__distributed_weights_are_refused(name: str, tmp_path: Path) -> None:
    args = SimpleNamespace(**{name: "full_shard"})
    with pytest.raises(NotImplementedError, match=rf"{name}.*output_dir"):
        td.keep_checkpoints(tmp_path).on_train_begin(args, SimpleNamespace(global_step=0), None)


def test_keep_checkpoints__one_process_writes(tmp_path: Path) -> None:
    keep = td.keep_checkpoints(tmp_path / "kept", every=1)
    state = SimpleNamespace(global_step=0, is_world_process_zero=False)
    keep.on_train_begin(SimpleNamespace(), state, None)
    keep.on_step_begin(None, state, None, optimizer=torch.optim.SGD([torch.ones(1)], lr=1))
    keep.on_step_end(None, state, None, model=Plain(), optimizer=None)
    assert list((tmp_path / "kept").iterdir()) == []
