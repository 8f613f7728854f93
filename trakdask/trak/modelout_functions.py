"""Model outputs: the number that is attributed, and how much the loss still depends on it.

The classes have the names, signatures and attributes of the TRAK package, and subclasses that were
written for it work unchanged. :func:`batched_task` gives the built-in outputs as tasks of trakdask,
whose gradients take one backward pass for a whole batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from trakdask.models.loading import digest_state
from trakdask.models.tasks import Batch, Classification, Forward, Task

_IMAGES = Classification(("image",))
_TEXTS = Classification(("input_ids", "token_type_ids", "attention_mask"), positional=False)
_SEED_OF_PAIRS = 0


class AbstractModelOutput(ABC):
    """Base class of model outputs, for subclasses of your own.

    A subclass is written for one of the two gradient computers:

    - For ``FunctionalGradientComputer``, ``get_output(model, weights, buffers, *sample)`` takes one
      sample without a batch axis and returns a scalar tensor, which is differentiated with respect
      to ``weights``. It must run the model with ``torch.func.functional_call(model, (weights,
      buffers), ...)``.
    - For ``IterativeGradientComputer``, ``get_output(model, None, None, *batch)`` takes the whole
      batch, calls ``model(...)``, and returns one number per sample.

    ``get_out_to_loss_grad(model, weights, buffers, batch)`` always takes the whole batch and
    returns one number per sample, of shape (batch, 1) or (batch,).

    Notes
    -----
    Unlike in the TRAK package, a subclass needs no ``__init__``.

    References
    ----------
    Park et al. 2023, sections 2 and 3: f(z; θ) and Q.
    """

    def __init__(self) -> None:  # noqa: B027 (subclasses written for the original call it)
        pass

    @abstractmethod
    def get_output(self, model: Any, batch: Iterable[Tensor]) -> Tensor:
        """Return the model output; see the class for the arguments that it is called with."""

    @abstractmethod
    def get_out_to_loss_grad(self, model: Any, batch: Iterable[Tensor]) -> Tensor:
        """Return the absolute derivative of the loss with respect to the model output."""


def _margin(
    task: Classification, model: nn.Module, weights: Any, buffers: Any, *sample: Tensor
) -> Tensor:
    """Return the margin of one sample, a scalar."""
    batch = Batch(zip(task.variables, (part[None] for part in sample), strict=True))
    return task.output(Forward(model, weights, buffers), batch)[0]


class ImageClassificationModelOutput(AbstractModelOutput):
    """Margin of an image classifier, log p/(1 - p) of the correct class.

    Parameters
    ----------
    temperature
        Divides the logits in the out-to-loss gradient 1 - p, but not in the margin.

    References
    ----------
    Park et al. 2023, section 3.3.
    """

    _task: ClassVar[Classification] = _IMAGES

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        self.softmax = nn.Softmax(-1)
        self.loss_temperature = temperature

    @staticmethod
    def get_output(  # type: ignore[override]
        model: nn.Module,
        weights: dict[str, Tensor],
        buffers: dict[str, Tensor],
        image: Tensor,
        label: Tensor,
    ) -> Tensor:
        """Return the margin of one image (without a batch axis), a scalar."""
        return _margin(_IMAGES, model, weights, buffers, image, label)

    @torch.no_grad()
    def get_out_to_loss_grad(  # type: ignore[override]
        self,
        model: nn.Module,
        weights: dict[str, Tensor] | None,
        buffers: dict[str, Tensor] | None,
        batch: Iterable[Tensor],
    ) -> Tensor:
        """Return 1 - p of a batch of inputs and labels, (batch, 1), float32 or float64."""
        task = self.with_temperature()
        # Outputs for whole batches are called without weights: the live model is called, with its
        # own.
        forward: Any = model if weights is None else Forward(model, weights, buffers or {})
        return task.out_to_loss(forward, Batch(zip(task.variables, batch, strict=True)))[:, None]

    def with_temperature(self) -> Classification:
        """Return the task of whole batches."""
        return replace(self._task, temperature=self.loss_temperature)


class TextClassificationModelOutput(ImageClassificationModelOutput):
    """Margin of a text classifier, log p/(1 - p) of the correct class.

    A sample is (input_ids, token_type_ids, attention_mask, label); the model takes the first three
    by name, and returns logits (batch, classes).

    Parameters
    ----------
    temperature
        Divides the logits in the out-to-loss gradient 1 - p, but not in the margin.
    """

    _task = _TEXTS

    @staticmethod
    def get_output(  # type: ignore[override]
        model: nn.Module,
        weights: dict[str, Tensor],
        buffers: dict[str, Tensor],
        input_id: Tensor,
        token_type_id: Tensor,
        attention_mask: Tensor,
        label: Tensor,
    ) -> Tensor:
        """Return the margin of one text (without a batch axis), a scalar."""
        text = (input_id, token_type_id, attention_mask)
        return _margin(_TEXTS, model, weights, buffers, *text, label)


class IterativeImageClassificationModelOutput(ImageClassificationModelOutput):
    """Margin of an image classifier, for :class:`.IterativeGradientComputer`.

    The model is called with whole batches and its own weights; ``weights`` and ``buffers`` may be
    None.

    Parameters
    ----------
    temperature
        Divides the logits in the out-to-loss gradient 1 - p, but not in the margin.
    """

    @staticmethod
    def get_output(  # type: ignore[override]
        model: nn.Module,
        weights: dict[str, Tensor] | None,
        buffers: dict[str, Tensor] | None,
        images: Tensor,
        labels: Tensor,
    ) -> Tensor:
        """Return the margins of a batch, (batch,)."""
        forward: Any = model
        return _IMAGES.output(forward, Batch(image=images, label=labels))


class _static_or_of_instance(staticmethod):  # type: ignore[type-arg]
    """A static method whose first argument is the instance, or the class if called on that."""

    def __get__(self, instance: Any, owner: Any = None) -> Callable[..., Any]:
        return MethodType(self.__func__, owner if instance is None else instance)


@dataclass(frozen=True, eq=False)
class PairsTask:
    """The output of CLIP for pairs of images and texts, of whole batches, against other pairs."""

    modelout: Any  # an instance, or the class
    variables = ("image", "text")

    def output(self, forward: Forward, batch: Batch) -> Tensor:
        """Compare pairs with other images and texts, (batch,)."""
        # 1. The other pairs, always the same ones.
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
        keys = np.random.Philox(key=_SEED_OF_PAIRS).random_raw(n)
        # A random subset without replacement: the pairs with the smallest keys.
        rows = np.sort(np.argsort(keys, kind="stable")[:size])
        # 2. Each image with the texts of these, and each text with their images.
        image, text, _ = forward(**batch)
        # -log Σ exp(φ·ψ' - φ·ψ) is φ·ψ - log Σ exp(φ·ψ'), and `logsumexp` does not overflow.
        right = (image * text).sum(1)
        by_text = right - (image @ texts[rows].to(image).T).logsumexp(1)
        return by_text + right - (text @ images[rows].to(text).T).logsumexp(1)

    def out_to_loss(self, forward: Forward, batch: Batch) -> Tensor:
        """Return 1 - p, (batch,), among the pairs of the batch."""
        image, text, logit_scale = forward(**batch)
        temperature = self.modelout.temperature
        # (image, text): a row compares an image with all texts, a column a text with all images.
        products = (logit_scale if temperature is None else temperature) * image @ text.T
        p: Tensor = (products.softmax(-1) + products.T.softmax(-1)).diag() / 2
        return 1 - p


class CLIPModelOutput(AbstractModelOutput):
    """Match of an image and its text against other pairs, for models like the ones of open_clip.

    With the embeddings φ of the image and ψ of the text, and φ' and ψ' of other pairs, the
    output is -log Σ exp(φ·ψ' - φ·ψ) - log Σ exp(φ'·ψ - φ·ψ). The model is called as
    ``model(image=..., text=...)`` and returns (φ, ψ, logit_scale). The other pairs are drawn from
    the pairs that :meth:`get_embeddings` has embedded. Call it before ``featurize``, and again for
    each checkpoint; a warning is issued if the embeddings belong to another checkpoint.

    Parameters
    ----------
    temperature
        Multiplies φ·ψ in the out-to-loss gradient. By default the ``logit_scale`` that the model
        returns, at each call.
    simulated_batch_size
        Number of other pairs.

    Notes
    -----
    Differences from the TRAK package:

    - Embeddings belong to the instance whose ``get_embeddings`` is called, so that instances do not
      overwrite each other's embeddings. ``CLIPModelOutput.get_embeddings(...)``, on the class, sets
      the embeddings of all instances that have none.
    - Other pairs are drawn uniformly, without replacement and with a fixed seed, and are the same
      for all samples. The original draws without a seed for every sample, with probabilities
      proportional to the index of a pair, so no two runs agree.
    - If there are fewer pairs than ``size``, they are not padded with zeros.
    - Embeddings stay on the device of the model.
    - The temperature of the first checkpoint is not used for the others.
    - ``get_out_to_loss_grad`` returns (batch, 1), which can be stored, instead of (batch,).

    As in the original, the out-to-loss gradient compares each pair with the others of its batch, so
    it depends on how samples are batched.

    References
    ----------
    Park et al. 2023, section 5.1.
    """

    num_computed_embeddings: int = 0
    sim_batch_size: int = 300
    image_embeddings: Tensor | None = None
    text_embeddings: Tensor | None = None
    _digest: str | None = None
    """Digest of the weights that the embeddings were computed with."""

    def __init__(self, temperature: float | None = None, simulated_batch_size: int = 300) -> None:
        super().__init__()
        self.softmax = nn.Softmax(-1)
        self.temperature = temperature
        torch.backends.cuda.enable_mem_efficient_sdp(False)  # vmap does not support this backend
        self.sim_batch_size = simulated_batch_size
        CLIPModelOutput.sim_batch_size = simulated_batch_size  # for calls on the class

    @_static_or_of_instance
    def get_embeddings(
        self: Any,
        model: nn.Module,
        loader: Iterable[Any],
        batch_size: int,
        embedding_dim: int,
        size: int = 50_000,
        preprocess_fn_img: Callable[[Any], Any] | None = None,
        preprocess_fn_txt: Callable[[Any], Any] | None = None,
    ) -> None:
        """Embed the first pairs of a loader, from which other pairs are then drawn.

        Parameters
        ----------
        model
            The model, at the checkpoint that will be featurized.
        loader
            Batches of (images, texts).
        batch_size
            Not used; the loader decides on the sizes of the batches.
        embedding_dim
            Not used; the model returns embeddings of its own length.
        size
            Largest number of pairs to embed.
        preprocess_fn_img, preprocess_fn_txt
            Applied to images and to texts before the model is called; for example, they move them
            to the model's device.

        """
        pairs: list[tuple[Tensor, Tensor]] = []
        with torch.no_grad():
            for image, text in loader:
                image = image if preprocess_fn_img is None else preprocess_fn_img(image)
                text = text if preprocess_fn_txt is None else preprocess_fn_txt(text)
                pairs.append(model(image, text)[:2])
                # A loader may be much longer than what is embedded.
                if sum(len(images) for images, _ in pairs) >= size:
                    break
        self.image_embeddings, self.text_embeddings = (
            torch.cat(parts)[:size] for parts in zip(*pairs, strict=True)
        )
        self.num_computed_embeddings = len(self.image_embeddings)
        self._digest = digest_state(dict(model.named_parameters()))

    @_static_or_of_instance
    def get_output(
        self: Any,
        model: nn.Module,
        weights: dict[str, Tensor],
        buffers: dict[str, Tensor],
        image: Tensor,
        label: Tensor,
    ) -> Tensor:
        """Return the output of one image and text (without a batch axis), a scalar."""
        batch = Batch(image=image[None], text=label[None])
        return PairsTask(self).output(Forward(model, weights, buffers), batch)[0]

    @torch.no_grad()
    def get_out_to_loss_grad(  # type: ignore[override]
        self,
        model: nn.Module,
        weights: dict[str, Tensor],
        buffers: dict[str, Tensor],
        batch: Iterable[Tensor],
    ) -> Tensor:
        """Return 1 - p of a batch of images and texts, (batch, 1), p the mean of both directions.

        p is the softmax over the pairs of this batch.
        """
        image, text = batch
        pairs = Batch(image=image, text=text)
        return PairsTask(self).out_to_loss(Forward(model, weights, buffers), pairs)[:, None]

    def is_of_other_weights(self, model: nn.Module) -> bool:
        """Return whether the embeddings were computed with other weights than the model has."""
        return self._digest not in (None, digest_state(dict(model.named_parameters())))


TASK_TO_MODELOUT: dict[str, type[AbstractModelOutput]] = {
    "image_classification": ImageClassificationModelOutput,
    "clip": CLIPModelOutput,
    "text_classification": TextClassificationModelOutput,
    "iterative_image_classification": IterativeImageClassificationModelOutput,
}
"""The outputs that ``TRAKer(task="...")`` knows by name."""


def batched_task(modelout: object) -> Task | None:
    """Return a built-in output as a task of trakdask, which takes whole batches by name.

    None for all others, which include subclasses of these and instances with replaced methods.
    """
    # The task would compute what the class defines, and ignore a method that somebody has replaced.
    if {"get_output", "get_out_to_loss_grad"} & set(vars(modelout)):
        return None
    if type(modelout) in (ImageClassificationModelOutput, TextClassificationModelOutput):
        return modelout.with_temperature()  # type: ignore[attr-defined]
    return PairsTask(modelout) if type(modelout) is CLIPModelOutput else None
