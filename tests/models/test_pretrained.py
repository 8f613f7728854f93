"""Folders of transformers and PEFT give what ``from_pretrained`` of the class gives: the oracle."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import fsspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import trakdask as td
from tests.models.language_models import SMALL, bert, causal_lm, gpt2, peft
from tests.models.language_models import transformers as hf
from trakdask.errors import CheckpointError
from trakdask.models import checkpoints

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers")

IDS = {"input_ids": torch.tensor([[3, 4, 5, 6, 7]])}
PIXELS = {"pixel_values": torch.linspace(-1, 1, 3 * 32 * 32).reshape(1, 3, 32, 32)}

SEEN = {"input_ids": torch.tensor([[3, 32, 30, 30, 30, 30, 33]])}  # with the place of a picture

TEXT = {**SMALL, "num_hidden_layers": 1, "num_key_value_heads": 2, "head_dim": 4}
VISION = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "image_size": 32, "patch_size": 16},
}
MARKS = {"image_token_id": 30, "vision_start_token_id": 32, "vision_end_token_id": 33}


def of(kind: str, config: str, **options: object) -> Callable[[], nn.Module]:
    return lambda: getattr(hf, kind)(getattr(hf, config)(**options))


def lm(config: str, **options: object) -> Callable[[], nn.Module]:
    return lambda: causal_lm(config, **TEXT | options)


def detr() -> nn.Module:
    backbone = hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], out_features=["stage2"]
    )
    sizes = {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "d_model": 16, "num_queries": 3}
    layers = {"encoder_layers": 1, "decoder_layers": 1}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    options = {"use_timm_backbone": False, "backbone_config": backbone, "backbone": None}
    options["use_pretrained_backbone"] = False
    return hf.DetrForObjectDetection(hf.DetrConfig(**options, **sizes, **layers, **heads))


def wav2vec2(**options: object) -> nn.Module:
    convolutions = {"conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (8, 4)}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    config = hf.Wav2Vec2Config(**TEXT | convolutions | positions | options)
    return hf.Wav2Vec2ForCTC(config)


def llava() -> nn.Module:
    configs = {
        "vision_config": hf.CLIPVisionConfig(**VISION),
        "text_config": hf.LlamaConfig(**TEXT),
    }
    return hf.LlavaForConditionalGeneration(hf.LlavaConfig(**configs, image_token_id=30))


def gemma3() -> nn.Module:
    vision = {**VISION, "model_type": "siglip_vision_model"}
    config = hf.Gemma3Config(
        text_config=TEXT, vision_config=vision, mm_tokens_per_image=4, image_token_id=30
    )
    return hf.Gemma3ForConditionalGeneration(config)


def qwen2_vl() -> nn.Module:
    vision = {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 16, "patch_size": 4}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 1e4}
    text = {**TEXT, "rope_parameters": rope}
    config = hf.Qwen2VLConfig(text_config=text, vision_config=vision | {"mlp_ratio": 2}, **MARKS)
    return hf.Qwen2VLForConditionalGeneration(config)


PATCHES = {
    "pixel_values": torch.linspace(-1, 1, 16 * 96).reshape(16, 96),
    "image_grid_thw": torch.tensor([[1, 4, 4]]),
    "mm_token_type_ids": torch.tensor([[0, 0, 1, 1, 1, 1, 0]]),
}
FAMILIES: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor]]] = {
    "bert": (bert, IDS),
    "vit": (of("ViTForImageClassification", "ViTConfig", **VISION), PIXELS),
    "clip": (of("CLIPModel", "CLIPConfig", text_config={**TEXT, "projection_dim": 8}, vision_config=VISION, projection_dim=8), IDS | PIXELS),
    "t5": (of("T5ForConditionalGeneration", "T5Config", vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2), IDS | {"decoder_input_ids": torch.tensor([[0, 3, 4]])}),
    "gpt2": (gpt2, IDS),
    "llama": (lm("LlamaConfig"), IDS),
    "mixtral": (lm("MixtralConfig", num_local_experts=2), IDS),
    "qwen2_vl": (qwen2_vl, SEEN | PATCHES),
    "gemma3": (gemma3, SEEN | PIXELS),
    "detr": (detr, PIXELS),
    "wav2vec2": (wav2vec2, {"input_values": torch.linspace(-1, 1, 400)[None]}),
    "llava": (llava, SEEN | PIXELS),
}  # fmt: skip


def first(output: Any) -> Tensor:
    """Return the tensor of an output that the model is asked for."""
    names = ("logits", "logits_per_image", "last_hidden_state")
    return next(output[name] for name in names if name in output)


def outputs(
    build: Callable[[], nn.Module], checkpoint: object, inputs: dict[str, Tensor]
) -> Tensor:
    model = td.Model(build, [checkpoint], task="classification")
    with torch.no_grad():
        return first(model.forward(model.checkpoints[0])(**inputs))


def same(
    build: Callable[[], nn.Module], checkpoint: object, wanted: Any, inputs: Any = IDS
) -> None:
    """Compare a model at a checkpoint with the outputs of another one."""
    with torch.no_grad():
        expected = first(wanted.eval()(**inputs))
    torch.testing.assert_close(outputs(build, checkpoint, inputs), expected, rtol=0, atol=1e-6)


def saved(base: Callable[[], nn.Module], folder: Path) -> Callable[[], Any]:
    """Save a model, and return what loads it."""
    base().save_pretrained(folder / "base")
    return lambda: type(base()).from_pretrained(folder / "base")


@pytest.mark.parametrize("family", FAMILIES)
def test_folder__gives_what_from_pretrained_gives(family: str, tmp_path: Path) -> None:
    build, inputs = FAMILIES[family]
    torch.manual_seed(1)
    build().save_pretrained(tmp_path)
    loaded = type(build()).from_pretrained(tmp_path)
    same(build, tmp_path, loaded, inputs)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    in_folder = [tmp_path] * (family in ("bert", "gpt2", "mixtral"))
    for place in (tmp_path / "pytorch_model.bin", *in_folder):
        same(build, place, loaded, inputs)


LM, TARGETS = {"task_type": "CAUSAL_LM"}, {"target_modules": ["q_proj", "down_proj"]}
PROMPTS = {**LM, "num_virtual_tokens": 3}
ADAPTERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "lora": (lm("LlamaConfig"), lambda: peft.LoraConfig(r=2, **TARGETS)),
    "lora of experts": (FAMILIES["mixtral"][0], lambda: peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)),
    "lora with a head": (bert, lambda: peft.LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS")),
    "lora with tokens": (lm("LlamaConfig"), lambda: peft.LoraConfig(r=2, **TARGETS, trainable_token_indices=[3, 5])),
    "lora of embeddings": (gpt2, lambda: peft.LoraConfig(r=2, target_modules=["c_attn", "wte"], fan_in_fan_out=True)),
    "lora with a norm": (gpt2, lambda: peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, modules_to_save=["ln_f"])),
    "dora": (gpt2, lambda: peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, use_dora=True)),
    "vera": (lm("LlamaConfig"), lambda: peft.VeraConfig(r=2, target_modules=["q_proj", "o_proj"])),
    "vera without its matrices": (lm("LlamaConfig"), lambda: peft.VeraConfig(r=2, target_modules=["q_proj", "o_proj"], save_projection=False)),
    "prompt": (gpt2, lambda: peft.PromptTuningConfig(**PROMPTS)),
    "prompt of a classifier": (bert, lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="SEQ_CLS")),
    "prefix": (lm("LlamaConfig"), lambda: peft.PrefixTuningConfig(**PROMPTS)),
    "prefix by layers": (lm("LlamaConfig"), lambda: peft.PrefixTuningConfig(**PROMPTS, prefix_projection=True, encoder_hidden_size=8)),
    "llama-adapter": (lm("LlamaConfig"), lambda: peft.AdaptionPromptConfig(**LM, adapter_len=3, adapter_layers=1)),
}  # fmt: skip


@pytest.mark.parametrize("method", ADAPTERS)
@pytest.mark.filterwarnings("ignore:Specified to not:UserWarning")
def test_adapter__gives_what_from_pretrained_gives(method: str, tmp_path: Path) -> None:
    base, config = ADAPTERS[method]
    torch.manual_seed(1)
    saved_base = saved(base, tmp_path)
    trained = peft.get_peft_model(saved_base(), config())
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter += 0.1 * torch.randn_like(parameter) * parameter.requires_grad
    trained.save_pretrained(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(saved_base(), tmp_path / "adapter").eval()
    inputs = IDS | {"attention_mask": torch.ones_like(IDS["input_ids"])}
    with torch.no_grad():
        wanted, without = first(loaded(**inputs)), first(saved_base().eval()(**inputs))
    assert float((wanted[:, -1] - without[:, -1]).abs().max()) > 1e-4
    settings = tmp_path / "adapter" / "adapter_config.json"
    content = json.loads(settings.read_text())
    # The base model is where the adapter says; and, as on another machine, it is not there.
    for build, at in ((base, content["base_model_name_or_path"]), (saved_base, "some/model")):
        settings.write_text(json.dumps(content | {"base_model_name_or_path": at}))
        adapted = lambda: peft.get_peft_model(build(), config())  # noqa: B023, E731
        found = outputs(adapted, tmp_path / "adapter", inputs)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("start", ["pissa_niter_4", "olora"])
def test_adapter__that_changes_its_base_model_first(start: str, tmp_path: Path) -> None:
    base = ADAPTERS["lora"][0]
    config = lambda: peft.LoraConfig(r=2, **TARGETS, init_lora_weights=start)  # noqa: E731
    trained = peft.get_peft_model(saved(base, tmp_path)(), config())
    trained.save_pretrained(tmp_path / "adapter")
    build = lambda: peft.get_peft_model(base(), config())  # noqa: E731
    with pytest.raises(CheckpointError, match=rf"'{start}'.* try model.state_dict\(\)"):
        td.Model(build, [tmp_path / "adapter"], task="classification")
    same(build, trained.state_dict(), trained)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
def test_adapter__with_embeddings_of_more_words(tmp_path: Path) -> None:
    """The base model's own embeddings do not fit, and are not needed."""
    base = FAMILIES["gpt2"][0]

    def build(base: Any) -> Any:
        base.resize_token_embeddings(43, mean_resizing=False)
        return peft.get_peft_model(
            base, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
        )

    trained = build(saved(base, tmp_path)())
    trained.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    same(lambda: build(base()), tmp_path / "adapter", trained)
    renamed(tmp_path / "base", (".ln_1.", ".other."))
    with pytest.raises(CheckpointError, match=r"ln_1.*no such tensor.*its base model"):
        outputs(lambda: build(base()), tmp_path / "adapter", IDS)


