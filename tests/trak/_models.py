"""Small models of many kinds, with batches for them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

CLASSES = 3


class Scaled(nn.Module):
    """A scalar parameter, a buffer that takes part, and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(12, CLASSES)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("shift", torch.linspace(-1, 1, 12))
        self.register_buffer("unused", torch.zeros(3, dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x + self.shift) * self.scale


class Classifier(nn.Module):
    """An encoder of token ids as the text output calls it, of plain layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.kinds = nn.Embedding(20, 8, padding_idx=0), nn.Embedding(2, 8)
        self.hidden, self.last = nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, attention_mask: Tensor) -> Tensor:
        tokens = self.hidden(self.words(input_ids) + self.kinds(token_type_ids)).tanh()
        weight = attention_mask.to(tokens.dtype)[..., None]
        return self.last((tokens * weight).sum(1) / weight.sum(1))


class Pair(nn.Module):
    """Image and text towers and a temperature, in the manner of open_clip."""

    def __init__(self, dim: int = 5) -> None:
        super().__init__()
        self.visual = nn.Sequential(nn.Flatten(), nn.Linear(12, dim))
        self.words, self.project = nn.Embedding(20, 6), nn.Linear(6, dim)
        self.logit_scale = nn.Parameter(torch.tensor(1.2))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        seen = nn.functional.normalize(self.visual(image), dim=-1)
        read = nn.functional.normalize(self.project(self.words(text).mean(1)), dim=-1)
        return seen, read, self.logit_scale.exp()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, CLASSES)),
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.GELU(), nn.Linear(5, CLASSES)),
    "normed": lambda: nn.Sequential(
        *(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(8, 3), nn.LayerNorm(3), nn.Linear(3, CLASSES)),
    ),
    "scaled": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 12), Scaled()),
}
"""Classifiers of images."""


def untrained(
    build: Callable[[], nn.Module], dtype: torch.dtype = torch.float32, seed: int = 0
) -> nn.Module:
    torch.manual_seed(seed)
    return build().to(dtype).eval()


def built(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    return untrained(MODELS[name], dtype, seed)


def checkpoints(name: str, n: int) -> list[dict[str, Tensor]]:
    return [built(name, seed=seed).state_dict() for seed in range(n)]


def images(n: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    x, y = torch.randn(n, 1, 4, 4, generator=rng), torch.randint(CLASSES, (n,), generator=rng)
    return [x.to(dtype), y]


def texts(n: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(2)
    ids, kinds = (torch.randint(high, (n, 7), generator=rng) for high in (20, 2))
    lengths = torch.randint(1, 8, (n,), generator=rng)
    mask = (torch.arange(7) < lengths[:, None]).long()
    return [ids * mask, kinds, mask, torch.randint(CLASSES, (n,), generator=rng)]


def pair_batch(n: int, seed: int = 3) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(n, 12, generator=rng), torch.randint(20, (n, 5), generator=rng)]


def margin_of(logits: Tensor, label: Tensor) -> Tensor:
    """Return log p/(1 - p) of one sample by the definition, in float64."""
    p = logits.double().softmax(-1)
    others = torch.cat([p[:label], p[label + 1 :]])
    return p[label].log() - others.sum().log()
