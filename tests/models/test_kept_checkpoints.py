"""The callback while ``Trainer`` really trains tiny models, against what another callback saw."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import trakdask as td
from tests.models.language_models import VOCABULARY, adapted, gpt2, transformers

pytest.importorskip("accelerate")

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]


def lora() -> nn.Module:
    torch.manual_seed(0)  # every process has to build the same base model
    return adapted(gpt2(), ["c_attn"], fan_in_fan_out=True)


class Plain(nn.Module):
    """A module that transformers did not make, with tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = (
            nn.Embedding(VOCABULARY, 8),
            nn.Linear(8, VOCABULARY, bias=False),
        )
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
    ids = np.random.default_rng(0).integers(3, VOCABULARY, (12, 6))
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


def kept_rates(folder: Path) -> dict[str, float]:
    return json.loads((folder / "learning_rates.json").read_text())


@pytest.mark.parametrize(
    ("build", "every", "steps"),
    [
        (gpt2, "save", [4, 8, 9]),
        (lora, 2, [2, 4, 6, 8]),
        (Plain, "epoch", [3, 6, 9]),
    ],
)
def test_keep_checkpoints__what_the_model_was(build, every, steps, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    saving = {"save_strategy": "steps", "save_steps": 4, "save_total_limit": 1}
    options = saving if every == "save" else {}
    watcher = train(build(), tmp_path, td.keep_checkpoints(kept, every=every), **options)
    model = td.Model(build, kept, task=td.tasks.CausalLM("input_ids"))
    rates, names = kept_rates(kept), [f"checkpoint-{step}" for step in steps]
    assert [each.name for each in model.checkpoints] == list(rates) == names
    for checkpoint, before, step in zip(model.checkpoints, [0, *steps], steps, strict=False):
        for name, tensor in model.forward(checkpoint).parameters.items():
            torch.testing.assert_close(tensor, watcher.weights[step][name], rtol=0, atol=0)
        expected = np.mean([watcher.rates[i] for i in range(before + 1, step + 1)])
        assert rates[checkpoint.name] == pytest.approx(expected)
    assert len(set(rates.values())) == len(steps)
    assert not list(kept.rglob("optimizer*"))


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
    made = td.fits.second_moments(td.Model(gpt2, kept, task="causal_lm"), kept)
    assert list(made.digests) == ["checkpoint-5"]


def test_keep_checkpoints__optimizer_without_second_moments(tmp_path: Path) -> None:
    keep = td.keep_checkpoints(tmp_path / "kept", every="epoch", second_moments=True)
    with pytest.raises(NotImplementedError, match=r"exp_avg_sq.*SGD.*adamw_torch"):
        train(gpt2(), tmp_path, keep, optim="sgd")
    assert not list((tmp_path / "kept").glob("checkpoint-*"))


def test_keep_checkpoints__of_a_run_that_was_continued(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    options = {"save_strategy": "steps", "save_steps": 3}
    train(gpt2(), tmp_path, td.keep_checkpoints(kept), max_steps=3, **options)
    with pytest.raises(FileExistsError, match=r"kept.*checkpoint-3"):
        train(gpt2(), tmp_path, td.keep_checkpoints(kept), **options)
    train(gpt2(), tmp_path, td.keep_checkpoints(kept), resume=True, **options)
    assert list(kept_rates(kept)) == ["checkpoint-3", "checkpoint-6", "checkpoint-9"]
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
    assert [each.name for each in model.checkpoints] == ["checkpoint-3"]


def test_keep_checkpoints__one_process_writes_whole_weights(tmp_path: Path) -> None:
    keep = td.keep_checkpoints(tmp_path / "kept", every=1)
    state = SimpleNamespace(global_step=0, is_world_process_zero=False)
    with pytest.raises(NotImplementedError, match=r"fsdp.*output_dir"):
        keep.on_train_begin(SimpleNamespace(fsdp="full_shard"), state, None)
    keep.on_train_begin(SimpleNamespace(), state, None)
    keep.on_step_begin(None, state, None, optimizer=torch.optim.SGD([torch.ones(1)], lr=1))
    keep.on_step_end(None, state, None, model=Plain(), optimizer=None)
    assert list((tmp_path / "kept").iterdir()) == []
