"""Folders of transformers and PEFT give what ``from_pretrained`` of the class gives: the oracle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trakdask as td
from tests.models.language_models import SMALL, VOCABULARY, bert, causal_lm, gpt2, peft
from tests.models.language_models import transformers as hf

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers")

IDS = {"input_ids": torch.tensor([[3, 4, 5, 6, 7]])}
PIXELS = {"pixel_values": torch.linspace(-1, 1, 3 * 32 * 32).reshape(1, 3, 32, 32)}
SEEN = {"input_ids": torch.tensor([[3, 30, 4, 5]])}

TEXT = {**SMALL, "num_key_value_heads": 2, "head_dim": 4}
VISION = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "image_size": 32, "patch_size": 16},
}


def of(kind: str, config: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(hf, kind)(config)


def lm(config: str, **options: object) -> Callable[[], nn.Module]:
    return lambda: causal_lm(config, **options)


def clip() -> nn.Module:
    text = {**SMALL, "projection_dim": 8}
    config = hf.CLIPConfig(text_config=text, vision_config=VISION, projection_dim=8)
    return hf.CLIPModel(config)


def t5() -> nn.Module:
    config = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1}
    return hf.T5ForConditionalGeneration(hf.T5Config(**config, num_heads=2, decoder_start_token_id=0))


def detr() -> nn.Module:
    backbone = hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], out_features=["stage2"]
    )
    sizes = {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "d_model": 16, "num_queries": 3}
    layers = {"encoder_layers": 1, "decoder_layers": 1}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    options = {"use_timm_backbone": False, "backbone_config": backbone, "backbone": None}
    config = hf.DetrConfig(**options, **sizes, **layers, **heads)
    return hf.DetrForObjectDetection(config)


def wav2vec2() -> nn.Module:
    convolutions = {"conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (8, 4)}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    return hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**SMALL, **convolutions, **positions))


def convnext() -> nn.Module:
    config = hf.ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2)
    return hf.ConvNextForImageClassification(config)


def llava() -> nn.Module:
    vision = hf.CLIPVisionConfig(**VISION)
    config = hf.LlavaConfig(
        vision_config=vision, text_config=hf.LlamaConfig(**TEXT), image_token_id=30
    )
    return hf.LlavaForConditionalGeneration(config)


FAMILIES: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor]]] = {
    "bert": (bert, IDS),
    "distilbert": (
        of("DistilBertForMaskedLM", hf.DistilBertConfig(vocab_size=40, dim=16, hidden_dim=24, n_layers=1, n_heads=2)),
        IDS,
    ),
    "roberta": (of("RobertaForMaskedLM", hf.RobertaConfig(**SMALL)), IDS),
    "vit": (of("ViTForImageClassification", hf.ViTConfig(**VISION)), PIXELS),
    "clip": (clip, IDS | PIXELS),
    "t5": (t5, IDS | {"decoder_input_ids": torch.tensor([[0, 3, 4]])}),
    "gpt2": (gpt2, IDS),
    "gpt_neox": (lm("GPTNeoXConfig"), IDS),
    "llama": (lm("LlamaConfig", **TEXT), IDS),
    "mistral": (lm("MistralConfig", **TEXT), IDS),
    "mixtral": (lm("MixtralConfig", **TEXT, num_local_experts=2), IDS),
    "qwen2": (lm("Qwen2Config", **TEXT), IDS),
    "qwen2_moe": (
        lm("Qwen2MoeConfig", **TEXT, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8, shared_expert_intermediate_size=8),
        IDS,
    ),
    "phi": (lm("PhiConfig"), IDS),
    "detr": (detr, PIXELS),
    "wav2vec2": (wav2vec2, {"input_values": torch.linspace(-1, 1, 400)[None]}),
    "convnext": (convnext, PIXELS),
    "llava": (llava, {"input_ids": torch.tensor([[3, 30, 30, 30, 30, 5]])} | PIXELS),
}  # fmt: skip


def first(output: Any) -> Tensor:
    """Return the tensor of an output that the model is asked for."""
    names = ("logits", "logits_per_image", "last_hidden_state")
    return next(output[name] for name in names if name in output)


def outputs(build: Callable[[], nn.Module], checkpoint: object, inputs: dict[str, Tensor]) -> Tensor:
    model = td.Model(build, [checkpoint], task="classification")
    with torch.no_grad():
        return first(model.forward(model.checkpoints[0])(**inputs))


@pytest.mark.parametrize("family", FAMILIES)
def test_folder__gives_what_from_pretrained_gives(family: str, tmp_path: Path) -> None:
    build, inputs = FAMILIES[family]
    torch.manual_seed(1)
    build().save_pretrained(tmp_path)
    loaded = type(build()).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        wanted = first(loaded(**inputs))
    torch.testing.assert_close(outputs(build, tmp_path, inputs), wanted, rtol=0, atol=1e-6)
