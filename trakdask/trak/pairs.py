"""The output of CLIP as a task of trakdask: an image and a text against other pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from trakdask.models.tasks import Batch, Forward

_SEED = 0


@dataclass(frozen=True, eq=False)
class PairsTask:
    """The output for pairs of images and texts, of whole batches."""

    modelout: Any  # an instance, or the class
    variables = ("image", "text")

    def output(self, forward: Forward, batch: Batch) -> Tensor:
        """Compare pairs with other images and texts, (batch,)."""
        images, texts = self._others()
        image, text, _ = forward(**batch)
        right = (image * text).sum(1)
        by_text = right - (image @ texts.to(image).T).logsumexp(1)
        return by_text + right - (text @ images.to(text).T).logsumexp(1)

    def out_to_loss(self, forward: Forward, batch: Batch) -> Tensor:
        """Return 1 - p, (batch,), among the pairs of the batch."""
        image, text, logit_scale = forward(**batch)
        temperature = self.modelout.temperature
        products = (logit_scale if temperature is None else temperature) * image @ text.T
        p: Tensor = (products.softmax(-1) + products.T.softmax(-1)).diag() / 2
        return 1 - p

    def _others(self) -> tuple[Tensor, Tensor]:
        images, texts = self.modelout.image_embeddings, self.modelout.text_embeddings
        if images is None:
            raise AssertionError(
                "expected embeddings of other images and texts, got none; try "
                "traker.task.get_embeddings(model, loader, ...) before traker.featurize"
            )
        n, size = len(images), self.modelout.sim_batch_size
        if not 0 < size <= n:
            raise ValueError(
                f"expected simulated_batch_size in 1..{n} ({n} embeddings), got {size}; try "
                f"CLIPModelOutput(simulated_batch_size={n}), or embed more pairs"
            )
        # Raw bits are the same in all versions of numpy; results of Generator.choice need not be.
        keys = np.random.Philox(key=_SEED).random_raw(n)
        rows = np.sort(np.argsort(keys, kind="stable")[:size])
        return images[rows], texts[rows]
