"""Models of transformers and PEFT against one ``backward()`` per sample, without any padding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor, nn

import trakdask as td
from tests.models import engines
from tests.models.language_models import VOCABULARY, adapted, causal_lm, gpt2, llama, made
from trakdask.models.tasks import Batch

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers")

LENGTH = 9
GROUPED = {"num_key_value_heads": 2, "head_dim": 4}
EXPERTS = {**GROUPED, "num_experts_per_tok": 2, "experts_implementation": "eager"}

ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {
    "gpt2, tied embeddings": gpt2,
    "gpt-neox, rotary positions": partial(causal_lm, "GPTNeoXConfig"),
    "llama, grouped queries": llama,
    "qwen2, biases": partial(causal_lm, "Qwen2Config", **GROUPED),
    "qwen3, normalised queries": partial(causal_lm, "Qwen3Config", **GROUPED),
    "mixtral, experts": partial(causal_lm, "MixtralConfig", **EXPERTS, num_local_experts=4),
    "qwen3-moe, experts": partial(
        causal_lm, "Qwen3MoeConfig", **EXPERTS, num_experts=4, moe_intermediate_size=12
    ),
}
QUERIES = ["q_proj", "v_proj"]
MIXTRAL = ARCHITECTURES["mixtral, experts"]
ADAPTERS: dict[str, Callable[[], nn.Module]] = {
    "lora": lambda: adapted(llama(), QUERIES),
    "dora": lambda: adapted(llama(), QUERIES, use_dora=True),
    "lora of transposed weights": lambda: adapted(gpt2(), ["c_attn"], fan_in_fan_out=True),
    "lora beside experts": lambda: adapted(MIXTRAL(), QUERIES),
}


def samples(n: int = 5) -> xr.Dataset:
    """Sequences of different lengths, padded on the right."""
    ids = np.random.default_rng(0).integers(3, VOCABULARY, (n, LENGTH))
    mask = (np.arange(LENGTH) < LENGTH - np.arange(n)[:, None]).astype(np.int64)
    return td.from_arrays({"input_ids": ids * mask, "attention_mask": mask}, chunks=3)


def token_margins(logits: Tensor, ids: Tensor) -> Tensor:
    log_p = logits[:-1].log_softmax(1).gather(1, ids[1:, None])
    return (log_p - (-log_p.exp()).log1p()).sum()


def backward(module: nn.Module, names: list[str]) -> np.ndarray:
    """Gradients of the margins, one unpadded sequence and one ``backward()`` at a time."""

    def output(module: nn.Module, one: Batch) -> Tensor:
        alone = one["input_ids"][one["attention_mask"] > 0]
        return token_margins(module(input_ids=alone[None]).logits[0], alone)

    data = samples().compute(scheduler="sync")
    batch = Batch({name: torch.from_numpy(values.values) for name, values in data.items()})
    found, _ = engines.backward(module.requires_grad_(), output, batch)
    return torch.cat([found[name] for name in names], 1).numpy()


def features(model: td.Model, gradients: str = "hooks", **options: object) -> np.ndarray:
    found = td.featurize(samples(), model, projector=td.Identity(), gradients=gradients, **options)
    return found.compute(scheduler="sync").feature[..., 0].values


def close(found: np.ndarray, expected: np.ndarray, tolerance: float = 1e-6) -> None:
    """Compare whole rows: an element may be small by cancellation."""
    error = np.linalg.norm(found - expected, axis=-1)
    assert (error <= tolerance * np.linalg.norm(expected, axis=-1)).all(), error


@pytest.mark.parametrize("name", [*ARCHITECTURES, *ADAPTERS])
def test_hooks__equal_backward(name: str) -> None:
    module = made((ARCHITECTURES | ADAPTERS)[name])
    model = td.Model(module, task="causal_lm", parameters="*lora_*" if name in ADAPTERS else None)
    assert list(model.shapes) == [
        n for n, _ in module.named_parameters() if name in ARCHITECTURES or "lora_" in n
    ]
    close(features(model), backward(module, list(model.shapes)))


def test_vmap__attention_that_it_cannot_run_says_what_to_type() -> None:
    fused = td.Model(made(partial(gpt2, attn_implementation="sdpa")), task="causal_lm")
    with pytest.raises(td.errors.BlockError, match=r"gradients='loop'.*attn_implementation='eager"):
        features(fused, "vmap")
    close(features(fused, "auto"), features(fused, "loop"))


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # torch's vmap
def test_hooks__of_other_implementations_of_experts() -> None:
    module = made(ARCHITECTURES["qwen3-moe, experts"]).float()
    expected = features(td.Model(module, task="causal_lm"))
    for implementation in ("grouped_mm", "batched_mm"):
        module.set_experts_implementation(implementation)
        found = features(td.Model(module, task="causal_lm"))
        np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


def test_hooks__gradient_checkpointing_is_invisible() -> None:
    module = made(llama)
    expected = features(td.Model(module, task="causal_lm"))
    module.gradient_checkpointing_enable()
    module.train()
    np.testing.assert_array_equal(features(td.Model(module, task="causal_lm")), expected)


class Dropped(nn.Module):
    """An expert that gets only some of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 6), nn.Linear(6, VOCABULARY)
        self.expert = nn.Linear(6, 6)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x, used = self.embedding(input_ids), attention_mask > 0
        return self.head(x.index_put((used,), self.expert(x[used]).tanh()))


def test_hooks__rows_that_do_not_belong_to_single_samples_are_refused() -> None:
    model = td.Model(made(Dropped), task="causal_lm")
    with pytest.raises(td.errors.BlockError, match=r"rows.*gradients='vmap', or 'loop'"):
        features(model)
    lengths = [9, 9, 3, 5, 7, 8, 4, 3]  # pairs with even sums, after a pair that cannot tell
    mask = (np.arange(LENGTH) < np.array(lengths)[:, None]).astype(np.int64)
    data = td.from_arrays({"input_ids": mask, "attention_mask": mask}, chunks=8)
    lazy = td.featurize(data, model, projector=td.Identity(), gradients="hooks", batch_size=2)
    with pytest.raises(td.errors.BlockError, match=r"rows.*gradients='vmap', or 'loop'"):
        lazy.compute(scheduler="sync")
