"""Pairs of images and texts: their embeddings, and how well these match."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from trakdask.models.tasks.clip import random_rows

__all__ = ["checked_embeddings", "matches", "negatives"]

_SEED = 0


def checked_embeddings(pair: Sequence[Tensor], embedding_dim: int) -> list[Tensor]:
    """Return the embeddings of images and texts, both (batch, embedding_dim), without a graph."""
    for what, embedding in zip(("image", "text"), pair, strict=True):
        if embedding.ndim != 2 or embedding.shape[1] != embedding_dim:
            raise ValueError(
                f"expected {what} embeddings (batch, {embedding_dim}), got "
                f"{tuple(embedding.shape)}; try embedding_dim={embedding.shape[-1]}"
            )
    return [embedding.detach() for embedding in pair]


def negatives(holder: Any) -> tuple[Tensor, Tensor]:
    """Return the embeddings of images and texts that all samples are compared with."""
    if holder.image_embeddings is None or holder.text_embeddings is None:
        raise AssertionError(
            "expected embeddings of other images and texts, got none; try "
            "traker.task.get_embeddings(model, loader, ...) before traker.featurize"
        )
    n, size = len(holder.image_embeddings), holder.sim_batch_size
    if not 0 < size <= n:
        raise ValueError(
            f"expected simulated_batch_size in 1..{n} ({n} embeddings), got {size}; try "
            f"CLIPModelOutput(simulated_batch_size={n}), or embed more pairs"
        )
    rows = random_rows(n, size, _SEED)
    return holder.image_embeddings[rows], holder.text_embeddings[rows]


def matches(image: Tensor, text: Tensor, images: Tensor, texts: Tensor) -> Tensor:
    """Compare pairs (batch, embedding) with negatives; return (batch,)."""
    right = (image * text).sum(1)
    by_text = right - (image @ texts.to(image).T).logsumexp(1)
    return by_text + right - (text @ images.to(text).T).logsumexp(1)
