"""Pairs of images and texts: their embeddings, and how well they match."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

__all__ = ["checked_embeddings", "matches", "negatives"]

_SEED = 0


def checked_embeddings(pair: Sequence[Tensor], embedding_dim: int) -> list[Tensor]:
    """Return the embeddings of images and texts, both (batch, embedding_dim), without a graph."""
    for what, found in zip(("image", "text"), pair, strict=True):
        if found.ndim != 2 or found.shape[1] != embedding_dim:
            raise ValueError(
                f"expected {what} embeddings (batch, {embedding_dim}), got {tuple(found.shape)}; "
                f"try embedding_dim={found.shape[-1]}"
            )
    return [found.detach() for found in pair]


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
    # Raw bits: numpy keeps their stream in all versions.
    keys = np.random.Philox(key=_SEED).random_raw(n)
    rows = np.sort(np.argsort(keys, kind="stable")[:size])
    return holder.image_embeddings[rows], holder.text_embeddings[rows]


def matches(image: Tensor, text: Tensor, images: Tensor, texts: Tensor) -> Tensor:
    """Compare pairs (batch, embedding) with negatives; return (batch,)."""
    right = (image * text).sum(1)
    by_text = right - (image @ texts.to(image).T).logsumexp(1)
    return by_text + right - (text @ images.to(text).T).logsumexp(1)
