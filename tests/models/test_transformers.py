"""Tasks on models of transformers: tiny, random, built here; against a loop of ``backward()``."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor, nn

import trakdask as td
from trakdask.models import tasks

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

VOCABULARY, LENGTH = 40, 9
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2}
TEXT = {**SMALL, "intermediate_size": 24, "num_attention_heads": 4, "max_position_embeddings": 16}


def bert(attention: str = "eager") -> nn.Module:
    config = transformers.BertConfig(**TEXT, num_labels=3, attn_implementation=attention)
    return transformers.BertForSequenceClassification(config)


def gpt2(attention: str = "eager") -> nn.Module:
    """Input and output embeddings are one matrix; positions are absolute."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=16,
        n_layer=2,
        n_head=4,
        n_positions=16,
        attn_implementation=attention,
    )
    return transformers.GPT2LMHeadModel(config)


def llama(attention: str = "eager") -> nn.Module:
    """RMSNorm, rotary positions, two query heads per key and value head."""
    config = transformers.LlamaConfig(**TEXT, num_key_value_heads=2, attn_implementation=attention)
    return transformers.LlamaForCausalLM(config)


class ClipTowers(nn.Module):
    """CLIPModel in the form of open_clip: what the task ``clip`` needs of a wrapper."""

    def __init__(self) -> None:
        super().__init__()
        vision = {"image_size": 8, "patch_size": 4, "num_channels": 1, "intermediate_size": 24}
        vision |= {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = transformers.CLIPConfig(
            text_config={**TEXT, "eos_token_id": VOCABULARY - 1},
            vision_config=vision,
            projection_dim=8,
            attn_implementation="eager",
        )
        self.clip = transformers.CLIPModel(config)

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = self.clip(input_ids=text, pixel_values=image)
        return found.image_embeds, found.text_embeds, self.clip.logit_scale.exp()


@functools.cache
def weights(build: Callable[[], nn.Module], seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    state = build().state_dict()
    generator = torch.Generator().manual_seed(seed)  # livelier than an initialisation
    return {n: t + 0.2 * torch.randn(t.shape, generator=generator) for n, t in tied(state).items()}


def tied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Leave out the second name of a shared matrix, as safetensors files do."""
    return {
        n: t
        for n, t in state.items()
        if n != "lm_head.weight" or "transformer.wte.weight" not in state
    }


def module(build: Callable[[], nn.Module]) -> nn.Module:
    made = build().eval()
    made.load_state_dict(weights(build), strict=False)
    return made


def model(
    build: Callable[[], nn.Module], task, like: Callable[[], nn.Module] | None = None
) -> td.Model:
    return td.Model(build, [weights(like or build)], task=task)


def arrays(n: int = 5) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    mask = (np.arange(LENGTH) < LENGTH - np.arange(n)[:, None]).astype(np.int64)
    return {
        "input_ids": random.integers(1, VOCABULARY - 1, (n, LENGTH)),
        "attention_mask": mask,
        "label": np.arange(n) % 3,
        "image": random.standard_normal((n, 1, 8, 8)).astype("f4"),
        "text": random.integers(1, VOCABULARY - 1, (n, LENGTH)),
    }


def samples(*names: str, n: int = 5, **others: np.ndarray) -> xr.Dataset:
    found = {**arrays(n), **others}
    return td.from_arrays({name: found[name] for name in (*names, *others)}, chunks=3)


def text_samples() -> xr.Dataset:
    return samples("input_ids", "attention_mask", "label")


def featurize(data: xr.Dataset, made: td.Model, gradients: str = "loop") -> xr.Dataset:
    return td.featurize(data, made, projector=td.Identity(), gradients=gradients).compute()


def backward(made: nn.Module, outputs: list[Tensor]) -> np.ndarray:
    """Gradients of some outputs in the order of the parameters, one ``backward()`` each."""
    rows = []
    for output in outputs:
        made.zero_grad()
        output.backward(retain_graph=True)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in made.parameters()]
        rows.append(torch.cat([g.flatten() for g in gradients]).numpy())
    return np.stack(rows)


def log_odds(logits: Tensor, label: int) -> Tensor:
    p = logits.double().softmax(0)[label]
    return (p / (1 - p)).log()


def class_margins(made: nn.Module, *names: str) -> list[Tensor]:
    data = {name: torch.from_numpy(value) for name, value in arrays().items()}
    names = names or ("input_ids", "attention_mask")
    logits = made(**{name: data[name] for name in names}).logits
    return [log_odds(z, int(y)) for z, y in zip(logits, data["label"], strict=True)]


def unpadded_class_margins(made: nn.Module) -> list[Tensor]:
    return class_margins(made, "input_ids")


def token_margins(made: nn.Module) -> list[Tensor]:
    data = arrays()
    found = []
    for ids, mask in zip(data["input_ids"], data["attention_mask"], strict=True):
        alone = torch.from_numpy(ids[mask > 0])[None]  # no padding, no mask
        logits = made(input_ids=alone).logits[0]
        found.append(
            sum(log_odds(z, int(t)) for z, t in zip(logits[:-1], alone[0, 1:], strict=True))
        )
    return found


def close(found: np.ndarray, expected: np.ndarray, tolerance: float = 1e-4) -> None:
    """Compare whole rows: an element may be small by cancellation."""
    error = np.linalg.norm(found - expected, axis=-1)
    assert (error <= tolerance * np.linalg.norm(expected, axis=-1)).all(), error


UNPADDED = tasks.TextClassification("input_ids")
CASES = [
    pytest.param(bert, "text_classification", class_margins, "loop", id="bert-loop"),
    pytest.param(bert, UNPADDED, unpadded_class_margins, "vmap", id="bert-vmap"),
    pytest.param(gpt2, "causal_lm", token_margins, "loop", id="gpt2-loop"),
    pytest.param(gpt2, "causal_lm", token_margins, "vmap", id="gpt2-vmap"),
    pytest.param(llama, "causal_lm", token_margins, "loop", id="llama-loop"),
    pytest.param(llama, "causal_lm", token_margins, "vmap", id="llama-vmap"),
    pytest.param(bert, "text_classification", class_margins, "hooks", id="bert-hooks"),
    pytest.param(gpt2, "causal_lm", token_margins, "hooks", id="gpt2-hooks"),
    pytest.param(llama, "causal_lm", token_margins, "hooks", id="llama-hooks"),
]


@pytest.mark.parametrize(("build", "task", "margins", "gradients"), CASES)
def test_featurize__equals_backward(build, task, margins, gradients: str) -> None:
    made = module(build)
    outputs = margins(made)
    found = featurize(text_samples(), model(build, task), gradients)
    np.testing.assert_allclose(found.output[:, 0], [f.item() for f in outputs], rtol=1e-4)
    close(found.feature[:, :, 0].values, backward(made, outputs))


@pytest.mark.parametrize(("build", "task", "margins", "gradients"), CASES[-3:])
def test_featurize__order_of_samples_is_invisible(build, task, margins, gradients: str) -> None:
    made, data = model(build, task), text_samples()
    order = [3, 0, 4, 1, 2]
    whole = featurize(data, made, gradients)
    moved = featurize(data.isel(sample=order).chunk(sample=2), made, gradients)
    close(moved.feature[:, :, 0].values, whole.feature[order, :, 0].values, 1e-5)
    np.testing.assert_allclose(moved.out_to_loss, whole.out_to_loss[order], rtol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("build", [gpt2, llama])
def test_causal_lm__padding_is_invisible(build, side: str) -> None:
    data = arrays()
    data["attention_mask"][:] = 1
    junk = np.full((5, 4), 7)
    padded = {
        name: np.concatenate([value, pad][:: -1 if side == "left" else 1], axis=1)
        for name, value, pad in (
            ("input_ids", data["input_ids"], junk),
            ("attention_mask", data["attention_mask"], 0 * junk),
        )
    }
    task = tasks.CausalLM()
    if side == "left" and build is gpt2:  # its positions are absolute
        task = tasks.CausalLM(("input_ids", "attention_mask", "position_ids"))
        padded["position_ids"] = (padded["attention_mask"].cumsum(1) - 1).clip(0)
    given = samples("input_ids", "attention_mask", attention_mask=data["attention_mask"])
    expected = featurize(given, model(build, "causal_lm"))
    found = featurize(td.from_arrays(padded, chunks=3), model(build, task))
    close(found.feature[:, :, 0].values, expected.feature[:, :, 0].values)
    np.testing.assert_allclose(found.output, expected.output, rtol=1e-4)
    np.testing.assert_allclose(found.out_to_loss, expected.out_to_loss, rtol=1e-4)


@pytest.mark.parametrize(("build", "gradients"), [(gpt2, "loop"), (gpt2, "vmap"), (llama, "hooks")])
def test_causal_lm__sequence_without_tokens_to_predict(build, gradients: str) -> None:
    data = samples("input_ids", "attention_mask")
    expected = featurize(data, model(build, "causal_lm"), gradients)
    mask = arrays()["attention_mask"]
    mask[1] = 0
    data = samples("input_ids", attention_mask=mask)
    with pytest.raises(
        td.errors.BlockError, match=r"token to predict, got 0 tokens.* at sample 1;"
    ):
        featurize(data, model(build, "causal_lm"), gradients)
    found = td.featurize(
        data,
        model(build, "causal_lm"),
        projector=td.Identity(),
        gradients=gradients,
        on_error="record",
    ).compute()
    assert "token to predict" in found.error[1, 0].item()
    rest = [0, 2, 3, 4]
    assert (found.error[rest] == "").all()
    close(found.feature[rest, :, 0].values, expected.feature[rest, :, 0].values)


@pytest.mark.parametrize("build", [gpt2, llama])
def test_causal_lm__loss_is_that_of_the_model(build) -> None:
    """Labels as the model itself takes them: Σ log(1 + exp(-margin)) is its loss."""
    data = {name: torch.from_numpy(value) for name, value in arrays().items()}
    labels = data["input_ids"].masked_fill(data["attention_mask"] == 0, -100)
    labels[0, 2:5] = -100
    task = tasks.CausalLM(labels="labels", position="token")
    given = {"input_ids": data["input_ids"], "attention_mask": data["attention_mask"]}
    sequence, position = tasks.expand_tokens(given | {"labels": labels}, task)
    rows = {name: value[sequence].numpy() for name, value in (given | {"labels": labels}).items()}
    made = model(build, task)
    forward = made.forward(made.checkpoints[0])
    batch = {name: torch.from_numpy(value) for name, value in rows.items()}
    with torch.no_grad():
        margins = made.task.output(forward, tasks.Batch(batch, token=torch.from_numpy(position)))
        loss = module(build)(**given, labels=labels).loss
    torch.testing.assert_close(nn.functional.softplus(-margins).mean(), loss)


@pytest.mark.parametrize("gradients", ["loop", "vmap", "hooks"])
def test_clip__two_towers(gradients: str) -> None:
    data, pool = samples("image", "text"), samples("image", "text", n=8).isel(sample=slice(5, 8))
    negatives = tasks.clip_embeddings(model(ClipTowers, "clip"), pool)
    made = module(ClipTowers)
    given, others = (
        [torch.from_numpy(d[n].values) for n in ("image", "text")] for d in (data, pool)
    )
    with torch.no_grad():
        images, texts, _ = made(*others)
    outputs = []
    for image, text in zip(*made(*given)[:2], strict=True):
        both = (
            torch.stack([image @ text, *(image @ t for t in texts)]),
            torch.stack([image @ text, *(i @ text for i in images)]),
        )
        outputs.append(sum(log_odds(z, 0) for z in both))
    task = tasks.Clip(negatives, n_negatives=3)
    found = featurize(data, model(ClipTowers, task), gradients)
    np.testing.assert_allclose(found.output[:, 0], [f.item() for f in outputs], rtol=1e-4)
    close(found.feature[:, :, 0].values, backward(made, outputs))
    assert ((found.out_to_loss > 0) & (found.out_to_loss < 1)).all()


@pytest.mark.parametrize(
    ("build", "task"),
    [(bert, "text_classification"), (gpt2, "causal_lm"), (llama, "causal_lm")],
)
def test_featurize__attention_that_vmap_cannot_run_says_what_to_type(build, task: str) -> None:
    fused = model(functools.partial(build, "sdpa"), task, like=build)
    with pytest.raises(td.errors.BlockError) as caught:
        featurize(text_samples(), fused, "vmap")
    assert "attn_implementation='eager'" in str(caught.value)
    assert "gradients='loop'" in str(caught.value)
    expected = featurize(text_samples(), model(build, task), "loop").feature[:, :, 0].values
    for gradients in ("loop", "hooks", "auto"):
        close(featurize(text_samples(), fused, gradients).feature[:, :, 0].values, expected)
