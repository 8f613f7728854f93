"""Folders of transformers and PEFT give what ``from_pretrained`` of the class gives: the oracle."""

from __future__ import annotations

import json
import pickle
import shutil
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
from tests.models.language_models import SMALL, adapted, bert, causal_lm, gpt2, peft
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


def of(kind: str, config: str, **options: object) -> Callable[[], nn.Module]:
    return lambda: getattr(hf, kind)(getattr(hf, config)(**options))


def lm(config: str, **options: object) -> Callable[[], nn.Module]:
    return lambda: causal_lm(config, **TEXT | options)


def llava() -> nn.Module:
    configs = {
        "vision_config": hf.CLIPVisionConfig(**VISION),
        "text_config": hf.LlamaConfig(**TEXT),
    }
    return hf.LlavaForConditionalGeneration(hf.LlavaConfig(**configs, image_token_id=30))


FAMILIES: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor]]] = {
    "bert": (bert, IDS),
    "vit": (of("ViTForImageClassification", "ViTConfig", **VISION), PIXELS),
    "gpt2": (gpt2, IDS),
    "llama": (lm("LlamaConfig"), IDS),
    "mixtral": (lm("MixtralConfig", num_local_experts=2), IDS),
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
    "dora": (gpt2, lambda: peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, use_dora=True)),
    "vera": (lm("LlamaConfig"), lambda: peft.VeraConfig(r=2, target_modules=["q_proj", "o_proj"])),
    "vera without its matrices": (lm("LlamaConfig"), lambda: peft.VeraConfig(r=2, target_modules=["q_proj", "o_proj"], save_projection=False)),
    "prompt": (gpt2, lambda: peft.PromptTuningConfig(**PROMPTS)),
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
        built = lambda: peft.get_peft_model(build(), config())  # noqa: B023, E731
        found = outputs(built, tmp_path / "adapter", inputs)
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


@pytest.mark.parametrize("prefix", ["", "module."])
def test_folder__with_old_names(prefix: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    trained = bert()
    trained.save_pretrained(tmp_path)
    old = [("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")]
    parts = [(f"{part}.", f"{prefix}{part}.") for part in ("bert", "classifier")]
    renamed(tmp_path, *old, *parts)
    same(bert, tmp_path, trained)


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
    "other words": (lm("LlamaConfig"), lm("LlamaConfig", vocab_size=41), r"\(41, 16\), got \(40, 16\)"),
    "no head": (of("BertModel", "BertConfig", **SMALL), bert, r"'classifier\.weight'.*no such tensor"),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_folder__of_another_model(case: str, tmp_path: Path) -> None:
    """``from_pretrained`` would go on with random weights, or without some."""
    saved, built, words = OTHERS[case]
    saved().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        td.Model(built, [tmp_path], task="classification")


# ------------------------------------------------------------------- steps of a run, one base, damage


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model, whole and in shards, and the steps of a run."""
    root = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    base = gpt2()
    base.save_pretrained(root / "base")
    base.save_pretrained(root / "shards", max_shard_size="10KB")
    for step in (2, 10):
        gpt2().save_pretrained(root / "run" / f"checkpoint-{step}")
    return root


def lora(base: nn.Module, **options: Any) -> Any:
    return adapted(base, **{"targets": ["c_attn"], "fan_in_fan_out": True, **options})


def adapter(folder: Path, seed: int = 1) -> tuple[Path, Any]:
    """Save an adapter of the base model; return its folder and the model."""
    torch.manual_seed(seed)
    made = lora(hf.GPT2LMHeadModel.from_pretrained(folder / "base"))
    made.save_pretrained(folder / f"adapter{seed}")
    return folder / f"adapter{seed}", made


def test_make_checkpoints__all_steps_of_a_run_in_their_order(folder: Path) -> None:
    fsspec.filesystem("memory").put(str(folder / "run"), "/saved/run", recursive=True)
    for given in (folder / "run", str(folder / "run"), "memory://saved/run"):
        model = td.Model(gpt2, given, task="causal_lm")
        assert [each.name for each in model.checkpoints] == ["checkpoint-2", "checkpoint-10"]
    for wrong, words in (
        ("memory://saved/nothing", "memory://saved/nothing"),
        (folder / "run", r"checkpoint-2.*try .*checkpoints="),
    ):
        with pytest.raises(CheckpointError, match=words):
            td.Model(gpt2, [wrong], task="causal_lm")


def test_adapter__several_share_one_base_which_belongs_to_their_identity(
    folder: Path, tmp_path: Path
) -> None:
    (first_at, one), (second_at, two), (_, three) = (adapter(folder, seed) for seed in (1, 2, 3))
    other = Path(shutil.copytree(first_at, tmp_path / "adapter"))
    gpt2().save_pretrained(tmp_path / "base")
    settings = other / "adapter_config.json"
    content = json.loads(settings.read_text()) | {"base_model_name_or_path": str(tmp_path / "base")}
    settings.write_text(json.dumps(content))
    memory = peft.get_peft_model_state_dict(three)
    states = {"1": first_at, "2": second_at, "memory": memory, "3": other}
    model = td.Model(one, states, task="causal_lm", parameters="*lora_*")
    made = model.checkpoints
    assert made[0].base is made[1].base is not None
    assert made[0].base == made[2].base  # which build gives
    assert len({checkpoint.digest for checkpoint in made}) == 4
    for checkpoint, trained in zip(made, (one, two, three), strict=False):
        found, wanted = model.forward(checkpoint)(**IDS), trained.eval()(**IDS)
        torch.testing.assert_close(first(found), first(wanted), rtol=0, atol=1e-6)


def test_folder__damaged(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder / "shards", tmp_path / "copy"))
    first_shard, second, *_ = sorted(copy.glob("*.safetensors"))
    second.unlink()
    with pytest.raises(FileNotFoundError, match="-of-"):
        td.Model(gpt2, [copy], task="causal_lm")
    first_shard.write_bytes(first_shard.read_bytes()[:-50])
    with pytest.raises(CheckpointError, match="cannot be read"):
        td.Model(gpt2, [copy], task="causal_lm")


def two_adapters() -> Any:
    made = lora(gpt2())
    made.add_adapter("other", made.peft_config["default"])
    return made


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: lora(gpt2(hidden_size=32)), r"shape"),
        (lambda: lora(gpt2(), targets=["c_proj"]), r"c_proj.*target modules"),
        (two_adapters, r"one adapter.*default.*other"),
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
