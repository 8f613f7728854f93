"""Tiny models of many kinds, with samples for them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

import trakdask as td
from tests.models.language_models import gpt2, llama
from tests.models.language_models import transformers as hf

N, LENGTH, CLASSES, WORDS = 6, 7, 3, 40


def images(n: int = N, seed: int = 0) -> xr.Dataset:
    """Return images and classes, in two chunks."""
    rng = np.random.default_rng(seed)
    return td.from_arrays(
        {"image": rng.standard_normal((n, 4, 6, 6)).astype("f4")},
        coords={"label": np.arange(n) % CLASSES},
    ).chunk(sample=n // 2)


def numbers(n: int = N, seed: int = 0) -> xr.Dataset:
    """Return rows of a table as inputs, images and texts, and classes, in two chunks."""
    rng = np.random.default_rng(seed)
    x, text = rng.standard_normal((2, n, 5)).astype("f4")
    arrays = {"x": x, "image": x, "text": text, "label": np.arange(n) % CLASSES}
    return td.from_arrays(arrays).chunk(sample=n // 2)


def tokens(n: int = N, seed: int = 0) -> xr.Dataset:
    """Return texts, some of which are padded, and classes, in two chunks."""
    rng = np.random.default_rng(seed)
    mask = np.arange(LENGTH) < rng.integers(3, LENGTH + 1, n)[:, None]
    arrays = {
        "input_ids": np.where(mask, rng.integers(3, WORDS, (n, LENGTH)), 0),
        "attention_mask": mask.astype("i8"),
    }
    return td.from_arrays(arrays, coords={"label": np.arange(n) % CLASSES}).chunk(sample=n // 2)


class Convolutions(nn.Module):
    """Convolutions in groups, all kinds of norms, and a buffer that checkpoints do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(4, 8, 3, groups=2), nn.GroupNorm(2, 8), nn.ReLU()),
            *(nn.Conv2d(8, 6, 3, stride=2), nn.BatchNorm2d(6), nn.Flatten(), nn.LayerNorm(6)),
        )
        self.head = nn.Linear(6, CLASSES)
        self.register_buffer("scale", torch.linspace(1, 2, 6), persistent=False)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.body(image) * self.scale)


class Recurrent(nn.Module):
    """Dropout between its layers must stay off, whatever the mode that cuDNN needs."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 6)
        self.rnn = kind(6, 5, 2, batch_first=True, bidirectional=True, dropout=0.5)
        self.head = nn.Linear(10, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head((self.rnn(self.words(input_ids))[0] * attention_mask[..., None]).mean(1))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, CLASSES)
        self.places = nn.Parameter(torch.randn(LENGTH, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(self.layers(self.words(input_ids) + self.places).mean(1))


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.visual, self.textual = nn.Linear(5, 4), nn.Linear(5, 4)
        self.logit_scale = nn.Parameter(torch.tensor(1.2))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        embeddings = self.visual(image), self.textual(text)
        seen, read = (nn.functional.normalize(e, dim=-1) for e in embeddings)
        return seen, read, self.logit_scale.exp()


def distilbert() -> nn.Module:
    sizes = {"vocab_size": WORDS, "dim": 16, "hidden_dim": 24, "n_layers": 1, "n_heads": 2}
    config = hf.DistilBertConfig(**sizes, num_labels=CLASSES, attn_implementation="eager")
    return hf.DistilBertForSequenceClassification(config)


def language_model() -> nn.Module:
    return gpt2(attn_implementation="eager")


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, CLASSES))


def clip_task() -> td.tasks.Clip:
    others = numbers(8, seed=1)
    torch.manual_seed(1)
    return td.tasks.Clip(td.tasks.Clip.negatives_of(td.Model(Towers(), task="clip"), others))


TEXT = "text_classification"
CASES: dict[str, tuple[xr.Dataset, Callable[[], nn.Module], object]] = {
    "perceptron": (numbers(), perceptron, "classification"),
    "CLIP": (numbers(), Towers, None),
    "convolutions": (images(), Convolutions, "image_classification"),
    "LSTM": (tokens(), lambda: Recurrent(nn.LSTM), TEXT),
    "GRU": (tokens(), lambda: Recurrent(nn.GRU), TEXT),
    "transformer": (tokens(), Encoder, TEXT),
    "DistilBERT": (tokens(), distilbert, TEXT),
    "GPT-2": (tokens(), language_model, "causal_lm"),
    "Llama": (tokens(), lambda: llama(attn_implementation="eager"), "causal_lm"),
}


def case(name: str, n_checkpoints: int = 1) -> tuple[xr.Dataset, td.Model]:
    """Return the samples of a case, and its model with random weights."""
    samples, build, task = CASES[name]
    states = []
    for seed in range(n_checkpoints):
        torch.manual_seed(seed)
        states.append(build().state_dict())
    return samples, td.Model(build, states, task=task or clip_task())