def test_adapter__inside_of_a_model_of_transformers(tmp_path: Path) -> None:
    load = saved(FAMILIES["llama"][0], tmp_path)

    def build() -> Any:
        built = load()
        options = {"init_lora_weights": False, "modules_to_save": ["norm"]}
        built.add_adapter(peft.LoraConfig(r=2, **TARGETS, **options))
        return built

    build().save_pretrained(tmp_path / "adapter")
    wanted = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    same(build, tmp_path / "adapter", wanted)


class Wrapped(nn.Module):
    """A model of transformers inside of another one."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = net or FAMILIES["vit"][0]()

    def forward(self, **inputs: Tensor) -> Any:
        return self.net(**inputs)


def test_adapter__inside_of_another_module(tmp_path: Path) -> None:
    base, config = ADAPTERS["prompt"]
    trained = peft.get_peft_model(saved(base, tmp_path)(), config())
    trained.save_pretrained(tmp_path / "adapter")
    inside = lambda: Wrapped(peft.get_peft_model(base(), config()))  # noqa: E731
    same(inside, tmp_path / "adapter", trained)


def renamed(path: Path, *changes: tuple[str, str]) -> None:
    """Change the names of tensors in a file, as old files have them."""
    tensors = load_file(path / "model.safetensors")
    for new, old in changes:
        assert any(new in name for name in tensors)
        tensors = {name.replace(new, old): tensor for name, tensor in tensors.items()}
    save_file(tensors, path / "model.safetensors")


OLD = {
    "gamma and beta": (bert, [("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")], IDS),
    "weight_g": (wav2vec2, [("parametrizations.weight.original0", "weight_g"), ("parametrizations.weight.original1", "weight_v")], FAMILIES["wav2vec2"][1]),
    "gamma below DDP": (bert, [("LayerNorm.weight", "LayerNorm.gamma"), ("bert.", "module.bert."), ("classifier.", "module.classifier.")], IDS),
}  # fmt: skip


@pytest.mark.parametrize("case", OLD)
def test_folder__with_old_names(case: str, tmp_path: Path) -> None:
    build, changes, inputs = OLD[case]
    torch.manual_seed(1)
    trained = build()
    trained.save_pretrained(tmp_path)
    renamed(tmp_path, *changes)
    same(build, tmp_path, trained, inputs)


def test_folder__of_the_model_inside_of_another_one(tmp_path: Path) -> None:
    trained = FAMILIES["vit"][0]()
    trained.save_pretrained(tmp_path)
    for given in (tmp_path, {f"model.net.{n}": t for n, t in trained.state_dict().items()}):
        same(Wrapped, given, trained, PIXELS)


def test_folder__of_a_model_with_a_head_that_the_built_one_lacks(tmp_path: Path) -> None:
    of("BertForPreTraining", "BertConfig", **SMALL)().save_pretrained(tmp_path)
    without_pooler = lambda: hf.BertModel(hf.BertConfig(**SMALL), add_pooling_layer=False)  # noqa: E731
    for build in (
        of("BertModel", "BertConfig", **SMALL),
        of("BertForMaskedLM", "BertConfig", **SMALL),
    ):
        same(build, tmp_path, type(build()).from_pretrained(tmp_path))
    assert outputs(without_pooler, tmp_path, IDS).shape == (1, 5, 16)


def test_folder__as_it_was_built_and_stored(tmp_path: Path) -> None:
    """Neither the arguments of the class nor the layers that were changed are in the folder."""

    def build() -> nn.Module:
        built = FAMILIES["vit"][0]()
        built.classifier = nn.Sequential(nn.Linear(16, 5), nn.Linear(5, 7))
        return built

    trained = build().to(torch.bfloat16)
    trained.save_pretrained(tmp_path)
    model = td.Model(build, [tmp_path], task="classification")
    forward = model.forward(model.checkpoints[0])
    assert {tensor.dtype for tensor in forward.parameters.values()} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32
    torch.testing.assert_close(
        forward.parameters["classifier.1.weight"], trained.classifier[1].weight
    )


def test_folder__at_a_url_and_on_workers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Only the files with weights are read, and again where nothing is cached."""
    build, inputs = FAMILIES["mixtral"]
    trained = build()
    trained.save_pretrained(tmp_path / "saved", max_shard_size="10KB")
    trained.save_pretrained(tmp_path / "whole")
    fsspec.filesystem("memory").put(str(tmp_path / "saved"), "/pretrained", recursive=True)
    capfd.readouterr()
    here, there, whole = (
        td.Model(build, [place], task="classification")
        for place in (tmp_path / "saved", "memory://pretrained", tmp_path / "whole")
    )
    assert len({each.checkpoints[0].digest for each in (here, there, whole)}) == 1
    checkpoints._states.by_digest.clear()
    sent = pickle.loads(cloudpickle.dumps(there))
    found = sent.forward(sent.checkpoints[0])(**inputs)
    wanted = here.forward(here.checkpoints[0])(**inputs)
    torch.testing.assert_close(first(found), first(wanted), rtol=0, atol=0)
    assert capfd.readouterr() == ("", "")


OTHERS = {
    "more layers": (lm("LlamaConfig", num_hidden_layers=2), lm("LlamaConfig"), r"layers\.1\..* too"),
    "fewer layers": (lm("LlamaConfig"), lm("LlamaConfig", num_hidden_layers=2), r"layers\.1\..*no such tensor"),
    "other words": (lm("LlamaConfig"), lm("LlamaConfig", vocab_size=41), r"\(41, 16\), got \(40, 16\)"),
    "no head": (of("BertModel", "BertConfig", **SMALL), bert, r"'classifier\.weight'.*no such tensor"),
    "another class": (gpt2, bert, r"no such tensor.*build function"),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_folder__of_another_model(case: str, tmp_path: Path) -> None:
    """``from_pretrained`` would go on with random weights, or without some."""
    saved, built, words = OTHERS[case]
    saved().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        td.Model(built, [tmp_path], task="classification")
