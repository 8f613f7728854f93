"""Contrastive models of images and texts, such as CLIP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from trakdask.checks import require_integer, require_number
from trakdask.html_tables import HtmlTable
from trakdask.models.loading import digest_state
from trakdask.models.tasks.logits import (
    as_tensors,
    at_least_float32,
    check_variable,
    one_minus_p,
    shape_of,
)
from trakdask.models.tasks.protocol import Batch, Forward


@dataclass(frozen=True)
class Clip(HtmlTable):
    """Matching of images and texts against a fixed set of other pairs, the negatives.

    With the embeddings φ of the image and ψ of the text, and the embeddings φ' and ψ' of the
    negatives, the output is the sum of two margins, f = m_text + m_image,

    - m_text = φ·ψ - logsumexp(φ·ψ'), the margin of the correct text among the texts,
    - m_image = φ·ψ - logsumexp(φ'·ψ), the margin of the correct image among the images,

    and Q = 1 - (p_text + p_image)/2, where p belongs to the same margins at ``temperature``.

    Parameters
    ----------
    negatives
        Embeddings of images and of texts, both (n, embedding), by name of the checkpoint, as
        ``Clip.negatives_of`` returns them. They are constants: no
        gradient flows through them. TRAK takes 300.
    image, text
        Names of the variables; the model is called as ``model(image, text)``.
    temperature
        Divides the products in Q only. By default 1/``logit_scale``, where ``logit_scale`` is the
        third value that the model returns.

    Raises
    ------
    TypeError, ValueError
        If an option is invalid, or images and texts differ in shape. When run, if there are no
        negatives for the checkpoint, or the model does not return (image embedding, text embedding,
        logit_scale), as the models of open_clip do.

    Notes
    -----
    All samples of a checkpoint have the same negatives, so neither f nor Q depends on the rest of a
    batch. A sample that is itself a negative would be compared with its own copy, so choose
    negatives that are neither training samples nor targets.

    The loss is the sum of two cross-entropies ℓ = Σ log(1 + exp(-m)), as in training up to a
    factor. Q is the number for which Q·∇f is nearest to -∇ℓ as vectors in the space of the margins,
    at ``temperature`` as in traker.

    traker differs in four ways: negatives are drawn for every sample, with probabilities
    proportional to their index; the negatives of one checkpoint serve all checkpoints; Q compares a
    pair with the rest of its batch; and ``temperature`` is a factor, not a divisor.

    References
    ----------
    Park et al. 2023, section 5.1; traker's ``CLIPModelOutput``.

    Examples
    --------
    >>> import torch, trakdask as td
    >>> images = texts = torch.eye(8)  # from Clip.negatives_of, in earnest
    >>> td.tasks.Clip({"clip.pt": (images, texts)}).variables
    ('image', 'text')
    """

    loss_kind: ClassVar[str] = "other"
    naming: ClassVar[tuple[str, ...]] = ("image", "text")
    number_variables: ClassVar[tuple[str, ...]] = ()
    negatives: Mapping[str, tuple[Tensor, Tensor]] | None = field(
        default=None, repr=False, compare=False
    )
    image: str = "image"
    text: str = "text"
    temperature: float | None = None
    digest: str = field(default="", init=False)

    def __post_init__(self) -> None:
        if self.temperature is not None:
            require_number("temperature", self.temperature, remedy="try 0.07")
        check_variable(self.image, "image")
        check_variable(self.text, "text")
        if self.negatives is None:  # a model with this task can compute the negatives
            return
        if not isinstance(self.negatives, Mapping):
            raise TypeError(
                "expected negatives by checkpoint, got "
                f"{type(self.negatives).__name__}; try td.tasks.Clip.negatives_of(model, samples)"
            )
        constants = {}
        for name, (image, text) in self.negatives.items():
            if image.ndim != 2 or image.shape != text.shape:
                raise ValueError(
                    "expected negatives (n, embedding) of images and of texts, in pairs, got "
                    f"{tuple(image.shape)} and {tuple(text.shape)} for checkpoint {name!r}; try "
                    "td.tasks.Clip.negatives_of(model, samples)"
                )
            # On the CPU, because the task travels to workers; _margins moves them to the model's
            # device.
            constants[name] = (image.detach().cpu(), text.detach().cpu())
        flat = {f"{name}/{i}": t for name, pair in constants.items() for i, t in enumerate(pair)}
        # Stores compare this text in the place of the embeddings, which no attribute can hold.
        object.__setattr__(self, "digest", digest_state(flat)[:32])
        object.__setattr__(self, "negatives", constants)

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of the variables that the task reads."""
        return (self.image, self.text)

    def embed(self, forward: Forward, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the embeddings of images and texts, both (batch, embedding)."""
        return self._call(forward, batch)[:2]

    @staticmethod
    def negatives_of(
        model: Any,
        samples: Mapping[Any, Any],
        *,
        batch_size: int = 256,
        device: str | torch.device = "cpu",
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Embed images and texts at every checkpoint of a model, to serve as negatives.

        Parameters
        ----------
        model
            A model with ``task="clip"``, or with a :class:`Clip` that names the variables.
        samples
            Images and texts by the task's names: arrays, tensors or a Dataset.
        batch_size
            Samples per pass.
        device
            Device of torch that the model runs on.

        Returns
        -------
        (image embeddings, text embeddings), both (n, embedding) on the CPU, by name of the
        checkpoint.

        Raises
        ------
        TypeError, ValueError
            If the model has another task, or samples lack a variable.

        Notes
        -----
        Cost: reads all samples into memory, and runs them once per checkpoint. A few hundred
        samples suffice: ``td.tasks.Clip.negatives_of(model, pool.isel(sample=slice(300)))``.
        """
        task = getattr(model, "task", None)
        if not isinstance(task, Clip):
            kind = type(model if task is None else task).__name__
            raise TypeError(f"expected a td.Model of task='clip', got {kind}")
        require_integer("batch_size", batch_size, 1, remedy="try batch_size=256")
        whole = as_tensors(samples, task.variables)
        starts = range(0, len(whole[task.image]), batch_size)
        parts = [{n: t[i : i + batch_size].to(device) for n, t in whole.items()} for i in starts]
        embeddings = {}
        for checkpoint in model.checkpoints:
            # Each checkpoint embeds the negatives anew: margins compare embeddings of one model.
            forward = model.forward(checkpoint).mapped(lambda tensor: tensor.to(device))
            with torch.no_grad():
                pairs = [task.embed(forward, Batch(part)) for part in parts]
            image, text = (torch.cat(part).cpu() for part in zip(*pairs, strict=True))
            embeddings[checkpoint.name] = (image, text)
        return embeddings

    def output(self, forward: Forward, batch: Batch) -> Tensor:
        """Return the sum of both margins, (batch,)."""
        image, text, _ = self._call(forward, batch)
        # As in other tasks, the margin has no temperature.
        by_text, by_image = self._margins(forward, image, text, 1.0)
        return by_text + by_image

    def out_to_loss(self, forward: Forward, batch: Batch) -> Tensor:
        """Return the mean of 1 - p of both directions, (batch,)."""
        image, text, logit_scale = self._call(forward, batch)
        scale = logit_scale if self.temperature is None else 1 / self.temperature
        if scale is None:
            raise ValueError(
                "expected a model that returns (image embedding, text embedding, logit_scale), got "
                "no logit_scale; try td.tasks.Clip(..., temperature=0.07), or return it"
            )
        by_text, by_image = self._margins(forward, image, text, scale)
        return (one_minus_p(by_text) + one_minus_p(by_image)) / 2

    def _call(self, forward: Forward, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        returned = forward(batch[self.image], batch[self.text])
        image, text, *more = returned if isinstance(returned, tuple | list) else (returned, None)
        size = len(batch[self.image])
        shapes = [shape_of(image), shape_of(text)]
        if shapes[0] != shapes[1] or image.ndim != 2 or len(image) != size:
            raise ValueError(
                f"expected (image embedding, text embedding, logit_scale), both ({size}, "
                f"embedding), from model(image, text), got {shapes}; try wrapping the model"
            )
        return at_least_float32(image), at_least_float32(text), more[0] if more else None

    def _margins(
        self, forward: Forward, image: Tensor, text: Tensor, scale: Tensor | float
    ) -> tuple[Tensor, Tensor]:
        negatives, name = self.negatives or {}, forward.checkpoint
        if name is None or name not in negatives:
            raise ValueError(
                f"expected negatives for checkpoint {name!r}, got some for {list(negatives)}; try "
                "td.tasks.Clip(td.tasks.Clip.negatives_of(model, samples))"
            )
        images, texts = (t.to(image) for t in negatives[name])
        # φ·ψ, (batch,), against (batch, n) products with the negatives of either kind.
        correct = scale * (image * text).sum(1)
        by_text = correct - (scale * image @ texts.T).logsumexp(1)
        return by_text, correct - (scale * text @ images.T).logsumexp(1)
