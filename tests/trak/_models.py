"""Small models of many kinds, with batches for them, and gradients by a loop of ``backward()``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

N, CLASSES = 6, 4


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


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 7), nn.ReLU(), nn.Linear(7, CLASSES))


def convolutional(norm: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        norm(),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 4, 3, groups=2),
        nn.Flatten(),
        nn.Linear(4, CLASSES),
    )


IMAGE_MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (12,)),
    "group norm": (lambda: convolutional(lambda: nn.GroupNorm(2, 6)), (3, 6, 6)),
    "batch norm": (lambda: convolutional(lambda: nn.BatchNorm2d(6)), (3, 6, 6)),
    "scalar and buffers": (Scaled, (12,)),
}


def made(build: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    module = build().to(dtype).eval()
    for name, tensor in module.named_buffers():
        if "running" in name:
            tensor.uniform_(0.5, 2)
    return module


def image_batch(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    rng = torch.Generator().manual_seed(1)
    images = torch.randn(N, *shape, generator=rng).to(dtype)
    return [images, torch.randint(CLASSES, (N,), generator=rng)]


def text_batch() -> list[Tensor]:
    rng = torch.Generator().manual_seed(2)
    ids, kinds = (torch.randint(high, (N, 7), generator=rng) for high in (20, 2))
    lengths = torch.randint(1, 8, (N,), generator=rng)
    mask = (torch.arange(7) < lengths[:, None]).long()
    return [ids * mask, kinds, mask, torch.randint(CLASSES, (N,), generator=rng)]


def pair_batch(n: int = N, seed: int = 3) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(n, 12, generator=rng), torch.randint(20, (n, 5), generator=rng)]


def margin_of(logits: Tensor, label: Tensor) -> Tensor:
    """Return log p/(1 - p) of one sample by the definition, in float64."""
    p = logits.double().softmax(-1)
    others = torch.cat([p[:label], p[label + 1 :]])
    return p[label].log() - others.sum().log()


def backward_one_by_one(
    module: nn.Module, output_of: Callable[[int], Tensor], n: int
) -> dict[str, Tensor]:
    """Differentiate the output of each sample by all parameters."""
    rows: dict[str, list[Tensor]] = {name: [] for name, _ in module.named_parameters()}
    for i in range(n):
        module.zero_grad()
        output_of(i).backward()
        for name, parameter in module.named_parameters():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            rows[name].append(grad.clone())
    module.zero_grad()
    return {name: torch.stack(grads) for name, grads in rows.items()}
