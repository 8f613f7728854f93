"""Tiny models of transformers with random weights, and adapters of PEFT, which tests share."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

VOCABULARY = 40
SMALL = {
    **{"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 24},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}


def causal_lm(config: str, **options: object) -> nn.Module:
    settings = getattr(transformers, config)(**{**SMALL, **options})
    return transformers.AutoModelForCausalLM.from_config(settings)


def gpt2(**options: object) -> nn.Module:
    """Input and output embeddings are one matrix; positions are absolute."""
    return causal_lm("GPT2Config", **options)


def llama(**options: object) -> nn.Module:
    """RMSNorm, rotary positions, two query heads per key and value head."""
    return causal_lm("LlamaConfig", num_key_value_heads=2, head_dim=4, **options)


def bert(**options: object) -> nn.Module:
    config = transformers.BertConfig(**{**SMALL, **options}, num_labels=3)
    return transformers.BertForSequenceClassification(config)


def adapted(base: nn.Module, targets: list[str], **options: object) -> nn.Module:
    """Return a model with an adapter that is not the identity."""
    settings = {"r": 2, "target_modules": targets, "init_lora_weights": False, **options}
    return peft.get_peft_model(base, peft.LoraConfig(**settings))


def made(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a model in float64 with weights that are livelier than an initialisation."""
    torch.manual_seed(0)
    module = build().double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return module
