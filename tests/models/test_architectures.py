"""Small random language models of transformers and PEFT: hooks against a loop of ``backward()``."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor, nn

import trakdask as td

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers")

VOCABULARY, LENGTH = 40, 9
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 4}
EXPERTS = {**GROUPED, "num_experts_per_tok": 2, "experts_implementation": "eager"}


def causal_lm(config: str, **options: object) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**options))


def gpt2() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16}
    return causal_lm("GPT2Config", **sizes, bos_token_id=1, eos_token_id=2)


ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {
    "gpt2, tied embeddings": gpt2,
    "gpt-neox, rotary positions": partial(causal_lm, "GPTNeoXConfig", **SMALL),
    "llama, grouped queries": partial(causal_lm, "LlamaConfig", **GROUPED),
    "llama, tied embeddings": partial(
        causal_lm, "LlamaConfig", **GROUPED, tie_word_embeddings=True
    ),
    "qwen2, biases": partial(causal_lm, "Qwen2Config", **GROUPED),
    "qwen3, normalised queries": partial(causal_lm, "Qwen3Config", **GROUPED),
    "mistral, sliding window": partial(causal_lm, "MistralConfig", **GROUPED, sliding_window=4),
    "mixtral, experts": partial(causal_lm, "MixtralConfig", **EXPERTS, num_local_experts=4),
    "qwen3-moe, experts": partial(
        causal_lm, "Qwen3MoeConfig", **EXPERTS, num_experts=4, moe_intermediate_size=12
    ),
}


def adapted(build: Callable[[], nn.Module], targets: list[str], **options: object) -> nn.Module:
    settings = {"r": 2, "target_modules": targets, "init_lora_weights": False, **options}
    return peft.get_peft_model(build(), peft.LoraConfig(**settings))


QUERIES = ["q_proj", "v_proj"]
ADAPTERS: dict[str, Callable[[], nn.Module]] = {
    "lora": partial(adapted, ARCHITECTURES["llama, grouped queries"], QUERIES),
    "rslora": partial(
        adapted, ARCHITECTURES["qwen2, biases"], QUERIES, use_rslora=True, lora_alpha=3
    ),
    "dora": partial(adapted, ARCHITECTURES["llama, grouped queries"], QUERIES, use_dora=True),
    "lora of transposed weights": partial(adapted, gpt2, ["c_attn"], fan_in_fan_out=True),
    "lora beside experts": partial(adapted, ARCHITECTURES["mixtral, experts"], QUERIES),
}


def made(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a model in float64 with weights that are livelier than an initialisation."""
    torch.manual_seed(0)
    module = build().double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return module


def samples(n: int = 5) -> xr.Dataset:
    """Sequences of different lengths, padded on the right."""
    ids = np.random.default_rng(0).integers(3, VOCABULARY, (n, LENGTH))
    mask = (np.arange(LENGTH) < LENGTH - np.arange(n)[:, None]).astype(np.int64)
    return td.from_arrays({"input_ids": ids * mask, "attention_mask": mask}, chunks=3)


def backward(module: nn.Module, names: list[str]) -> np.ndarray:
    """Gradients of the summed margins, one unpadded sequence and one ``backward()`` at a time."""
    data, parameters = samples().compute(scheduler="sync"), dict(module.named_parameters())
    rows = []
    for ids, mask in zip(data.input_ids.values, data.attention_mask.values, strict=True):
        alone = torch.from_numpy(ids[mask > 0])[None]
        for parameter in module.parameters():
            parameter.requires_grad, parameter.grad = True, torch.zeros_like(parameter)
        log_p = module(input_ids=alone).logits[0, :-1].log_softmax(1).gather(1, alone[0, 1:, None])
        (log_p - (-log_p.exp()).log1p()).sum().backward()
        gradients = [parameters[name].grad for name in names]
        rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
    return torch.stack(rows).numpy()


def features(model: td.Model, gradients: str = "hooks") -> np.ndarray:
    found = td.featurize(samples(), model, projector=td.Identity(), gradients=gradients)
    return found.compute(scheduler="sync").feature[..., 0].values


def close(found: np.ndarray, expected: np.ndarray) -> None:
    error = np.linalg.norm(found - expected, axis=-1)
    assert (error <= 1e-6 * np.linalg.norm(expected, axis=-1)).all(), error


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_hooks__equal_backward(name: str) -> None:
    module = made(ARCHITECTURES[name])
    model = td.Model(module, task="causal_lm")
    assert list(model.shapes) == [n for n, _ in module.named_parameters()]
    close(features(model), backward(module, list(model.shapes)))


@pytest.mark.parametrize("name", ADAPTERS)
def test_hooks__of_adapters_equal_backward(name: str) -> None:
    module = made(ADAPTERS[name])
    model = td.Model(module, task="causal_lm", parameters="*lora_*")
    assert 0 < len(model.shapes) < len(list(module.parameters()))
    close(features(model), backward(module, list(model.shapes)))


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # torch's vmap
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_hooks__of_other_implementations_of_experts(implementation: str) -> None:
    module = made(ARCHITECTURES["qwen3-moe, experts"]).float()
    expected = features(td.Model(module, task="causal_lm"))
    module.set_experts_implementation(implementation)
    found = features(td.Model(module, task="causal_lm"))
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


def test_hooks__gradient_checkpointing_is_invisible() -> None:
    module = made(ARCHITECTURES["llama, grouped queries"])
    expected = features(td.Model(module, task="causal_lm"))
    module.gradient_checkpointing_enable()
    module.train()
    np.testing.assert_array_equal(features(td.Model(module, task="causal_lm")), expected)


def test_model__quantised_layers_are_refused() -> None:
    quantised = type("Linear4bit", (nn.Linear,), {"__module__": "bitsandbytes.nn.modules"})
    module = nn.Sequential(nn.Embedding(3, 4), quantised(4, 3))
    for build in (module, lambda: module):
        with pytest.raises(TypeError, match=r"'1'.*bitsandbytes.nn.modules.Linear4bit.*bfloat16"):
            td.Model(build, [module.state_dict()], task="causal_lm")


def test_hooks__rows_that_do_not_belong_to_single_samples_are_refused() -> None:
    """Experts that get only some of the tokens cannot be followed."""

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(VOCABULARY, 6), nn.Linear(6, VOCABULARY)
            self.expert = nn.Linear(6, 6)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            x, used = self.embedding(input_ids), attention_mask > 0
            return self.head(x.index_put((used,), self.expert(x[used]).tanh()))

    model = td.Model(made(Dropped), task="causal_lm")
    with pytest.raises(td.errors.BlockError, match=r"rows.*gradients='loop'"):
        features(model)
    lengths = [9, 9, 3, 5, 7, 8, 4, 3]  # pairs with even sums, after a pair that cannot tell
    mask = (np.arange(LENGTH) < np.array(lengths)[:, None]).astype(np.int64)
    data = td.from_arrays({"input_ids": mask, "attention_mask": mask}, chunks=8)
    with pytest.raises(td.errors.BlockError, match=r"rows.*gradients='loop'"):
        td.featurize(data, model, projector=td.Identity(), gradients="hooks", batch_size=2).compute(
            scheduler="sync"
        )
