"""Models of benchmarks: sizes between a laptop's toys and small real ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trakdask import examples
from trakdask.models.tasks import Batch


def conv(n_in: int, n_out: int, pool: bool = False) -> nn.Sequential:
    layers = [nn.Conv2d(n_in, n_out, 3, padding=1, bias=False), nn.BatchNorm2d(n_out), nn.ReLU()]
    return nn.Sequential(*layers, *([nn.MaxPool2d(2)] if pool else []))


class ResNet9(nn.Module):
    """Nine weight layers on 32 × 32 × 3 images, 2.3M parameters."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(3, width), conv(width, 2 * width, pool=True))
        self.first = nn.Sequential(conv(2 * width, 2 * width), conv(2 * width, 2 * width))
        self.middle = nn.Sequential(
            conv(2 * width, 4 * width, pool=True), conv(4 * width, 4 * width, pool=True)
        )
        self.second = nn.Sequential(conv(4 * width, 4 * width), conv(4 * width, 2 * width))
        self.down = nn.Conv2d(4 * width, 2 * width, 1, bias=False)
        self.head = nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.first(x)
        x = self.middle(x)
        x = self.down(x) + self.second(x)
        return self.head(x.amax((2, 3)))


class Block(nn.Module):
    """One layer of GPT-2: pre-norm, causal attention with one matrix for q, k and v, GELU."""

    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.n_heads = n_heads

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(n, length, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        scores = qkv[0] @ qkv[1].mT * (width // self.n_heads) ** -0.5
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(later, -torch.inf).softmax(-1) @ qkv[2]
        x = x + self.out(mixed.transpose(1, 2).reshape(n, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Encoder(nn.Module):
    """Positions, and twelve layers of ``nn.MultiheadAttention`` with pre-norm."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.pos_embedding = nn.Parameter(torch.empty(1, length, width).normal_(std=0.02))
        layers = [
            nn.TransformerEncoderLayer(
                width, 12, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(12)
        ]
        self.layers, self.ln = nn.Sequential(*layers), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.ln(self.layers(x + self.pos_embedding))


class ViT(nn.Module):
    """ViT-B/16 with the modules, shapes and parameters of torchvision's, 86.6M of them."""

    def __init__(self, width: int = 768) -> None:
        super().__init__()
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.conv_proj = nn.Conv2d(3, width, 16, stride=16)
        self.encoder = Encoder(1 + (224 // 16) ** 2, width)
        self.heads = nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_proj(x).flatten(2).mT
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1)
        return self.heads(self.encoder(x)[:, 0])


@dataclass(frozen=True)
class Subject:
    """A classifier, and inputs for it."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], Batch]


def images(n_channels: int, size: int) -> Callable[[int], Batch]:
    def make(n: int) -> Batch:
        generator = torch.Generator().manual_seed(n)
        image = torch.randn(n, n_channels, size, size, generator=generator)
        return Batch(image=image, label=torch.arange(n) % 10)

    return make


def tokens(length: int, width: int) -> Callable[[int], Batch]:
    def make(n: int) -> Batch:
        generator = torch.Generator().manual_seed(n)
        image = torch.randn(n, length, width, generator=generator)
        return Batch(image=image, label=torch.arange(n) % 10)

    return make


class OneBlock(nn.Module):
    """One of the twelve layers of GPT-2, 7.1M parameters, on 128 tokens, and a small classifier."""

    def __init__(self, width: int = 768) -> None:
        super().__init__()
        self.block, self.head = Block(width, 12), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x).mean(1))


SUBJECTS = {
    "cnn": Subject(examples.digits_cnn, images(1, 8)),
    "resnet": Subject(ResNet9, images(3, 32)),
    "vit": Subject(ViT, images(3, 224)),
    "gpt2": Subject(OneBlock, tokens(128, 768)),
}
